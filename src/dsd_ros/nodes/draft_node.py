# SPDX-License-Identifier: Apache-2.0
"""The robot's half of a decode as a lifecycle node: draft model, camera, session with the verifier, ``dsd/decode``.

configure loads the draft model, activate opens the session, deactivate closes it, cleanup frees the model. With
``autostart`` the node activates itself, and keeps trying while no verifier answers. A session that breaks later is
resumed or reopened by the next decode, or in the background before there is one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
from builtin_interfaces.msg import Duration
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.publisher import Publisher

from dsd_msgs.msg import DecodeStats, ReplyProgress, RoundStats
from dsd_msgs.srv import Decode
from dsd_ros.decoding.modes import streams
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.edge.drafters import Worth
from dsd_ros.edge.engine import DraftEngine, load_draft
from dsd_ros.edge.observation import History
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.edge.session import EdgeSession, check_settings
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.navigation.run.actions import action_in, read_grammar
from dsd_ros.navigation.safety.causes import WAITING
from dsd_ros.ros import health, qos
from dsd_ros.ros.camera import Camera, RecentFrames
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.ros.images import ImageMessageError, Picture, to_rgb
from dsd_ros.ros.link_keeper import LinkKeeper
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.running import NodeLog, run_main
from dsd_ros.ros.settings import DraftNodeSettings
from dsd_ros.ros.stamps import seconds, to_duration
from dsd_ros.shown import seconds_name
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.authentication import AuthenticatedChannel
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkRefused, LinkTimeout
from dsd_ros.wire.client import DeadlineExceeded, DecodeCancelled

Answer: TypeAlias = Decode.Response
_OPEN_LIMIT_S = 10.0  # for one attempt to open the session
_REPLY_LIMIT_S = 15.0  # for a reply whose request has no time-out
_MAX_TEXT = 8192  # as in ReplyProgress.msg
_MAX_PIECE, _MAX_GAINED, _MAX_REJECTED, _MAX_EXITS = 64, 128, 64, 256  # as in RoundStats.msg
_COPIED_FROM_ROUND = RoundStats.get_fields_and_field_types().keys() - {
    "gained",
    "rejected",
    "exit_layers",
    "exit_times",
}
_COPIED_FROM_REPLY = (
    "mode", "rounds", "tau", "bytes_up", "bytes_down", "total_time", "draft_time", "verify_time",
    "draft_share", "passes_per_token", "sooner", "draft_round_time", "verify_round_time", "cost_ratio", "link_delay",
    "peak_memory", "threads", "mean_exit", "exits", "predrafts_used", "predrafts_wasted", "sync_time",
)  # fmt: skip


class DraftNode(ManagedNode[DraftNodeSettings]):
    """See the module. ``_lock`` is held by whoever uses or changes the session."""

    def __init__(self) -> None:
        super().__init__("draft_node", DraftNodeSettings, heartbeat=True)
        self._log_lines = NodeLog(self)
        self._channel = DdsChannel(self)
        self._proven: AuthenticatedChannel | None = None  # the same with a token
        self._session: EdgeSession | None = None
        self._worth = Worth()
        self._loaded: tuple[VisionLanguageModel | DraftEngine, Vocabulary | None] | None = None
        self._lock = threading.Lock()
        self._generation = 0  # of decode requests: a newer one cancels earlier ones
        self._interruptions = 0  # of opening the session, which a decode request does not interrupt
        self._frames = RecentFrames()
        self._replies = self._parsed = 0  # replies, and those among them that end in an action of the grammar
        self._keeper = LinkKeeper(self._reconnect, self._on_link_found, self._on_link_still_lost)

        self._camera = Camera(self, self._settings.image_transport)
        self._progress = self.create_publisher(ReplyProgress, "dsd/reply_progress", qos.PROPOSALS)
        self._stats = self.create_publisher(DecodeStats, "dsd/decode_stats", qos.STATE)
        self.create_service(Decode, "dsd/decode", self._on_decode, callback_group=ReentrantCallbackGroup())
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        settings = self._settings
        self._grammar = read_grammar(settings.grammar)
        self._proven = AuthenticatedChannel(self._channel, settings.token) if settings.token() else None
        model = load_draft(settings.model, settings.draft_engine)
        vocabulary = Vocabulary.load(settings.target_tokenizer) if settings.target_tokenizer else None
        with self._lock:
            self._loaded = model, vocabulary
            self._session = self._new_session()
        drafts = f"is drafted with at {settings.draft_engine}" if settings.draft_engine else "loaded"
        self.get_logger().info(f"draft model {model.name} {drafts}")

    def begin(self) -> None:
        """:raises LinkError: when the session could not be opened within ten seconds, or was interrupted."""
        before = self._interruptions
        with self._lock:
            assert self._session is not None, "load comes first"
            try:
                self._session.open(time.monotonic() + _OPEN_LIMIT_S, lambda: self._interruptions != before)
            except DecodeCancelled as error:
                raise LinkClosed("opening the session was interrupted") from error
        self._health.report(health.OK, f"session open, mode {self._settings.decode.mode}", self._proof())

    def change(self, settings: DraftNodeSettings) -> None:
        if self._loaded is not None:  # the next decode uses a new session
            check_settings(settings.decode, *self._loaded, settings.form(settings.decode.max_tokens))

    def interrupt(self) -> None:
        self._interruptions += 1

    def end(self) -> None:
        """Close the session; a decode under way is cancelled."""
        self._keeper.found()
        self._generation += 1
        with self._lock:
            if self._session is not None:
                self._session.close()

    def unload(self) -> None:
        with self._lock:
            self._session = self._loaded = None  # and the model with them

    def give_back(self) -> None:
        self._generation += 1
        self._keeper.close()
        self._channel.close()
        self._log_lines.close()

    def _new_session(self) -> EdgeSession:
        """A session with the present settings. Call with the lock held, after :meth:`load`."""
        assert self._loaded is not None
        settings = self._settings
        made_with = settings.decode, settings.link
        self._made_with = *made_with, settings.constrain
        model, vocabulary = self._loaded
        form = settings.form(settings.decode.max_tokens)
        return EdgeSession(self._proven or self._channel, model, *made_with, vocabulary, form, self._worth)

    # -- the session ---------------------------------------------------------------------------

    @contextmanager
    def _turn(self, deadline: float, newest: bool = False) -> Iterator[Callable[[], bool]]:
        """Hold the session; yields a function that says whether a newer request is waiting for it.

        :param newest: this is a request itself, and cancels earlier ones.
        :raises DecodeCancelled: when a newer request came first.
        :raises DeadlineExceeded: when no earlier request ended in time.
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

    def _link_lost(self, sentence: str) -> None:
        self._health.report(health.WARN, sentence)
        self._keeper.lost()

    def _reconnect(self) -> None:
        """One attempt, abandoned when a decode is requested, which reconnects as well."""
        try:
            with self._turn(time.monotonic() + _OPEN_LIMIT_S) as cancelled:
                if self._session is not None and self.active and self._keeper.down:  # no decode has found it meanwhile
                    self._session.reconnect(time.monotonic() + _OPEN_LIMIT_S, cancelled)
        except DeadlineExceeded as error:
            raise LinkTimeout(str(error)) from error

    def _on_trouble(self, sentence: str) -> None:
        """The decode under way waits for an answer that is overdue, or no longer does."""
        if sentence:
            self._health.report(health.WARN, f"{WAITING}: {sentence}")
        else:
            self._health.report(health.OK, "session open", self._proof())

    def _on_link_found(self) -> None:
        if self.active:
            self._health.report(health.OK, "session open again")

    def _on_link_still_lost(self, error: LinkError) -> None:
        if self.active:
            self._health.report(health.WARN, f"link lost: {error}")

    # -- decoding ------------------------------------------------------------------------------

    def _on_decode(self, request: Decode.Request, answer: Answer) -> Answer:
        text = request.instruction.strip()
        refusal = _refusal(request, text)
        if refusal:
            return _fail(answer, Answer.INVALID_REQUEST, refusal)
        deadline = time.monotonic() + (seconds(request.timeout) or _REPLY_LIMIT_S)
        try:
            with self._turn(deadline, newest=True) as cancelled:
                return self._decode(request, text, deadline, cancelled, answer)
        except DecodeCancelled:
            return _fail(answer, Answer.CANCELED, "A newer request took this one's place.")
        except DeadlineExceeded as error:
            return _fail(answer, Answer.TIMED_OUT, str(error))

    def _decode(
        self, request: Decode.Request, text: str, deadline: float, cancelled: Callable[[], bool], answer: Answer
    ) -> Answer:
        """Get a picture, decode, publish statistics. Call with the session held; raises DecodeCancelled."""
        if self._session is None or not self.active:
            return _fail(answer, Answer.LINK_LOST, f"There is no session with a verifier: {self.reason}")
        if self._made_with != (self._settings.decode, self._settings.link, self._settings.constrain):
            self._session.close()
            self._session = self._new_session()
        wait = min(self._settings.image_timeout_s, max(0.0, deadline - time.monotonic()))
        not_before = seconds(request.not_before)
        image = self._camera.fresh(not_before, wait, cancelled)
        if cancelled():
            raise DecodeCancelled
        if image is None:
            return _fail(answer, Answer.NO_IMAGE, self._camera.complaint(not_before, wait))
        answer.observation_stamp = image.header.stamp
        try:
            rgb = to_rgb(image)
            history = self._history(request, image, rgb)
            options = {"deadline": deadline, "cancelled": cancelled, "history": history}
            reply = self._reply(image, rgb, text, request.allow_unverified, options)
        except ImageMessageError as error:
            return _fail(answer, Answer.NO_IMAGE, str(error))
        except DecodeCancelled:
            if self._health.level == health.WARN:  # while it waited: who says now when the link is back?
                self._keeper.lost()
            raise
        except DeadlineExceeded as error:
            self._link_lost(str(error))
            return _fail(answer, Answer.LINK_LOST if error.trouble else Answer.TIMED_OUT, str(error))
        except (VerifierRefused, LinkRefused) as error:
            self._link_lost(f"refused: {error}")
            return _fail(answer, Answer.REFUSED, str(error))
        except LinkError as error:
            self._link_lost(f"link lost: {error}")
            return _fail(answer, Answer.LINK_LOST, str(error))
        except ValueError as error:
            return _fail(answer, Answer.FAILED, str(error))
        except RuntimeError as error:  # from torch, e.g. out of memory: this reply is lost, the node is not
            self._health.report(health.ERROR, f"the draft model failed: {error}")
            return _fail(answer, Answer.FAILED, f"The draft model failed: {error}")
        return self._answer(reply, image, answer)

    def _reply(
        self, image: Picture, rgb: np.ndarray, text: str, allow_unverified: bool, options: dict[str, Any]
    ) -> DecodedReply:
        """The verified reply, published as it grows; the draft's own if that is allowed and the link is lost."""
        session = self._session
        assert session is not None
        about = {"header": image.header, "instruction": text, "mode": session.settings.mode}
        progress = ReplyPublisher(self._progress, session.text, **about)
        patience = self._settings.link_patience_s if allow_unverified else None
        try:
            reply = session.decode(
                rgb, text, progress.publish, patience=patience, on_trouble=self._on_trouble, **options
            )
        except (DeadlineExceeded, VerifierRefused, LinkRefused):
            raise
        except LinkError as error:
            if not (allow_unverified and session.can_decode_alone):
                raise
            self._link_lost(f"link lost: {error}")
            return session.decode_alone(rgb, text, **options)
        progress.publish(reply.text, len(reply.tokens), reply.records[-1], done=True)
        return reply

    def _answer(self, reply: DecodedReply, image: Picture, answer: Answer) -> Answer:
        answer.success, answer.code = True, Answer.OK
        answer.text, answer.verified, answer.stats = reply.text, reply.verified, self._statistics(reply, image)
        self.get_logger().info(reply.summary())
        if not reply.verified:
            answer.message = "Not verified: the link is lost, and this is the draft's word alone."
            return answer
        self._stats.publish(answer.stats)
        self._keeper.found()
        figures = {"last reply, s": f"{reply.seconds:.3f}", "from drafts": f"{100 * reply.draft_share:.0f} %"}
        figures["replies that parse"] = f"{self._parsed} of {self._replies}"
        self._health.report(health.OK, "session open", figures | self._proof())
        return answer

    def _proof(self) -> dict[str, str]:
        """What /diagnostics says of the token."""
        if self._proven is None:
            return {"authenticated": "no"}
        return {"authenticated": "yes", "dropped messages": str(self._proven.dropped.count)}

    def _history(self, request: Decode.Request, image: Picture, rgb: np.ndarray) -> History:
        """The earlier steps to show to the model; also keeps the present picture for later requests."""
        stamp, most = image.header.stamp, self._settings.history_frames
        if not most:
            return []
        self._frames.remember((stamp.sec, stamp.nanosec), rgb)
        stamps = [(earlier.sec, earlier.nanosec) for earlier in request.history_stamps]
        return self._frames.history(stamps, request.history_actions, most)

    def _statistics(self, reply: DecodedReply, image: Picture) -> DecodeStats:
        now = self.get_clock().now()
        parses = bool(action_in(reply.text, self._grammar))
        self._replies, self._parsed = self._replies + 1, self._parsed + parses
        stats = DecodeStats(
            observation_stamp=image.header.stamp,
            transport=self._settings.transport,
            gamma=round(reply.draft_length),
            tokens=len(reply.tokens),
            accepted=list(reply.accepted),
            link_time=to_duration(0.0 if streams(reply.mode) else max(0.0, reply.wait_seconds - reply.verify_seconds)),
            miss_rate=float(reply.miss_rate) if reply.drafted_ahead else 0.0,
            choice=reply.choice[:256],
            worker_error=reply.worker_error[:256],
            observation_age=to_duration(now.nanoseconds * 1e-9 - seconds(image.header.stamp)),
            parses=parses,
            parse_share=self._parsed / self._replies,
        )
        copy_figures(reply, stats, _COPIED_FROM_REPLY)
        if reply.speculative_decoding is not None:
            for name, value in asdict(reply.speculative_decoding).items():
                setattr(stats.speculative_decoding, name, value)
        stats.header.stamp = now.to_msg()
        stats.header.frame_id = image.header.frame_id
        return stats


