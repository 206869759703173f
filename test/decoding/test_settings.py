# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import fields

import pytest

from dsd_ros.decoding.modes import PRESETS, ModeError, Proof, Shape
from dsd_ros.decoding.settings import DecodeSettings, SettingsError


def test_an_unknown_mode_is_refused_naming_the_known():
    with pytest.raises(ModeError, match="unknown mode 'fast'; known modes are stream, ar, dsd"):
        DecodeSettings(mode="fast")
    for name in ("auto", "best"):
        with pytest.raises(ModeError, match=f"mode {name} is gone: use stream"):
            DecodeSettings(mode=name)


def test_every_setting_is_described_and_bounded():
    for field in fields(DecodeSettings):
        assert field.metadata["help"]
        if field.name == "mode":
            assert field.metadata["choices"] == tuple(PRESETS)
        elif isinstance(field.default, str):
            choices = field.metadata.get("choices", (field.default,))
            assert field.default in choices and len(set(choices)) == len(choices)
        else:
            assert field.metadata["min"] < field.metadata["max"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_length", 0), ("draft_length", 65), ("temperature", -0.5), ("temperature", float("nan")),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("seed", -1), ("max_tokens", 0), ("max_tokens", 5000),
        ("predraft_source", "hopes"), ("predraft_workers", 0), ("predraft_workers", 65),
        ("predraft_budget", 0), ("pipeline_depth", 0), ("pipeline_depth", 9),
        ("min_exit_confidence", 1.5), ("min_exit_confidence", float("nan")),
        ("shape", "bush"), ("tree_budget", 0), ("tree_budget", 65), ("tree_expansion", "2,0"),
        ("tree_expansion", ""), ("tree_expansion", "2,two"), ("tree_expansion", "4,4,4"),
        ("exit_layers", "0"), ("exit_layers", "two"), ("exit_layers", "2,,4"), ("exit_layers", "65536"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        DecodeSettings(**{name: value})


def test_exits_are_named_by_their_layers():
    assert DecodeSettings().exits == ()
    assert DecodeSettings(exit_layers="none").exits is None
    assert DecodeSettings(exit_layers=" 4, 2,4 ").exits == (2, 4)


def test_exits_are_used_where_they_name_outcomes_to_draft_ahead_for():
    assert DecodeSettings(mode="fsd").uses_exits
    for values in ({"mode": "dsd"}, {"predraft_source": "guesses"}, {"exit_layers": "none"}):
        assert not DecodeSettings(**{"mode": "fsd"} | values).uses_exits


def test_a_mode_has_its_proof_unless_another_is_asked_for():
    assert DecodeSettings(mode="dsd").proven_by is Proof.FULL
    assert DecodeSettings(mode="coupled").proven_by is Proof.COUPLED
    assert DecodeSettings(mode="fsd", proof="coupled").proven_by is Proof.COUPLED
    assert DecodeSettings(mode="coupled", proof="full").proven_by is Proof.FULL
    # The target alone can draw with the noise that coupled drafts are drawn with.
    assert DecodeSettings(mode="ar", proof="coupled").proven_by is Proof.COUPLED
    with pytest.raises(SettingsError, match="mode ar draws with shared noise, not by proof 'full'"):
        DecodeSettings(mode="ar", proof="full")


def test_what_split_cannot_do_is_refused_with_a_sentence():
    values = {"mode": "fsd", "proof": "split", "temperature": 1.0}
    tree = {"shape": "expansion", "tree_expansion": "2,2"}
    with pytest.raises(SettingsError, match="early exits cannot name the outcome of a tree.* predraft_source"):
        DecodeSettings(**values, **tree)
    with pytest.raises(SettingsError, match="rounds with trees cannot be sent ahead.* pipeline_depth 1"):
        DecodeSettings(**values, **tree, predraft_source="guesses", pipeline_depth=2)
    assert DecodeSettings(**values, **tree, predraft_source="guesses").splits
    assert DecodeSettings(**values, **tree, exit_layers="none").splits
    assert DecodeSettings(**values, pipeline_depth=3).splits
    # Greedy, nothing is drawn on either side.
    assert not DecodeSettings(mode="fsd", proof="split", pipeline_depth=3).splits
    assert not DecodeSettings(mode="dsd", temperature=1.0).splits


def test_a_mode_has_its_shape_unless_another_is_asked_for():
    assert DecodeSettings(mode="dsd").shaped_by is Shape.SEQUENCE
    assert DecodeSettings(mode="mc-dsd").shaped_by is Shape.EXPANSION
    assert DecodeSettings(mode="mc-tslt").proven_by is Proof.TRUNCATED
    assert DecodeSettings(mode="mc-tslt", shape="sequence").shaped_by is Shape.SEQUENCE
    assert DecodeSettings(mode="fsd", shape="budget").shaped_by is Shape.BUDGET
    assert DecodeSettings(mode="dssd", shape="expansion", temperature=1.0).splits
    assert DecodeSettings(mode="ar", shape="sequence").shaped_by is Shape.SEQUENCE
    with pytest.raises(SettingsError, match="mode ar has no rounds whose drafts could have shape 'expan"):
        DecodeSettings(mode="ar", shape="expansion")


def test_a_tree_by_budget_needs_a_target_that_says_one_token():
    assert DecodeSettings(mode="coupled", shape="budget", temperature=1.0).shaped_by is Shape.BUDGET
    for name in ("dsd", "dssd", "tslt"):
        assert DecodeSettings(mode=name, shape="budget").shaped_by is Shape.BUDGET
        with pytest.raises(SettingsError, match="'budget' draws no nodes.* use shape expansion"):
            DecodeSettings(mode=name, shape="budget", temperature=1.0)
