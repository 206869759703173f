# SPDX-License-Identifier: Apache-2.0
"""Every proof gives the target's tokens, within its number of bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as profile, strategies as st
from joint import ALPHA, FEW, IMAGE as PIXEL, INSTRUCTION, LENGTH, MANY, PER_REPLY, count, p_value
from lossy_channel import LossyChannel
from table_model import TableModel, joint_distribution

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding import tree_growth
from dsd_ros.decoding.methods import base, split, truncated
from dsd_ros.decoding.rejection import TreeVerdict
from dsd_ros.decoding.sampling import sample, transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Draft, Outcome
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
PATIENT = LinkSettings(response_timeout_s=0.05, attempts=60)
PROOFS = ("coupled", "split", "truncated")
TREE = {"shape": "expansion", "tree_expansion": "2,2"}
AHEAD = (
    {"mode": "fsd"},
    {"mode": "fsd", "pipeline_depth": 3, "predraft_workers": 64},
    {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 2},
)


def over(channel, replies: int = 2, model=DRAFT, link=None, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(**({"mode": "dsd", "temperature": 1.0, "seed": 3, "max_tokens": 40} | values))
    with EdgeSession(channel, model, chosen, link) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


def tokens_of(replies: list[DecodedReply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.7}, {"temperature": 0.0}])
def test_coupled_says_what_the_target_alone_says_with_the_same_noise(sampling):
    with VerifierEngine(TARGET) as engine:

        def run(**values):
            with LocalChannel(engine) as channel:
                return over(channel, proof="coupled", **sampling, **values)

        wanted = tokens_of(run(mode="ar"))
        assert wanted[0] != wanted[1] or sampling.get("temperature") == 0.0
        for values in ({"mode": "coupled"}, {"mode": "coupled", "draft_length": 7}, *AHEAD):
            replies = run(**values)
            assert tokens_of(replies) == wanted, values
            assert not any(reply.worker_error for reply in replies)
            assert sum(sum(reply.accepted) for reply in replies) > 0


def test_every_proof_through_a_websocket_to_another_process(target_directory, draft, picture, serving):
    """A real model: the tokens of a verifier in this process, whatever the shape and whoever drafts when."""
    noise = {"proof": "coupled", "temperature": 0.8}
    drawn = {"temperature": 0.8, "top_k": 40}
    tree, budget = {"shape": "expansion"}, {"shape": "budget"}
    groups = [  # of settings that have to draw the same tokens
        [{"mode": "ar"}, {"mode": "mc-dsd"}, {"mode": "fsd", "pipeline_depth": 2} | budget],
        [
            {"mode": "ar"} | noise, {"mode": "coupled"} | noise,
            {"mode": "fsd", "pipeline_depth": 2} | noise,
            {"mode": "dsd"} | noise | tree, {"mode": "dsd"} | noise | budget,
        ],
        [{"mode": "dssd"} | drawn, {"mode": "fsd", "proof": "split", "predraft_source": "guesses"} | drawn],
        [{"mode": "tslt", "top_rho_proof": 0.8} | drawn],
        [{"mode": "mc-dsd"} | drawn],
        [{"mode": "dssd"} | drawn | tree],
        [{"mode": "mc-tslt", "top_float_proof": "float32"} | drawn],
    ]  # fmt: skip

    def run(channel, values):
        chosen = DecodeSettings(seed=7, max_tokens=16, **values)
        with channel, EdgeSession(channel, draft, chosen) as session:
            return [session.decode(picture(n), INSTRUCTION).tokens for n in range(4)]

    with serving(str(target_directory)) as url:
        afar = [[run(WebsocketChannel(url), values) for values in group] for group in groups]
    with VerifierEngine(load_model(ModelSettings(str(target_directory)))) as engine:
        for group, replies in zip(groups, afar, strict=True):
            here = run(LocalChannel(engine), group[0])
            assert all(tokens == here for tokens in replies), group
            assert len(set(map(tuple, here))) == 4


def sampled(proof: str, samples: int, **values) -> float:
    """The chance of the counts that the target alone would give, if the decode is exact."""
    target = TableModel(2, ends=False, period=LENGTH)
    draft = TableModel(2, ends=False, period=LENGTH, noise=0.7, padding=4)
    chosen = DecodeSettings(
        proof=proof, seed=7, max_tokens=LENGTH * PER_REPLY,
        **({"mode": "dsd", "temperature": 1.0, "draft_length": 2} | values),
    )  # fmt: skip
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen) as session,
    ):
        counts = count(session, 8, samples)
    wanted = joint_distribution(target, PIXEL, INSTRUCTION, chosen.sampling, LENGTH)
    return p_value(counts, wanted)


EVERY = [
    ("coupled", {"mode": "ar", "top_k": 5}),  # what it draws with drafts as well, as shown above
    ("split", {"draft_length": 4, "temperature": 0.7, "top_k": 5}),
    ("truncated", {"draft_length": 3, "top_p": 0.9, "top_rho_proof": 0.6}),
    ("full", TREE),
    ("split", TREE),
    ("truncated", TREE | {"top_k_proof": 2}),
]


@pytest.mark.parametrize(("proof", "values"), EVERY[:3], ids=str)  # trees: test_reference.py
def test_sampled_tokens_are_the_targets(proof, values):
    assert sampled(proof, FEW, **values) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(("proof", "values"), EVERY, ids=str)
def test_many_sampled_tokens_are_the_targets(proof, values):
    assert sampled(proof, MANY, **values) > ALPHA


def test_noise_of_another_distribution_is_noticed(monkeypatch):
    def uniform(seed, reply, position, size):
        return np.random.default_rng([seed, reply, position]).random(size)

    monkeypatch.setattr(base, "gumbel", uniform)
    assert sampled("coupled", 1000) < ALPHA


def _inverted(tree, chances, p, generator):
    for i, (x, q_x) in enumerate(zip(tree.tokens, chances, strict=True)):
        if generator.random() * float(p[i][x]) >= q_x:  # min(1, q/p)
            return TreeVerdict(tree.path_to(i - 1), 0, owed=True)
    return TreeVerdict(tree.path_to(len(tree) - 1), sample(p[-1], generator))


def test_an_inverted_ratio_is_noticed_in_split(monkeypatch):
    monkeypatch.setattr(split, "verify_split_tree", _inverted)
    assert sampled("split", 1000) < ALPHA


def test_a_resample_from_p_instead_of_the_rest_is_noticed(monkeypatch):
    monkeypatch.setattr(split, "split_residual", lambda p, q: p)
    assert sampled("split", 2000) < ALPHA


def test_truncation_after_sampling_is_noticed(monkeypatch):
    """Drawn from the whole distribution and verified against what is kept of it: not lossless."""
    whole = []

    def noting(logits, chosen):
        whole.append(transform(logits, chosen))
        return whole[-1]

    def from_whole(q, count, generator):
        drawn = sample(whole[-1][0], generator)
        return [[drawn if q[0, drawn] > 0 else int((whole[-1] * (q > 0)).argmax())]]

    monkeypatch.setattr(truncated, "transform", noting)
    monkeypatch.setattr(tree_growth, "draw_children", from_whole)
    assert sampled("truncated", 1500, top_k_proof=2, draft_length=4) < ALPHA


@pytest.mark.parametrize("proof", PROOFS)
def test_greedy_every_proof_sends_ids_alone_and_says_what_the_target_says(proof, serving):
    with VerifierEngine(TARGET) as engine:
        with LocalChannel(engine) as channel:
            wanted = tokens_of(over(channel, mode="ar", temperature=0.0))
        for mode in ("dsd", "fsd"):
            with Watched(engine) as channel:
                replies = over(channel, mode=mode, proof=proof, temperature=0.0)
            assert tokens_of(replies) == wanted
            for draft in channel.drafts:
                assert not (draft.evidence or draft.resampled)


@pytest.mark.parametrize("ahead", [{"predraft_source": "guesses"}, {"predraft_source": "guesses", "pipeline_depth": 3}])
def test_split_drafted_ahead_draws_the_tokens_of_split(ahead):
    with VerifierEngine(TARGET) as engine:
        values = {"proof": "split"} | ahead
        with LocalChannel(engine) as channel:
            wanted = tokens_of(over(channel, mode="dssd", proof="split"))
        for _ in range(5):  # on a busy machine no draft may be ready in time
            with LocalChannel(engine) as channel:
                replies = over(channel, mode="fsd", **values)
            assert tokens_of(replies) == wanted
            if sum(reply.predrafts_used for reply in replies) > 0:
                return
    pytest.fail("no draft made ahead was used")


@pytest.fixture(scope="module")
def undisturbed():
    replies = {}
    with VerifierEngine(TARGET) as engine:
        for proof in PROOFS:
            for shape in ("sequence", "expansion"):
                with LocalChannel(engine) as channel:
                    values = {"proof": proof, "shape": shape}
                    replies[proof, shape] = tokens_of(over(channel, mode="dsd", **values))
    return replies


@given(
    seed=st.integers(0, 1 << 20),
    proof=st.sampled_from(PROOFS),
    mode=st.sampled_from(["dsd", "fsd"]),
    shape=st.sampled_from(["sequence", "expansion"]),
    loss=st.floats(0, 0.15),
    doubled=st.floats(0, 0.3),
    delayed=st.floats(0, 0.2),
    cut=st.floats(0, 0.04),
)
@profile(max_examples=15, suppress_health_check=list(HealthCheck))
def test_any_misfortune_leaves_the_reply_as_it_is(undisturbed, seed, proof, mode, shape, loss, doubled, delayed, cut):
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as inner:
        channel = LossyChannel(inner, seed, loss, doubled, delayed, cut)
        replies = over(
            channel, link=PATIENT, mode=mode, proof=proof, shape=shape, predraft_workers=2,
            predraft_source="guesses",
        )  # fmt: skip
    assert tokens_of(replies) == undisturbed[proof, shape]


class Watched(LocalChannel):
    """Keeps the drafts that went up."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.drafts: list[Draft] = []

    def send(self, message):
        if isinstance(message, Draft):
            self.drafts.append(message)
        super().send(message)


