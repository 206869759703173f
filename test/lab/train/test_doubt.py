"""What the expert would say if things stood a little elsewhere, and how a learner hears of it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from dsd_lab.train import data
from dsd_lab.train.architecture import DRAFT, build_model
from dsd_lab.train.batches import EOS
from dsd_lab.train.doubt import shares
from dsd_lab.train.forward import tower_forward
from dsd_lab.train.frames import Frame, load_frames, save_shard
from dsd_lab.train.language_stage import reply_logits, reply_loss
from dsd_lab.train.questions import Mixer, Questions
from dsd_lab.train.text import all_instructions, train_tokenizer
from dsd_lab.worlds.expert import DRAWS, doubts, misjudged, reply
from dsd_lab.worlds.guide import View
from dsd_lab.worlds.sight import visible_pixels
from dsd_lab.worlds.situations import Situation, Split, world_of
from dsd_ros.robot.sim.world import RADIUS, ROBOT_RADIUS, Thing, World

SEMICOLON, COMMA = 1, 2
MARKS = (SEMICOLON, COMMA, 3)


def view_of(bearing: float, gap: float, pixels: int = 900) -> View:
    """A red chair alone in a large room, at a bearing in degrees and a gap in metres."""
    away = gap + RADIUS["chair"] + ROBOT_RADIUS
    angle = math.radians(bearing)
    chair = Thing("chair", "red", away * math.cos(angle), away * math.sin(angle), 0.0)
    world = World(0, 9.0, 9.0, (chair,), (), 0, (0.0, 0.0, 0.0), "find the red chair")
    return View.showing(world, (0.0, 0.0, 0.0), {0: pixels})


def actions_of(view: View, seed: int = 0) -> tuple[str, Counter[str]]:
    own = reply(view, "red chair")
    others = doubts(view, [("red chair", own)], np.random.default_rng(seed))[0]
    assert own not in [text for text, _ in others]
    assert 0 <= sum(n for _, n in others) <= DRAWS
    count: Counter[str] = Counter()
    for text, n in others:
        count[text.rsplit("Action: ", 1)[1]] += n
    return own.rsplit("Action: ", 1)[1], count


@pytest.mark.parametrize(
    ("view", "own", "other"),
    [
        (view_of(0.0, 0.401), "forward 25 cm", "stop"),
        (view_of(0.0, 0.399), "stop", "forward 25 cm"),
        (view_of(10.05, 0.55), "turn left 15 degrees", "forward 25 cm"),
        (view_of(-9.95, 1.9), "forward 75 cm", "turn right 15 degrees"),
        (view_of(0.0, 1.9, 61), "forward 75 cm", "turn left 45 degrees"),  # it may be out of sight
        (view_of(0.0, 1.9, 59), "turn left 45 degrees", "forward 75 cm"),  # or in sight after all
    ],
)
def test_near_an_edge_about_half_of_the_misjudged_replies_are_others(view: View, own: str, other: str) -> None:
    said, others = actions_of(view)
    assert said == own
    assert DRAWS / 5 < others[other] < DRAWS * 4 / 5


@pytest.mark.parametrize("view", [view_of(0.0, 1.9), view_of(14.0, 0.2), view_of(33.0, 0.5)])
def test_far_from_every_edge_no_reply_has_another_action(view: View) -> None:
    own, others = actions_of(view)
    assert set(others) <= {own}


def test_what_shows_too_little_is_kept_apart() -> None:
    faint = 0
    for seed in range(12):
        world = world_of(seed, Situation.HIDDEN, Split.TRAINING)
        for turn in range(8):
            pose = (*world.start[:2], turn * math.pi / 4)
            view, shown = View.at(world, pose), visible_pixels(world, pose)
            assert {**view.pixels, **view.faint} == shown
            assert all(view.pixels[i] >= 60 for i in view.pixels)
            assert all(view.faint[i] < 60 for i in view.faint)
            faint += len(view.faint)
    assert faint > 0


def test_everything_is_misjudged_as_seen_from_the_robot() -> None:
    world = world_of(4, Situation.HIDDEN, Split.TRAINING)
    view = View.at(world, world.start)
    rng = np.random.default_rng(3)
    views = [misjudged(view, rng) for _ in range(800)]
    for index in range(len(world.things)):
        turned = [one.bearing(index) - view.bearing(index) for one in views]
        far = [
            math.log((one.gap(index) + r) / (view.gap(index) + r))
            for one in views
            for r in [world.things[index].radius + ROBOT_RADIUS]
        ]
        assert math.degrees(np.std(turned)) == pytest.approx(0.7, rel=0.15)
        assert np.std(far) == pytest.approx(0.03, rel=0.15)
        assert abs(np.mean(turned)) < 0.002 and abs(np.mean(far)) < 0.005
    assert all(one.pose == view.pose and len(one.world.things) == len(world.things) for one in views)
    assert np.std([one.world.half_x for one in views]) > 0.01


def test_labels_are_drawn_as_without_doubts_and_come_back_from_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = data.world_frames(7, 12, None, Situation.TWO, Split.TRAINING)
    assert any(others for frame in labels for others in frame.doubts)
    assert all(len(frame.doubts) == len(frame.replies) for frame in labels)
    save_shard(tmp_path / "shard00000", images, labels)
    assert load_frames(tmp_path).labels == labels
    monkeypatch.setattr(data, "doubts", lambda view, replies, rng: [[] for _ in replies])
    _, without = data.world_frames(7, 12, None, Situation.TWO, Split.TRAINING)
    assert [(f.pose, f.replies, f.free) for f in without] == [(f.pose, f.replies, f.free) for f in labels]


def test_shares_are_of_the_replies_that_say_the_same_up_to_there() -> None:
    own = [10, 11, SEMICOLON, 20, COMMA, 30, 31, EOS]
    others = [
        ([10, 12, SEMICOLON, 21, COMMA, 33, 31, EOS], 6),  # another place, of which nothing else follows
        ([10, 11, SEMICOLON, 22, COMMA, 30, 31, EOS], 3),  # another clause, the same plan
        ([10, 11, SEMICOLON, 22, COMMA, 32, 31, EOS], 2),
        ([10, 11, SEMICOLON, 20, COMMA, 30, 34, EOS], 4),
    ]
    total = DRAWS + 1
    assert sorted(shares(own, others, MARKS)) == [
        (1, 12, pytest.approx(6 / total)),
        (3, 22, pytest.approx(5 / (total - 6))),
        (5, 32, pytest.approx(2 / (total - 6))),
        (6, 34, pytest.approx(4 / (total - 8))),
    ]
    assert shares(own, [], MARKS) == []


def test_what_the_expert_says_stays_the_likeliest() -> None:
    own = [10, 11, EOS]
    found = shares(own, [([12, EOS], DRAWS - 4), ([13, EOS], 4)], MARKS)
    assert sum(share for _, _, share in found) == pytest.approx(0.45)
    assert found[0][2] / found[1][2] == pytest.approx((DRAWS - 4) / 4)


def test_a_batch_holds_the_shares_at_their_tokens_and_the_loss_is_theirs() -> None:
    replies = [
        "The red chair is left, 0.4 m away; nothing else is near it, and I have arrived. Action: stop",
        "The red chair is left, 0.5 m away; nothing else is near it, the way is clear. Action: forward 25 cm",
        "No red chair in view, nothing but the room, so I look around. Action: turn left 45 degrees",
    ]  # fmt: skip
    tokenizer = train_tokenizer([*replies * 30, *all_instructions()[::70]])
    thing = ("chair", "red", 0.3, 0.4, 400)

    def frame(which: int, others: list[tuple[str, int]]) -> Frame:
        return Frame(
            7, (0.0, 0.0, 0.0), [thing] if which < 2 else [], [("red chair", replies[which])],
            free=[1.0] * data.FREE_WAYS, doubts=[others],
        )  # fmt: skip

    labels = [frame(0, [(replies[1], 8)]), frame(1, []), frame(2, [(replies[0], 3)])]
    batch = Mixer(Questions(tokenizer, labels), 12, seed=1, variants=2).draw(0, 0.0)
    place, target, instead = (getattr(batch, n).tolist() for n in ("unsure", "targets", "instead"))
    rows = batch.pictures[batch.back]
    asked = batch.wanted // batch.ids.shape[1]
    seen = Counter()
    for where, other, share in zip(place, instead, batch.shares.tolist(), strict=True):
        row = int(rows[asked[where]])
        wanted = {0: ("4", "5", 8 / (DRAWS + 1)), 2: ("No", "The", 3 / (DRAWS + 1))}[row]
        said = tuple(tokenizer.decode([token]) for token in (target[where], other))
        assert (*said, share) == (*wanted[:2], pytest.approx(wanted[2]))
        seen[row] += 1
    assert seen == Counter(row for row in rows.tolist() if row != 1)

    model = build_model(DRAFT, 3).eval()
    images = np.random.default_rng(0).integers(0, 255, (3, 168, 252, 3)).astype(np.uint8)
    with torch.no_grad():
        features = tower_forward(model.model.visual, torch.from_numpy(images))
        features = features[batch.pictures][batch.back]
        loss, _, _ = reply_loss(model, None, batch, features)
        logits = reply_logits(model, batch, features)
    wanted = functional.one_hot(batch.targets, logits.shape[1]).float()
    for where, other, share in zip(place, instead, batch.shares.tolist(), strict=True):
        wanted[where, target[where]] -= share
        wanted[where, other] += share
    each = functional.cross_entropy(logits, wanted, reduction="none")
    assert loss.item() == pytest.approx(float((each * batch.weights).sum() / batch.weights.sum()))
