# SPDX-License-Identifier: Apache-2.0
"""The service `dsd/ask` with real nodes: over DDS, through a bridge, without documents, with the link lost."""

from __future__ import annotations

import re
import signal
import time
from datetime import datetime, timezone

import pytest
from builtin_interfaces.msg import Duration
from nav_msgs.msg import Odometry
from ros_rig import GoalClient, Rig
from tiny_text import make_tiny_text

from dsd_msgs.msg import AnswerSource, MemoryAnswer, NavAction, Question, Verdict
from dsd_msgs.srv import Ask
from dsd_ros.dragon.documents.embedding import SentenceEncoder
from dsd_ros.dragon.documents.store import Store, open_documents
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.nodes.memory_node import SOURCE, SightingMemory, sightings
from dsd_ros.ros import qos
from dsd_ros.ros.dds_channel import AGGREGATION, DdsChannel, TopicOrder, VerifierTopics
from dsd_ros.ros.stamps import quaternion, to_stamp
from dsd_ros.wire import messages as wire

QUESTION = "which chair do I like?"
SEEN = "The red chair is straight ahead, 1.2 m away; nothing else is near it, the way is clear."


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A text model that says anything: what it costs and where it comes from is what counts here."""
    return make_tiny_text(tmp_path_factory.mktemp("reader"), seed=3, kind="qwen2")


@pytest.fixture
def places(tmp_path):
    """The robot's documents and the cloud's."""
    texts = {"robot": "My chair is the Viola.", "cloud": "The Viola chair is red. It is of oak."}
    for side, text in texts.items():
        (tmp_path / side).mkdir()
        (tmp_path / side / "facts.md").write_text(text)
    return tmp_path / "robot", tmp_path / "cloud"


def start_memory(rig: Rig, reader, documents, **parameters):
    return rig.host(
        "memory_node", model__path=reader, documents=documents,
        **{"answer__max_tokens": 12, "answer__patience_s": 2.0} | parameters,
    )  # fmt: skip


def start_verifier(rig: Rig, pair, reader, documents):
    return rig.start("verifier_node", model__path=pair[0], text_model=reader, documents=documents)


def ask(rig: Rig, question: str = QUESTION, **fields):
    fields = {"timeout": Duration(sec=40)} | fields
    return rig.call(Ask, "dsd/ask", Ask.Request(question=question, **fields), 60.0)


def test_questions_are_answered_over_topics_and_outlive_the_cloud(rig, tiny_pair, reader, places):
    own, general = places
    # An answer's text ends where the model ends it; a random one does not, and a cut one is no whole answer.
    # In step, each token takes a round trip, so that there is a midst to lose the cloud in.
    start_memory(
        rig, reader, own, answer__attempts=100, answer__patience_s=1.0, answer__window=1,
    )  # fmt: skip
    verifier = start_verifier(rig, tiny_pair, reader, general)
    rig.until_active("memory_node")
    rig.until_active("verifier_node")
    first = ask(rig, max_tokens=8)
    assert first.stats.documents == 1 and first.stats.cloud_documents == 1, first.message
    assert first.stats.tokens <= 8 and first.stats.bytes_up > 0 and first.stats.bytes_down > 0
    assert first.stats.device_accepted + first.stats.cloud_accepted > 0
    assert first.success == (first.stats.tokens < 8 or "not at its end" not in first.message)

    for question, fields, code in [
        ("", {}, Ask.Response.INVALID_REQUEST),
        ("x" * 2001, {}, Ask.Response.INVALID_REQUEST),
        (QUESTION, {"timeout": Duration(sec=-1)}, Ask.Response.INVALID_REQUEST),
        (QUESTION, {"max_tokens": 5000}, Ask.Response.FAILED),
    ]:
        refused = ask(rig, question, **fields)
        assert not refused.success and refused.code == code and refused.message

    lost = LostInMidAnswer(rig, verifier.process)
    whole = ask(rig, max_tokens=60)
    # The cloud falls silent in mid-answer and comes back with what it had to say: not a token changes.
    silent = lost.ask(lambda: None)
    verifier.process.send_signal(signal.SIGCONT)
    assert silent().text == whole.text
    # It dies in mid-answer; another one goes on with what was decided.
    dead = lost.ask(verifier.process.kill)
    verifier.process.wait()
    start_verifier(rig, tiny_pair, reader, general)
    answer = dead()
    assert answer.text == whole.text and answer.stats.tokens == whole.stats.tokens
    assert not any("started again" in line for line in rig.lines)
    assert not any("Traceback" in line for line in rig.lines)


class LostInMidAnswer:
    """Stops the verifier's process once some tokens of an answer are decided."""

    def __init__(self, rig: Rig, process) -> None:
        self._rig, self._process = rig, process
        self._client = rig.node.create_client(Ask, "dsd/ask")
        self._armed = False
        self._asks: dict[int, list[int]] = {}  # of each answer: with how many tokens it was asked for
        self._done_with: set[int] = set()
        questions = rig.node.create_subscription(Question, "dsd/question", self._on_question, qos.LINK)
        for topic in ("dsd/verdict_up", "dsd/verdict_down"):
            rig.node.create_subscription(Verdict, topic, self._on_verdict, qos.PROPOSALS)
        rig.until(self._client.service_is_ready)
        rig.until_linked("memory_node", questions)
        rig.until(lambda: rig.node.count_publishers("dsd/verdict_up"))

    def _on_question(self, question: Question) -> None:
        self._asks.setdefault(question.ask, []).append(len(question.answered))

    def _new(self) -> list[int]:
        """With how many tokens the answer under way was asked for, each time; empty before it was."""
        return next((told for ask, told in self._asks.items() if ask not in self._done_with), [])

    def _on_verdict(self, verdict: Verdict) -> None:
        # Verdicts of the answer before may still come while this one is asked for.
        known = verdict.ask in self._asks and verdict.ask not in self._done_with
        if self._armed and known and verdict.position >= 3:
            self._armed = False
            self._process.send_signal(signal.SIGSTOP)

    def ask(self, then):
        """Ask, lose the verifier in mid-answer and do ``then``; what is returned waits for the answer.

        Where the answer was whole before the verifier stopped, it is asked again.
        """
        self._rig.until(lambda: self._asks, what="the question of the answer before")
        for _ in range(20):
            self._done_with = set(self._asks)
            self._armed = True
            request = Ask.Request(question=QUESTION, timeout=Duration(sec=200), max_tokens=60)
            future = self._client.call_async(request)
            self._rig.until(lambda f=future: not self._armed or f.done(), 200.0)
            # Of the question asked again, with what was decided, it is known that it was in the midst.
            self._rig.until(lambda f=future: f.done() or len(self._new()) >= 2)
            if not future.done() and self._new()[-1] >= 3:
                break
            self._process.send_signal(signal.SIGCONT)
            self._rig.until(future.done, 200.0)
        else:
            raise AssertionError("no answer was lost in its midst")
        then()

        def result():
            self._rig.until(future.done, 200.0)
            answer = future.result()
            assert answer.stats.attempts > 1 and answer.stats.cloud_documents == 1, answer.message
            return answer

        return result


