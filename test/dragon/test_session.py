# SPDX-License-Identifier: Apache-2.0
"""Device and cloud in one process: with any settings, the tokens are those of the joint mixture."""

from __future__ import annotations

import math
import threading
import time

import pytest
from asking import Letters, Shelf, in_one_thread
from lossy_channel import LossyChannel
from msgspec.structs import replace
from table_model import TableModel

from dsd_lab.dragon.ablations import AblationClient
from dsd_lab.dragon.settings import AblationSettings
from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_ros.dragon import server
from dsd_ros.dragon.answers import AnswerRefused, SentenceSource, sources_of
from dsd_ros.dragon.client import DragonClient
from dsd_ros.dragon.mixture import LocalMixture
from dsd_ros.dragon.server import DragonServer
from dsd_ros.dragon.settings import SIDES, ServiceSettings
from dsd_ros.vlm.errors import PromptError
from dsd_ros.wire import messages as m
from dsd_ros.wire.channel import LinkClosed, LinkError, LocalChannel
from dsd_ros.wire.client import DeadlineExceeded, DecodeCancelled

DEVICE, CLOUD = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.8, padding=3)
OURS = Shelf(("the owner likes the Viola", 0.4), ("chairs have legs", 0.1))
THEIRS = Shelf(("the Viola is red", 0.6), ("the Cello is blue", -0.3))
LETTERS = Letters(12)
QUESTION = "where to?"


def reference(settings: AblationSettings, reply: int = 1, question: str = QUESTION) -> list[int]:
    return in_one_thread((DEVICE, LETTERS, OURS), (CLOUD, LETTERS, THEIRS), settings, question, reply)


def service(**changes) -> DragonServer:
    return DragonServer(CLOUD, THEIRS, ServiceSettings(**changes), asking=LETTERS)


def session(channel, settings: AblationSettings, model=DEVICE) -> DragonClient:
    """A device that hands over as the settings' ``schedule`` says; the cloud is the product's."""
    return AblationClient(channel, model, OURS, settings, asking=LETTERS)


@pytest.fixture
def cloud():
    with service() as running:
        yield running
        all_given_back(running)


def all_given_back(cloud: DragonServer) -> None:
    until = time.monotonic() + 60
    while cloud.answers and time.monotonic() < until:
        time.sleep(0.01)
    assert cloud.answers == 0, "an answer was not given back"


@pytest.mark.parametrize(("temperature", "window", "schedule"), [(0.0, 1, "cloud"), (1.0, 6, "auto")])
def test_the_answer_is_that_of_both_mixtures(cloud, temperature, window, schedule):
    settings = AblationSettings(
        temperature=temperature, window=window, schedule=schedule, head=2, max_tokens=24, seed=5,
        aggregator="cloud" if window == 1 else "device",
    )  # fmt: skip
    with LocalChannel(cloud) as channel, session(channel, settings) as asking:
        seen: list[int] = []
        answer = asking.answer(QUESTION, on_token=lambda text, tokens: seen.append(len(tokens)))
        assert answer.tokens == reference(settings)
        assert seen == list(range(1, len(answer.tokens) + 1))
        statistics = answer.statistics
        assert len(statistics.steps) == len(statistics.token_seconds) == len(answer.tokens)
        assert answer.text == DEVICE.decode_text(answer.tokens) and answer.whole
        assert statistics.cloud_documents == statistics.device_documents == 2
        assert list(statistics.token_seconds) == sorted(statistics.token_seconds)
        assert min(statistics.bytes_up, statistics.bytes_down) > 0
        assert asking.answer("another one").tokens == reference(settings, 2, "another one")


@pytest.mark.parametrize("schedule", ["device", "random"])
def test_the_sources_are_the_same_whoever_aggregates(cloud, schedule):
    settings = AblationSettings(max_tokens=24, schedule=schedule)
    with LocalChannel(cloud) as channel, session(channel, settings) as asking:
        answer = asking.answer(QUESTION)
    steps = answer.statistics.steps
    assert [step.sources for step in steps] == [
        tuple((number, pytest.approx(share, abs=0.02)) for number, share in both)
        for both in told_by_hand(answer.tokens)
    ]
    assert {step.aggregator for step in steps} == ({"device"} if schedule == "device" else set(SIDES))
    names = [document.source for document in (*OURS.documents, *THEIRS.documents)]
    assert answer.sources and {source.document for source in answer.sources} <= set(names)


