"""`dsd-lab train pair`: from nothing to the shipped target and draft, in resumable stages.

Every stage keeps its state in the cache and says there what it was built upon, so that a run killed at any
point goes on where it stopped, and a stage whose forerunner has changed begins anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dsd_lab.train.architecture import SIZES, build_model
from dsd_lab.train.curves import PICTURE, draw_training
from dsd_lab.train.dagger import meet
from dsd_lab.train.data import load_frames
from dsd_lab.train.devices import torch_device
from dsd_lab.train.distil import answered, some_pictures, teacher
from dsd_lab.train.forward import PLAIN, Passes
from dsd_lab.train.goal_heads import GoalHeads
from dsd_lab.train.language_stage import Look, cached_look, frozen_look, live_look, train_language
from dsd_lab.train.pair_data import render, trained_tokenizer
from dsd_lab.train.pair_models import average, digest, fold, keep_start, load_start, unfold, write_model
from dsd_lab.train.questions import VARIANTS, Mixer, Questions
from dsd_lab.train.settings import ExitSettings, TrainSettings
from dsd_lab.train.stages import Report
from dsd_lab.train.vision_stage import Heads, train_vision

__all__ = ["TrainSettings", "smoke_settings", "train_pair", "write_model"]

# Seeds of the worlds that models are rolled out in: none of them is rendered for imitation.
DAGGER_SEEDS = range(3_000_000, 4_000_000)
DRAFT_SEEDS = range(4_000_000, 5_000_000)
_ROUND = 100_000  # seeds set apart for each round
_OWN_WEIGHT = 4  # how often a picture counts that a model met itself: they are few


def smoke_settings(out: Path, cache: Path, seed: int = 0) -> TrainSettings:
    """A run of a few minutes on one core that still learns something measurable."""
    return TrainSettings(
        out=out, cache=cache, seed=seed, size="small", worlds=24, validation_worlds=4, workers=1,
        threads=1, batch=32, live_batch=16,
        vision_steps=120, language_steps=80, joint_steps=10, draft_steps=40, exit_steps=20,
        dagger_rounds=1, dagger_worlds=4, draft_worlds=4, distilled=64, exit_worlds=2,
        evaluate=False, smoke=True,
    )  # fmt: skip


def train_pair(settings: TrainSettings, report: Report | None = None) -> dict[str, Any]:
    """Train target and draft and write both model directories; resumes where a kill left it.

    `report(line, share)` hears of every stage's progress. Returns the stages' figures (and the
    evaluation's under "evaluation"), which are in the cache as figures.json, too. Raises ValueError for a device
    that is not there.
    """
    if settings.smoke and settings.vision_steps is None:
        if settings.start is not None:
            raise ValueError("A smoke run begins from nothing; leave out start, or smoke.")
        # A tiny run must not take the place of the shipped pair, nor mix with a whole run's pictures.
        smoke = settings.cache / "smoke"
        out = smoke / "models" if settings.out == Path("models") else settings.out
        settings = replace(
            smoke_settings(out, smoke, settings.seed),
            device=settings.device, compile=settings.compile,
        )  # fmt: skip
    report = report or (lambda line, share: None)
    settings = settings.resolved()
    torch.set_num_threads(settings.threads)
    run = PairTraining(settings, report)
    figures: dict[str, Any] = {"settings": _plain(settings)}
    if run.start:
        figures["start"] = run.start
    figures["vision"] = run.vision()
    figures["target"] = run.target()
    figures["joint"] = run.joint()
    figures["dagger"] = [run.dagger(k) for k in range(settings.dagger_rounds)]
    run.average()
    run.write_target()
    figures["draft"] = run.draft()
    figures["draft_own"] = run.draft_own()
    run.write_draft()
    try:
        for name in ("target", "draft"):
            draw_training(figures, settings.out / name / PICTURE, name)
    except ModuleNotFoundError as error:  # no reason to lose the rest
        report(str(error), 1.0)
    if settings.exits:
        figures["exits"] = run.exits()
    write_json(settings.cache / "figures.json", figures)
    if settings.evaluate:
        from dsd_lab.pair.pair import evaluate_pair

        figures["evaluation"] = evaluate_pair(
            settings.out / "target", settings.out / "draft", training=figures, write_cards=True, report=report
        )
        if settings.exits:
            run.exits_card(figures["exits"])
    return figures


class PairTraining:
    """State shared by the stages of one run; each stage loads what it did before a kill."""

    def __init__(self, settings: TrainSettings, report: Report) -> None:
        self.settings, self.report = settings, report
        self.device = torch_device(settings.device)
        if settings.compile:
            # Kept, so that a run that goes on need not compile again.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.cache / "compiled"))
        self.passes = Passes(settings.compile)  # of the target: a draft's minutes are too few
        self.frames, self.validation = render(settings, report)
        self.tokenizer = trained_tokenizer(settings.cache, self.frames, settings.start)
        self.questions = Questions(self.tokenizer, self.frames.labels, settings.history)
        self.pool = np.arange(len(self.frames.labels))
        self.size, self.small_size = SIZES[settings.size]
        self.model = build_model(self.size, settings.seed).to(self.device)
        torch.manual_seed(settings.seed + 1)
        self.heads = Heads(self.size.width)
        self.goals = GoalHeads(self.size.width)
        self.small = build_model(self.small_size, settings.seed + 7)
        torch.manual_seed(settings.seed + 8)
        self.project = nn.Linear(self.size.width, self.small_size.width)
        self.small_goals = GoalHeads(self.small_size.width)
        # What the first stage is built upon: another seed or size, or other pictures, begin anew.
        self.after = f"{settings.seed}-{settings.size}-{settings.history}-{len(self.pool)}"
        if settings.skip_worlds:
            self.after += f"-behind{settings.skip_worlds}"
        self.start: dict[str, str] = {}  # digests of the models gone on from
        if settings.start is not None:
            self.start["target"] = load_start(self.model, settings.start / "target")
            if (settings.start / "draft").is_dir():
                self.start["draft"] = load_start(self.small, settings.start / "draft")
                self.project = unfold(self.small, self.model.model.visual)
            self.after = "-".join([self.after, *self.start.values()])
        self.ends: list[Path] = []  # of the stages with the tower unfrozen

    def vision(self) -> dict[str, Any]:
        """Teach the tower what stands where."""
        s, path = self.settings, self.settings.cache / "vision.safetensors"
        if s.vision_minutes == 0 and s.vision_steps is None:
            return {}
        trained = bool(self.start)
        rate = 7e-4 if trained else 1.5e-3  # what has been learned is lost in longer steps
        figures = train_vision(
            self.model.model.visual, self.heads, self.frames, self.validation, path,
            _minutes(s.vision_minutes), s.vision_steps, _count(s.batch), rate,
            s.seed, self.device, trained, self.passes, after=self.after, report=self.report,
            save_seconds=s.save_seconds,
        )  # fmt: skip
        self.after = digest(path)
        return figures

    def target(self) -> dict[str, Any]:
        """Teach the language half to answer from the frozen tower's tokens."""
        s = self.settings
        minutes, steps = _minutes(s.language_minutes), s.language_steps
        if minutes == 0 and steps is None:
            return {}
        look = frozen_look(self.model.model.visual, self.frames, self.device, self.passes)
        mixer = self._mixer(self.questions, s.seed, captions=True)
        goals, rate = (None, 2e-4) if self.start else (self.goals, 2e-3)
        return self._language("target", self.model, goals, look, mixer, minutes, steps, captions=0.3, rate=rate)

    def joint(self) -> dict[str, Any]:
        """Train on with the tower unfrozen.

        Heads teach what a reply hardly tells, but pull a model that has learned to reply away from what it knows.
        """
        minutes, seed = _minutes(self.settings.joint_minutes), self.settings.seed + 10
        if self.start:
            return self._live("target-joint", seed, minutes, 3e-4)
        return self._live("target-joint", seed, minutes, 1e-3, self.heads, self.goals)

    def dagger(self, round_: int) -> dict[str, Any]:
        """Roll the model out in new worlds, add what it met, train on with the tower unfrozen."""
        s = self.settings
        folder = s.cache / f"dagger{round_}-{self.after}"
        first = round_ * _ROUND + s.skip_worlds
        met = self._meet(folder, self.model, DAGGER_SEEDS[first : first + s.dagger_worlds])
        extra = load_frames(folder)
        rows = len(self.frames.labels) + np.arange(len(extra.labels))
        self.pool = np.concatenate([self.pool, *[rows] * _OWN_WEIGHT])
        self.frames.add(extra)
        self.questions.add(extra.labels)
        name, rate = f"target-dagger{round_}", (1e-4 if self.start else 5e-4) * 0.5**round_
        figures = self._live(name, s.seed + 20 + round_, _minutes(s.dagger_minutes), rate)
        return {"met": met, "pictures": len(extra.labels), **figures}

    def average(self) -> None:
        """Average the weights at the ends of the stages with the tower unfrozen, later ones more."""
        average(self.model, self.ends)
        s = self.settings
        if s.start is not None and s.start_share:
            keep_start(self.model, s.start / "target", s.start_share)
            self.after += f"-{s.start_share}"

    def write_target(self) -> None:
        write_model(self.model, self.tokenizer, self.settings.out / "target")

    def draft(self) -> dict[str, Any]:
        """Train the draft on the target's own replies, behind a copy of its tower."""
        s = self.settings
        self.small.to(self.device)
        shown = some_pictures(self.frames, s.distilled, s.seed)
        # Nothing from here on needs the rest, which is most of the memory.
        del self.frames, self.questions, self.pool
        folder = s.cache / f"distilled-{self.after}"
        labels, self.features = answered(self.model, self.tokenizer, shown, folder, s.seed, self.report)
        self.answers = Questions(self.tokenizer, labels, s.history)
        return self._draft("draft", s.seed + 9, np.arange(len(labels)), 2e-3, 0.1)

    def draft_own(self) -> dict[str, Any]:
        """Let the draft act, let the target answer about what it met, train on both."""
        s = self.settings
        if s.draft_worlds == 0:
            return {}
        self._fold()
        folder = s.cache / f"draft-met-{self.after}"
        first = s.skip_worlds
        met = self._meet(folder, self.small, DRAFT_SEEDS[first : first + s.draft_worlds])
        extra = load_frames(folder)
        labels, features = answered(
            self.model, self.tokenizer, extra, s.cache / f"distilled-own-{self.after}",
            s.seed + 1, self.report,
        )  # fmt: skip
        rows = len(self.answers.labels) + np.arange(len(labels))
        pool = np.concatenate([np.arange(rows[0]), *[rows] * _OWN_WEIGHT])
        self.answers.add(labels)
        self.features = torch.cat([self.features, features])
        figures = self._draft("draft-own", s.seed + 11, pool, 1e-3, 0.0)
        return {"met": met, "pictures": len(labels), **figures}

    def write_draft(self) -> None:
        self._fold()
        write_model(self.small, self.tokenizer, self.settings.out / "draft")

    def exits(self) -> dict[str, Any]:
        """Train the target's early exits, as `dsd-lab train exits` does."""
        from dsd_lab.train.exits import train_exits

        s = self.settings
        report = train_exits(
            ExitSettings(
                model=str(s.out / "target"), minutes=None if s.exit_steps else s.exit_minutes,
                steps=s.exit_steps, seed=s.seed, cache=s.cache / "exits", worlds=s.exit_worlds,
                held_out=24 if s.smoke else 400, threads=s.threads, workers=s.workers, device=s.device,
            ),
            self.report,
        )  # fmt: skip
        return report

    def exits_card(self, figures: dict[str, Any]) -> None:
        """Put the exits' section back into a card that was written anew."""
        from dsd_lab.train.exit_report import write_card

        write_card(self.settings.out / "target" / "README.md", figures)

    def _mixer(self, questions: Questions, seed: int, captions: bool = False, **rest: Any) -> Mixer:
        s = self.settings
        rest.setdefault("batch", s.batch)
        variants = 32 if s.smoke else VARIANTS
        return Mixer(questions, seed=seed, captions=captions, variants=variants, history=s.history, **rest)

    def _live(
        self, name: str, seed: int, minutes: float, rate: float,
        heads: Heads | None = None, goals: GoalHeads | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        s = self.settings
        mixer = self._mixer(self.questions, seed, batch=s.live_batch, pool=self.pool)
        look = live_look(self.model.model.visual, heads, self.frames, seed, self.device, self.passes)
        figures = self._language(
            name, self.model, goals, look, mixer, minutes, s.joint_steps, rate=rate, averaged=True
        )  # fmt: skip
        self.ends.append(s.cache / f"{name}.safetensors")
        return figures

    def _draft(self, name: str, seed: int, pool: np.ndarray, rate: float, captions: float) -> dict[str, Any]:
        s = self.settings
        mixer = self._mixer(self.answers, seed, captions=captions > 0, pool=pool)
        # Replies were given without earlier pictures: with some, only the probabilities are the target's.
        soft = s.soft_targets or s.history > 0
        return self._language(
            name, self.small, self.small_goals, cached_look(self.features, self.project), mixer,
            _minutes(s.draft_minutes) / (2 if s.draft_worlds else 1), s.draft_steps, rate=rate,
            captions=captions, teacher=teacher(self.model, self.features) if soft else None,
        )  # fmt: skip

    def _language(
        self, name: str, model: Any, goals: GoalHeads | None, look: Look, mixer: Mixer, minutes: float,
        steps: int | None, **rest: Any,
    ) -> dict[str, Any]:  # fmt: skip
        path = self.settings.cache / f"{name}.safetensors"
        figures = train_language(
            model, goals, look, mixer, path, minutes, steps, name=name, device=self.device,
            passes=self.passes if model is self.model else PLAIN,
            after=self.after, report=self.report, save_seconds=self.settings.save_seconds, **rest,
        )  # fmt: skip
        self.after = digest(path)
        return figures

    def _meet(self, folder: Path, model: Any, seeds: range) -> dict[str, Any]:
        s = self.settings
        size = self.size if model is self.model else self.small_size
        return meet(
            folder, model, size, self.tokenizer, seeds, s.workers, s.history, self.report
        )  # fmt: skip

    def _fold(self) -> None:
        fold(self.small, self.model.model.visual, self.project)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(part, path)


def _minutes(value: float | None) -> float:
    assert value is not None, "settings are resolved"
    return value


def _count(value: int | None) -> int:
    assert value is not None, "settings are resolved"
    return value


def _plain(settings: TrainSettings) -> dict[str, Any]:
    return {k: v for k, v in vars(settings).items() if not isinstance(v, Path)}