def test_a_verifier_without_documents_says_so(rig, tiny_pair, reader, places):
    start_memory(rig, reader, places[0])
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.until_active("memory_node")
    rig.until_active("verifier_node")
    refused = ask(rig)
    assert not refused.success and refused.code == Ask.Response.REFUSED
    assert "without documents" in refused.message


def test_without_a_cloud_there_is_no_answer(rig, reader):
    memory = start_memory(rig, reader, "", answer__attempts=2)
    rig.until_active("memory_node")
    lost = ask(rig)
    assert not lost.success and lost.code == Ask.Response.LINK_LOST
    client = rig.node.create_client(Ask, "dsd/ask")
    client.call_async(Ask.Request(question=QUESTION))
    began = time.monotonic()
    memory.close()  # with a question under way
    assert time.monotonic() - began < 5.0


def test_what_overtakes_its_question_waits_for_it(rig):
    arrived: list[wire.Message] = []
    topics = VerifierTopics(rig.node, arrived.append)
    topics.start()
    client = DdsChannel(rig.node, match_timeout=30.0, topics=AGGREGATION)
    question = wire.Question(
        9, 0, wire.PROTOCOL_VERSION, "t", 8, "why?", 2, 0.0, 0, 1, 2, 8, 4, "cloud",
    )  # fmt: skip
    try:
        proposals = [wire.Proposal(9, 0, place, 0, 3, 0.0, b"p") for place in range(3)]
        for message in (*proposals, question):
            client.send(message)
        rig.until(lambda: len(arrived) == 4)
        assert arrived == [question, *proposals]
        lost = wire.Reveal(10, 0, 0, 0, [1])  # its question never comes: the service refuses it
        client.send(lost)
        rig.until(lambda: len(arrived) == 5)
        assert arrived[-1] == lost
        verdict = wire.Verdict(9, 0, 0, 3, True, False, hands_over=True)
        topics.publish(wire.QuestionReply(9, 0, "", "m", "f", 8))
        topics.publish(verdict)
        assert isinstance(client.receive(10.0), wire.QuestionReply)
        assert client.receive(10.0) == verdict
        assert len(arrived) == 5  # no node hears its own messages
    finally:
        client.close()
        topics.close()


