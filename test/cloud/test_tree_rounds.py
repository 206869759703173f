# SPDX-License-Identifier: Apache-2.0
"""Rounds with token trees, message by message: every proof, the end of the context, and invalid trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import IMAGE, Robot
from table_model import TableModel

from dsd_ros.cloud import rounds
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.methods.split import finish_split_tree, remaining_nodes, rounded_up, verify_split_tree
from dsd_ros.decoding.packing import pack_chances, pack_distributions, pack_kept, unpack_rows
from dsd_ros.decoding.rejection import TreeVerdict
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, transform
from dsd_ros.decoding.tree import ROOT, TokenTree
from dsd_ros.decoding.truncation import truncate
from dsd_ros.wire.messages import Outcome, Refusal, prefix_digest

MODEL = TableModel(1, ends=False)
SIZE = MODEL.vocab_size
SAMPLING = SamplingSettings(1.0)
#   -1 -> 0, 1, 2;  0 -> 3, 4;  1 -> 5;  2 -> 6;  5 -> 7;  6 -> 8
PARENTS = (-1, -1, -1, 0, 0, 1, 2, 5, 6)


@pytest.fixture
def engine():
    with VerifierEngine(MODEL) as made:
        yield made


def robot_of(engine, **request) -> Robot:
    robot = Robot(engine)
    assert robot.open(**request).error == ""
    robot.observe()
    return robot


def send(robot: Robot, tree: TokenTree, number: int = 1, confirmed: int = 0, **rest) -> None:
    robot.draft(number, confirmed, tree.tokens, parents=tree.parents_bytes(), **rest)


def target_sequence(said=(), model=MODEL):
    sequence = model.prefill(IMAGE, "go")
    sequence.append(list(said))
    return sequence


def rows_of(tree: TokenTree, said=(), model=MODEL) -> torch.Tensor:
    """The target's logits before a tree and after each node."""
    rows = []
    for node in range(-1, len(tree)):
        path = tree.tokens_of(tree.path_to(node))
        rows.append(target_sequence([*said, *path], model).next_logits())
    return torch.stack(rows)


def greedy(length: int, model=MODEL) -> list[int]:
    sequence = target_sequence((), model)
    for _ in range(length):
        sequence.append([int(sequence.next_logits().argmax())])
    return sequence.tokens


def other(*tokens: int) -> int:
    """A token that is none of these."""
    return next(token for token in range(SIZE - 1) if token not in tokens)


def along(said: list[int]) -> TokenTree:
    """A tree of PARENTS whose path 1, 5, 7 says what the target does, and no other node what it should."""
    wrong = [other(token) for token in said]
    return TokenTree((wrong[0], said[0], wrong[0], said[1], wrong[1], said[1], wrong[1], said[2], said[2]), PARENTS)


def verified(engine, robot: Robot) -> list[int]:
    """The tokens of the reply that the verifier is at."""
    return list(engine._sessions._sessions[robot.session].reply.sequence.tokens)


# Each proof


def drafted(seed: int, parents=PARENTS) -> tuple[TokenTree, torch.Tensor]:
    """A tree and what its inner nodes' children were drawn from."""
    rng = np.random.default_rng(seed)
    inner = TokenTree(tuple(range(len(parents))), parents).inner
    q = torch.from_numpy(rng.dirichlet(np.ones(SIZE), len(inner)).astype(np.float32))
    tokens = [int(rng.choice(SIZE, p=_normal(q[inner.index(parent)]))) for parent in parents]
    return TokenTree(tuple(tokens), parents), q


def _normal(row: torch.Tensor) -> np.ndarray:
    weights = row.double().numpy()
    return weights / weights.sum()


# Split: the robot goes on


def chances(tree: TokenTree, q: torch.Tensor) -> bytes:
    """Each node's probability, as it travels."""
    return pack_chances(np.array(rounded(tree, q), np.float32))


def rounded(tree: TokenTree, q: torch.Tensor) -> list[float]:
    r = rounded_up(q)
    return [float(r[tree.inner.index(parent), token]) for parent, token in zip(tree.parents, tree.tokens, strict=True)]


