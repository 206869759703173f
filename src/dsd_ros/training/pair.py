"""`dsd train pair`: from nothing to the shipped target and draft, in resumable stages."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from dsd_ros.robot.world import World

from .architecture import DRAFT, TARGET, build_model
from .data import (
    TRAIN_SEEDS,
    VALIDATION_SEEDS,
    Frames,
    generate,
    load_frames,
    save_shard,
)
from .goal_heads import GoalHeads
from .language_stage import Mixer, cached_look, image_tokens, live_look, train_language
from .replies import greedy_replies
from .rollouts import roll_out
from .settings import TrainSettings
from .text import all_instructions, instruction_for, prompt_ids, train_tokenizer
from .vision_stage import Heads, train_vision

Report = Callable[[str, float], None]
_OWN_WEIGHT = 4


def smoke_settings(out: Path, cache: Path, seed: int = 0) -> TrainSettings:
    """A run of a minute or two on one core that still learns something measurable."""
    return TrainSettings(
        out=out, cache=cache, seed=seed, worlds=24, workers=1, threads=1, batch=32,
        vision_steps=120, language_steps=60, joint_steps=10, draft_steps=40, dagger_rounds=0, distilled=64,
        evaluate=False, smoke=True,
    )  # fmt: skip


def train_pair(settings: TrainSettings, report: Report | None = None) -> dict[str, Any]:
    """Train target and draft and write both model directories; resumes where a kill left it.

    `report(line, share)` hears of every stage's progress.
    Returns the stages' figures (and the evaluation's under "evaluation").
    """
    if settings.smoke and settings.vision_steps is None:
        # A tiny run must not take the place of the shipped pair, nor mix with a whole run's pictures.
        smoke = settings.cache / "smoke"
        out = smoke / "models" if settings.out == Path("models") else settings.out
        settings = smoke_settings(out, smoke, settings.seed)
    report = report or (lambda line, share: None)
    torch.set_num_threads(settings.threads)
    run = _Run(settings, report)
    figures: dict[str, Any] = {"settings": _plain(settings)}
    figures["vision"] = run.vision()
    figures["target"] = run.target()
    figures["joint"] = run.joint()
    figures["dagger"] = [run.dagger(k) for k in range(settings.dagger_rounds)]
    run.average()
    run.write_target()
    figures["draft"] = run.draft()
    run.write_draft()
    (settings.cache / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    if settings.evaluate:
        from dsd_ros.evaluation.pair import evaluate_pair

        figures["evaluation"] = evaluate_pair(
            settings.out / "target",
            settings.out / "draft",
            training=figures,
            write_cards=True,
            report=report,
        )
    return figures


class _Run:
    """State shared by the stages of one run."""

    def __init__(self, settings: TrainSettings, report: Report) -> None:
        self.settings, self.report = settings, report
        cache = settings.cache
        per_world = 16
        made = [0]

        def count(n: int) -> None:
            made[0] += n
            report(f"rendered {made[0]} pictures", made[0] / (settings.worlds * per_world))

        validation = 40 if not settings.smoke else 6
        generate(cache / "train", TRAIN_SEEDS, settings.worlds, settings.workers, per_world, count)
        generate(cache / "val", VALIDATION_SEEDS, validation, settings.workers, per_world)
        self.frames = load_frames(cache / "train")
        self.validation = load_frames(cache / "val")
        self.tokenizer = self._tokenizer()
        self.model = build_model(TARGET, settings.seed)
        torch.manual_seed(settings.seed + 1)
        self.heads = Heads(TARGET.width)
        self.goals = GoalHeads(TARGET.width)
        self._features: torch.Tensor | None = None

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self.settings.cache / "tokenizer.json"
        if not path.exists():
            replies = [text for f in self.frames.labels[:20_000] for _, text in f.replies]
            part = path.with_suffix(".part")
            train_tokenizer(replies[::3] + all_instructions()).save(str(part))
            os.replace(part, path)
        return Tokenizer.from_file(str(path))

    @property
    def features(self) -> torch.Tensor:
        """The tower's tokens of all training pictures, as the tower is now."""
        if self._features is None:
            self.report("computing image tokens", 0.0)
            self._features = image_tokens(self.model.model.visual, self.frames.images)
        return self._features

    def vision(self) -> dict[str, float]:
        s = self.settings
        return train_vision(
            self.model.model.visual, self.heads, self.frames, self.validation,
            s.cache / "vision.safetensors",
            s.vision_minutes, s.vision_steps, s.batch, seed=s.seed, report=self.report,
        )  # fmt: skip

    def target(self) -> dict[str, float]:
        s = self.settings
        mixer = Mixer(self.frames, self.tokenizer, s.batch, s.seed)
        return train_language(
            self.model, self.goals, cached_look(lambda: self.features), mixer, s.cache / "target.safetensors",
            s.language_minutes, s.language_steps, report=self.report,
        )  # fmt: skip

    def joint(self) -> dict[str, float]:
        """Train on with the tower unfrozen."""
        s = self.settings
        return self._live("target-joint.safetensors", s.seed + 10, s.joint_minutes, 1.2e-3)

    def _live(self, name: str, seed: int, minutes: float, rate: float) -> dict[str, float]:
        s = self.settings
        mixer = Mixer(self.frames, self.tokenizer, s.live_batch, seed, per_picture=2)
        look = live_look(self.model.model.visual, self.heads, self.frames, seed)
        return train_language(
            self.model, self.goals, look, mixer, s.cache / name, minutes, s.joint_steps, rate,
            captions=0.0, report=self.report,
        )  # fmt: skip

    def dagger(self, round_: int) -> dict[str, float]:
        """Roll the model out in new worlds, add what it met, train on with the tower unfrozen."""
        s = self.settings
        folder = s.cache / f"dagger{round_}"
        first = 500_000 + round_ * 100_000
        block = 96
        met: dict[str, float] = {}
        for k in range(0, s.dagger_worlds, block):
            path = folder / f"shard{k // block:05d}"
            if path.with_suffix(".json").exists():
                continue
            seeds = TRAIN_SEEDS[first + k : first + min(k + block, s.dagger_worlds)]
            worlds = [World.from_seed(seed) for seed in seeds]
            result = roll_out(self.model, self.tokenizer, worlds)
            met = {
                "reached": float(np.mean(result.reached)),
                "collided": float(np.mean(result.collided)),
                "agreed": float(np.mean(result.agreed)),
            }
            self.report(f"roll-outs of round {round_}: {met}", k / s.dagger_worlds)
            save_shard(path, result.images, result.labels)
        extra = load_frames(folder)
        # The model's own pictures are few: they count several times.
        self.frames = Frames(
            np.concatenate([self.frames.images, *[extra.images] * _OWN_WEIGHT]),
            self.frames.labels + extra.labels * _OWN_WEIGHT,
        )
        self._features = None
        name = f"target-dagger{round_}.safetensors"
        figures = self._live(name, s.seed + 20 + round_, s.dagger_minutes, 1e-3 * 0.5**round_)
        return {**met, **figures}

    def average(self) -> None:
        """Average the weights at the ends of the stages with the tower unfrozen, later ones more.

        After M. Wortsman et al., "Model soups", 2022: the mean of fine-tuned weights of one lineage
        is steadier than each; here it ended going back and forth between two mistaken views.
        """
        names = ["target-joint.safetensors"]
        names += [f"target-dagger{k}.safetensors" for k in range(self.settings.dagger_rounds)]
        states = [load_file(self.settings.cache / name) for name in names]
        weights = np.array([1.5**k for k in range(len(states))])
        weights /= weights.sum()
        parts = {"language/": self.model.model.language_model, "tower/": self.model.model.visual}
        for prefix, module in parts.items():
            mean = {
                key[len(prefix) :]: sum(
                    float(w) * state[key] for w, state in zip(weights, states, strict=True)
                )
                for key in states[0]
                if key.startswith(prefix)
            }
            module.load_state_dict(mean)

    def write_target(self) -> None:
        write_model(self.model, self.tokenizer, self.settings.out / "target")

    def draft(self) -> dict[str, float]:
        """Train the draft on the target's own replies, behind a copy of its tower."""
        s = self.settings
        frames, features = self._distilled()
        self.small = build_model(DRAFT, s.seed + 7)
        torch.manual_seed(s.seed + 8)
        self.project = nn.Linear(TARGET.width, DRAFT.width)
        mixer = Mixer(frames, self.tokenizer, s.batch, s.seed + 9)
        return train_language(
            self.small, GoalHeads(DRAFT.width), cached_look(lambda: features, self.project), mixer,
            s.cache / "draft.safetensors",
            s.draft_minutes, s.draft_steps, captions=0.1, report=self.report,
        )  # fmt: skip

    def _distilled(self) -> tuple[Frames, torch.Tensor]:
        """Some pictures with the target's replies to their goals; kept in the cache."""
        s = self.settings
        path = s.cache / "distilled.json"
        rng = np.random.default_rng([s.seed, 50])
        rows = rng.permutation(len(self.frames.labels))[: s.distilled]
        features = image_tokens(self.model.model.visual, self.frames.images[rows])
        labels = [copy.copy(self.frames.labels[int(row)]) for row in rows]
        if path.exists():
            texts = json.loads(path.read_text())
        else:
            asked = [(n, goal) for n, f in enumerate(labels) for goal, _ in f.replies[:3]]
            texts = []
            for first in range(0, len(asked), 1024):
                some = asked[first : first + 1024]
                prompts = [prompt_ids(self.tokenizer, instruction_for(g, rng)) for _, g in some]
                index = torch.tensor([n for n, _ in some])
                ids = greedy_replies(self.model, features[index], prompts)
                texts += [self.tokenizer.decode(i, skip_special_tokens=True) for i in ids]
                self.report("the target answers for the draft", first / len(asked))
            part = path.with_suffix(".part")
            part.write_text(json.dumps(texts))
            os.replace(part, path)
        answers = iter(texts)
        for frame in labels:
            frame.replies = [(goal, next(answers)) for goal, _ in frame.replies[:3]]
        return Frames(np.empty((len(rows), 0)), labels), features

    def write_draft(self) -> None:
        """Fold the projection into the merger's last layer, so that the draft has its own tower."""
        big, small = self.model.model.visual, self.small.model.visual
        state = big.state_dict()
        last, weight, bias = big.merger.mlp[2], self.project.weight, self.project.bias
        with torch.no_grad():
            state["merger.mlp.2.weight"] = weight @ last.weight
            state["merger.mlp.2.bias"] = weight @ last.bias + bias
        small.load_state_dict(state)
        write_model(self.small, self.tokenizer, self.settings.out / "draft")


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model directory (float16 weights) next to the old one, then swap them."""
    from .text import write_processor_files

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    write_processor_files(part, tokenizer)
    copy.deepcopy(model).half().save_pretrained(part)
    write_processor_files(part, tokenizer)  # save_pretrained writes its own generation settings
    card = folder / "README.md"
    if card.exists():
        shutil.copy(card, part / "README.md")
    shutil.rmtree(folder, ignore_errors=True)
    (part / "model.safetensors").chmod(0o644)
    part.rename(folder)


def _plain(settings: TrainSettings) -> dict[str, Any]:
    return {k: v for k, v in vars(settings).items() if not isinstance(v, Path)}
