# SPDX-License-Identifier: Apache-2.0
"""DRAGON's baselines: the answer of each, and which parts of the documents are sent."""

from __future__ import annotations

import pytest
import torch
from asking import Letters, Shelf
from table_model import TableModel
from tiny_text import make_tiny_text

from dsd_lab.dragon import METHODS
from dsd_lab.dragon.baseline_service import BaselineService, pack_sequence, unpack_document, unpack_sequence
from dsd_lab.dragon.baselines import open_cloud, open_session
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.decoding.aggregation import eta, mixture
from dsd_ros.dragon.answers import AnswerRefused
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import LocalMixture
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.state import own_choice
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire import messages as m
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode

torch.set_num_threads(1)
DEVICE, CLOUD = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.8, padding=3)
OURS = Shelf(("the owner likes the Viola", 0.4), ("chairs have legs", 0.1))
THEIRS = Shelf(("the Viola is red", 0.6), ("the Cello is blue", -0.3))
LETTERS = Letters(12)
QUESTION = "where to?"
GREEDY = AblationSettings(max_tokens=12, seed=5)
SAMPLED = AblationSettings(max_tokens=12, seed=5, temperature=1.0)


class Heard(LocalChannel):
    """Keeps what travels, as bytes."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.up, self.down = [], []

    def send(self, message) -> None:
        self.up.append(message)
        super().send(message)

    def receive(self, timeout):
        self.down.append(super().receive(timeout))
        return self.down[-1]


def ask(method, settings, device=DEVICE, cloud=CLOUD, asking=LETTERS):
    """The answer, and the channel it came over."""
    with (
        open_cloud(method, settings, cloud, THEIRS, asking=asking) as service,
        Heard(service) as channel,
        open_session(method, channel, device, OURS, settings, asking=asking) as session,
    ):
        return session.answer(QUESTION), channel


def by_hand(sides, settings, combine) -> list[int]:
    """Mixtures of (model, documents) advanced together; ``combine`` their distributions."""
    mixtures = [LocalMixture(model, LETTERS, QUESTION, documents, settings.temperature) for model, documents in sides]
    tokens: list[int] = []
    while len(tokens) < settings.max_tokens:
        for side in mixtures:
            side.follow(tokens)
        tokens.append(own_choice(settings, 1, combine([side.next() for side in mixtures]), len(tokens)))
    return tokens


def both(locals_):
    device, cloud = locals_
    return mixture(device.p, cloud.p, device.log_weight, cloud.log_weight)


def joined(*documents) -> list[Retrieved]:
    best = sorted(documents, key=lambda d: -d.relevance)
    return [Retrieved("", " ".join(d.text for d in best), best[0].relevance)]


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_method_answers_from_its_documents(settings):
    ours, theirs = OURS.documents, THEIRS.documents
    only = {
        "device": (DEVICE, ours),
        "cloud": (CLOUD, theirs),
        "crcg": (DEVICE, joined(*ours)),
        "crcg-cloud": (CLOUD, joined(*theirs)),
        "drcg-text": (DEVICE, joined(*ours, *theirs)),
    }
    for method, side in only.items():
        answer, _ = ask(method, settings)
        assert answer.tokens == by_hand([side], settings, lambda locals_: locals_[0].p), method
        assert answer.text == DEVICE.decode_text(answer.tokens) and answer.whole
        figures = answer.statistics
        assert len(figures.token_seconds) == 12 and list(figures.token_seconds) == sorted(figures.token_seconds)
        assert 0 < figures.first_token_seconds <= figures.seconds
        assert (figures.bytes_up == 0) == (method in ("device", "crcg"))
        assert (figures.passes > 0) == (side[0] is DEVICE)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_in_step_is_the_mixture_of_both_sides(settings):
    answer, channel = ask("drdg-tw", settings)
    expected = by_hand([(DEVICE, OURS.documents), (CLOUD, THEIRS.documents)], settings, both)
    assert answer.tokens == expected
    assert {step.aggregator for step in answer.statistics.steps} == {"device"}
    drafts = [message for message in channel.down if isinstance(message, m.Proposal)]
    assert [draft.position for draft in drafts] == list(range(len(expected)))  # none ahead


@pytest.mark.parametrize(("temperature", "evidence"), [(0.0, "full"), (1.0, "sparse")])
def test_whole_sequences_are_put_together_position_by_position(temperature, evidence):
    settings = AblationSettings(max_tokens=12, seed=5, temperature=temperature, evidence=evidence)
    sides = [(DEVICE, OURS.documents), (CLOUD, THEIRS.documents)]
    rows = []
    for model, documents in sides:
        found: list[tuple[torch.Tensor, float]] = []

        def kept(locals_, found=found):
            found.append((locals_[0].p, locals_[0].log_weight))
            return locals_[0].p

        by_hand([(model, documents)], settings, kept)
        rows.append(found)
    expected = []
    for position, ((device, weight), (cloud, other)) in enumerate(zip(*rows, strict=True)):
        share, other_share = eta(weight, other)
        p = other_share * cloud.double()
        p[: len(device)] += share * device.double()
        expected.append(own_choice(settings, 1, p, position))
    answer, channel = ask("drdg-sw", settings)
    assert answer.tokens == expected
    sent = [message for message in channel.down if isinstance(message, m.Proposal)]
    assert len(sent) == settings.max_tokens and all(proposal.evidence for proposal in sent)
    # The question, and that it is time, go up: no verdict, and so no word of the device's side.
    assert [(type(message), message.attempt) for message in channel.up] == [(m.Question, 0), (m.Question, 1)]
    assert expected != by_hand(sides, settings, both), "nothing here told the two apart"


def test_the_text_of_the_clouds_documents_travels_and_none_of_the_robots():
    answer, channel = ask("drcg-text", GREEDY)
    down = b"".join(encode(message) for message in channel.down)
    up = b"".join(encode(message) for message in channel.up)
    for document in THEIRS.documents:
        assert document.text.encode() in down
    for document in OURS.documents:
        assert document.text.encode() not in up + down
    assert answer.statistics.bytes_down == len(down) and answer.statistics.bytes_up == len(up)
    assert answer.statistics.cloud_documents == answer.statistics.device_documents == 2
    for method in METHODS:
        if not method.startswith("drcg"):
            _, channel = ask(method, GREEDY)
            said = b"".join(encode(message) for message in channel.up + channel.down)
            assert not any(d.text.encode() in said for d in THEIRS.documents + OURS.documents)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(ModelSettings(str(make_tiny_text(tmp_path_factory.mktemp("tiny"), seed=3))))


def test_keys_and_values_travel_and_are_not_computed_again(tiny):
    settings = AblationSettings(max_tokens=6)
    answer, channel = ask("drcg-kv", settings, tiny, tiny, DocumentPrompt(tiny))
    dragon, _ = ask("dragon", settings, tiny, tiny, DocumentPrompt(tiny))
    assert answer.tokens == dragon.tokens
    sent = [message for message in channel.down if isinstance(message, m.Proposal)]
    for proposal, document in zip(sent, THEIRS.documents, strict=True):
        text, digest, keys = unpack_document(proposal.evidence)
        head = DocumentPrompt(tiny).pieces(document.text, QUESTION).head
        assert text == document.text and digest == m.prefix_digest(head)
        sequence = tiny.begin()
        sequence.append(head)
        sequence.next_logits()
        assert keys == pack_sequence(sequence)
        again = unpack_sequence(tiny, head, keys)
        for one in (sequence, again):
            one.append([5, 9])
        assert torch.allclose(sequence.next_logits(), again.next_logits(), atol=1e-5)
        with pytest.raises(ValueError, match="bytes in this model"):
            unpack_sequence(tiny, head[1:], keys)
    assert answer.statistics.bytes_down > sum(len(proposal.evidence) for proposal in sent)


def test_keys_and_values_of_another_model_are_refused(tiny, tmp_path):
    other = load_model(ModelSettings(str(make_tiny_text(tmp_path / "other", seed=4))))
    with pytest.raises(AnswerRefused, match="the very same model"):
        ask("drcg-kv", AblationSettings(max_tokens=6), tiny, other, DocumentPrompt(tiny))


def test_what_cannot_be_done_is_said():
    with pytest.raises(ValueError, match="no method 'rag'"):
        open_session("rag", LocalChannel(None), DEVICE, OURS)
    service = BaselineService("cloud", GREEDY, CLOUD, THEIRS, asking=LETTERS)
    with service, Heard(service) as channel, open_session("cloud", channel, DEVICE, OURS, asking=LETTERS) as session:
        session.answer(QUESTION)
        session.settings = GREEDY
        assert len(session.answer(QUESTION).tokens) == 12  # it can be asked again