def test_an_older_attempt_waits_for_nothing():
    out: list[wire.Message] = []
    order = TopicOrder(out.append, wire.QuestionReply)
    first, second = (wire.QuestionReply(5, n, "", "m", "f", 8) for n in (0, 1))
    early = wire.Proposal(5, 1, 0, 0, 3, 0.0, b"p")
    late = wire.Proposal(5, 0, 0, 0, 3, 0.0, b"p")
    for message in (first, early, second, late):
        order.arrived(message)
    assert out == [first, second, early, late]


@pytest.mark.parametrize(
    ("reasoning", "place"),
    [
        (SEEN, (1.5, 0.0)),
        ("The red chair is far left, 2.0 m away; a can on the right, I turn left.", (1.95, 1.22)),
        ("No red chair in view, only a red ball, so I look around.", None),
        ("The red chair is straight ahead", None),
        ("The big dog is straight ahead, 1.0 m away; the way is clear.", None),
        ("", None),
    ],
)
def test_only_what_is_said_to_be_seen_is_remembered(reasoning, place):
    found = sightings(reasoning, Pose(0.0, 0.0, 0.0), datetime(2026, 1, 1, tzinfo=timezone.utc))
    if place is None:
        assert found == []
    else:
        (seen,) = found
        assert seen.thing == "the red chair"
        assert (seen.x, seen.y) == (pytest.approx(place[0], abs=0.01), pytest.approx(place[1], abs=0.01))


def test_memory_outlives_the_node(tmp_path):
    with Store(tmp_path / "store", SentenceEncoder()) as store:
        assert SightingMemory(store).remember(SEEN, Pose(0.0, 0.0, 0.0), 1.0e9)
    with open_documents(tmp_path / "store") as store:
        memory = SightingMemory(store)
        assert [s.thing for s in memory.memory.sightings] == ["the red chair"]
        assert not memory.remember("No red chair in view.", Pose(0.0, 0.0, 0.0), 1.1e9)
        found = store.retrieve("where is the red chair?", 1)
        assert "I saw the red chair at x 1.5 m, y 0.0 m." in found[0].text
        assert [listed.source for listed in store.documents()] == [SOURCE]


def test_only_verified_replies_are_remembered(rig, reader):
    start_memory(rig, reader, "")
    rig.until_active("memory_node")
    odometry = rig.node.create_publisher(Odometry, "odom", qos.STATE)
    actions = rig.node.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
    rig.until(lambda: odometry.get_subscription_count() and actions.get_subscription_count())
    at = Odometry()
    at.pose.pose.orientation = quaternion(0.0)

    def act(colour: str, verified: bool = True, retracing: bool = False) -> None:
        odometry.publish(at)
        action = NavAction(reasoning=SEEN.replace("red", colour), verified=verified, retracing=retracing)
        action.observation_stamp = to_stamp(1.0e9)
        actions.publish(action)

    def told() -> set[str]:
        """The colours of the chairs that it says it remembers, each at its place."""
        place = re.compile(r"remembered: .* I saw the (\w+) chair at x 1.5 m, y 0.0 m")
        return {found[1] for line in rig.lines if (found := place.search(line))}

    def remembered(colour: str) -> bool:
        """Act until it is: the node drops what comes before it has found this publisher, and best effort loses."""
        act(colour)
        time.sleep(0.2)
        return colour in told()

    rig.until(lambda: remembered("red"))
    act("green", verified=False)
    act("blue", retracing=True)
    rig.until(lambda: remembered("white"))
    assert told() == {"red", "white"} and not any("green" in line or "blue" in line for line in rig.lines)