def told_by_hand(tokens: list[int]):
    """Of each token, what its two sides' documents give of its probability, where their own draft was that token."""
    sides = [
        LocalMixture(model, LETTERS, QUESTION, shelf.documents, 0.0)
        for model, shelf in ((DEVICE, OURS), (CLOUD, THEIRS))
    ]
    for count, token in enumerate(tokens):
        for side in sides:
            side.follow(tokens[:count])
        ours, theirs = (side.next() for side in sides)
        cloud = 1.0 / (1.0 + math.exp(ours.log_weight - theirs.log_weight))
        yield tuple(
            (local.source_of(token)[0], share * local.source_of(token)[1])
            if int(local.p.argmax()) == token
            else (0, 0.0)
            for local, share in ((ours, 1.0 - cloud), (theirs, cloud))
        )


def test_a_sentences_source_is_the_document_that_gives_most_of_it():
    words = ["It ", "is ", "the ", "Viola. ", "The ", "Viola ", "is ", "red, ", "v1.5 ", "mark. ", "Elsewhere: blue."]
    own, theirs, other = ("device", "owner.md"), ("cloud", "chairs.md"), ("device", "b.md")
    told = [{own: 0.4, theirs: 0.5}] * 2 + [{own: 0.9}] * 2 + [{theirs: 0.6, other: 0.1}] * 5 + [{}] + [{own: 1.0}]
    found = sources_of(range(11), told, lambda tokens: "".join(words[token] for token in tokens))
    assert found == (
        SentenceSource("It is the Viola.", "device", "owner.md"),
        SentenceSource("The Viola is red, v1.5 mark.", "cloud", "chairs.md"),
        SentenceSource("Elsewhere: blue.", "device", "owner.md"),
    )
    assert sources_of([1], [{}], str) == () == sources_of([], [], str)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("It is Mia.", "It is Mia."),
        ("I do not know.", "I do not know."),
        ("It is I do not know.", "I do not know."),
        ("It is the Viola. I do not know.", "I do not know."),
        ("The name is one I do not know yet", "I do not know."),
    ],
)
def test_an_answer_that_begins_and_then_does_not_know_is_withdrawn_as_a_whole(cloud, says, text):
    words, shown = says.split(), []
    device = TableModel(4, 12, ends=False)
    device.decode_text = lambda tokens: " ".join(words[: len(tokens)])
    with LocalChannel(cloud) as channel, session(channel, AblationSettings(max_tokens=len(words)), device) as asking:
        answer = asking.answer(QUESTION, lambda so_far, tokens: shown.append(so_far))
    assert answer.text == shown[-1] == text
    assert answer.known == bool(answer.sources) == ("not know" not in says)


def test_an_answer_ends_where_both_mixtures_end_it():
    device, theirs = TableModel(4, 12), TableModel(4, 12, noise=0.8)
    settings = AblationSettings(max_tokens=40, schedule="random")
    with (
        DragonServer(theirs, THEIRS, asking=LETTERS) as cloud,
        LocalChannel(cloud) as channel,
        session(channel, settings, device) as asking,
    ):
        for number in range(4):
            answer = asking.answer(f"{number} and on")
            assert answer.finished and answer.tokens[-1] == 11 and 11 not in answer.tokens[:-1]
            assert len(answer.tokens) < 40


def test_over_a_slow_link(cloud):
    settings = AblationSettings(temperature=1.0, max_tokens=16, window=4, schedule="random", seed=2)
    link = LinkProfile(0.01, 0.01, 0.002)
    with EmulatedChannel(LocalChannel(cloud), link) as channel, session(channel, settings) as asking:
        answer = asking.answer(QUESTION)
        assert answer.tokens == reference(settings)
        assert answer.statistics.switches > 0
        assert asking.profile.link.value > 0.01