def rejecting(behind: int, seeds=range(200)) -> tuple[int, TokenTree, torch.Tensor]:
    """A seed by which the first child of a node is rejected, with tree and q."""
    for seed in seeds:
        tree, q = drafted(seed)
        p = transform(rows_of(tree), SAMPLING)
        generator = generator_for("verifier", seed, 1, 1)
        verdict = verify_split_tree(tree, rounded(tree, q), p, generator)
        if verdict == TreeVerdict(tree.path_to(behind), 0, owed=True):
            return seed, tree, q
    raise AssertionError("no seed rejects there")


@pytest.mark.parametrize("node", [ROOT, 0])
def test_a_rejection_brings_all_that_the_robot_needs(engine, node):
    seed, tree, q = rejecting(node)
    robot = robot_of(engine, proof="split", temperature=1.0, seed=seed)
    send(robot, tree, evidence=chances(tree, q))
    outcome = robot.get()
    assert (outcome.accepted, outcome.next_token, outcome.confidence) == (node + 1, 0, 0.0)
    left = remaining_nodes(tree, node)
    rows = unpack_rows(outcome.distribution, 1 + len(left), SIZE)
    p = transform(rows_of(tree), SAMPLING)
    assert np.array_equal(np.stack(rows), p[[row + 1 for row in (node, *left)]].numpy())
    said = list(tree.tokens_of(tree.path_to(node)))
    assert verified(engine, robot) == said
    # What the robot then finds goes up with its next draft.
    finished = finish_split_tree(tree, node, q, torch.from_numpy(np.stack(rows)), np.random.default_rng(seed))
    found = [*tree.tokens_of(finished.path)[len(said) :], finished.next_token]
    following, q = drafted(seed + 1000)
    confirmed = len(said) + len(found)
    send(robot, following, 2, confirmed, evidence=chances(following, q), resampled=found)
    second = robot.get()
    p = transform(rows_of(following, said + found), SAMPLING)
    generator = generator_for("verifier", seed, 1, 2)
    expected = verify_split_tree(following, rounded(following, q), p, generator)
    assert (second.accepted, second.next_token) == (expected.last + 1, expected.next_token)
    told = following.tokens_of(expected.path)
    assert verified(engine, robot)[: confirmed + len(told)] == [*said, *found, *told]


def rejected(engine) -> tuple[Robot, TokenTree]:
    """A robot whose tree was rejected in front: up to 3 nodes can hold beside the first child."""
    seed, tree, q = rejecting(ROOT)
    robot = robot_of(engine, proof="split", temperature=1.0, seed=seed)
    send(robot, tree, evidence=chances(tree, q))
    assert robot.get().accepted == 0
    return robot, tree


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_end_of_a_reply_is_reported_without_an_answer(engine, count):
    robot, tree = rejected(engine)
    tokens = [1, 2, 3, 4][:count]
    for _ in range(2):
        robot.draft(1, count, resampled=tokens)
    assert robot.silent()
    assert verified(engine, robot) == tokens
    robot.draft(1, 1, resampled=[6])  # not another end
    send(robot, tree)  # a late double is not answered, and not taken for another round
    assert robot.silent()
    assert verified(engine, robot) == tokens


ODD = [
    (2, [3], "out-of-step"),  # it counts
    (1, [3, 1], "out-of-step"),
    (5, [1, 2, 3, 4, 5], "out-of-step"),  # no path is that long
    (2, [1, SIZE], "bad-distribution"),  # the target has no such token
]


@pytest.mark.parametrize(
    ("ends", "confirmed", "resampled", "code"),
    [
        (False, 0, [], "out-of-step"),  # the tokens are missing
        *((ends, *odd) for ends in (False, True) for odd in ODD),
    ],
)
def test_tokens_that_cannot_follow_are_refused_and_change_nothing(engine, ends, confirmed, resampled, code):
    robot, _ = rejected(engine)
    following, q = drafted(7)
    proven = {"evidence": chances(following, q)}
    if ends:
        robot.draft(1, confirmed, resampled=resampled)
    else:
        send(robot, following, 2, confirmed, resampled=resampled, **proven)
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == code and refusal.sentence
    assert verified(engine, robot) == []
    send(robot, following, 2, 4, resampled=[1, 2, 3, 4], **proven)
    assert robot.get().round == 2


