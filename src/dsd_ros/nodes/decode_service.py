"""The service ``decode``: a fresh picture in, a verified reply out; and the session, also while its link is down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rclpy.callback_groups import ReentrantCallbackGroup
from sensor_msgs.msg import Image

from dsd_msgs.msg import DecodeStats, ReplyProgress
from dsd_msgs.srv import Decode
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.errors import DeadlineExceeded, DecodeCancelled, VerifierRefused
from dsd_ros.edge.observation import History
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.nodes.link_keeper import LinkKeeper
from dsd_ros.nodes.progress import Progress
from dsd_ros.ros import health, qos
from dsd_ros.ros.camera import Camera
from dsd_ros.ros.frames import Frames
from dsd_ros.ros.images import ImageError, to_rgb
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.settings import DraftNodeSettings
from dsd_ros.ros.stamps import seconds
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkRefused, LinkTimeout

Answer = Decode.Response
_OPEN_LIMIT_S = 10.0  # one attempt to open the session


class DecodeService:
    """``_lock`` is held by whoever uses or changes the session."""

    def __init__(
        self, node: ManagedNode, report: health.Health, settings: DraftNodeSettings, decode_settings: DecodeSettings
    ) -> None:
        self._node = node
        self._health = report
        self._settings = settings
        self._decode_settings = decode_settings
        self._session: EdgeSession | None = None
        self._lock = threading.Lock()
        self._generation = 0  # of decode requests: a newer one ends those before it
        self._interruptions = 0  # of the opening of a session, which a decode request does not end
        self._frames = Frames()
        self._camera = Camera(node)
        self._progress = node.create_publisher(ReplyProgress, "reply_progress", qos.STATE)
        self._stats = node.create_publisher(DecodeStats, "decode_stats", qos.STATE)
        self._keeper = LinkKeeper(self._mend, self._on_found, self._on_still_lost)
        node.create_service(Decode, "decode", self._on_decode, callback_group=ReentrantCallbackGroup())

    # -- the session ---------------------------------------------------------------------------

    def give(self, session: EdgeSession | None) -> None:
        """What decodes from now on; None: nothing, and its memory goes."""
        with self._lock:
            self._session = session

    def open(self) -> None:
        """Open the session: LinkError when it could not be, in ten seconds or until ``interrupt``."""
        before = self._interruptions

        def cancelled() -> bool:
            return self._interruptions != before

        with self._lock:
            assert self._session is not None, "a session is given first"
            try:
                self._session.open(time.monotonic() + _OPEN_LIMIT_S, cancelled)
            except DecodeCancelled as error:
                raise LinkClosed("opening the session was interrupted") from error
        self._health.report(health.OK, f"session open, mode {self._decode_settings.mode}")

    def interrupt(self) -> None:
        """Give up opening the session, where that is under way. Any thread."""
        self._interruptions += 1

    def end(self) -> None:
        """Close the session. A decode under way ends as cancelled."""
        self._keeper.found()
        self._generation += 1
        with self._lock:
            if self._session is not None:
                self._session.close()

    def close(self) -> None:
        """The process ends."""
        self._generation += 1
        self._keeper.close()

    # -- a link that is lost -------------------------------------------------------------------

    def _lost(self, sentence: str) -> None:
        self._health.report(health.WARN, sentence)
        self._keeper.lost()

    def _mend(self) -> None:
        """One attempt, given up when somebody wants to decode: that mends the link, too."""
        try:
            with self._turn(time.monotonic() + _OPEN_LIMIT_S) as cancelled:
                if self._session is not None and self._node.active:
                    self._session.mend(time.monotonic() + _OPEN_LIMIT_S, cancelled)
        except DeadlineExceeded as error:
            raise LinkTimeout(str(error)) from error

    def _on_found(self) -> None:
        if self._node.active:
            self._health.report(health.OK, "session open again")

    def _on_still_lost(self, error: LinkError) -> None:
        if self._node.active:
            self._health.report(health.WARN, f"link lost: {error}")

    @contextmanager
    def _turn(self, deadline: float, newest: bool = False) -> Iterator[Callable[[], bool]]:
        """Hold the session; gives what says whether a newer request waits for it.

        ``newest``: this is a request. DecodeCancelled when a newer one came, DeadlineExceeded when none of
        those before it ended in time.
        """
        if newest:
            self._generation += 1
        mine = self._generation

        def cancelled() -> bool:
            return self._generation != mine

        while not self._lock.acquire(timeout=0.05):
            if cancelled():
                raise DecodeCancelled
            if time.monotonic() > deadline:
                raise DeadlineExceeded("An earlier decode did not end in time.")
        try:
            yield cancelled
        finally:
            self._lock.release()

    # -- decoding ------------------------------------------------------------------------------

    def _on_decode(self, request: Decode.Request, answer: Decode.Response) -> Decode.Response:
        text = request.instruction.strip()
        if not text or len(text) > MAX_INSTRUCTION_CHARS:
            return _fail(
                answer,
                Answer.INVALID_REQUEST,
                f"The instruction has {len(text)} characters; 1 to {MAX_INSTRUCTION_CHARS} are allowed.",
            )
        if not 0.0 <= request.timeout <= 3600.0:
            return _fail(answer, Answer.INVALID_REQUEST, f"The time-out is {request.timeout} s; it must be 0 to 3600.")
        if len(request.history_stamps) != len(request.history_actions):
            return _fail(
                answer,
                Answer.INVALID_REQUEST,
                f"There are {len(request.history_stamps)} stamps of earlier steps and "
                f"{len(request.history_actions)} actions; name one action for each.",
            )
        deadline = time.monotonic() + (request.timeout or self._settings.decode_timeout_s)
        try:
            with self._turn(deadline, newest=True) as cancelled:
                return self._decode(request, text, deadline, cancelled, answer)
        except DecodeCancelled:
            return _fail(answer, Answer.CANCELED, "A newer request took this one's place.")
        except DeadlineExceeded as error:
            return _fail(answer, Answer.TIMED_OUT, str(error))

    def _decode(
        self,
        request: Decode.Request,
        text: str,
        deadline: float,
        cancelled: Callable[[], bool],
        answer: Decode.Response,
    ) -> Decode.Response:
        """Picture, reply, statistics. Call with the lock held; DecodeCancelled."""
        if self._session is None or not self._node.active:
            return _fail(answer, Answer.LINK_LOST, f"There is no session with a verifier: {self._node.reason}")
        wait = min(self._settings.image_timeout_s, max(0.0, deadline - time.monotonic()))
        image = self._camera.fresh(seconds(request.not_before), wait, cancelled)
        if cancelled():
            raise DecodeCancelled
        if image is None:
            return _fail(
                answer,
                Answer.NO_IMAGE,
                f"No fresh picture came from the camera within {wait:.1f} s; the last one came "
                f"{min(self._camera.silence, 9999.0):.1f} s ago.",
            )
        answer.observation_stamp = image.header.stamp
        try:
            rgb = to_rgb(image)
            history = self._history(request, image, rgb)
            reply = self._reply(rgb, image, text, deadline, cancelled, request.allow_unverified, history)
        except ImageError as error:
            return _fail(answer, Answer.NO_IMAGE, str(error))
        except DeadlineExceeded as error:
            self._lost(str(error))
            return _fail(answer, Answer.TIMED_OUT, str(error))
        except (VerifierRefused, LinkRefused) as error:
            self._lost(f"refused: {error}")
            return _fail(answer, Answer.REFUSED, str(error))
        except LinkError as error:
            self._lost(f"link lost: {error}")
            return _fail(answer, Answer.LINK_LOST, str(error))
        except ValueError as error:
            return _fail(answer, Answer.FAILED, str(error))
        except RuntimeError as error:  # torch's, e.g. out of memory: this reply is lost, the node is not
            self._health.report(health.ERROR, f"the draft model failed: {error}")
            return _fail(answer, Answer.FAILED, f"The draft model failed: {error}")
        answer.success = True
        answer.code = Answer.OK
        answer.text = reply.text
        answer.verified = reply.verified
        answer.stats = self._statistics(reply, image)
        self._node.get_logger().info(reply.summary())
        if not reply.verified:
            answer.message = "Not verified: the link is lost, and this is the draft's word alone."
            return answer
        self._stats.publish(answer.stats)
        self._keeper.found()
        self._health.report(
            health.OK, "session open", {"last reply, s": f"{reply.seconds:.3f}", "tau": f"{reply.tau:.2f}"}
        )
        return answer

    def _reply(
        self,
        rgb: np.ndarray,
        image: Image,
        text: str,
        deadline: float,
        cancelled: Callable[[], bool],
        allow_unverified: bool,
        history: History,
    ) -> DecodedReply:
        """The verified reply, told as it grows; where that is allowed and the link is lost, the draft's own."""
        session = self._session
        assert session is not None
        progress = Progress(self._progress, image.header, text, session.text)
        patience = self._settings.link_patience_s if allow_unverified else None
        try:
            reply = session.decode(
                rgb,
                text,
                on_progress=progress.tell,
                deadline=deadline,
                cancelled=cancelled,
                history=history,
                patience=patience,
            )
        except (DeadlineExceeded, VerifierRefused, LinkRefused):
            raise
        except LinkError as error:
            if not (allow_unverified and session.can_decode_alone):
                raise
            self._lost(f"link lost: {error}")
            return session.decode_alone(rgb, text, deadline=deadline, cancelled=cancelled, history=history)
        progress.tell(reply.text, len(reply.tokens), reply.records[-1], done=True)
        return reply

    def _history(self, request: Decode.Request, image: Image, rgb: np.ndarray) -> History:
        """The earlier steps to be shown along; and the present picture may be one of a later request's."""
        stamp = image.header.stamp
        most = self._settings.history_frames
        if not most:
            return []
        self._frames.remember((stamp.sec, stamp.nanosec), rgb)
        stamps = [(earlier.sec, earlier.nanosec) for earlier in request.history_stamps]
        return self._frames.history(stamps, request.history_actions, most)

    def _statistics(self, reply: DecodedReply, image: Image) -> DecodeStats:
        settings = self._decode_settings
        now = self._node.get_clock().now()
        stats = DecodeStats(
            observation_stamp=image.header.stamp,
            mode=reply.mode,
            transport=self._settings.transport,
            gamma=round(reply.draft_length),
            rounds=reply.rounds,
            tokens=len(reply.tokens),
            tau=float(reply.tau),
            accepted=list(reply.accepted),
            bytes_up=reply.bytes_up,
            bytes_down=reply.bytes_down,
            seconds=float(reply.seconds),
            draft_seconds=float(reply.draft_seconds),
            verify_seconds=float(reply.verify_seconds),
            link_seconds=max(0.0, reply.wait_seconds - reply.verify_seconds),
            draft_round_seconds=float(reply.draft_round_seconds),
            verify_round_seconds=float(reply.verify_round_seconds),
            cost_ratio=float(reply.cost_ratio),
            link_delay_seconds=float(reply.link_delay_seconds),
            peak_memory=reply.peak_memory,
            threads=reply.threads,
            miss_rate=float(reply.miss_rate) if settings.predrafts else 0.0,
            mean_exit=float(reply.mean_exit),
            exits=reply.exits,
            predrafts_used=reply.predrafts_used,
            predrafts_wasted=reply.predrafts_wasted,
            sync_seconds=float(reply.sync_seconds),
            worker_error=reply.worker_error[:256],
            observation_age=float(now.nanoseconds * 1e-9 - seconds(image.header.stamp)),
        )
        stats.header.stamp = now.to_msg()
        stats.header.frame_id = image.header.frame_id
        return stats


def _fail(answer: Decode.Response, code: int, sentence: str) -> Decode.Response:
    answer.success, answer.code, answer.message = False, code, sentence[:1000]
    return answer