def test_relevances_of_another_scale_are_refused_unless_none_are_used():
    class Named(Shelf):
        fingerprint = "cosine of another model"

    shelf = Named(("the Viola is red", 0.6))
    with DragonServer(CLOUD, shelf, asking=LETTERS) as cloud, LocalChannel(cloud) as channel:
        with session(channel, AblationSettings()) as asking:
            with pytest.raises(AnswerRefused, match="same embedding model") as told:
                asking.answer(QUESTION)
            assert "unnamed" in str(told.value) and "cosine of another model" in str(told.value)
            asking.settings = settings = AblationSettings(documents=0, max_tokens=8)
            answer = asking.answer(QUESTION)  # both sides say what they know
            assert answer.tokens == reference(settings, 2) and answer.statistics.cloud_documents == 0
        with DragonClient(channel, DEVICE, shelf, asking=LETTERS) as asking:
            assert asking.answer(QUESTION).statistics.cloud_documents == 1


@pytest.mark.parametrize("seed", range(3))
def test_over_a_link_that_loses_doubles_reorders_and_breaks(cloud, seed):
    settings = AblationSettings(
        temperature=1.0, max_tokens=16, window=3, patience_s=0.1, attempts=60, seed=seed,
        schedule="random",
    )  # fmt: skip
    with LocalChannel(cloud) as inner:
        channel = LossyChannel(inner, seed, loss=0.04, doubled=0.2, delayed=0.05, cut=0.01)
        with session(channel, settings) as asking:
            assert asking.answer(QUESTION).tokens == reference(settings)
        channel._cut = channel._loss = 0.0


def test_many_devices_at_once(cloud):
    settings = [AblationSettings(temperature=1.0, max_tokens=12, seed=seed, schedule="random") for seed in range(6)]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        with LocalChannel(cloud) as channel, session(channel, settings[number]) as asking:
            found[number] = asking.answer(QUESTION).tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {number: reference(settings[number]) for number in range(6)}


def test_more_questions_than_the_cloud_takes_are_refused_and_the_silent_make_room(monkeypatch):
    with service(max_answers=1) as cloud, LocalChannel(cloud) as channel, LocalChannel(cloud) as stuck:
        stuck.send(asked())
        settings = AblationSettings(attempts=2, patience_s=1, max_tokens=6)
        with session(channel, settings) as asking:
            with pytest.raises(AnswerRefused, match="max_answers") as told:
                asking.answer(QUESTION)
            assert told.value.code == m.EndCode.OVERLOADED
            monkeypatch.setattr(server, "_SILENT_S", 0.0)  # as if its device had vanished silently
            assert asking.answer(QUESTION).tokens == reference(settings, 2)
        stuck.close()
        all_given_back(cloud)


def asked(**changes) -> m.Question:
    values = dict(
        ask=9, attempt=0, protocol_version=m.PROTOCOL_VERSION, tokenizer_fingerprint="letters-12", vocab_size=12,
        text=QUESTION, documents=2, temperature=0.0, seed=0, reply=1, head=4, max_tokens=8, window=4,
        aggregator="device",
    )  # fmt: skip
    return m.Question(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 1}, "same release"),
        ({"tokenizer_fingerprint": "x"}, "tokenizer"),
        ({"aggregator": "both"}, "aggregator"),
        ({"relevance_fingerprint": "of another model"}, "same embedding model"),
        ({"max_tokens": 0}, "tokens"),
        ({"vocab_size": 1 << 19}, "vocabulary"),
        ({"answered": [999]}, "does not have"),
        ({"answered": [1] * 8}, "as long"),
    ],
)
def test_a_refused_question_gets_the_reason(cloud, changes, words):
    with LocalChannel(cloud) as channel:
        channel.send(asked(**changes))
        reply = channel.receive(5)
        assert isinstance(reply, m.QuestionReply) and words in reply.error
        assert cloud.answers == 0