def test_a_round_that_fails_after_the_robots_own_tokens_can_be_sent_again(engine):
    robot, _ = rejected(engine)
    following, q = drafted(7)
    for _ in range(2):
        send(robot, following, 2, 2, resampled=[1, 2], evidence=b"odd")
        assert robot.get().code == "bad-distribution"
        assert verified(engine, robot) == []
    send(robot, following, 2, 2, resampled=[1, 2], evidence=chances(following, q))
    assert isinstance(robot.get(), Outcome)
    assert verified(engine, robot)[:2] == [1, 2]


def test_more_rows_than_a_message_holds_are_refused(engine, monkeypatch):
    monkeypatch.setattr(rounds, "MAX_EVIDENCE_BYTES", 100)
    seed, tree, q = rejecting(ROOT)
    robot = robot_of(engine, proof="split", temperature=1.0, seed=seed)
    send(robot, tree, evidence=chances(tree, q))
    assert "draft smaller trees" in robot.get().sentence
    assert verified(engine, robot) == []
    # A sequence of the same nodes gets a row where it is rejected, as ever.
    robot.draft(1, 0, tree.tokens[:1], evidence=pack_chances(np.array(rounded(tree, q)[:1], np.float32)))
    assert len(robot.get().distribution) <= 100


def test_rounds_ahead_of_a_rejection_and_tokens_that_nobody_asked_for_are_refused(engine):
    robot, _ = rejected(engine)
    following, q = drafted(7)
    proven = {"evidence": chances(following, q)}
    send(robot, following, 2, 1, resampled=[3], assumed=b"8 bytes.", **proven)
    assert robot.get().code == "assumption-failed" and verified(engine, robot) == []
    robot.draft(2, 1, resampled=[3])
    assert not robot.get().distribution
    robot.draft(3, 3, resampled=[1])
    assert robot.get().code == "out-of-step"


# Retransmission, rounds ahead


@pytest.mark.parametrize("proof", ["coupled", "split"])
def test_doubles_are_answered_alike_and_change_nothing(engine, proof):
    seed, tree, q = rejecting(ROOT)
    robot = robot_of(engine, proof=proof, temperature=1.0, seed=seed)
    evidence = chances(tree, q) if proof == "split" else b""
    send(robot, tree, evidence=evidence)
    first = robot.get()
    before = verified(engine, robot)
    for _ in range(2):
        send(robot, tree, evidence=evidence)
        assert robot.get() == first
    assert verified(engine, robot) == before and bool(first.distribution) == (proof == "split")


def test_a_tree_sent_ahead_holds_if_its_assumption_does(engine):
    said = greedy(9)
    robot = robot_of(engine)
    send(robot, along(said[:3]))
    assert robot.get().next_token == said[3]
    tree = along(said[4:7])
    send(robot, tree, 2, 4, assumed=prefix_digest([*said[:3], other(said[3])]))
    assert robot.get().code == "assumption-failed"
    assert verified(engine, robot) == said[:4]
    send(robot, tree, 2, 4, assumed=prefix_digest(said[:4]))
    assert robot.get().next_token == said[7]


# The context's end, ends of replies, odd ids


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_what_is_beyond_the_context_is_cut(room):
    said = greedy(6)
    with VerifierEngine(TableModel(1, ends=False, max_length=2 + 2 + room)) as engine:
        robot = robot_of(engine)
        robot.draft(1, 0, said[:1])
        assert robot.get().next_token == said[1]
        send(robot, along(said[2:5]), 2, 2)
        outcome = robot.get()
        node = (0, 2, 6, 8)[room]
        assert (outcome.accepted, outcome.next_token) == (node, said[2 + room])


