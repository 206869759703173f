# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train pair`: target and draft from nothing, in resumable stages.

Each stage keeps its state in the cache with the name of what it builds on, and starts over where that has changed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dsd_lab.train.data import generate
from dsd_lab.train.exits.training import train_exits
from dsd_lab.train.forward import image_tokens, torch_device
from dsd_lab.train.frames import Frame, Frames, load_frames, write_json
from dsd_lab.train.language import GoalHeads, Look, cached_look, frozen_look, language_stage, live_look
from dsd_lab.train.model import SIZES, average, build_model, digest, fold, load_start, unfold, write_model
from dsd_lab.train.questions import Questions
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.runs import meet
from dsd_lab.train.settings import ExitSettings, TrainSettings
from dsd_lab.train.stages import Report, Stage, run_stage
from dsd_lab.train.tokenizer import kept_tokenizer, prompt_ids
from dsd_lab.train.vision import Heads, vision_stage
from dsd_lab.worlds.phrases import all_instructions, instruction_for
from dsd_lab.worlds.situations import Split

# Seeds of the worlds for roll-outs; none of them is rendered for imitation.
DAGGER_SEEDS = range(3_000_000, 4_000_000)
DRAFT_SEEDS = range(4_000_000, 5_000_000)
GOALS = 3  # most goals per picture that the target answers about
_ROUND = 100_000  # seeds per round of DAgger
_OWN_WEIGHT = 4  # how often a picture counts that a model met itself: they are few
_BLOCK = 1024  # replies kept as one file


def train_pair(settings: TrainSettings, report: Report | None = None) -> dict[str, Any]:
    """Train target and draft and write both model directories; continues a killed run. The figures of each stage."""
    settings = settings.resolved()
    torch.set_num_threads(settings.threads)
    run = PairTraining(settings, report or (lambda line, share: None))
    plain = {name: value for name, value in vars(settings).items() if not isinstance(value, Path)}
    figures: dict[str, Any] = {"settings": plain, "start": run.start, "vision": run.vision(), "target": run.target()}
    figures |= {"joint": run.joint(), "dagger": [run.dagger(k) for k in range(settings.dagger_rounds)]}
    run.write_target()
    figures |= {"draft": run.draft(), "draft_own": run.draft_own()}
    run.write_draft()
    if settings.exits:
        figures["exits"] = run.exits()
    write_json(settings.cache / "figures.json", figures)
    return figures


