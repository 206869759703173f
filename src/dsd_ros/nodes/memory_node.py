# SPDX-License-Identifier: Apache-2.0
"""The robot's side of answering questions, and its memory: a text model, its own documents, what it has seen.

configure loads the text model and opens the documents, activate answers the service ``dsd/ask`` together with the cloud
(``dragon.client``), deactivate ends an answer under way, cleanup frees the model. The cloud's side is a verifier with
documents: a verifier_node, or a remote one through a bridge_node. The documents never leave this process.
"""

from __future__ import annotations

import math
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import TypeAlias

from nav_msgs.msg import Odometry
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup

from dsd_msgs.msg import AnswerSource, AskStats, NavAction
from dsd_msgs.srv import Ask
from dsd_ros.dragon.answers import Answer, AnswerRefused
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.documents.memory import Memory, Sighting, seen
from dsd_ros.dragon.documents.store import Store, open_documents
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.paths import SMALL_READER, documents_directory, reader_note, shipped_model
from dsd_ros.robot.sim.world import COLOURS, KINDS, ROBOT_RADIUS
from dsd_ros.ros import health, qos
from dsd_ros.ros.dds_channel import AGGREGATION, DdsChannel
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.polled import Polled, take
from dsd_ros.ros.running import NodeLog, run_main
from dsd_ros.ros.settings import MemoryNodeSettings
from dsd_ros.ros.stamps import pose_of, seconds, to_duration
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.authentication import AuthenticatedChannel
from dsd_ros.wire.channel import LinkError, LinkRefused
from dsd_ros.wire.client import DeadlineExceeded, DecodeCancelled

Response: TypeAlias = Ask.Response
SOURCE = "what the robot has seen"  # name of the document that memory keeps
_ASK_LIMIT_S = 30.0  # for an answer whose request has no time-out
_REPLACED = "A newer question took this one's place."
# How the shipped target says where a thing is; other wordings are not remembered.
_SEEN = re.compile(
    r"\bThe (?P<thing>\w+ \w+) is (?P<side>straight ahead|a little (?:left|right)|on the (?:left|right)|"
    r"far (?:left|right)), (?P<metres>\d+(?:\.\d+)?) m away\b"
)
_DEGREES = {"straight": 0.0, "a": 6.0, "on": 18.0, "far": 32.0}  # approximate bearing, by the side's first word


class MemoryNode(ManagedNode[MemoryNodeSettings]):
    """See the module. ``_turn`` is held by whoever uses or changes the session."""

    def __init__(self) -> None:
        super().__init__("memory_node", MemoryNodeSettings)
        self._log_lines = NodeLog(self)
        self._channel = DdsChannel(self, topics=AGGREGATION)
        self._model: VisionLanguageModel | None = None
        self._store: Store | None = None
        self._session: DragonClient | None = None
        self._pose: Pose | None = None  # the newest from odometry
        self._memory: SightingMemory | None = None
        self._turn = threading.Lock()
        self._generation = 0  # of questions: a newer one cancels earlier ones
        self._inputs = Polled(self)
        self._odometry = self._inputs.subscribe(Odometry, "odom", qos.SENSOR)
        group = MutuallyExclusiveCallbackGroup()
        self.create_subscription(NavAction, "dsd/nav_action", self._on_action, qos.STATE, callback_group=group)
        self.create_service(Ask, "dsd/ask", self._on_ask, callback_group=ReentrantCallbackGroup())
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        self._settings.token()  # reports now that there is none
        self._store = open_documents(documents_directory(self._settings.documents, "robot"))
        self._memory = SightingMemory(self._store)
        if (note := reader_note()) and self._settings.model.path == str(shipped_model(SMALL_READER)):
            self.get_logger().warning(note)
        self._model = load_model(self._settings.model)

    def begin(self) -> None:
        model, store = self._model, self._store
        assert model is not None and store is not None, "load comes first"
        token = self._settings.token
        channel = AuthenticatedChannel(self._channel, token) if token() else self._channel
        with self._turn:
            self._session = DragonClient(channel, model, store, self._settings.answer)
        documents = len(store.documents())
        self._health.report(health.OK, f"text model {model.name} loaded, {documents} documents, answering")

    def interrupt(self) -> None:
        self._generation += 1

    def end(self) -> None:
        self._generation += 1
        session = self._session
        if session is not None:
            session.close()  # ends an answer under way
        with self._turn:
            self._session = None

    def unload(self) -> None:
        self._model = self._memory = None
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def give_back(self) -> None:
        self.unload()
        self._channel.close()
        self._inputs.close()
        self._log_lines.close()

    # -- questions -----------------------------------------------------------------------------

    def _on_ask(self, request: Ask.Request, response: Response) -> Response:
        try:
            question = check_instruction(request.question)
        except ValueError as error:
            return _fail(response, Response.INVALID_REQUEST, str(error))
        timeout = seconds(request.timeout)
        if not 0.0 <= timeout <= 3600.0:
            sentence = f"The time-out is {timeout:g} s; it must be 0 to 3600."
            return _fail(response, Response.INVALID_REQUEST, sentence)
        deadline = time.monotonic() + (timeout or _ASK_LIMIT_S)
        self._generation += 1
        mine = self._generation
        while not self._turn.acquire(timeout=0.05):
            if self._generation != mine:
                return _fail(response, Response.CANCELED, _REPLACED)
            if time.monotonic() > deadline:
                return _fail(response, Response.TIMED_OUT, "An earlier answer did not end in time.")
        try:
            return self._answer(question, request.max_tokens, deadline, mine, response)
        finally:
            self._turn.release()

    def _answer(self, question: str, max_tokens: int, deadline: float, mine: int, response: Response) -> Response:
        session = self._session
        if session is None or not self.active:
            return _fail(response, Response.FAILED, self.reason)
        wanted = max_tokens or self._settings.answer.max_tokens
        try:
            session.settings = replace(self._settings.answer, max_tokens=wanted)
            answer = session.answer(question, cancelled=lambda: self._generation != mine, deadline=deadline)
        except DecodeCancelled:
            return _fail(response, Response.CANCELED, _REPLACED)
        except DeadlineExceeded as error:
            return self._lost(response, Response.LINK_LOST if error.trouble else Response.TIMED_OUT, error)
        except (AnswerRefused, LinkRefused) as error:
            return self._lost(response, Response.REFUSED, error)
        except LinkError as error:
            return self._lost(response, Response.LINK_LOST, error)
        except ValueError as error:  # from settings, prompts, contexts and stores
            return _fail(response, Response.FAILED, str(error))
        except RuntimeError as error:  # from torch: this answer is lost, the node is not
            self._health.report(health.ERROR, f"the text model failed: {error}")
            return _fail(response, Response.FAILED, f"The text model failed: {error}")
        response.text, response.stats = answer.text, statistics(answer)
        response.known, response.sources = answer.known, sources(answer)
        if not answer.finished:
            sentence = f"The answer was not at its end after {wanted} tokens; allow more (max_tokens)."
            return _fail(response, Response.FAILED, sentence)
        response.success, response.code = True, Response.OK
        if not answer.whole:
            response.message = "The link was lost: the end is from the robot's documents alone."
        self._health.report(health.OK, "answering", {"last answer, s": f"{answer.statistics.seconds:.2f}"})
        return response

    def _lost(self, response: Response, code: int, error: LinkError) -> Response:
        if self.active:
            self._health.report(health.WARN, str(error))
        return _fail(response, code, str(error))

    # -- memory --------------------------------------------------------------------------------

    def _on_action(self, action: NavAction) -> None:
        memory = self._memory
        if odometry := take(self._odometry):  # none is new when two actions come at once
            with suppress(OdometryError):
                self._pose = pose_of(odometry[-1])
        if memory is None or self._pose is None or not self._settings.remember:
            return
        if not action.verified or action.retracing:  # only what the target itself has seen
            return
        try:
            stamp = seconds(action.observation_stamp)
            new = memory.remember(action.reasoning, self._pose, stamp)
        except ValueError as error:
            self.get_logger().warning(f"not remembered: {error}", throttle_duration_sec=10.0)
            return
        for sighting in new:
            self.get_logger().info(f"remembered: {sighting.sentence}")


