"""How good a pair is: actions, truth of what it says, runs in the simulator, acceptance, exits, milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsd_lab.pair.cards import write_card
from dsd_lab.pair.costs import REPEATS, exit_agreement, time_model
from dsd_lab.pair.figures import (
    acceptance_figures,
    accepted,
    answer_figures,
    bars,
    exit_figures,
    near_misses,
    run_figures,
)
from dsd_lab.pair.intervals import ratio
from dsd_lab.pair.near import kept
from dsd_lab.pair.runs import MAX_STEPS, Run, action_of, drive, expert_length
from dsd_lab.pair.scenes import (
    DEMO,
    DEMO_INSTRUCTION,
    DEMO_SEED,
    FIRST_RUN_SEED,
    NAMES,
    SITUATIONS,
    Scene,
    held_out_scenes,
    rooms_of,
    scenes_of,
)
from dsd_lab.pair.speakers import Speaker, weights_mb
from dsd_lab.pair.words import Words, asked_in, read_words, words_figures
from dsd_lab.report import machine
from dsd_lab.worlds.situations import Split
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, resolve_directory
from dsd_ros.wire.messages import MAX_HISTORY

__all__ = [
    "DEMO_INSTRUCTION", "DEMO_SEED", "SITUATIONS", "Evidence", "action_of", "evaluate_pair", "held_out_scenes",
    "load_plain", "measure",
]  # fmt: skip

_FOR_EXITS = 100  # replies
Report = Callable[[str, float], None]


@dataclass
class Evidence:
    """Figures, and what they were counted from: scenes, each model's replies to them, near misses, and runs."""

    figures: dict[str, Any]
    scenes: list[Scene]
    texts: dict[str, list[str]] = field(default_factory=dict)
    near: dict[str, list[bool]] = field(default_factory=dict)  # whose action is a near miss
    runs: dict[str, list[tuple[str, Run]]] = field(default_factory=dict)  # situation, run


