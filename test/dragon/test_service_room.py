# SPDX-License-Identifier: Apache-2.0
"""A client that vanishes silently does not keep others from asking."""

from __future__ import annotations

import queue

import pytest
from leak_watch import Documents
from tiny_text import make_tiny_text

from dsd_ros.dragon import server as service_module
from dsd_ros.dragon.server import DragonServer, ServiceSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.messages import PROTOCOL_VERSION, EndCode, Question, QuestionEnd, QuestionReply


def question(model, ask: int) -> Question:
    return Question(
        ask, 0, PROTOCOL_VERSION, model.tokenizer_fingerprint, model.vocab_size, "why?", 1, 0.0, 0,
        1, "shared", "sparse", 4, 16, 2, 0, "auto", "device",
    )  # fmt: skip


def test_the_silent_make_room(tmp_path, monkeypatch):
    model = load_model(ModelSettings(str(make_tiny_text(tmp_path / "text", kind="qwen2"))))
    told: queue.Queue = queue.Queue()
    with DragonServer(model, Documents(["a b c"]), ServiceSettings(max_answers=1)) as service:
        service.submit(question(model, 1), told.put, "dds")
        assert isinstance(told.get(timeout=30), QuestionReply)
        service.submit(question(model, 2), told.put, "dds")
        refused = next_of(told, QuestionEnd)
        assert refused.ask == 2 and refused.code == EndCode.OVERLOADED
        monkeypatch.setattr(service_module, "_SILENT_S", 0.0)
        service.submit(question(model, 3), told.put, "dds")
        assert next_of(told, QuestionReply).ask == 3
        assert service.answers == 1


def next_of(told: queue.Queue, kind: type):
    while True:
        message = told.get(timeout=30)
        if isinstance(message, kind):
            return message


@pytest.mark.parametrize("value", [0, 10_001])
def test_settings_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=f"max_answers is {value}"):
        ServiceSettings(max_answers=value)
