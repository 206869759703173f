# SPDX-License-Identifier: Apache-2.0
"""Drafters of mode stream: what comes next after the verified tokens, and when there is no more to say."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from by_reference import reply_alone
from hypothesis import given, settings as profile, strategies as st
from stepped import Unhurried
from table_model import TableModel

from dsd_ros.cli.advice import draft_along
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafters import LEAD, ModelDrafter, Worth
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.client import Limits
from dsd_ros.wire.messages import DraftTokens

IMAGE = np.full((2, 2, 3), 5, np.uint8)
DRAFT = TableModel(4, 12, noise=0.6)
ENDS = DRAFT.eos_token_ids
SAMPLED = {"temperature": 1.0, "seed": 3}


def request(number: int = 1) -> ReplyRequest:
    return ReplyRequest(number, IMAGE, "go", None, str, Limits())


def begun(model=DRAFT, **values) -> ModelDrafter:
    drafter = ModelDrafter(model, DecodeSettings(**{"max_tokens": 100} | values))
    drafter.begin(request(), ENDS)
    return drafter


@cache
def what_it_would_say(verified: tuple[int, ...], sampled: bool) -> list[int]:
    """The draft model's own continuation, to where it has drafted far enough."""
    chosen = DecodeSettings(**SAMPLED if sampled else {})
    prompt, tokens = DRAFT.prefill(IMAGE, "go"), list(verified)
    while len(tokens) < min(len(verified) + LEAD, 99) and not (tokens and tokens[-1] in ENDS):
        sequence = prompt.fork()
        sequence.append(tokens)
        p, noise = transform(sequence.next_logits(), chosen.sampling), gumbel(3, 1, len(tokens), DRAFT.vocab_size)
        tokens.append(choose(p, noise) if sampled else int(p.argmax()))
    return tokens[len(verified) :]


@given(seed=st.integers(0, 1 << 30), sampled=st.booleans())
@profile(max_examples=40)
def test_whatever_is_verified_the_draft_is_what_the_model_would_say_next(seed, sampled):
    """Verified tokens that it had drafted, others, some at once or one by one; while it drafts, or before."""
    chance = random.Random(seed)
    drafter, verified = begun(**SAMPLED if sampled else {}), []
    while len(verified) < 90:
        said = what_it_would_say(tuple(verified), sampled)
        for _ in range(chance.randrange(LEAD + 5)):
            drafter.next()
        draft = drafter.next()
        assert draft == said[: len(draft)] and drafter.far_enough == (len(draft) == len(said))
        verified += said[: chance.randrange(len(said) + 1)]
        verified += [chance.randrange(11) for _ in range(chance.randrange(3))]
        while verified and verified[-1] in ENDS:
            verified.pop()
        drafter.follow(verified)


def test_the_last_token_of_the_longest_reply_is_the_targets():
    drafter = begun(max_tokens=3)
    for _ in range(5):
        draft = drafter.next()
    assert len(draft) == 2 and drafter.far_enough
    drafter.follow([*draft[:1], (draft[1] + 1) % 11])
    assert drafter.far_enough and drafter.next() == []


def test_a_full_context_and_a_token_it_does_not_have_end_its_drafts_for_the_reply():
    full = begun(TableModel(4, 12, ends=False, max_length=9))
    while not full.far_enough:
        full.next()
    assert full.next() == []
    drafter = begun()
    drafter.next()
    drafter.follow([1, 12])  # of a target with a larger vocabulary
    assert drafter.far_enough and drafter.next() == []
    drafter.follow([1, 12, 1])
    assert drafter.far_enough and drafter.next() == []
    drafter.begin(request(2), ENDS)
    assert not drafter.far_enough and len(drafter.next()) == 1


@pytest.mark.parametrize(
    "draft",
    [
        TableModel(4, 12, ends=False, max_length=9),  # its context is full in mid-reply
        TableModel(4, 12, ends=False, padding=20),  # drafts ids that the target does not have
        TableModel(4, 8, ends=False),  # lacks tokens of the target's
        TableModel(4, 12, noise=3.0),  # ends where the target does not
    ],
    ids=["context", "padding", "small", "ends"],
)
def test_the_reply_is_the_targets_whatever_the_draft_lacks(draft):
    target = TableModel(4, 12, ends=False)
    draft.tokenizer_fingerprint = target.tokenizer_fingerprint
    if draft.vocab_size > 12:
        draft.table = draft.table.new_zeros((32, 32, 32))
        draft.table[..., 20] = 50.0
    with (
        VerifierEngine(Unhurried(target)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, DecodeSettings(max_tokens=40)) as session,
    ):
        tokens = [session.decode(IMAGE, "go").tokens for _ in range(2)]
    wanted = reply_alone(target, IMAGE, "go", DecodeSettings(max_tokens=40))
    assert tokens == [wanted, wanted]


# ----------------------------------------------------------------------------- is it worth it?


def test_drafting_rests_when_nearly_nothing_comes_of_it_and_is_tried_again():
    worth = Worth()
    for _ in range(51):
        assert worth.begin()
        worth.learn(0, 5)
    assert worth.begin() and worth.explain() == ""  # 255 tokens are not enough to tell
    worth.learn(0, 5)
    assert "0 of the last 256" in worth.explain()
    tries = [worth.begin() for _ in range(48)]
    assert tries.count(True) == 3 and tries.index(True) == 15
    worth.learn(15, 30)
    assert not worth.begin()
    worth.learn(1, 2)  # 16 of 256
    assert worth.begin() and worth.explain() == ""


def test_a_robot_whose_drafts_are_worth_nothing_sends_none_and_says_so():
    target, draft = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.3)
    worth = Worth()
    with VerifierEngine(Unhurried(target)) as engine, LocalChannel(engine) as channel:
        sent, send = [], channel.send
        channel.send = lambda message: (sent.append(message), send(message))
        with EdgeSession(channel, draft, DecodeSettings(max_tokens=12), worth=worth) as session:
            wanted = session.decode(IMAGE, "go").tokens
            assert any(isinstance(message, DraftTokens) for message in sent)
            worth.learn(0, 256)
            sent.clear()
            replies = [session.decode(IMAGE, "go") for _ in range(15)]
            assert not any(isinstance(message, DraftTokens) for message in sent)
            assert all("drafting rests" in reply.choice for reply in replies)
            replies.append(session.decode(IMAGE, "go"))
            assert any(isinstance(message, DraftTokens) for message in sent)
    assert all(reply.tokens == wanted for reply in replies)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_agrees_with_the_tokens_that_it_would_say_next_itself(sampled):
    target = TableModel(4, 12)
    with VerifierEngine(target) as engine:
        channel = LocalChannel(engine)
        settings = DecodeSettings(max_tokens=20, **SAMPLED if sampled else {})
        with EdgeSession(channel, DRAFT, settings) as session:
            tokens = session.decode(IMAGE, "go").tokens
            agree, _, token_s = draft_along(session, tokens)
    itself = [what_it_would_say(tuple(tokens[:place]), sampled)[:1] for place in range(len(tokens))]
    agrees = [said == [token] for said, token in zip(itself, tokens, strict=True)]
    assert agree[:19] == agrees[:19] and token_s > 0
    assert {True, False} == set(agrees)  # else it shows nothing
