# SPDX-License-Identifier: Apache-2.0
"""Decode a bag's pictures again, in this process, and compare every reply with the recorded one. Needs no ROS."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from dsd_ros.decoding.modes import streams
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.observe.bag.reader import Bag, BagError
from dsd_ros.observe.bag.run import RecordedStep, Run, executed_phrases, picture_sent, pictures_of, stamp_of
from dsd_ros.pictures import read_picture
from dsd_ros.ros.settings import DraftModelSettings, ReplyGrammar, TargetModelSettings
from dsd_ros.vlm.settings import ModelSettings

_NEEDED = ("dsd/observation", "dsd/reply_progress", "dsd/decode_stats")
_HISTORY = 8  # previous steps, as many as the navigation node sends
_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay a bag; an empty option means as recorded."""

    mode: str = ""
    draft_model: str = ""
    target_model: str = ""


@dataclass
class ReplayTask:
    """A prepared bag: its recorded steps, their pictures (files), and how they are decoded."""

    bag: Bag
    run: Run
    steps: list[tuple[RecordedStep, bytes]]
    settings: DecodeSettings
    draft: ModelSettings
    target: ModelSettings
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReplayReply:
    """The replayed reply."""

    text: str
    tokens: list[int]
    rounds: int  # or passes
    seconds: float


@dataclass(frozen=True)
class StepComparison:
    """One step, recorded and replayed. ``changed`` names what differs: reply, action, tokens."""

    step: RecordedStep
    reply: ReplayReply
    changed: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.changed

    def lines(self) -> list[str]:
        """The difference as text."""
        step, reply = self.step, self.reply
        result = [
            f"step {step.number}, picture of {_seconds(step.stamp)}: {', '.join(self.changed)} changed",
            f"  - recorded: {step.text!r}",
            f"  + replayed: {reply.text!r}",
        ]
        if "action" in self.changed:
            result.append(f"    action: {step.action or 'none'} -> {step.action_in(reply.text) or 'none'}")
        if "tokens" in self.changed and step.tokens is not None:
            pairs = zip(step.tokens, reply.tokens, strict=False)
            shorter = min(len(step.tokens), len(reply.tokens))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            old, new_tokens = step.tokens[at : at + 4], reply.tokens[at : at + 4]
            result.append(
                f"    tokens: {len(step.tokens)} -> {len(reply.tokens)}, from token {at + 1} on: {old} -> {new_tokens}"
            )
        return result

    def as_json(self) -> dict[str, Any]:
        step = self.step
        return {
            "step": step.number,
            "same": self.same,
            "changed": list(self.changed),
            "recorded": {
                "stamp": step.stamp, "text": step.text, "action": step.action, "tokens": step.tokens,
            },
            "replayed": asdict(self.reply) | {"action": self.step.action_in(self.reply.text)},
        }  # fmt: skip


def prepare(bag: Bag, run: Run, options: ReplayOptions) -> ReplayTask:
    """The steps of a recorded run that can be decoded again, and how.

    :raises BagError: when it has none, or cannot be replayed exactly with these options.
    """
    notes: list[str] = []
    wanted = []
    for step in run.steps:
        if not step.verified:
            notes.append(f"step {step.number} is left out: its reply is unverified")
        elif not step.text or not step.instruction:
            notes.append(f"step {step.number} is left out: the bag lacks some of its messages")
        else:
            wanted.append(step)
    # What the verifier received is what the draft saw, even where the camera's topic was JPEG, whose decoders differ.
    sent = {step.number: picture_sent(step) for step in wanted}
    pictures = pictures_of(bag, {step.stamp for step in wanted if sent[step.number] is None})
    steps = []
    for step in wanted:
        found = sent[step.number] or pictures.get(step.stamp)
        if found is None:
            notes.append(f"step {step.number} is left out: the bag lacks its picture")
            continue
        steps.append((step, found))
    if not steps:
        why = " ".join(f"{note[0].upper()}{note[1:]}." for note in notes) or "It has no complete reply."
        lacks = [bag.topic(name) for name in _NEEDED if bag.topic(name) not in bag.counts]
        if lacks:
            why += f" It has no messages on {', '.join(lacks)}: record these topics as well."
        raise BagError(f"{bag.path} has nothing to replay. {why}")
    recorded = settings_of(run)
    other: dict[str, Any] = {"mode": options.mode} if options.mode else {}
    if streams(options.mode):
        other |= {"proof": "preset", "shape": "preset"}
    settings = replace(recorded, **other)
    if not recorded.sampling.greedy:
        _check_draws(recorded, settings, [step.reply for step, _ in steps])
    draft = {"path": options.draft_model} if options.draft_model else {}
    target = {"path": options.target_model} if options.target_model else {}
    return ReplayTask(
        bag,
        run,
        steps,
        settings,
        _recorded(run, "draft_node", DraftModelSettings, "model.", draft),
        _recorded(run, "verifier_node", TargetModelSettings, "model.", target),
        notes,
    )