def packed(number: int) -> int:
    """Bytes that MessagePack takes for a number."""
    return 1 + sum(number >= bound for bound in (128, 256)) + 2 * (number >= 1 << 16)


def varints(ids: list[int]) -> int:
    """Bytes of ids, seven bits in each."""
    return sum(1 + (token >= 1 << 7) + (token >= 1 << 14) for token in ids)


def overhead(draft: Draft) -> int:
    """Bytes of a draft that are not about its tokens: kind, session, three numbers and a length."""
    return 2 + 5 + sum(map(packed, (draft.reply, draft.round, draft.confirmed))) + 2


def test_coupled_sends_nothing_but_ids():
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        (reply,) = over(channel, 1, mode="coupled", max_tokens=96)
    for draft in channel.drafts:
        assert len(encode(draft)) == overhead(draft) + varints(draft.tokens) <= 24
    assert sum(map(overhead, channel.drafts)) <= 12 * reply.rounds


@pytest.mark.parametrize("top_k", [0, 5])
def test_split_sends_a_number_a_token_and_gets_a_row_where_one_is_rejected(top_k):
    class Both(Watched):
        def receive(self, timeout):
            message = super().receive(timeout)
            if isinstance(message, Outcome):
                outcomes.append(message)
            return message

    outcomes: list[Outcome] = []
    with VerifierEngine(TARGET) as engine, Both(engine) as channel:
        (reply,) = over(channel, 1, mode="dssd", max_tokens=96, top_k=top_k)
    for draft in channel.drafts:
        # No distributions, and 12 bits each; after a rejection nothing for parents.
        told = 3 + varints(draft.resampled) if draft.resampled else 0
        brought = 2 + -(-3 * len(draft.tokens) // 2)
        assert len(encode(draft)) <= overhead(draft) + varints(draft.tokens) + brought + told
    assert sum(bool(draft.resampled) for draft in channel.drafts) > 0
    row = 5 + (5 * 4 + 7) // 8 + 4 * 5 if top_k else 1 + 4 * 12
    for outcome in outcomes:
        rejected = outcome.accepted < len(channel.drafts[outcome.round - 1].tokens)
        assert len(outcome.distribution) == (row if rejected else 0)
    assert reply.bytes_up < 96 * (12 + 2 * 4)


def test_truncated_sends_half_floats_and_packed_ids():
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        (reply,) = over(channel, 1, mode="tslt", max_tokens=96, top_k_proof=3)
    for draft in channel.drafts:
        gamma = len(draft.tokens)
        # A count, 3 ids of 4 bits for a vocabulary of 15, 3 float16.
        assert len(draft.evidence) == (1 + gamma * (2 + 2 + 6) if gamma else 0)
        ids = varints(draft.tokens)
        assert len(encode(draft)) <= overhead(draft) + ids + len(draft.evidence) + 2
    assert sum(reply.accepted) > 0


def test_the_largest_ids_survive_and_take_three_bytes_each():
    draft = Draft((1 << 32) - 1, 1, 2, 3, [152_063, 152_062, 0])
    assert decode(encode(draft)) == draft
    assert len(encode(draft)) == overhead(draft) + 3 + 3 + 1


def test_a_draft_that_no_message_could_hold_is_refused_at_once():
    wide = TableModel(4, 12, padding=200_000)
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as channel:
        chosen = DecodeSettings(temperature=1.0, draft_length=64, mode="dsd")
        with pytest.raises(ValueError, match="draft_length 64 is too long.* use 52 or less"):
            EdgeSession(channel, wide, chosen)
        EdgeSession(channel, wide, replace(chosen, draft_length=52))
        EdgeSession(channel, wide, replace(chosen, proof="coupled"))