def test_a_goal_that_memory_cannot_make_plain_ends_at_once(rig):
    client = GoalClient(rig)
    rig.host("navigation_node", memory__when="auto", memory__timeout_s=3.0)
    rig.until_active("navigation_node")
    rig.until(client.ready)
    answers = ["I do not know.", "The Viola is red. Go: find the red chair"]
    asked: list[str] = []

    def answer(request, response):
        asked.append(request.question)
        response.success, response.text, response.sources = True, answers[0], known
        return response

    known = [AnswerSource(sentence="The Viola is red.", side=AnswerSource.CLOUD, document="chairs.md")]
    latched, feedback = [], []
    rig.node.create_subscription(MemoryAnswer, "dsd/memory_answer", latched.append, qos.LATCHED)

    def heard(message) -> None:
        feedback.append(message.feedback)

    told = "bring me to the chair I like"
    _, absent = client.result(client.send(instruction=told))()
    assert absent.outcome == RunOutcome.NOT_KNOWN and "start the memory node" in absent.message
    rig.node.create_service(Ask, "dsd/ask", answer)
    rig.until(lambda: not _absent(client, told))
    _, unknown = client.result(client.send(heard, instruction=told))()
    assert unknown.outcome == RunOutcome.NOT_KNOWN and asked[-1] == told
    assert unknown.answer == "I do not know." and unknown.instruction == ""
    wanted = "I do not know which chair you like. Say it by its colour, or add a document that tells it."
    assert unknown.question == wanted and wanted in unknown.message
    rig.until(lambda: latched and latched[-1].question == wanted, what="the question on the topic")
    assert latched[-1].goal == told and latched[-1].instruction == ""
    rig.until(lambda: feedback, what="feedback")
    assert [(each.phase, each.step, each.distance_travelled) for each in feedback] == [("asking", 0, 0.0)]
    rig.until(lambda: any(f"the robot asks: {wanted}" in line for line in rig.lines))
    # What it does know is carried out; here there is no robot to do it.
    answers.pop(0)
    _, resolved = client.result(client.send(instruction=told))()
    assert list(resolved.sources) == known and resolved.question == ""
    rig.until(lambda: latched[-1].instruction == "find the red chair" and list(latched[-1].sources) == known)
    assert resolved.instruction == "find the red chair" and told in resolved.message
    assert resolved.outcome in (RunOutcome.ODOMETRY_LOST, RunOutcome.SAFETY_STOP)
    count = len(asked)
    _, plain = client.result(client.send(instruction="find the red chair"))()
    assert plain.outcome == resolved.outcome and len(asked) == count  # and others are not asked
    rig.until(lambda: latched[-1].goal == "find the red chair" and latched[-1].answer == "")


def _absent(client, told) -> bool:
    return "start the memory node" in client.result(client.send(instruction=told))()[1].message


def test_a_goal_can_be_cancelled_while_memory_is_asked(rig):
    client = GoalClient(rig)
    rig.host("navigation_node", memory__when="always")
    rig.until_active("navigation_node")
    rig.until(client.ready)
    asked, go_on = [], []

    def answer(request, response):
        asked.append(request.question)
        rig.until(lambda: go_on)
        return response

    rig.node.create_service(Ask, "dsd/ask", answer)
    rig.until_linked("navigation_node")
    handle = client.send(instruction="find the red chair")
    rig.until(lambda: asked)
    refused = client.result(client.send(instruction="find the red chair"))()[1]
    assert refused.outcome == RunOutcome.BAD_GOAL and "under way" in refused.message
    finish = client.result(handle)
    client.cancel(handle)
    _, cancelled = finish()
    go_on.append(True)
    assert cancelled.outcome == RunOutcome.CANCELLED and cancelled.steps == 0
