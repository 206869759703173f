# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings as profile, strategies as st
from msgspec.structs import replace

from dsd_ros.wire import messages as m
from dsd_ros.wire.codec import WireError, decode, encode

u16, u32 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1)
ids = st.integers(0, m.MAX_VOCABULARY - 1)
session = st.integers(1, (1 << 32) - 1)
tokens = st.lists(ids, max_size=64)
short = st.text(max_size=256)
confidences = u16.map(lambda units: units / 65535)
pasts = st.builds(
    m.Past,
    action=short, encoding=short, height=st.integers(0, 8192), width=st.integers(0, 8192),
    image=st.binary(max_size=50), digest=st.binary(min_size=8, max_size=8),
)  # fmt: skip
MESSAGES = st.one_of(
    st.builds(
        m.SessionRequest,
        request=u32, protocol_version=u16, mode=short, tokenizer_fingerprint=short, vocab_size=u32,
        temperature=st.floats(0, 100), top_k=u32, top_p=st.floats(0, 1, exclude_min=True),
        seed=st.integers(0, (1 << 63) - 1), max_tokens=st.integers(1, m.MAX_REPLY), resume=st.binary(max_size=16),
        exits=st.booleans(), exit_layers=st.lists(u16, max_size=256),
        min_exit_confidence=st.floats(0, 1), proof=short,
    ),
    st.builds(
        m.SessionReply,
        request=u32, session=u32, error=st.text(max_size=1024), target_name=short,
        target_fingerprint=short, vocab_size=u32, eos_token_ids=st.lists(ids, max_size=16),
        exit_layers=st.lists(u16, max_size=256), ticket=st.binary(max_size=16),
        side_factor=u16, min_pixels=u32, max_pixels=u32,
    ),
    st.builds(
        m.Observation,
        session=session, reply=u32, instruction=st.text(min_size=1, max_size=2000),
        height=st.integers(0, 8192), width=st.integers(0, 8192), encoding=short, image=st.binary(max_size=300),
        verified=st.lists(ids, max_size=300), rounds=u32, history=st.lists(pasts, max_size=8),
    ),
    st.builds(m.DraftTokens, session=session, reply=u32, stream=u32, start=u32, tokens=tokens),
    st.builds(
        m.VerifiedTokens,
        session=session, reply=u32, at=u32, tokens=st.lists(ids, max_size=300), accepted=u16, drafted=u16,
        compute_us=u32, ended=st.booleans(),
    ),
    st.builds(
        m.Draft,
        session=session, reply=u32, round=u32, confirmed=u32, tokens=tokens,
        evidence=st.binary(max_size=300), parents=st.binary(max_size=64),
        assumed=st.binary(max_size=8), resampled=tokens,
    ),
    st.builds(
        m.Outcome,
        session=session, reply=u32, round=u32, layer=u16, accepted=u16, next_token=ids,
        confidence=confidences, is_final=st.booleans(), compute_us=u32,
    ),
    st.builds(
        m.Outcome,
        session=session, reply=u32, round=u32, layer=u16, accepted=u16, next_token=st.just(0),
        confidence=confidences, is_final=st.booleans(), compute_us=u32,
        distribution=st.binary(max_size=300),
    ),
    st.builds(
        m.Refusal,
        session=u32, reply=u32, round=u32, code=short, sentence=st.text(max_size=1024),
    ),
    st.builds(m.SessionClose, session=session),
    st.builds(
        m.Question,
        ask=session, attempt=u16, protocol_version=u16, tokenizer_fingerprint=short, vocab_size=u32,
        text=st.text(min_size=1, max_size=2000), documents=st.integers(0, 64),
        temperature=st.floats(0, 100), seed=st.integers(0, (1 << 63) - 1), reply=u32,
        randomness=short, evidence=short, head=st.integers(1, 4096), max_tokens=u16,
        window=st.integers(1, 64), reweight_every=u16, schedule=short, aggregator=short,
        eos_token_ids=st.lists(ids, max_size=16), answered=st.lists(ids, max_size=300),
        relevance_fingerprint=short,
    ),
    st.builds(
        m.QuestionReply,
        ask=session, attempt=u16, error=st.text(max_size=1024), model_name=short,
        model_fingerprint=short, vocab_size=u32, eos_token_ids=st.lists(ids, max_size=16), documents=u16,
        held=u32,
    ),
    st.builds(
        m.Proposal,
        ask=session, attempt=u16, position=u16, rejections=u16, token=ids,
        log_weight=st.floats(-1000, 1000), evidence=st.binary(max_size=300),
        decode_us=u32, sent=u32, echo=u32, held=u32,
    ),
    st.builds(
        m.Verdict,
        ask=session, attempt=u16, position=u16, token=ids, device_accepted=st.booleans(),
        cloud_accepted=st.booleans(), hands_over=st.booleans(), decode_us=u32, sent=u32, echo=u32, held=u32,
    ),
    st.builds(
        m.Reveal,
        ask=session, attempt=u16, position=u16, rejections=u16,
        ids=st.lists(ids, min_size=1, max_size=200), values=st.binary(max_size=300),
    ),
    st.builds(m.QuestionEnd, ask=session, attempt=u16, code=short, sentence=st.text(max_size=1024)),
)  # fmt: skip


