"""The robot's half of a decode as a lifecycle node: draft model, camera, session with the verifier.

configure loads the draft model, activate opens the session, deactivate closes it, cleanup frees the model. With
``autostart`` the node takes itself there, and keeps trying while no verifier answers. A session that breaks later
is resumed, or opened anew, by the next decode.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from sensor_msgs.msg import Image

from dsd_msgs.msg import DecodeStats, ReplyProgress
from dsd_msgs.srv import Decode
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.errors import DeadlineExceeded, DecodeCancelled, VerifierRefused
from dsd_ros.edge.link import LinkSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.nodes import health, qos
from dsd_ros.nodes.camera import Camera
from dsd_ros.nodes.dds_channel import DdsChannel
from dsd_ros.nodes.images import ImageError, to_rgb
from dsd_ros.nodes.managed import ManagedNode
from dsd_ros.nodes.models import declare_model
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.progress import Progress
from dsd_ros.nodes.running import main as run_main
from dsd_ros.nodes.stamps import seconds
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.channel import LinkError, LinkRefused

Answer = Decode.Response
MAX_INSTRUCTION_CHARS = 2000
_OPEN_LIMIT_S = 10.0  # one attempt to open the session


@dataclass(frozen=True)
class DraftNodeSettings:
    """Parameters of the node itself."""

    transport: str = field(
        default="dds",
        metadata={
            "help": "what carries the drafts from here, for the statistics",
            "choices": ("dds", "websocket"),
        },
    )
    image_timeout_s: float = field(
        default=2.0,
        metadata={"help": "how long to wait for a fresh picture, s", "min": 0.1, "max": 30.0},
    )
    decode_timeout_s: float = field(
        default=15.0,
        metadata={"help": "how long a reply may take when the caller gives no limit, s",
                  "min": 0.5, "max": 120.0},
    )  # fmt: skip
    target_tokenizer: str = field(
        default="",
        metadata={
            "help": "the target's directory or tokenizer.json, where the draft has another tokenizer; "
            "empty: the draft's"
        },
    )


class DraftNode(ManagedNode):
    """See the module. ``_session_lock`` is held by whoever uses or changes the session."""

    def __init__(self) -> None:
        super().__init__("draft_node", heartbeat=True)
        self._settings = declare(self, DraftNodeSettings)
        self._model_settings = declare_model(self, "draft")
        self._decode_settings = declare(self, DecodeSettings, "decode.")
        self._link_settings = declare(self, LinkSettings, "link.")
        refuse_unknown(self)
        self._session: EdgeSession | None = None
        self._session_lock = threading.Lock()
        self._generation = 0  # of decode requests: a newer one ends those before it

        self._channel = DdsChannel(self)
        self._camera = Camera(self)
        self._progress = self.create_publisher(ReplyProgress, "reply_progress", qos.STATE)
        self._stats = self.create_publisher(DecodeStats, "decode_stats", qos.STATE)
        self.create_service(
            Decode, "decode", self._on_decode, callback_group=ReentrantCallbackGroup()
        )
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        model = load_model(self._model_settings)
        tokenizer = self._settings.target_tokenizer
        vocabulary = Vocabulary.load(tokenizer) if tokenizer else None
        session = EdgeSession(
            self._channel, model, self._decode_settings, self._link_settings, vocabulary
        )
        with self._session_lock:
            self._session = session
        self.get_logger().info(f"draft model {model.name} loaded")

    def begin(self) -> None:
        with self._session_lock:
            assert self._session is not None, "load comes first"
            self._session.open(time.monotonic() + _OPEN_LIMIT_S)
        self._health.report(health.OK, f"session open, mode {self._decode_settings.mode}")

    def end(self) -> None:
        self._cancel_decodes()
        with self._session_lock:
            if self._session is not None:
                self._session.close()

    def unload(self) -> None:
        with self._session_lock:
            self._session = None  # and the model with it

    def give_back(self) -> None:
        self._channel.close()

    def _cancel_decodes(self) -> None:
        self._generation += 1

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
            return _fail(
                answer,
                Answer.INVALID_REQUEST,
                f"The time-out is {request.timeout} s; it must be 0 to 3600.",
            )
        deadline = time.monotonic() + (request.timeout or self._settings.decode_timeout_s)
        self._generation += 1
        mine = self._generation

        def cancelled() -> bool:
            return self._generation != mine

        while not self._session_lock.acquire(timeout=0.05):
            if cancelled():
                return _fail(answer, Answer.CANCELED, "A newer request took this one's place.")
            if time.monotonic() > deadline:
                return _fail(answer, Answer.TIMED_OUT, "An earlier decode did not end in time.")
        try:
            return self._decode(text, seconds(request.not_before), deadline, cancelled, answer)
        finally:
            self._session_lock.release()

    def _decode(
        self, text: str, not_before: float, deadline: float, cancelled: Any, answer: Decode.Response
    ) -> Decode.Response:
        """Picture, reply, statistics. Call with the lock held."""
        if self._session is None or not self.active:
            return _fail(
                answer, Answer.LINK_LOST, f"There is no session with a verifier: {self.reason}"
            )
        wait = min(self._settings.image_timeout_s, max(0.0, deadline - time.monotonic()))
        image = self._camera.fresh(not_before, wait, cancelled)
        if cancelled():
            return _fail(answer, Answer.CANCELED, "A newer request took this one's place.")
        if image is None:
            return _fail(
                answer,
                Answer.NO_IMAGE,
                f"No fresh picture came from the camera within {wait:.1f} s; the last one came "
                f"{min(self._camera.silence, 9999.0):.1f} s ago.",
            )
        answer.observation_stamp = image.header.stamp
        progress = Progress(self._progress, image.header, text, self._session.text)
        try:
            reply = self._session.decode(
                to_rgb(image),
                text,
                on_progress=progress.tell,
                deadline=deadline,
                cancelled=cancelled,
            )
        except ImageError as error:
            return _fail(answer, Answer.NO_IMAGE, str(error))
        except DecodeCancelled:
            return _fail(answer, Answer.CANCELED, "A newer request took this one's place.")
        except DeadlineExceeded as error:
            self._health.report(health.WARN, str(error))
            return _fail(answer, Answer.TIMED_OUT, str(error))
        except (VerifierRefused, LinkRefused) as error:
            self._health.report(health.WARN, f"refused: {error}")
            return _fail(answer, Answer.REFUSED, str(error))
        except LinkError as error:
            self._health.report(health.WARN, f"link lost: {error}")
            return _fail(answer, Answer.LINK_LOST, str(error))
        except ValueError as error:
            return _fail(answer, Answer.FAILED, str(error))
        except (
            RuntimeError
        ) as error:  # torch's, e.g. out of memory: this reply is lost, the node is not
            self._health.report(health.ERROR, f"the draft model failed: {error}")
            return _fail(answer, Answer.FAILED, f"The draft model failed: {error}")
        answer.success = True
        answer.code = Answer.OK
        answer.text = reply.text
        answer.verified = True
        answer.stats = self._statistics(reply, image)
        progress.tell(reply.text, len(reply.tokens), reply.records[-1], done=True)
        self._stats.publish(answer.stats)
        self.get_logger().info(reply.summary())
        self._health.report(
            health.OK,
            "session open",
            {"last reply, s": f"{reply.seconds:.3f}", "tau": f"{reply.tau:.2f}"},
        )
        return answer

    def _statistics(self, reply: DecodedReply, image: Image) -> DecodeStats:
        settings = self._decode_settings
        now = self.get_clock().now()
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


def main() -> None:
    run_main(DraftNode, threads=6)