def load_plain(folder: Path) -> tuple[Any, Any]:
    """A model directory as (transformers model in float32, tokenizers.Tokenizer)."""
    from tokenizers import Tokenizer
    from transformers import Qwen2VLForConditionalGeneration

    _check(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def evaluate_pair(
    target: Path,
    draft: Path | None,
    scenes: int = 200,
    seeds: int = 40,
    gamma: int = 4,
    training: dict[str, Any] | None = None,
    write_cards: bool = False,
    report: Report | None = None,
    situations: Sequence[str] = SITUATIONS,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """The figures of ``measure`` of two model directories; with ``write_cards`` they go into both model cards."""
    for folder in (target, draft):
        if folder is not None:
            _check(folder)
    models = [ModelSettings(str(folder)) for folder in (target, draft) if folder is not None]
    figures = measure(
        models[0],
        models[1] if draft is not None else None,
        scenes,
        seeds,
        gamma,
        situations,
        history=((training or {}).get("settings") or {}).get("history", 0),
        repeats=repeats,
        training=training,
        report=report,
    ).figures
    if write_cards:
        for name, folder in (("target", target), ("draft", draft)):
            if folder is not None:
                write_card(folder, name, figures, training)
        (target.parent / "figures.json").write_text(
            json.dumps({"evaluation": figures, "training": training}, indent=1) + "\n"
        )
    return figures


def measure(
    target: ModelSettings,
    draft: ModelSettings | None,
    scenes: int = 200,
    seeds: int = 40,
    gamma: int = 4,
    situations: Sequence[str] = SITUATIONS,
    one_by_one: bool = False,
    max_steps: int = MAX_STEPS,
    split: str = Split.TEST,
    history: int = 0,
    words: str = "",
    repeats: int = REPEATS,
    training: dict[str, Any] | None = None,
    report: Report | None = None,
) -> Evidence:
    """Measure a pair, or a model alone, on ``scenes`` questions and ``seeds`` runs of each situation.

    The figures under "all" are of all situations but the demo's rooms, unless those alone are measured. The models
    are loaded one after the other. An action counts as right when it is exactly the expert's; for the rest see
    ``pair_runs.drive``, ``pair_truth.truths``, ``pair_figures`` and ``pair_costs``. Models of the shipped shape
    answer many questions at once unless ``one_by_one``. ``words``: a file that ``pair_words.read_words`` reads, in
    whose words the scenes' questions are asked, too (figures under "words"). ``repeats``: of what is timed.
    ``training``: figures of the training, for its time. ``report(line, share)`` hears of the progress. Raises
    ValueError (ModelError among them) on counts below 1, an unknown situation or split, or no usable model.
    """
    _check_counts(scenes=scenes, seeds=seeds, gamma=gamma, max_steps=max_steps, repeats=repeats)
    for name in situations:
        if name not in NAMES:
            raise ValueError(f"there is no situation {name!r}; name {', '.join(NAMES)}")
    if split not in list(Split):
        raise ValueError(f"there is no split {split!r}; name {', '.join(Split)}")
    if not 0 <= history <= MAX_HISTORY:
        raise ValueError(f"history must be 0 to {MAX_HISTORY}, but it is {history}.")
    for settings in (target, draft):
        if settings is not None:
            resolve_directory(settings.path)  # better known before the pictures than after
    others = read_words(words) if words else None
    tell = report or (lambda line, share: None)
    tell("rendering scenes", 0.0)
    situations = tuple(dict.fromkeys(situations))
    asked = [scene for name in situations for scene in scenes_of(name, scenes, split)]
    rooms = {name: rooms_of(name, seeds, split) for name in situations}
    lengths = {name: [expert_length(world) for world in some] for name, some in rooms.items()}
    figures: dict[str, Any] = {
        "machine": f"{machine()}, torch {torch.__version__}",
        "situations": list(situations),
        "split": str(split),
        "history": history,
        "scenes": scenes,
        "seeds": seeds,
        "first_run_seed": FIRST_RUN_SEED,
        "gamma": gamma,
        "max_steps": max_steps,
        "draft": None,
        "acceptance": None,
        "tokens_per_round": None,
    }
    counted = _counted(situations)
    figures["expert_misjudging"] = ratio(
        [kept(scene.view, scene.goal) for scene in asked if scene.situation in counted]
    )
    evidence = Evidence(figures, asked)
    if words:
        figures["words"] = Path(words).name
    task = _Task(evidence, rooms, lengths, others, one_by_one, max_steps, history, repeats, tell)
    speaker = task.model("target", target, 0.05, 0.5 if draft is not None else 0.9)
    replies = task.replies
    found = exit_agreement(speaker.model, *_some(asked, replies))
    figures["exits"] = exit_figures(found)
    tokenizer = speaker.model.tokenizer_fingerprint
    whole = [n for n, reply in enumerate(replies) if speaker.ended(reply)]
    del speaker  # two large models may not fit
    if draft is not None:
        speaker = task.model("draft", draft, 0.5, 0.9)
        if speaker.model.tokenizer_fingerprint == tokenizer:
            tell("acceptance", 0.95)
            some = [replies[n] for n in whole]
            guesses = some and speaker.followed(
                [asked[n].picture for n in whole], [asked[n].instruction for n in whole], some
            )
            rows = accepted(guesses, some, gamma)
            figures |= acceptance_figures(rows)
            figures["acceptance_by_situation"] = {
                name: acceptance_figures(
                    [row for row, n in zip(rows, whole, strict=True) if asked[n].situation == name]
                )
                for name in situations
            }
    figures["bars"] = bars(figures, training)
    return evidence


class _Task:
    """What both models are put through."""

    def __init__(
        self,
        evidence: Evidence,
        rooms: dict[str, list[World]],
        lengths: dict[str, list[float | None]],
        others: Words | None,
        one_by_one: bool,
        max_steps: int,
        history: int,
        repeats: int,
        tell: Report,
    ) -> None:
        self.evidence, self.rooms, self.lengths = evidence, rooms, lengths
        self.others = others
        self.one_by_one, self.max_steps, self.history = one_by_one, max_steps, history
        self.repeats, self.tell = repeats, tell
        self.counted = _counted(list(rooms))
        self.replies: list[list[int]] = []  # of the model that was asked last

    def model(self, role: str, settings: ModelSettings, first: float, last: float) -> Speaker:
        """Ask one model, let it run, and time it; its figures go under ``role``."""
        evidence, scenes = self.evidence, self.evidence.scenes
        self.tell(f"{role}: loading", first)
        speaker = Speaker.load(settings, self.one_by_one)
        half = (first + last) / 2
        says = f"{role}: replies about {len(scenes)} scenes"
        self.tell(says, first)
        self.replies = speaker.replies(
            [scene.picture for scene in scenes],
            [scene.instruction for scene in scenes],
            tell=lambda share: self.tell(says, first + share * (half - first)),
        )
        evidence.texts[role] = [speaker.text(reply) for reply in self.replies]
        evidence.near[role] = near_misses(scenes, evidence.texts[role])
        found: dict[str, Any] = {"situations": {}}
        if self.others is not None:
            self.tell(f"{role}: replies in other words", half)
            found["words"] = self._in_words(self.others, speaker)
        named = [(name, room) for name, rooms in self.rooms.items() for room in rooms]
        drives = f"{role}: {len(named)} runs"
        runs = drive(
            speaker,
            [room for _, room in named],
            self.max_steps,
            self.history,
            lambda share: self.tell(drives, half + share * (last - half)),
        )
        evidence.runs[role] = [(name, run) for (name, _), run in zip(named, runs, strict=True)]
        for name in self.rooms:
            found["situations"][name] = self._figures(role, [name])
        found["all"] = self._figures(role, self.counted)
        world = World.from_seed(DEMO_SEED, DEMO_INSTRUCTION)
        demo = drive(speaker, [world], self.max_steps, self.history)
        evidence.figures[role] = found | {
            "name": speaker.model.name,
            "parameters": speaker.parameters,
            "weights_mb": weights_mb(resolve_directory(settings.path)),
            "tokens": sum(map(len, self.replies)) / len(self.replies),
            "one_by_one": not speaker.batched,
            "demo_reached": demo[0].reached,
            "ms": time_model(speaker.model, scenes[0].picture, scenes[0].instruction, self.repeats),
        }
        return speaker

    def _in_words(self, words: Words, speaker: Speaker) -> dict[str, Any]:
        """Of answers to the same questions in other words."""
        scenes = [scene for scene in self.evidence.scenes if scene.situation in self.counted]
        instructions = asked_in(words, scenes)
        replies = speaker.replies([scene.picture for scene in scenes], instructions)
        return words_figures(scenes, instructions, [speaker.text(reply) for reply in replies])

    def _figures(self, role: str, situations: Sequence[str]) -> dict[str, Any]:
        """Of answers and runs in some situations."""
        scenes, texts = self.evidence.scenes, self.evidence.texts[role]
        rows = [n for n, scene in enumerate(scenes) if scene.situation in situations]
        runs = [run for name, run in self.evidence.runs[role] if name in situations]
        lengths = [length for name in situations for length in self.lengths[name]]
        near = self.evidence.near[role]
        answers = answer_figures([scenes[n] for n in rows], [texts[n] for n in rows], [near[n] for n in rows])
        return answers | run_figures(runs, lengths)


def _counted(situations: Sequence[str]) -> list[str]:
    """Those of all figures: the demo's rooms are no test of what a pair is to reach."""
    return [name for name in situations if name != DEMO] or list(situations)


def _some(scenes: list[Scene], replies: list[list[int]]) -> Iterator[Any]:
    """Pictures, instructions and replies, evenly out of all situations."""
    chosen = range(0, len(scenes), max(1, len(scenes) // _FOR_EXITS))
    yield [scenes[n].picture for n in chosen]
    yield [scenes[n].instruction for n in chosen]
    yield [replies[n] for n in chosen]


def _check(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no model: train one with `dsd-lab train pair`.")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but it is {value}.")