@given(MESSAGES)
@profile(max_examples=400)
def test_messages_survive(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
@profile(max_examples=500)
def test_arbitrary_bytes_raise_nothing_but_wire_errors(data):
    try:
        decode(data)
    except WireError as error:
        assert str(error)


@given(MESSAGES, st.data())
@profile(max_examples=400)
def test_damaged_messages_raise_nothing_but_wire_errors(message, data):
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut])):
        try:
            again = decode(candidate)
        except WireError:
            continue
        assert decode(encode(again)) == again


@pytest.mark.parametrize("module", ["messages", "codec", "channel", "outbox", "websocket"])
def test_what_a_relay_imports_does_not_load_torch(module):
    program = f"import sys, dsd_ros.wire.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


QUESTION = m.Question(1, 0, 5, "f", 512, "why?", 2, 0.0, 0, 0, "shared", "sparse", 16, 96, 8, 0, "auto", "device")
PROPOSAL = m.Proposal(1, 0, 0, 0, 7, 0.0, b"")
PAST = m.Past("stop", "png", 1, 1, b"", bytes(8))


def outcome(**changes):
    values = dict(session=1, reply=1, round=1, layer=1, accepted=0, next_token=5, confidence=0.5, is_final=True)
    return m.Outcome(**(values | changes))


