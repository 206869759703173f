# SPDX-License-Identifier: Apache-2.0
"""One pass over a whole tree gives each node the result of its path alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny_models import TOKENS, make_tiny_model

from dsd_ros.decoding.tree import TokenTree
from dsd_ros.vlm.errors import ContextError, SequenceError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.sequence import TreeLayout, grow_trees_together

INSTRUCTION = "find the silver bottle"
REPLY = [3, 77, 200, 12, 12]
#   -1 -> 0 (5), 1 (6), 2 (5);  0 -> 3 (7), 4 (8);  2 -> 5 (9);  4 -> 6 (5)
TREE = TokenTree((5, 6, 5, 7, 8, 9, 5), (-1, -1, -1, 0, 0, 2, 4))


def same(actual, expected):
    torch.testing.assert_close(actual[..., :TOKENS], expected[..., :TOKENS], atol=1e-4, rtol=1e-4)


def alone(model, image, tokens):
    """The logits after ``tokens``, by a sequence of their own."""
    sequence = model.prefill(image, INSTRUCTION)
    sequence.append(tokens)
    return sequence.next_logits()


def rows_alone(model, image, reply, tree):
    """The logits before a tree and after each node, each path a sequence of its own."""
    paths = [tree.path_to(node) for node in range(-1, len(tree))]
    return torch.stack([alone(model, image, [*reply, *tree.tokens_of(path)]) for path in paths])


def check_cache(sequence, image):
    """The keys and values are those of a sequence that was fed the same tokens plainly."""
    fresh = sequence.model.prefill(image, INSTRUCTION)
    fresh.append(sequence.tokens)
    fresh.next_logits()
    length = sequence._cache.length
    mine, plain = (s._cache._data[..., :length, :] for s in (sequence, fresh))
    torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


@pytest.fixture
def forwards(model, monkeypatch):
    """How many tokens each pass of the model was fed."""
    seen = []
    run_layers = model._run_layers

    def counting(hidden, *rest):
        seen.append(hidden.shape[1])
        return run_layers(hidden, *rest)

    monkeypatch.setattr(model, "_run_layers", counting)
    return seen


def test_layout_by_hand():
    # Two tokens in the cache, one pending, then a tree: 0, 1 at the root, 2 below 0.
    layout = TreeLayout.of([-1, -1, 0], 0, 2, 1)
    expected = ["111000", "111100", "111010", "111101"]
    assert ["".join("01"[int(bit)] for bit in row) for row in layout.mask] == expected
    assert layout.positions.tolist() == [2, 3, 3, 4] and layout.end == 5
    # The same, with the first two nodes in the cache already.
    held = TreeLayout.of([-1, -1, 0], 2, 3, 0)
    assert np.array_equal(held.mask, layout.mask[-1:])
    assert held.positions.tolist() == [4] and held.end == 5


@pytest.mark.parametrize(("with_image", "pending", "hooked"), [(True, 0, True), (False, 3, False), (True, 1, True)])
def test_every_node_equals_its_path(model, picture, forwards, with_image, pending, hooked):
    image = picture() if with_image else None
    expected = rows_alone(model, image, REPLY[: 2 + pending], TREE)
    sequence = model.prefill(image, INSTRUCTION)
    sequence.append(REPLY[:2])
    sequence.next_logits()
    sequence.append(REPLY[2 : 2 + pending])
    seen = []
    hook = (lambda layer, hidden: seen.append((layer, hidden.clone()))) if hooked else None
    forwards.clear()
    logits = sequence.verify_tree(TREE.tokens, TREE.parents, hook)
    assert len(forwards) == 1
    assert logits.shape == (8, model.vocab_size) and logits.dtype == torch.float32
    same(logits, expected)
    assert sequence.tokens == REPLY[: 2 + pending]
    if hooked:
        assert [layer for layer, _ in seen] == list(range(model.num_layers))
        assert all(h.shape == (8, model.hidden_size) for _, h in seen)
        same(model.head(seen[-1][1]), logits)


def test_directly_after_the_prompt(model, picture):
    expected = rows_alone(model, picture(), [], TREE)
    sequence = model.prefill(picture(), INSTRUCTION)
    same(sequence.verify_tree(TREE.tokens, TREE.parents), expected)
    rows = []
    hook = lambda layer, hidden: rows.append(len(hidden))  # noqa: E731
    same(sequence.verify_tree(TREE.tokens, TREE.parents, hook), expected)
    assert rows == [8] * model.num_layers
    same(sequence.verify_tree([], []), expected[:1])
    same(sequence.verify_tree([], [], hook), expected[:1])


@pytest.mark.parametrize("node", [-1, 2, 6])
def test_every_path_can_be_kept(model, picture, forwards, node):
    sequence = model.prefill(picture(), INSTRUCTION)
    sequence.append(REPLY)
    logits = sequence.verify_tree(TREE.tokens, TREE.parents)
    path = TREE.path_to(node)
    sequence.keep_path(path)
    reply = [*REPLY, *TREE.tokens_of(path)]
    assert sequence.tokens == reply
    check_cache(sequence, picture())
    forwards.clear()
    # What the pass has shown is known without another, back to the token in front of the tree.
    assert torch.equal(sequence.next_logits(), logits[node + 1])
    twin = sequence.fork()
    twin.rollback(len(REPLY))
    assert torch.equal(twin.next_logits(), logits[0])
    assert not forwards
    same(sequence.verify([40, 41])[-1], alone(model, picture(), [*reply, 40, 41]))


def test_growing_level_by_level_is_one_pass_a_level(model, picture, forwards):
    expected = rows_alone(model, picture(), REPLY, TREE)
    sequence = model.prefill(picture(), INSTRUCTION)
    sequence.append(REPLY)
    forwards.clear()
    rows = [sequence.next_logits()[None]]
    levels = (slice(0, 3), slice(3, 6), slice(6, 7))
    rows += [sequence.grow_tree(TREE.tokens[level], TREE.parents[level]) for level in levels]
    assert forwards == [5, 3, 3, 1]
    same(torch.cat(rows), expected)
    sequence.keep_path((0, 4, 6))
    check_cache(sequence, picture())
    same(sequence.next_logits(), expected[7])
    # Without next_logits in front, pending tokens ride along.
    other = model.prefill(picture(), INSTRUCTION)
    other.append(REPLY)
    forwards.clear()
    same(other.grow_tree(TREE.tokens[:3], TREE.parents[:3]), expected[1:4])
    same(other.grow_tree([], []), expected[:0])
    same(other.next_logits(), expected[0])
    same(other.grow_tree(TREE.tokens[3:], TREE.parents[3:]), expected[4:])
    assert forwards == [8, 4]


def test_trees_of_several_sequences_grow_in_one_pass(model, picture, forwards):
    """Other pictures, prefixes, pending counts, and levels of other sizes; each as alone."""
    images = [picture(0), None, picture(2, 112, 168), picture(0)]
    replies = [REPLY, REPLY[:2], [], REPLY[:4]]
    trees = [TREE, TokenTree.chain([9, 8, 7]), TokenTree((1, 2, 3), (-1, -1, 0)), TokenTree((), ())]
    sequences = [model.prefill(image, INSTRUCTION) for image in images]
    for sequence, reply in zip(sequences, replies, strict=True):
        sequence.append(reply)
    sequences[1].next_logits()
    expected = [rows_alone(model, *row) for row in zip(images, replies, trees, strict=True)]
    forwards.clear()
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for depth in (1, 2, 3):
        growths = []
        for sequence, tree in zip(sequences, trees, strict=True):
            level = [node for node in range(len(tree)) if tree.depths[node] == depth]
            parents = [tree.parents[node] for node in level]
            growths.append((sequence, [tree.tokens[node] for node in level], parents))
        for found, logits in zip(rows, grow_trees_together(growths), strict=True):
            assert logits.shape[1] == model.vocab_size
            found.append(logits)
    assert len(forwards) == 3
    for sequence, found, right in zip(sequences, rows, expected, strict=True):
        same(torch.cat(found), right[1:])
        same(sequence.next_logits(), right[0])
    for sequence, tree, image, right in zip(sequences, trees, images, expected, strict=True):
        sequence.keep_path(tree.path_to(len(tree) - 1))
        same(sequence.next_logits(), right[-1])
        check_cache(sequence, image)
    with pytest.raises(SequenceError, match="list each sequence once"):
        grow_trees_together([(sequences[0], [1], [-1])] * 2)
    assert grow_trees_together([]) == []


def test_a_full_sequence_leaves_the_others_trees_as_they_were(model, picture):
    short, full = (model.prefill(picture(), INSTRUCTION) for _ in range(2))
    full.append([5] * (model.max_length - full.prompt_length))
    with pytest.raises(ContextError, match="ask for a shorter reply"):
        grow_trees_together([(short, [1], [-1]), (full, [1], [-1])])
    same(short.grow_tree([1], [-1])[0], alone(model, picture(), [1]))


def test_failures_leave_the_sequence_as_it_was(model, picture, monkeypatch):
    def hook(layer, hidden):
        raise RuntimeError("gone")

    sequence = model.prefill(picture(), INSTRUCTION)
    sequence.append(REPLY)
    with pytest.raises(RuntimeError, match="gone"):
        sequence.verify_tree(TREE.tokens, TREE.parents, hook)
    assert sequence.tokens == REPLY
    expected = rows_alone(model, picture(), REPLY, TREE)
    same(sequence.grow_tree(TREE.tokens[:3], TREE.parents[:3]), expected[1:4])
    with monkeypatch.context() as patch:
        patch.setattr(model, "head", lambda hidden: hook(0, hidden))
        with pytest.raises(RuntimeError, match="gone"):
            sequence.grow_tree(TREE.tokens[3:], TREE.parents[3:])
    same(sequence.grow_tree(TREE.tokens[3:], TREE.parents[3:]), expected[4:])
    for path in ([7], [-1], [3], [0, 5], [0, 0]):
        with pytest.raises(SequenceError, match="not a path of the 7-node tree"):
            sequence.keep_path(path)
    for tokens, parents in (([1, 2], [-1]), ([1], [7]), ([1], [-2])):
        with pytest.raises(SequenceError, match="tree"):
            sequence.grow_tree(tokens, parents)
    with pytest.raises(SequenceError, match="not in the vocabulary"):
        sequence.verify_tree([1, model.vocab_size], [-1, -1])
    sequence.keep_path([0, 4, 6])
    check_cache(sequence, picture())
    sequence.verify_tree(TREE.tokens, TREE.parents)
    sequence.append([9])  # drops the tree
    with pytest.raises(SequenceError, match="not a path of the 0-node tree"):
        sequence.keep_path([0])


def test_the_context_holds_paths_not_nodes(tmp_path):
    small = load_model(ModelSettings(str(make_tiny_model(tmp_path / "m", seed=3, max_positions=64))))
    sequence = small.prefill(None, INSTRUCTION)
    room = 64 - sequence.prompt_length
    reply = list(range(room - 2))
    sequence.append(reply)
    wide = TokenTree(tuple(range(20)), (-1,) * 10 + (0,) * 10)
    rows = sequence.verify_tree(wide.tokens, wide.parents)
    same(rows[20], alone(small, None, [*reply, 0, 19]))
    sequence.keep_path([0, 19])
    same(sequence.next_logits(), rows[20])
    with pytest.raises(ContextError, match="holds 64"):
        sequence.verify_tree([1], [-1])
    sequence.rollback(room - 1)
    with pytest.raises(ContextError, match="holds 64"):
        sequence.verify_tree([1, 2], [-1, 0])
    assert len(sequence.tokens) == room - 1
    same(sequence.verify_tree([1, 2], [-1, -1])[2], alone(small, None, [*reply, 0, 2]))


STEP = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, 255), max_size=3)),
    st.tuples(st.just("verify"), st.lists(st.integers(0, 255), max_size=3)),
    st.tuples(st.just("rollback"), st.floats(0, 1)),
    st.tuples(st.just("grow"), st.lists(st.tuples(st.integers(0, 255), st.floats(0, 1)), max_size=4)),
    st.tuples(st.just("tree"), st.lists(st.tuples(st.integers(0, 255), st.floats(0, 1)), max_size=6)),
    st.tuples(st.just("keep"), st.floats(0, 1)),
    st.tuples(st.just("logits"), st.none()),
    st.tuples(st.just("fork"), st.booleans()),
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=3, max_size=10), with_image=st.booleans())
def test_any_history_equals_a_fresh_sequence(model, picture, steps, with_image):
    image = picture(4) if with_image else None
    sequence = model.prefill(image, INSTRUCTION)
    reply: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    others = []

    def path_to(node):
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    for name, argument in steps:
        if name in ("grow", "tree"):
            if name == "tree":
                tokens, parents = [], []
            first = len(tokens)
            for token, where in argument:
                parents.append(round(where * len(tokens)) - 1)
                tokens.append(token)
            call = sequence.verify_tree if name == "tree" else sequence.grow_tree
            rows = call(tokens[first:], parents[first:])
            for node, row in zip(range(len(tokens) - 1, -1, -1), rows.flip(0), strict=False):
                path = [tokens[n] for n in path_to(node)]
                same(row, alone(model, image, reply + path))
                break  # one of each call is enough
        elif name == "keep":
            path = path_to(round(argument * len(tokens)) - 1)
            sequence.keep_path(path)
            reply = reply + [tokens[node] for node in path]
            tokens, parents = [], []
        elif name == "logits":
            same(sequence.next_logits(), alone(model, image, reply))
        elif name == "fork":
            others.append((sequence if argument else sequence.fork(), reply))
            sequence = sequence.fork() if argument else sequence
        else:
            if name == "rollback":
                reply = reply[: round(argument * len(reply))]
                sequence.rollback(len(reply))
            else:
                getattr(sequence, name)(argument)
                reply = reply + argument
            tokens, parents = [], []
        assert sequence.tokens == reply
    for other, said in [*others, (sequence, reply)]:
        assert other.tokens == said
        same(other.next_logits(), alone(model, image, said))
