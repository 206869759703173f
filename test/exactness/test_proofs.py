"""What travels with a draft: for each proof the target's tokens come out, in no more bytes than it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from joint import ALPHA, INSTRUCTION, LENGTH, PER_REPLY, count, p_value
from joint import IMAGE as PIXEL
from lossy_channel import LossyChannel
from table_model import TableModel, joint_distribution

import dsd_ros.cloud.verification as verification
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.link import LinkSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.codec import encode
from dsd_ros.wire.local import LocalChannel
from dsd_ros.wire.messages import Draft
from dsd_ros.wire.websocket_client import WebsocketChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
PATIENT = LinkSettings(response_timeout_s=0.05, attempts=60)
AHEAD = (
    {"mode": "fsd"},
    {"mode": "fsd", "pipeline_depth": 3, "predraft_batch": 4},
    {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 2},
)


def over(channel, replies: int = 2, model=DRAFT, link=None, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(**({"temperature": 1.0, "seed": 3, "max_tokens": 40} | values))
    with EdgeSession(channel, model, chosen, link) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


def tokens_of(replies: list[DecodedReply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.7}, {"temperature": 0.0}]
)
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


def test_coupled_through_a_websocket_to_another_process(target_directory, draft, picture, serving):
    """A real model: ar, coupled and fsd draw the same tokens."""
    variants = ({"mode": "ar"}, {"mode": "coupled"}, {"mode": "fsd", "pipeline_depth": 2})
    with serving(str(target_directory)) as url:
        replies = []
        for values in variants:
            chosen = DecodeSettings(
                proof="coupled", temperature=0.8, seed=7, max_tokens=16, **values
            )
            with WebsocketChannel(url) as channel, EdgeSession(channel, draft, chosen) as session:
                replies.append([session.decode(picture(n), INSTRUCTION).tokens for n in range(6)])
    assert replies[0] == replies[1] == replies[2]
    assert len(set(map(tuple, replies[0]))) == 6


def sampled(proof: str, samples: int, **values) -> float:
    """The chance of the counts that the target alone would give, if the decode is exact."""
    target = TableModel(2, ends=False, period=LENGTH)
    draft = TableModel(2, ends=False, period=LENGTH, noise=0.7, padding=4)
    chosen = DecodeSettings(
        proof=proof, seed=7, max_tokens=LENGTH * PER_REPLY,
        **({"temperature": 1.0, "draft_length": 2} | values),
    )  # fmt: skip
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen) as session,
    ):
        counts = count(session, 8, samples)
    wanted = joint_distribution(target, PIXEL, INSTRUCTION, chosen.sampling, LENGTH)
    return p_value(counts, wanted)


@pytest.mark.parametrize(
    "proof, values",
    [
        ("coupled", {}),
        ("coupled", {"draft_length": 4, "temperature": 1.3, "top_k": 5}),
    ],
    ids=str,
)
def test_sampled_tokens_are_the_targets(proof, values):
    assert sampled(proof, 12_000, **values) > ALPHA


def test_noise_of_another_distribution_is_noticed(monkeypatch):
    def uniform(seed, reply, position, size):
        return np.random.default_rng([seed, reply, position]).random(size)

    monkeypatch.setattr(verification, "gumbel", uniform)
    assert sampled("coupled", 4000) < ALPHA


@pytest.fixture(scope="module")
def undisturbed():
    replies = {}
    with VerifierEngine(TARGET) as engine:
        for proof in ("coupled",):
            with LocalChannel(engine) as channel:
                replies[proof] = tokens_of(over(channel, mode="dsd", proof=proof))
    return replies


@given(
    seed=st.integers(0, 1 << 20),
    proof=st.sampled_from(["coupled"]),
    mode=st.sampled_from(["dsd", "fsd"]),
    loss=st.floats(0, 0.15),
    doubled=st.floats(0, 0.3),
    delayed=st.floats(0, 0.2),
    cut=st.floats(0, 0.04),
)
@profile(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_misfortune_leaves_the_reply_as_it_is(
    undisturbed, seed, proof, mode, loss, doubled, delayed, cut
):
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as inner:
        channel = LossyChannel(inner, seed, loss, doubled, delayed, cut)
        replies = over(channel, link=PATIENT, mode=mode, proof=proof, predraft_workers=2)
    assert tokens_of(replies) == undisturbed[proof]


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


def overhead(draft: Draft) -> int:
    """Bytes of a draft that are not about its tokens: kind, session, and three numbers."""
    numbers = draft.reply, draft.round, draft.confirmed
    return 2 + 10 + sum(map(packed, numbers)) + 1 + 2 * (len(draft.tokens) > 15)


def test_coupled_sends_nothing_but_ids():
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        (reply,) = over(channel, 1, mode="coupled", max_tokens=96)
    for draft in channel.drafts:
        assert len(encode(draft)) == overhead(draft) + sum(map(packed, draft.tokens)) <= 24 + 20
    assert sum(map(overhead, channel.drafts)) <= 16 * reply.rounds
    ids = sum(packed(token) for draft in channel.drafts for token in draft.tokens)
    assert ids / len(reply.tokens) <= 8


def test_the_largest_ids_survive_and_take_five_bytes_each():
    draft = Draft(b"8 bytes.", 1, 2, 3, [152_063, 152_062, 0])
    assert len(encode(draft)) == overhead(draft) + 5 + 5 + 1
