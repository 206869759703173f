# SPDX-License-Identifier: Apache-2.0
"""A message of every type, no field of which has its default."""

from __future__ import annotations

from typing import Any

from dsd_ros.wire import messages as m

NAME = {"session": 7, "reply": 2, "round": 3}
PAST = m.Past("forward 50 cm", "rgb8", 1, 1, b"abc", b"digestof")
SAMPLES: dict[type, dict[str, Any]] = {
    m.SessionRequest: {
        "request": 5, "protocol_version": 7, "mode": "dsd", "tokenizer_fingerprint": "f", "vocab_size": 8,
        "temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 9, "max_tokens": 40, "resume": b"r" * 16, "exits": True,
        "exit_layers": [1], "min_exit_confidence": 0.5, "proof": "full", "nonce": b"n" * 16,
        "grammar": "{}",
    },
    m.SessionReply: {
        "request": 5, "session": 7, "error": "no", "target_name": "t", "target_fingerprint": "f", "vocab_size": 8,
        "eos_token_ids": [7], "exit_layers": [2], "ticket": b"t" * 16, "side_factor": 28,
        "min_pixels": 3136, "max_pixels": 12845056, "nonce": b"n" * 16,
    },
    m.Observation: {
        "session": 7, "reply": 2, "instruction": "go", "height": 1, "width": 1, "encoding": "rgb8", "image": b"abc",
        "verified": [3, 300], "rounds": 1, "history": [PAST], "messages": b'[["user",["go"]]]',
    },
    m.DraftTokens: {"session": 7, "reply": 2, "stream": 3, "start": 4, "tokens": [1, 300]},
    m.VerifiedTokens: {
        "session": 7, "reply": 2, "at": 4, "tokens": [1, 300], "accepted": 1, "drafted": 2, "compute_us": 6,
        "ended": True,
    },
    m.Draft: NAME | {
        "confirmed": 4, "tokens": [1, 2], "evidence": b"e", "parents": b"\0\1", "assumed": b"assumed.",
        "resampled": [3],
    },
    m.Outcome: NAME | {
        "layer": 4, "accepted": 1, "next_token": 5, "confidence": 0.25, "is_final": False, "compute_us": 6,
    },
    m.Refusal: NAME | {"code": "overloaded", "sentence": "later"},
    m.SessionClose: {"session": 7},
    m.Question: {
        "ask": 9, "attempt": 1, "protocol_version": 7, "tokenizer_fingerprint": "f", "vocab_size": 8, "text": "what",
        "documents": 2, "temperature": 1.0, "seed": 3, "reply": 1,
        "head": 4, "max_tokens": 9, "window": 2, "aggregator": "cloud",
        "eos_token_ids": [7], "answered": [1], "relevance_fingerprint": "r", "nonce": b"n" * 16,
    },
    m.QuestionReply: {
        "ask": 9, "attempt": 1, "error": "no", "model_name": "t", "model_fingerprint": "f", "vocab_size": 8,
        "eos_token_ids": [7], "documents": 1, "held": 2, "sources": ["a.md"],
    },
    m.Proposal: {
        "ask": 9, "attempt": 1, "position": 2, "rejections": 1, "token": 4, "log_weight": 0.5, "evidence": b"e",
        "decode_us": 1, "sent": 2, "echo": 3, "held": 4, "source": 1, "source_share": 90,
    },
    m.Verdict: {
        "ask": 9, "attempt": 1, "position": 2, "token": 4, "device_accepted": True, "cloud_accepted": True,
        "hands_over": True, "decode_us": 1, "sent": 2, "echo": 3, "held": 4, "source": 1, "source_share": 90,
        "cloud_share": 80,
    },
    m.Reveal: {"ask": 9, "attempt": 1, "position": 2, "rejections": 1, "ids": [1, 2], "values": b"abcd"},
    m.QuestionEnd: {"ask": 9, "attempt": 1, "code": "cancelled", "sentence": "no"},
}  # fmt: skip