class PairTraining:
    """The state that the stages of one run share."""

    def __init__(self, settings: TrainSettings, report: Report) -> None:
        self.settings, self.report = settings, report
        s = settings
        self.device = torch_device(s.device)
        self.folders = [s.cache / "train"]
        generate(self.folders[0], Split.TRAINING, s.worlds, s.workers, report=report)
        self.frames = load_frames(*self.folders)
        self.rendered = len(self.frames.labels)
        self.tokenizer = self._tokenizer()
        self.size, self.small_size = SIZES[s.size]
        self.model = build_model(self.size, s.seed).to(self.device)
        torch.manual_seed(s.seed + 1)
        self.heads, self.goals = Heads(self.size.width), GoalHeads(self.size.width)
        self.small = build_model(self.small_size, s.seed + 7)
        torch.manual_seed(s.seed + 8)
        self.project, self.small_goals = (
            nn.Linear(self.size.width, self.small_size.width),
            GoalHeads(self.small_size.width),
        )
        # What the first stage builds on; each stage then names its checkpoint here.
        self.after = f"{s.seed}-{s.size}-{self.rendered}"
        self.start: dict[str, str] = {}  # digests of the models to continue from
        if s.start is not None:
            self.start["target"] = load_start(self.model, s.start / "target")
            if (s.start / "draft").is_dir():
                self.start["draft"] = load_start(self.small, s.start / "draft")
                self.project = unfold(self.small, self.model.model.visual)
            self.after = "-".join([self.after, *self.start.values()])
        self.ends: list[Path] = []  # checkpoints of the stages that train the tower, too

    def vision(self) -> dict[str, Any]:
        """Teach the tower what stands where; a trained pair knows that already."""
        s = self.settings
        if self.start:
            return {}
        stage = vision_stage(self.model.model.visual, self.heads, self.frames, s.batch, seed=s.seed, device=self.device)
        return self._run(stage, s.vision_minutes, s.vision_steps)

    def target(self) -> dict[str, Any]:
        """Teach the language half to answer from the frozen tower's tokens; a trained pair does so already."""
        s = self.settings
        if self.start:
            return {}
        look = frozen_look(self.model.model.visual, self.frames, self.device)
        questions = Questions(self.tokenizer, self.frames.labels, s.batch, s.seed)
        stage = language_stage("target", self.model, self.goals, look, questions, captions=0.3, device=self.device)
        return self._run(stage, s.language_minutes, s.language_steps)

    def joint(self) -> dict[str, Any]:
        """Train tower and language half together; the heads would pull a trained pair away from what it knows."""
        heads, goals, rate = (None, None, 3e-4) if self.start else (self.heads, self.goals, 1e-3)
        return self._live("target-joint", self.settings.seed + 10, self.settings.joint_minutes, rate, heads, goals)

    def dagger(self, round_: int) -> dict[str, Any]:
        """Roll the target out in new worlds, add what it met, and train both halves on everything."""
        s = self.settings
        folder = s.cache / f"dagger{round_}-{self.after}"
        seeds = DAGGER_SEEDS[round_ * _ROUND :][: s.dagger_worlds]
        met = meet(folder, self.model, self.size, self.tokenizer, seeds, s.workers, self.report)
        self.folders.append(folder)
        self.frames = load_frames(*self.folders)
        rate = (1e-4 if self.start else 5e-4) * 0.5**round_
        figures = self._live(f"target-dagger{round_}", s.seed + 20 + round_, s.dagger_minutes, rate)
        return {"met": met, **figures}

    def write_target(self) -> None:
        """Average the ends of the stages that trained the tower, and write the target."""
        average(self.model, self.ends)
        write_model(self.model, self.tokenizer, self.settings.out / "target")

    def draft(self) -> dict[str, Any]:
        """Train the draft on the target's own replies ("On-Policy Distillation", R. Agarwal et al., 2024)."""
        s = self.settings
        self.small.to(self.device)
        rows = np.random.default_rng([s.seed, 50]).permutation(len(self.frames.labels))[: s.distilled]
        shown = self.frames.at(sorted(rows.tolist()))
        del self.frames  # most of the memory, and not needed any more
        self.labels, self.features = self._answered(shown, s.cache / f"distilled-{self.after}", s.seed)
        return self._draft("draft", s.seed + 9, list(range(len(self.labels))), 2e-3, 0.1)

    def draft_own(self) -> dict[str, Any]:
        """Let the draft act, let the target answer about what it met, and train on both."""
        s = self.settings
        if s.draft_worlds == 0:
            return {}
        fold(self.small, self.model.model.visual, self.project)
        folder = s.cache / f"draft-met-{self.after}"
        seeds = DRAFT_SEEDS[: s.draft_worlds]
        met = meet(folder, self.small, self.small_size, self.tokenizer, seeds, s.workers, self.report)
        labels, features = self._answered(load_frames(folder), s.cache / f"distilled-own-{self.after}", s.seed + 1)
        first = len(self.labels)
        pool = [*range(first), *[first + n for n in range(len(labels))] * _OWN_WEIGHT]
        self.labels, self.features = [*self.labels, *labels], torch.cat([self.features, features])
        return {"met": met, **self._draft("draft-own", s.seed + 11, pool, 1e-3, 0.0)}

    def write_draft(self) -> None:
        """Write the draft with its own copy of the target's tower."""
        fold(self.small, self.model.model.visual, self.project)
        write_model(self.small, self.tokenizer, self.settings.out / "draft")

    def exits(self) -> dict[str, Any]:
        """Train the target's early exits, as `dsd-lab train exits` does."""
        s = self.settings
        exits = ExitSettings(
            model=str(s.out / "target"), minutes=None if s.exit_steps else s.exit_minutes, steps=s.exit_steps,
            seed=s.seed, cache=s.cache / "exits", worlds=s.exit_worlds, held_out=24 if s.smoke else 400,
            threads=s.threads, workers=s.workers, device=s.device,
        )  # fmt: skip
        return train_exits(exits, self.report)

    def _tokenizer(self) -> Any:
        """The tokenizer of both models: that of the pair to continue from, or trained on replies and instructions."""
        s = self.settings
        path = s.start / "target" / "tokenizer.json" if s.start else s.cache / "tokenizer.json"
        replies = [text for frame in self.frames.labels[:20_000] for _, text in frame.replies]
        return kept_tokenizer(path, replies[::3] + all_instructions())

    def _live(
        self, name: str, seed: int, minutes: float, rate: float, heads: Heads | None = None,
        goals: GoalHeads | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A stage that trains the tower, too; the pictures that the target met itself count more."""
        s = self.settings
        pool = [*range(self.rendered), *[*range(self.rendered, len(self.frames.labels))] * _OWN_WEIGHT]
        questions = Questions(self.tokenizer, self.frames.labels, s.live_batch, seed, pool)
        look = live_look(self.model.model.visual, heads, self.frames, seed, self.device)
        stage = language_stage(name, self.model, goals, look, questions, rate, averaged=True, device=self.device)
        figures = self._run(stage, minutes, s.joint_steps)
        self.ends.append(s.cache / f"{name}.safetensors")
        return figures

    def _draft(self, name: str, seed: int, pool: list[int], rate: float, captions: float) -> dict[str, Any]:
        s = self.settings
        questions = Questions(self.tokenizer, self.labels, s.batch, seed, pool)
        look: Look = cached_look(self.features, self.project)
        stage = language_stage(
            name, self.small, self.small_goals, look, questions, rate, captions, device=self.device
        )  # fmt: skip
        return self._run(stage, s.draft_minutes / (2 if s.draft_worlds else 1), s.draft_steps)

    def _run(self, stage: Stage, minutes: float, steps: int | None) -> dict[str, Any]:
        s = self.settings
        path = s.cache / f"{stage.name}.safetensors"
        figures = run_stage(stage, path, minutes, steps, self.device, self.after, self.report, s.save_seconds)
        self.after = digest(path)
        return figures

    def _answered(self, frames: Frames, folder: Path, seed: int) -> tuple[list[Frame], torch.Tensor]:
        """The pictures' labels with the target's greedy replies, kept in blocks, and its image tokens."""
        rng = np.random.default_rng([seed, 51])
        asked = [(n, goal) for n, frame in enumerate(frames.labels) for goal, _ in frame.replies[:GOALS]]
        prompts = prompt_ids(self.tokenizer, [instruction_for(goal, rng) for _, goal in asked])
        features = image_tokens(self.model.model.visual, frames.images)
        folder.mkdir(parents=True, exist_ok=True)
        texts: list[str] = []
        for first in range(0, len(asked), _BLOCK):
            path = folder / f"replies{first // _BLOCK:05d}.json"
            if not path.exists():
                rows = [n for n, _ in asked[first : first + _BLOCK]]
                ids = greedy_replies(self.model, features, prompts[first : first + _BLOCK], rows=rows)
                write_json(path, [self.tokenizer.decode(one, skip_special_tokens=True) for one in ids])
            texts += json.loads(path.read_text())
            self.report("the target answers for the draft", first / len(asked))
        answers = iter(texts)
        labels = []
        for frame in frames.labels:
            labels.append(copy.copy(frame))
            labels[-1].replies = [(goal, next(answers)) for goal, _ in frame.replies[:GOALS]]
            labels[-1].doubts = []  # the expert's
        return labels, features