def sightings(reasoning: str, pose: Pose, time: datetime) -> list[Sighting]:
    """The thing that a reply says it sees at a distance, located for a robot at ``pose``; empty if there is none.

    Positions are in metres of the odometry frame.
    """
    found = _SEEN.search(reasoning)
    if found is None:
        return []
    side = found["side"]
    angle = math.radians(_DEGREES[side.split()[0]]) * (-1.0 if side.endswith("right") else 1.0)
    ahead = float(found["metres"]) + ROBOT_RADIUS
    return seen(found["thing"], pose.x, pose.y, pose.yaw + angle, time, COLOURS, KINDS, ahead=ahead)


class SightingMemory:
    """Keeps sightings in a store, together with those it holds already. For one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.memory = Memory.read("\n".join(store.texts(SOURCE)))

    def remember(self, reasoning: str, pose: Pose, stamp: float) -> list[Sighting]:
        """Store and return what is new in a verified reply about a picture of ``stamp`` (s)."""
        time = datetime.fromtimestamp(stamp, timezone.utc)
        new = [sighting for sighting in sightings(reasoning, pose, time) if self.memory.add(sighting)]
        if new:
            self._store.add(self.memory.document(SOURCE))
        return new


def sources(answer: Answer) -> list[AnswerSource]:
    """The documents that tell an answer, as messages."""
    sides = {"device": AnswerSource.ROBOT, "cloud": AnswerSource.CLOUD}
    return [
        AnswerSource(sentence=each.sentence[:512], side=sides[each.side], document=each.document[:64])
        for each in answer.sources[:64]
    ]


def statistics(answer: Answer) -> AskStats:
    """An answer's figures as a message."""
    figures = answer.statistics
    stats = AskStats(tokens=len(answer.tokens), documents=figures.device_documents)
    stats.total_time = to_duration(figures.seconds)
    stats.first_token_time = to_duration(figures.first_token_seconds)
    for name in ("cloud_documents", "switches", "reveals", "attempts", "bytes_up", "bytes_down"):
        setattr(stats, name, getattr(figures, name))
    for name in ("device_accepted", "cloud_accepted"):
        setattr(stats, name, sum(getattr(step, name) for step in figures.steps))
    return stats


def _fail(response: Response, code: int, sentence: str) -> Response:
    response.success, response.code, response.message = False, code, sentence[:1000]
    return response


def main() -> None:
    run_main(MemoryNode, threads=5)