class ReplyPublisher:
    """Publishes one reply pass by pass, or round by round.

    :param text: turns tokens into text.
    :param about: the message's fields that stay: the picture's header, the instruction, the mode.
    """

    def __init__(self, publisher: Publisher, text: Callable[[list[int]], str], **about: Any) -> None:
        self._publisher = publisher
        self._text = text
        self._pieces: dict[int, str] = {}
        self._message = ReplyProgress(**about)

    def publish(self, text: str, tokens: int, last: RoundRecord, done: bool = False) -> None:
        """Publish the verified ``text`` of ``tokens`` after pass or round ``last``; ``done``: once more, at the end."""
        message = self._message
        message.text, message.verified_tokens, message.done = text[:_MAX_TEXT], tokens, done
        if not done:
            message.rounds += 1
            message.last_round = self._round(last)
        self._publisher.publish(message)

    def _round(self, last: RoundRecord) -> RoundStats:
        stats = RoundStats()
        copy_figures(last, stats, _COPIED_FROM_ROUND)
        stats.exit_layers = list(last.exit_layers[:_MAX_EXITS])
        stats.exit_times = [to_duration(value) for value in last.exit_seconds[:_MAX_EXITS]]
        stats.gained = [self._piece(token) for token in last.gained[:_MAX_GAINED]]
        stats.rejected = [self._piece(token) for token in last.rejected[:_MAX_REJECTED]]
        return stats

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = shortened(self._text([token]))
        return self._pieces[token]