def replay(task: ReplayTask) -> Iterator[StepComparison]:
    """Decode the steps again, with both models in this process; one comparison a step.

    :raises ModelError: when a model cannot be loaded.
    """
    from dsd_ros.cloud.engine import in_process_channel
    from dsd_ros.edge.session import EdgeSession
    from dsd_ros.edge.settings import PATIENT_LINK
    from dsd_ros.edge.vocabulary import Vocabulary
    from dsd_ros.vlm.loading import load_model

    about = task.run.parameters_of("draft_node")
    tokenizer, frames = str(about.get("target_tokenizer", "")), int(about.get("history_frames", 0))
    words = _recorded(task.run, "draft_node", ReplyGrammar, "", {})
    seen: dict[int, np.ndarray] = {}
    with (
        in_process_channel(task.target) as channel,
        EdgeSession(
            channel,
            load_model(task.draft),
            task.settings,
            PATIENT_LINK,
            Vocabulary.load(tokenizer) if tokenizer else None,
            words.form(task.settings.max_tokens),
        ) as session,
    ):
        recorded = {v.target_fingerprint for v in task.run.verifiers if v.target_fingerprint}
        if session.verifier is not None and recorded and session.verifier.target_fingerprint not in recorded:
            task.notes.append("the target model is not the one it was recorded with")
        for step, picture in task.steps:
            image = read_picture(picture)
            past = [(seen[stamp], action) for stamp, action in history_of(task.run, step) if stamp in seen]
            if frames:
                seen[step.stamp] = image
            reply = session.decode(image, step.instruction, history=past[-frames:])
            yield compare(step, ReplayReply(reply.text, reply.tokens, reply.rounds, reply.seconds))


def settings_of(run: Run) -> DecodeSettings:
    """The decode settings of the recorded run: its parameters, else those its session was opened with.

    :raises BagError: when they are not valid in this version.
    """
    other: dict[str, Any] = {}
    if not any(name.startswith("decode.") for name in run.parameters_of("draft_node")):
        names = ("mode", "proof", "temperature", "top_k", "top_p", "seed", "max_tokens")
        other = {name: getattr(request, name) for request in run.requests[-1:] for name in names}
        other = other or {"mode": str(run.steps[-1].stats["mode"])}
    return _recorded(run, "draft_node", DecodeSettings, "decode.", other)


def _recorded(run: Run, node: str, kind: type[_Settings], prefix: str, other: dict[str, Any]) -> _Settings:
    """A group of a node's recorded parameters; ``other`` values count first, and defaults for what the bag lacks."""
    parameters = run.parameters_of(node)
    kinds = typing.get_type_hints(kind)
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    given = {name: parameters[prefix + name] for name in names if prefix + name in parameters} | other
    try:
        return kind(**{name: kinds[name](value) for name, value in given.items()})
    except (ValueError, TypeError, OverflowError) as error:
        raise BagError(f"{run.bag.path} was recorded with settings this version does not accept: {error}") from None


def history_of(run: Run, step: RecordedStep) -> tuple[tuple[int, str], ...]:
    """The previous steps of the same run, oldest first, as the navigation node sends them to the draft node."""
    stamps = [stamp_of(action.observation_stamp) for action in run.actions]
    # Stamps name pictures; their order is that of the robot's clock, which may have been set.
    mine = stamps.index(step.stamp) if step.stamp in stamps else sum(stamp < step.stamp for stamp in stamps)
    number = int(run.actions[mine].step) if step.stamp in stamps else 1 << 32  # of the action, counted within a run
    before: list[tuple[int, list[Any]]] = []
    count = 0
    for stamp, action in reversed(list(zip(stamps[:mine], run.actions, strict=False))):
        if action.retracing:
            continue
        if int(action.step) >= number or count == _HISTORY:
            break  # belongs to the previous run
        if not before or before[-1][0] != stamp:
            before.append((stamp, []))
        before[-1][1].insert(0, action)
        number, count = int(action.step), count + 1
    return tuple((stamp, executed_phrases(actions, run.grammar)) for stamp, actions in reversed(before))


def compare(step: RecordedStep, reply: ReplayReply) -> StepComparison:
    """Compare a replayed reply with its recorded step."""
    changed = []
    if reply.text != step.text:
        changed.append("reply")
    if step.action_in(reply.text) != step.action:
        changed.append("action")
    if reply.tokens != step.tokens and (step.tokens is not None or len(reply.tokens) != int(step.stats["tokens"])):
        changed.append("tokens")
    return StepComparison(step, reply, tuple(changed))


def _check_draws(recorded: DecodeSettings, settings: DecodeSettings, numbers: list[int]) -> None:
    """Raise BagError when sampled replies would not be drawn as they were recorded."""
    if numbers != list(range(1, len(numbers) + 1)):
        raise BagError(
            "The bag's replies are sampled, and their random draws depend on the number of earlier replies, some of "
            "which are missing. Record from the start, or with temperature 0."
        )
    if recorded.drawn_by != settings.drawn_by:
        raise BagError(
            f"The bag's replies are sampled in mode {recorded.mode}, and mode {settings.mode} draws others of the "
            "same distribution; replay it in its own mode, or record with temperature 0 or proof coupled."
        )


def _seconds(stamp: int) -> str:
    return f"{stamp // 1_000_000_000}.{stamp % 1_000_000_000:09d} s" if stamp else "none"