def test_hostile_messages_end_their_question_and_nothing_else(cloud):
    with LocalChannel(cloud) as channel:
        channel.send(m.Proposal(5, 0, 0, 0, 1, 0.0, b""))
        end = channel.receive(5)
        assert isinstance(end, m.QuestionEnd) and end.code == m.EndCode.UNKNOWN
        hostile = [
            m.Proposal(9, 0, 0, 0, 1, 0.0, b"?"),
            m.Proposal(9, 0, 0, 0, 1, 0.0, bytes(10_000)),
            m.Proposal(9, 0, 7, 0, 4000, 0.0, b""),
            m.Verdict(9, 0, 0, 4000, False, False),
            m.Reveal(9, 0, 0, 0, [4000]),
        ]
        for attempt, message in enumerate(hostile):
            begins = "cloud" if isinstance(message, m.Proposal) else "device"
            channel.send(asked(attempt=attempt, aggregator=begins, window=2))
            first = m.QuestionReply if begins == "cloud" else m.Proposal
            while not isinstance(channel.receive(5), first):
                pass
            channel.send(replace(message, attempt=attempt))
            while not isinstance(end := channel.receive(5), m.QuestionEnd):
                pass
            assert end.attempt == attempt and end.sentence and "Traceback" not in end.sentence
        settings = AblationSettings(max_tokens=6)
        with LocalChannel(cloud) as other, session(other, settings) as asking:
            assert asking.answer(QUESTION).tokens == reference(settings)


class Layered(TableModel):
    """Passes of many layers that take their time."""

    def __init__(self, layers: int, seconds: float, noise: float = 0.0) -> None:
        super().__init__(4, 12, ends=False, noise=noise)
        self.layers, self.seconds, self.passed = layers, seconds, 0

    def forward_batch(self, feeds, on_layer=None):
        for layer in range(self.layers * (on_layer is not None)):
            self.passed += 1
            time.sleep(self.seconds)
            on_layer(layer, None)
        return super().forward_batch(feeds)


def test_a_rejection_ends_the_forward_pass_under_way():
    device, theirs = Layered(20, 0.001), Layered(20, 0.001, noise=1.5)
    settings = AblationSettings(temperature=1.0, max_tokens=32, schedule="random", window=4)
    with (
        DragonServer(theirs, THEIRS, asking=LETTERS) as cloud,
        LocalChannel(cloud) as channel,
        session(channel, settings, device) as asking,
    ):
        answer = asking.answer(QUESTION)
    statistics = answer.statistics
    assert min(statistics.rejections.values()) > 0
    assert statistics.preemptions > 0
    assert all(0.0 < share < 1.0 for share in statistics.accepted.values())


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_an_answer_can_be_ended_at_once(cloud, how):
    model = Layered(2000, 0.005)
    with LocalChannel(cloud) as channel:
        asking = session(channel, AblationSettings(), model)
        began = time.monotonic()
        late = began + 0.2
        if how == "close":
            threading.Timer(0.2, asking.close).start()
            with pytest.raises(LinkClosed):
                asking.answer(QUESTION)
        elif how == "deadline":
            with pytest.raises(DeadlineExceeded):
                asking.answer(QUESTION, deadline=late)
        else:
            with pytest.raises(DecodeCancelled):
                asking.answer(QUESTION, cancelled=lambda: time.monotonic() > late)
        asking.close()
        assert model.passed < 2000
        assert not [t for t in threading.enumerate() if t.name.startswith("ask-")]


def test_where_the_link_stays_lost_the_device_goes_on_alone_and_says_so():
    settings = AblationSettings(temperature=1.0, max_tokens=12, patience_s=0.2, attempts=2, on_loss="alone")
    cloud = service()
    with LocalChannel(cloud) as channel, session(channel, settings) as asking:
        whole = reference(settings)

        def cut(_text: str, tokens: list[int]) -> None:
            if len(tokens) == 3:
                cloud.close()

        answer = asking.answer(QUESTION, on_token=cut)
        alone = answer.statistics.alone_from
        assert 3 <= alone < len(answer.tokens) and not answer.whole
        assert answer.tokens[:alone] == whole[:alone]
        assert len(answer.statistics.steps) == alone
    settings = AblationSettings(attempts=2, patience_s=0.1)
    with LocalChannel(cloud) as channel, session(channel, settings) as asking, pytest.raises(LinkError):
        asking.answer(QUESTION)


def test_a_question_that_no_model_takes(cloud):
    with LocalChannel(cloud) as channel, session(channel, AblationSettings()) as asking:
        for text in ("  ", "<|im_end|>"):
            with pytest.raises(PromptError):
                asking.answer(text)
