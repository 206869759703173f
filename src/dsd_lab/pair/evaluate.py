# SPDX-License-Identifier: Apache-2.0
"""How good a pair is: actions, truth of what it says, runs in the simulator, acceptance, exits, milliseconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsd_lab.pair.costs import REPEATS, exit_agreement, time_model
from dsd_lab.pair.figures import (
    Figures,
    Words,
    acceptance_figures,
    accepted,
    answer_figures,
    asked_in,
    bars,
    kept,
    near_misses,
    ratio,
    read_words,
    run_figures,
    words_figures,
)
from dsd_lab.pair.report import write_card
from dsd_lab.pair.scenes import (
    DEMO,
    DEMO_INSTRUCTION,
    DEMO_SEED,
    FIRST_RUN_SEED,
    NAMES,
    SITUATIONS,
    Scene,
    rooms_of,
    scenes_of,
)
from dsd_lab.pair.settings import PairSettings
from dsd_lab.report import header
from dsd_lab.train.exits.training import write_card as write_exits
from dsd_lab.train.pair import train_pair
from dsd_lab.train.replies import Speaker
from dsd_lab.train.runs import MAX_STEPS, Run, drive, expert_run
from dsd_lab.train.settings import TrainSettings
from dsd_lab.train.stages import Report
from dsd_lab.worlds.situations import Split
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, resolve_directory

GAMMA = 4  # drafted tokens per round
CODE = ("dsd_lab/pair", "dsd_lab/worlds", "dsd_ros/robot/sim", "dsd_ros/vlm/backbones.py")
_FOR_EXITS = 100  # replies


def train_and_evaluate(settings: TrainSettings, report: Report | None = None) -> Figures:
    """Train a pair, measure it where the settings ask for that, and write its model cards."""
    training = train_pair(settings, report)
    settings = settings.resolved()
    if not settings.evaluate:
        return training
    pair = PairSettings(target=str(settings.out / "target"), draft=str(settings.out / "draft"))
    figures = evaluate_pair(pair, report=report)
    for role in ("target", "draft"):
        write_card(settings.out / role, role, figures, training)
    if settings.exits:
        write_exits(settings.out / "target" / "README.md", training["exits"])
    found = {"evaluation": figures, "training": training}
    (settings.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    return training | {"evaluation": figures}


def evaluate_pair(
    settings: PairSettings, alone: bool = False, report: Report | None = None, repeats: int = REPEATS
) -> Figures:
    """Measure a pair, or its target ``alone``, on questions and runs of each situation; ValueErrors, ModelError.

    The figures under "all" leave the demo's rooms out, unless those alone are measured. An action is right when it is
    exactly the expert's. The models are loaded one after the other. ``repeats``: of what is timed.
    """
    situations = _checked(settings)
    roles = {"target": settings.target} | ({} if alone else {"draft": settings.draft})
    models = {role: ModelSettings(path, device=settings.device, dtype=settings.dtype) for role, path in roles.items()}
    for model in models.values():
        resolve_directory(model.path)  # known before the pictures, not after
    words = read_words(settings.words) if settings.words else None
    task = _Task(settings, situations, words, report or (lambda line, share: None), repeats)
    figures = task.figures
    speaker = task.measure("target", models["target"], 0.05, 0.9 if alone else 0.5)
    replies, scenes = task.replies, task.scenes
    some = range(0, len(scenes), max(1, len(scenes) // _FOR_EXITS))
    figures["exits"] = exit_agreement(
        speaker.model,
        [scenes[n].picture for n in some],
        [scenes[n].instruction for n in some],
        [replies[n] for n in some],
    )
    tokenizer = speaker.model.tokenizer_fingerprint
    whole = [n for n, reply in enumerate(replies) if speaker.ended(reply)]
    del speaker
    if not alone:
        speaker = task.measure("draft", models["draft"], 0.5, 0.9)
        if speaker.model.tokenizer_fingerprint == tokenizer:
            task.report("acceptance", 0.95)
            figures |= _acceptance(speaker, [scenes[n] for n in whole], [replies[n] for n in whole], situations)
    figures["bars"] = bars(figures)
    return header("pair", CODE, **{role: resolve_directory(path) for role, path in roles.items()}) | figures


def _checked(settings: PairSettings) -> tuple[str, ...]:
    """The situations that settings name; ValueError for settings out of range."""
    for name in ("scenes", "seeds"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, but it is {getattr(settings, name)}.")
    situations = tuple(dict.fromkeys(filter(None, settings.situations.split(",")))) or SITUATIONS
    for name in situations:
        if name not in NAMES:
            raise ValueError(f"there is no situation {name!r}; name {', '.join(NAMES)}")
    if settings.split not in list(Split):
        raise ValueError(f"there is no split {settings.split!r}; name {', '.join(Split)}")
    return situations


def _acceptance(
    speaker: Speaker, scenes: Sequence[Scene], replies: Sequence[Sequence[int]], situations: Sequence[str]
) -> Figures:
    """How many of the draft's guesses the target's replies accept."""
    guesses: Any = []
    if replies:
        pictures, instructions = [scene.picture for scene in scenes], [scene.instruction for scene in scenes]
        guesses = speaker.followed(pictures, instructions, replies)
    rows = accepted(guesses, replies, GAMMA)
    by_situation = {
        name: acceptance_figures([row for row, scene in zip(rows, scenes, strict=True) if scene.situation == name])
        for name in situations
    }
    return acceptance_figures(rows) | {"acceptance_by_situation": by_situation}


class _Task:
    """The questions and runs that both models are given, and their figures."""

    def __init__(
        self, settings: PairSettings, situations: Sequence[str], words: Words | None, report: Report, repeats: int
    ) -> None:
        self.words, self.report, self.repeats = words, report, repeats
        report("rendering scenes", 0.0)
        self.scenes = [s for name in situations for s in scenes_of(name, settings.scenes, settings.split)]
        self.rooms = {name: rooms_of(name, settings.seeds, settings.split) for name in situations}
        experts = {name: [expert_run(room) for room in some] for name, some in self.rooms.items()}
        # Metres of the expert's path; None where it does not reach a goal.
        self.lengths = {
            name: [run.length if run.reached and run.world.target_index is not None else None for run in runs]
            for name, runs in experts.items()
        }
        # The demo's rooms are no test of what a pair should reach.
        self.counted = [name for name in situations if name != DEMO] or list(situations)
        self.replies: list[list[int]] = []  # of the model that was measured last
        self.figures: Figures = {
            "situations": list(situations),
            "split": str(settings.split),
            "scenes": settings.scenes,
            "seeds": settings.seeds,
            "first_run_seed": FIRST_RUN_SEED,
            "gamma": GAMMA,
            "max_steps": MAX_STEPS,
            "draft": None,
            "acceptance": None,
            "tokens_per_round": None,
            "expert_misjudging": ratio([kept(s.view, s.goal) for s in self.scenes if s.situation in self.counted]),
        }
        if words is not None:
            self.figures["words"] = Path(settings.words).name

    def measure(self, role: str, settings: ModelSettings, first: float, last: float) -> Speaker:
        """Ask one model, let it run, and time it; its figures go under ``role``."""
        scenes, half = self.scenes, (first + last) / 2
        self.report(f"{role}: loading", first)
        speaker = Speaker.load(settings)
        says = f"{role}: replies about {len(scenes)} scenes"
        self.report(says, first)
        self.replies = speaker.replies(
            [scene.picture for scene in scenes],
            [scene.instruction for scene in scenes],
            lambda share: self.report(says, first + share * (half - first)),
        )
        texts = [speaker.model.decode_text(reply) for reply in self.replies]
        found: Figures = {"situations": {}}
        if self.words is not None:
            self.report(f"{role}: replies in other words", half)
            asked = [scene for scene in scenes if scene.situation in self.counted]
            instructions = asked_in(self.words, asked)
            answers = speaker.answer([scene.picture for scene in asked], instructions)
            found["words"] = words_figures(asked, instructions, answers)
        named = [(name, room) for name, rooms in self.rooms.items() for room in rooms]
        drives = f"{role}: {len(named)} runs"
        runs = drive(
            speaker.answer,
            [room for _, room in named],
            report=lambda share: self.report(drives, half + share * (last - half)),
        )
        evidence = _Evidence(scenes, texts, near_misses(scenes, texts), [n for n, _ in named], runs, self.lengths)
        found["situations"] = {name: evidence.figures([name]) for name in self.rooms}
        found["all"] = evidence.figures(self.counted)
        (demo,) = drive(speaker.answer, [World.from_seed(DEMO_SEED, DEMO_INSTRUCTION)])
        self.figures[role] = found | {
            "name": speaker.model.name,
            "parameters": sum(p.numel() for p in speaker.model.hf.parameters()),
            "weights_mb": weights_mb(resolve_directory(settings.path)),
            "tokens": sum(map(len, self.replies)) / len(self.replies),
            "demo_reached": demo.reached,
            "ms": time_model(speaker.model, scenes[0].picture, scenes[0].instruction, self.repeats),
        }
        return speaker


@dataclass
class _Evidence:
    """What one model answered and how it ran, to be counted by situation."""

    scenes: Sequence[Scene]
    texts: Sequence[str]
    near: Sequence[bool]
    names: Sequence[str]  # the situation of each run
    runs: Sequence[Run]
    lengths: dict[str, list[float | None]]

    def figures(self, situations: Sequence[str]) -> Figures:
        """Figures of the answers and runs in some situations."""
        rows = [n for n, scene in enumerate(self.scenes) if scene.situation in situations]
        answers = answer_figures(*([some[n] for n in rows] for some in (self.scenes, self.texts, self.near)))
        runs = [run for name, run in zip(self.names, self.runs, strict=True) if name in situations]
        return answers | run_figures(runs, [length for name in situations for length in self.lengths[name]])


def weights_mb(directory: Path) -> float:
    """Megabytes (10^6) of a model directory's weights, exits included."""
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors")) / 1e6


def command_of(settings: PairSettings, alone: bool) -> str:
    """The command that measures with these settings."""
    words = ["dsd-lab evaluate pair"]
    for one in dataclasses.fields(PairSettings):
        if (value := getattr(settings, one.name)) != one.default:
            words += [f"--{one.name}", str(value)]
    return " ".join([*words, *(["--no-draft"] if alone else [])])