@pytest.mark.parametrize(
    "message",
    [
        outcome(session=0),
        outcome(next_token=m.MAX_VOCABULARY),
        outcome(next_token=-1),
        outcome(reply=1 << 32),
        outcome(accepted=1 << 16),
        outcome(confidence=1.5),
        outcome(confidence=float("nan")),
        m.Draft(1, 1, 1, 0, [0] * 65),
        m.Draft(1, 1, 1, 0, [m.MAX_VOCABULARY]),
        m.DraftTokens(0, 1, 1, 0, [1]),
        m.DraftTokens(1, 1, 1 << 32, 0, [1]),
        m.DraftTokens(1, 1, 1, -1, [1]),
        m.DraftTokens(1, 1, 1, 0, [0] * 65),
        m.DraftTokens(1, 1, 1, 0, [m.MAX_VOCABULARY]),
        m.VerifiedTokens(1, 1, -1, [1]),
        m.VerifiedTokens(1, 1, 0, [m.MAX_VOCABULARY]),
        m.VerifiedTokens(1, 1, 0, [0] * (m.MAX_REPLY + 1)),
        m.VerifiedTokens(1, 1, 0, [1], 1 << 16),
        m.Observation(1, 1, "", 1, 1, "png", b""),
        m.Observation(1, 1, "x" * 2001, 1, 1, "png", b""),
        m.Observation(1, 1, "x", -1, 1, "png", b""),
        m.Observation(1, 1, "x", 1, 8193, "png", b""),
        m.Observation(1, 1, "x", 1, 1, "png", bytes(m.MAX_IMAGE_BYTES + 1)),
        m.Observation(1, 1, "x", 1, 1, "png", b"", [0] * (m.MAX_REPLY + 1)),
        m.Observation(1, 1, "x", 1, 1, "png", b"", [m.MAX_VOCABULARY]),
        m.Observation(1, 1, "x", 1, 1, "png", b"", [0], 1 << 32),
        m.Observation(1, 1, "x", 1, 1, "png", b"", history=[PAST] * 9),
        m.Observation(1, 1, "x", 1, 1, "png", b"", history=[replace(PAST, digest=b"")]),
        m.Observation(1, 1, "x", 1, 1, "png", b"", history=[replace(PAST, digest=bytes(9))]),
        m.SessionRequest(1, 1, "ar", "f", 5, float("nan"), 0, 1.0, 0, 9),
        m.SessionRequest(1, 1, "ar", "f", 5, float("inf"), 0, 1.0, 0, 9),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 0.0, 0, 9),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, 0),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, m.MAX_REPLY + 1),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, 9, exit_layers=[1] * 257),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, 9, exit_layers=[1 << 16]),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, 9, min_exit_confidence=1.5),
        m.SessionRequest(1, 1, "ar", "f", 5, 0.0, 0, 1.0, 0, 9, min_exit_confidence=float("nan")),
        m.Draft(1, 1, 1, 0, [], assumed=bytes(9)),
        replace(QUESTION, ask=0),
        replace(QUESTION, text=""),
        replace(QUESTION, text="x" * 2001),
        replace(QUESTION, documents=65),
        replace(QUESTION, temperature=float("nan")),
        replace(QUESTION, temperature=-1.0),
        replace(QUESTION, seed=1 << 63),
        replace(QUESTION, head=0),
        replace(QUESTION, head=4097),
        replace(QUESTION, window=0),
        replace(QUESTION, window=65),
        replace(QUESTION, max_tokens=1 << 16),
        replace(QUESTION, eos_token_ids=[1] * 17),
        replace(QUESTION, answered=[0] * (m.MAX_REPLY + 1)),
        replace(QUESTION, answered=[m.MAX_VOCABULARY]),
        replace(PROPOSAL, ask=0),
        replace(PROPOSAL, token=m.MAX_VOCABULARY),
        replace(PROPOSAL, position=1 << 16),
        replace(PROPOSAL, log_weight=float("nan")),
        replace(PROPOSAL, log_weight=float("inf")),
        replace(PROPOSAL, log_weight=1000.5),
        m.Verdict(1, 0, 0, m.MAX_VOCABULARY, True, True),
        m.Verdict(1, 0, -1, 0, True, True),
        m.Reveal(1, 0, 0, 0, []),
        m.Reveal(1, 0, 0, 0, [1] * 1025),
        m.Reveal(1, 0, 0, 0, [1], bytes(4 * 1024 + 1)),
        m.QuestionEnd(0, 0, "cancelled", ""),
    ],
)  # fmt: skip
def test_every_bound_is_checked(message):
    with pytest.raises(WireError):
        decode(encode(message))


def test_oversized_frames_are_neither_made_nor_read():
    huge = m.Draft(1, 1, 1, 0, [1], evidence=bytes(m.MAX_FRAME_BYTES))
    with pytest.raises(WireError, match="over the limit"):
        encode(huge)
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes(m.MAX_FRAME_BYTES + 1))


def test_a_prefix_has_one_digest_and_another_prefix_another():
    # BLAKE2b of the ids as little-endian uint32; a robot and a verifier of other builds must agree.
    assert m.prefix_digest([]).hex() == "e4a6a0577479b2b4"
    assert m.prefix_digest([1, 152_063]).hex() == "6889f3df6eabdb63"
    prefixes = [[], [0], [0, 0], [1], [1, 0], [0, 1], [256], [1 << 16], [m.MAX_VOCABULARY - 1]]
    assert len({m.prefix_digest(prefix) for prefix in prefixes}) == len(prefixes)
