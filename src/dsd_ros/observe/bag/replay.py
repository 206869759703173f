# SPDX-License-Identifier: Apache-2.0
"""Turn a bag into replay requests, and compare the replayed replies with the recorded ones."""

from __future__ import annotations

import typing
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dsd_ros.decoding.modes import Proof, streams
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.observe.bag.reader import Bag
from dsd_ros.observe.bag.replay_system import ReplayPlan, ReplayReply, ReplayRequest, reusable_parameters
from dsd_ros.observe.bag.run import RecordedStep, Run, executed_phrase, picture_sent, pictures_of, stamp_of
from dsd_ros.observe.bag.storage import BagError

_NEEDED = ("dsd/observation", "dsd/reply_progress", "dsd/decode_stats")
_HISTORY = 8  # previous steps, as many as the navigation node sends
_SAME_DRAWS = {"dsd", "fsd"}  # presets that draw the same tokens when sampling


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay a bag; an empty option means as recorded."""

    mode: str = ""
    transport: str = ""
    draft_model: str = ""
    target_model: str = ""


@dataclass
class ReplayTask:
    """A prepared bag: its requests, each with its recorded step, and how to start the nodes."""

    bag: Bag
    run: Run
    plan: ReplayPlan
    mode: str
    asked: list[tuple[RecordedStep, ReplayRequest]]
    shareable: bool  # nodes that replayed another bag can be reused
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Stamp of the first picture, ns."""
        return self.asked[0][1].stamp

    @property
    def last(self) -> int:
        return self.asked[-1][1].stamp


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
        about = f"picture of {_seconds(reply.stamp)}: {reply.text!r}" if reply.text else reply.message
        result = [
            f"step {step.number}: {', '.join(self.changed)} changed",
            f"  - recorded, picture of {_seconds(step.stamp)}: {step.text!r}",
            f"  + replayed, {about}",
        ]
        if "action" in self.changed:
            result.append(f"    action: {step.action or 'none'} -> {step.action_in(reply.text) or 'none'}")
        if "tokens" in self.changed and step.tokens is not None and reply.tokens is not None:
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
    """The replay requests of a recorded run.

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
    asked = []
    for step in wanted:
        found = sent[step.number] or pictures.get(step.stamp)
        if found is None:
            notes.append(f"step {step.number} is left out: the bag lacks its picture")
            continue
        asked.append((step, ReplayRequest(step.stamp, *found, step.instruction, history_of(run, step))))
    if not asked:
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
    sampled = not recorded.sampling.greedy
    if sampled:
        _check_draws(recorded, settings, [step.reply for step, _ in asked])
    draft = reusable_parameters(run.parameters_of("draft_node"), "draft_node")
    draft |= {f"decode.{item.name}": getattr(settings, item.name) for item in fields(settings)}
    verifier = reusable_parameters(run.parameters_of("verifier_node"), "verifier_node")
    if options.draft_model:
        draft["model.path"] = options.draft_model
    if options.target_model:
        verifier["model.path"] = options.target_model
    transport = options.transport or str(run.steps[0].stats.get("transport", "dds"))
    plan = ReplayPlan(transport if transport == "websocket" else "dds", draft, verifier)
    return ReplayTask(bag, run, plan, settings.mode, asked, not sampled, notes)


def settings_of(run: Run) -> DecodeSettings:
    """The decode settings of the recorded run: its parameters, else those its session was opened with.

    :raises BagError: when they are not valid in this version.
    """
    given = {
        name.removeprefix("decode."): value
        for name, value in run.parameters_of("draft_node").items()
        if name.startswith("decode.")
    }
    if not given and run.requests:
        request = run.requests[-1]
        given = {
            "mode": request.mode, "proof": request.proof, "temperature": request.temperature,
            "top_k": request.top_k, "top_p": request.top_p, "seed": request.seed, "max_tokens": request.max_tokens,
        }  # fmt: skip
    if not given:
        given = {"mode": str(run.steps[-1].stats["mode"])}
    kinds = typing.get_type_hints(DecodeSettings)
    try:
        return DecodeSettings(**{name: kinds[name](value) for name, value in given.items() if name in kinds})
    except (ValueError, TypeError, OverflowError) as error:
        raise BagError(f"{run.bag.path} was recorded with settings this version does not accept: {error}") from None


def history_of(run: Run, step: RecordedStep) -> tuple[tuple[int, str], ...]:
    """The previous steps of the same run, oldest first, as the navigation node sends them to the draft node."""
    mine = [a for a in run.actions if stamp_of(a.observation_stamp) == step.stamp]
    number = int(mine[0].step) if mine else 1 << 32  # of the action, counted within a run
    before: list[tuple[int, str]] = []
    for action in reversed(run.actions):
        stamp = stamp_of(action.observation_stamp)
        if stamp >= step.stamp or action.retracing:
            continue
        if int(action.step) >= number or len(before) == _HISTORY:
            break  # belongs to the previous run
        before.append((stamp, executed_phrase(action, run.grammar)))
        number = int(action.step)
    return tuple(reversed(before))


def compare(step: RecordedStep, reply: ReplayReply) -> StepComparison:
    """Compare a replayed reply with its recorded step."""
    changed = []
    if reply.text != step.text:
        changed.append("reply")
    if step.action_in(reply.text) != step.action:
        changed.append("action")
    both = step.tokens is not None and reply.tokens is not None
    same = step.tokens == reply.tokens if both else int(step.stats["tokens"]) == reply.count
    if not same:
        changed.append("tokens")
    return StepComparison(step, reply, tuple(changed))


def _check_draws(recorded: DecodeSettings, settings: DecodeSettings, numbers: list[int]) -> None:
    """Raise BagError when sampled replies would not be drawn as they were recorded."""
    if numbers != list(range(1, len(numbers) + 1)):
        raise BagError(
            "The bag's replies are sampled, and their random draws depend on the number of earlier replies, some of "
            "which are missing. Record from the start, or with temperature 0."
        )
    coupled = recorded.proven_by is Proof.COUPLED and settings.proven_by is Proof.COUPLED
    if coupled:
        return
    if recorded.mode != settings.mode and not {recorded.mode, settings.mode} <= _SAME_DRAWS:
        raise BagError(
            f"The bag's replies are sampled in mode {recorded.mode}, and mode {settings.mode} draws others of the "
            "same distribution; replay it in its own mode, or record with temperature 0 or proof coupled."
        )


def _seconds(stamp: int) -> str:
    return f"{stamp // 1_000_000_000}.{stamp % 1_000_000_000:09d} s" if stamp else "none"