def test_split_where_the_context_ends_says_nothing_about_what_was_cut():
    seed, tree, q = rejecting(ROOT)
    with VerifierEngine(TableModel(1, ends=False, max_length=2 + 2)) as engine:
        robot = robot_of(engine, proof="split", temperature=1.0, seed=seed)
        send(robot, tree, evidence=chances(tree, q))
        outcome = robot.get()
        left = remaining_nodes(tree.cut(2), ROOT)
        assert outcome.accepted == 0 and len(left) == 4
        p = torch.from_numpy(np.stack(unpack_rows(outcome.distribution, 5, SIZE)))
        assert torch.equal(p, transform(rows_of(tree), SAMPLING)[[0, 2, 3, 6, 7]])
        finished = finish_split_tree(tree, ROOT, q, p, np.random.default_rng(0))
        assert len(finished.path) <= 2
        # No more than that can follow.
        robot.draft(1, 4, resampled=[1, 2, 3, 4])
        assert robot.get().code == "out-of-step"
        robot.draft(1, 3, resampled=[1, 2, 3])
        assert robot.silent() and verified(engine, robot) == [1, 2, 3]


def test_the_end_of_a_reply_is_a_node_like_others():
    model = TableModel(1)
    model.table[..., SIZE - 1] += 9.0
    end = SIZE - 1
    with VerifierEngine(model) as engine:
        robot = robot_of(engine)
        send(robot, TokenTree((0, end), (-1, -1)))
        outcome = robot.get()
        assert outcome.accepted == 2
        assert verified(engine, robot) == [end, outcome.next_token]


def test_ids_the_target_does_not_have_are_rejected(engine):
    said = greedy(3)
    tree = TokenTree((SIZE + 1000, said[0], SIZE, said[1]), (-1, -1, 1, 1))
    robot = robot_of(engine)
    send(robot, tree)
    outcome = robot.get()
    assert (outcome.accepted, outcome.next_token) == (4, said[2])
    # Sampled: what no node of the path says has no chance.
    robot = robot_of(engine, proof="split", temperature=1.0)
    send(robot, tree, evidence=pack_chances(np.full(4, 0.5, np.float32)))
    assert robot.get().accepted == 0


# What is no tree, or not proven


@pytest.mark.parametrize(
    ("parents", "sentence"),
    [
        ([0], "as many parents"),
        ([1, 0, 0, 1, 1, 2, 3, 6, 7], "names parent 0"),  # itself
        ([0, 0, 0, 2, 1, 2, 3, 6, 7], "in the order of their parents"),
    ],
)
def test_what_is_no_tree_is_refused(engine, parents, sentence):
    robot = robot_of(engine, proof="coupled", temperature=1.0)
    robot.draft(1, 0, [1] * 9, parents=bytes(parents))
    refusal = robot.get()
    assert refusal.code == "bad-distribution" and sentence in refusal.sentence
    assert verified(engine, robot) == []
    send(robot, along([1, 2, 3]))
    assert isinstance(robot.get(), Outcome)


@pytest.mark.parametrize(
    ("proof", "spoil"),
    [
        ("full", lambda tree, q: b""),
        ("full", lambda tree, q: pack_distributions(q[:-1])),
        ("full", lambda tree, q: pack_distributions(q[[0] * len(tree)])),  # one per node
        ("full", lambda tree, q: pack_distributions(2 * q)),
        ("full", lambda tree, q: pack_distributions(q * torch.nan)),
        ("full", lambda tree, q: pack_distributions(torch.eye(SIZE)[[other(*tree.tokens)] * 6])),
        ("truncated", lambda tree, q: b""),
        ("truncated", lambda tree, q: pack_kept([truncate(row, SIZE) for row in q[:-1]], SIZE)),
        ("split", lambda tree, q: b""),
        ("split", lambda tree, q: chances(tree, q)[:-2]),
        ("split", lambda tree, q: chances(tree, q) + b"\0\0"),
        ("split", lambda tree, q: bytes(2 * len(tree))),
        ("split", lambda tree, q: pack_chances(np.full(len(tree), 2.0, np.float32))),
        ("split", lambda tree, q: b"\xff" * (2 * len(tree))),
    ],
)
def test_what_does_not_prove_a_tree_is_refused_and_changes_nothing(engine, proof, spoil):
    tree, q = drafted(3)
    robot = robot_of(engine, proof=proof, temperature=1.0)
    send(robot, tree, evidence=spoil(tree, q))
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == "bad-distribution"
    assert refusal.sentence and verified(engine, robot) == []
    robot.draft(1, 0)
    assert robot.get().round == 1