def copy_figures(record: DecodedReply | RoundRecord, message: Any, names: Iterable[str]) -> None:
    """Copy a record's figures to the fields of these names; a duration's record is in seconds."""
    for name in names:
        present = getattr(message, name)
        if isinstance(present, Duration):
            setattr(message, name, to_duration(getattr(record, seconds_name(name))))
        else:
            setattr(message, name, type(present)(getattr(record, name)))


def shortened(text: str, limit: int = _MAX_PIECE) -> str:
    """The longest beginning of a text that takes at most ``limit`` bytes in UTF-8."""
    if len(text) * 4 <= limit:
        return text
    return text.encode()[:limit].decode(errors="ignore")


def _refusal(request: Decode.Request, text: str) -> str:
    """Why a request is invalid; empty when it is valid."""
    if not text or len(text) > MAX_INSTRUCTION_CHARS:
        return f"The instruction has {len(text)} characters; 1 to {MAX_INSTRUCTION_CHARS} are allowed."
    if not 0.0 <= seconds(request.timeout) <= 3600.0:
        return f"The time-out is {seconds(request.timeout):g} s; it must be 0 to 3600."
    stamps, actions = len(request.history_stamps), len(request.history_actions)
    if stamps != actions:
        return f"There are {stamps} stamps of earlier steps and {actions} actions; name one action for each."
    return ""


def _fail(answer: Answer, code: int, sentence: str) -> Answer:
    answer.success, answer.code, answer.message = False, code, sentence[:1000]
    return answer


def main() -> None:
    run_main(DraftNode, threads=6)
