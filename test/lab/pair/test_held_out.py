# SPDX-License-Identifier: Apache-2.0
"""Held-out questions: as their schema says, in language that no training draws, and judged by their right answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsd_lab import read_data
from dsd_lab.pair.held_out import HeldOut, load_questions, normal, shipped_questions, verdict
from dsd_lab.train.reader.facts import language

KINDS = {
    "names", "objects", "places", "times", "owners", "permissions", "counts", "negations", "two hops", "errands",
    "dated", "contradictions", "not told",
}  # fmt: skip
ITEM = HeldOut("x", "objects", "?", ("a",), ("b",), ("red", "deep red"), "both", "hand")


def sentences(lang: dict[str, Any]) -> Iterator[str]:
    """The templates of documents and questions, and the free sentences."""
    for domain in lang["domains"]:
        parts = [domain, *domain.get("properties", {}).values()]
        for name in ("tell", "ask", "tell_who", "ask_who", "tell_deed", "ask_deed", "tell_trait", "ask_trait"):
            yield from (one for part in parts for one in part.get(name, ()))
        yield from (one for part in parts for name in ("check", "deny") for one in [part.get(name)] if one)
        yield from (one for said in domain.get("described", ()) for name in ("tell", "ask") for one in said[name])
        yield from (one for row in domain.get("free", []) for one in row[:2])
        yield from (one for row in domain.get("facts", []) for one in row[:2])
    yield from (*lang["bring"], *lang["fillers"], *lang["other"])


def vocabulary(lang: dict[str, Any]) -> Iterator[str]:
    """Names, kinds, people, values but colours, and what happens in rooms."""
    people = lang["people"]
    yield from (*people["roles"], *people["first"], *people["last"], *people["traits"])
    for domain in lang["domains"]:
        yield from (*domain["kinds"], *domain.get("events", ()))
        yield from domain["names"] if isinstance(domain["names"], list) else ()
        values = [about["value"] for about in domain.get("properties", {}).values()]
        values += [row[3] for row in domain.get("free", ())]
        yield from (word for words in values if isinstance(words, list) for word in words)
    yield from (word for name, words in lang["values"].items() if name != "colour" for word in words)


def test_there_are_enough_of_every_kind() -> None:
    items = load_questions()
    kinds = Counter(item.kind for item in items)
    assert len(items) >= 400 and kinds.keys() == KINDS and min(kinds.values()) >= 8, kinds
    assert kinds["two hops"] >= 120 and sum(item.by == "hand" for item in items) >= 120
    assert all(item.disagree == (item.kind == "contradictions") for item in items)
    assert all(len(item.device) >= 2 and len(item.cloud) >= 2 for item in items)


def test_no_training_draws_their_language() -> None:
    trained, held_out = language(), read_data("pair/held_out.toml")
    assert sorted(set(sentences(trained)) & set(sentences(held_out))) == []
    same = set(vocabulary(trained)) & set(vocabulary(held_out)) - {"person", "sentence"}
    assert sorted(same) == []
    assert not set(held_out["people"]["first"]) & set(read_data("train/reader/words.toml")["names"])


def test_neither_side_holds_both_facts() -> None:
    """What the answer ends in is told by one side only, and the other one tells what it is said of."""
    split = values = 0
    for item in load_questions():
        if item.kind != "two hops" or item.by != "template" or item.answers[0] in ("Yes.", "No."):
            continue
        values += 1
        device, cloud = (normal(" ".join(side)) for side in (item.device, item.cloud))
        answer = normal(item.answers[0])
        assert answer in device or answer in cloud, item
        split += (answer in device) != (answer in cloud)
    assert values >= 80 and split >= 0.85 * values  # elsewhere the other side has the word about another thing


def test_the_documents_hold_what_is_asked() -> None:
    for item in (*load_questions(), *shipped_questions()):
        if not item.answers or normal(item.answers[0]) in ("yes", "no") or item.kind in ("errands", "contradictions"):
            continue
        every = normal(" ".join((*item.device, *item.cloud)))
        assert any(normal(answer) in every for answer in item.answers), item


def test_twelve_are_over_the_documents_that_ship() -> None:
    items = shipped_questions()
    assert len(items) == 12 and sum(item.needs == "both" for item in items) >= 5
    assert any("Viola" in text for text in items[0].device) and any("oak" in text for text in items[0].cloud)


def test_a_verdict() -> None:
    for text, expected in [
        ("It is the Viola. The Viola is red.", "right"),
        ("The Viola is a deep red!", "right"),
        ("It is red (2026-03-01).", "right"),
        ("red", "right"),
        ("The Viola is not red.", "wrong"),
        ("The Viola is redder.", "wrong"),
        ("It is the Viola.", "wrong"),
        ("The Viola is red. No.", "wrong"),
        ("The Viola is blue. Elsewhere: red.", "wrong"),
        ("It is the Viola. I do not know.", "unknown"),
        ("The colour is unknown.", "unknown"),
        ("", "wrong"),
    ]:
        assert verdict(ITEM, text) == expected


def test_what_is_counted_may_follow_its_number() -> None:
    for text, expected in [
        ("The Owl Nest has thirteen seats.", "right"),
        ("It is thirteen.", "right"),
        ("The Owl Nest has thirteen hundred.", "wrong"),
        ("The Owl Nest has thirteen forty.", "wrong"),
        ("The Owl Nest has thirteen of 16.", "wrong"),
        ("It has no thirteenth seat.", "wrong"),
        ("It is not thirteen seats.", "wrong"),
    ]:
        assert verdict(replace(ITEM, answers=("thirteen", "13")), text) == expected


def test_a_verdict_where_nothing_is_told_or_documents_disagree() -> None:
    nothing = replace(ITEM, answers=(), needs="none")
    assert verdict(nothing, "It is the Viola. I do not know.") == "right"
    assert verdict(nothing, "The Viola is red.") == "wrong"
    clash = replace(ITEM, disagree=True)
    assert verdict(clash, "The Viola is red. Elsewhere: blue.") == "right"
    assert verdict(clash, "The Viola is red.") == "wrong"
    newer = replace(ITEM, answers=("blue",))
    assert verdict(newer, "The Viola is red (2025-01-01). Newer: blue (2026-01-01).") == "right"
    assert (
        verdict(replace(ITEM, answers=("find the red chair",)), "The Viola is red. Go: find the red chair") == "right"
    )


def test_what_is_not_as_the_schema_says_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'none'; only one that nothing tells"):
        replace(ITEM, needs="none")
    with pytest.raises(ValueError, match="needs 'nobody'"):
        replace(ITEM, needs="nobody")
    with pytest.raises(ValueError, match="lacks its words"):
        replace(ITEM, device=())
