# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_text import make_tiny_text

from dsd_ros.dragon.answers import AnswerStatistics
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.server import ServiceSettings
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.dragon.state import Step
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_model


@pytest.mark.parametrize("kind", [AggregationSettings, ServiceSettings])
def test_every_setting_keeps_its_bounds(kind):
    for item in dataclasses.fields(kind):
        wrong = [item.metadata[end] + step for end, step in (("min", -1), ("max", 1)) if end in item.metadata]
        for value in wrong or ["none of them"]:
            with pytest.raises(ValueError, match=item.name):
                kind(**{item.name: value})


def test_a_model_says_how_it_is_asked_about_a_document(tmp_path):
    directory = make_tiny_text(tmp_path / "model")
    said = {"format": 1, "prompt": "{instruction}", "document_prompt": "It is said: {document} So, {question}"}
    (directory / "dsd.json").write_text(json.dumps(said))
    model = load_model(ModelSettings(str(directory)))
    head, tail = DocumentPrompt(model).pieces("It rains.", "how is it?")
    text = model.tokenizer.decode([*head, *tail], skip_special_tokens=False)
    assert "It is said: It rains. So, how is it?" in text
    assert model.tokenizer.decode(head, skip_special_tokens=False).endswith("It rains.")
    head, tail = DocumentPrompt(model).pieces("", "how is it?")
    assert "It is said:  So, how is it?" in model.tokenizer.decode([*head, *tail], skip_special_tokens=False)
    (directory / "dsd.json").write_text(json.dumps(said | {"document_prompt": "{document}"}))
    with pytest.raises(ModelError, match="document"):
        load_model(ModelSettings(str(directory)))


def test_statistics_are_summed_up():
    steps = (Step(3, "device", True, False, True), Step(4, "cloud", True, True, False))
    found = AnswerStatistics(2.0, 0.5, (0.5, 2.0), 300, 100, steps)
    assert found.accepted == {"device": 1.0, "cloud": 0.5}
    assert (found.switches, found.aggregators, found.bytes_per_token) == (1, ("device", "cloud"), 200)
