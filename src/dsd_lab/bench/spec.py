# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench spec`: Spec-Bench (Xia et al., Findings of ACL 2024, arXiv 2401.07851) in the product's modes.

The questions are 80 of our own in its categories, or those of its file. They are asked turn by turn. All modes get the
same conversation, and their tokens must be equal. As there, a speed-up is a ratio of mean tokens a second, and the mean
accepted tokens (tau) are those that a round adds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.harness import PROFILE, Bench, Column, Decoding, Report, Told, given
from dsd_lab.bench.modes import check_pace, verifier_of
from dsd_lab.bench.pace import PacedModel, hold, paced
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.real import PAUSE_S, sides
from dsd_lab.bench.scenes import TEXT_MODEL, WARM_UP_TOKENS, Scene, decode, text_models, trained_for_text
from dsd_lab.bench.sweeps import Variant, parse_modes
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.parts import parts
from dsd_lab.report import CODE, BenchError, Row, check_range, code_digest, header, ratio, rounded
from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, part
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.prompts import Chat
from dsd_ros.wire.channel import Channel

OWN_QUESTIONS = Path(__file__).with_name("questions.jsonl")
SOURCE = "data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench (Apache-2.0)"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
COUNT = 480
OWN_SHA256 = hashlib.sha256(OWN_QUESTIONS.read_bytes()).hexdigest()
MODES_GREEDY = "ar stream dsd fsd dsd:shape=budget"
# With shared noise all of these draw the same tokens; dsd draws its own.
MODES_SAMPLED = "ar stream coupled fsd:proof=coupled coupled:shape=budget dsd"
TRANSPORTS = ("local", "process")
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TASKS = {  # Spec-Bench's columns, and the categories of each
    "MT-bench": _MT_BENCH,
    "Translation": ("translation",),
    "Summarization": ("summarization",),
    "QA": ("qa",),
    "Math": ("math_reasoning",),
    "RAG": ("rag",),
}
OVERALL = "Overall"
_TASK_OF = {category: task for task, categories in TASKS.items() for category in categories}
_CODE = (*CODE, "dsd_lab/bench/spec.py")

Answers = dict[str, list[dict[str, Any]]]  # by variant, one entry a turn


@dataclass(frozen=True)
class Question:
    """One question of one or more turns."""

    number: int
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path) -> tuple[list[Question], str]:
    """All questions of Spec-Bench's file, or of one in its format, and its SHA-256; BenchError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path} cannot be read ({error.strerror}); get {SOURCE}") from error
    found = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        try:
            record = json.loads(line)
            turns = tuple(map(str, record["turns"]))
            question = Question(int(record["question_id"]), _TASK_OF[record["category"]], turns)
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path}, line {number} is no question of Spec-Bench ({error!r}); get {SOURCE}") from error
        if not (turns and all(turn.strip() for turn in turns)):
            raise BenchError(f"{path}, line {number} has a question without text; get {SOURCE}")
        found.append(question)
    if twice := [number for number, count in Counter(q.number for q in found).items() if count > 1]:
        raise BenchError(f"{path} has question {twice[0]} twice; get {SOURCE}")
    if not found:
        raise BenchError(f"{path} holds no questions; get {SOURCE}")
    return found, hashlib.sha256(content).hexdigest()


def chosen(questions: Sequence[Question], per_task: int) -> list[Question]:
    """``per_task`` questions of each task, evenly spread over it; 0: all."""
    picked = []
    for task in TASKS:
        of_task = [question for question in questions if question.task == task]
        count = min(per_task or len(of_task), len(of_task))
        picked += [of_task[number * len(of_task) // count] for number in range(count)]
    return picked


@arguments
class Flags:
    questions: Path | None = flag(
        None, "Spec-Bench's data/spec_bench/question.jsonl (default: 80 of our own in its categories)", metavar="FILE"
    )
    per_category: int = flag(0, "questions of each category, evenly spread; 0: all", metavar="N")
    modes: str = flag("", "as in bench modes (default: dsd, fsd and a tree; sampled: with proof coupled)")
    model: str = flag("text", TEXT_MODEL, metavar="DIR")
    draft: str = model_option("draft")
    profile: str = flag("loopback", PROFILE)
    time_scale: float = flag(
        1.0, "multiply every held time and delay by S while measuring, and divide what is reported by it", metavar="S"
    )
    transport: str = flag(
        "local", "process: the verifier is a process, and robot and verifier have a core each", choices=TRANSPORTS
    )
    decoding: Decoding = part(Decoding)
    cache: Path = flag(Path(".cache/spec"), "folder for the answers of an unfinished run")
    json: Path | None = json_option()


def measure(flags: Flags, told: Told) -> Report:
    """Ask the questions in every mode; ValueErrors, ModelError, LinkError.

    An interrupted run with the same models, modes, link and code goes on after its last whole question.
    """
    profile, per_task = load_profile(flags.profile), flags.per_category
    common = {"max_tokens": 128, **given(flags.decoding)}
    usual = MODES_SAMPLED if common.get("temperature", 0.0) > 0.0 else MODES_GREEDY
    variants = parse_modes(flags.modes or usual, common, profile.gamma)
    draft, target = text_models(flags.draft, "" if flags.model == "text" else flags.model)
    check_range("per-category", per_task, 0, COUNT)
    if not any(variant.decode.mode == "ar" for variant in variants):
        raise BenchError("speed-ups are over mode ar, which is not among --modes; add it")
    check_pace(profile, flags.transport, flags.time_scale)
    questions, digest = read_questions(flags.questions or OWN_QUESTIONS)
    asked = chosen(questions, per_task)
    robot, cloud = paced(load_model(draft)), paced(load_model(target))
    if cloud.reads_pictures:
        raise BenchError(f"{cloud.name} reads pictures, and Spec-Bench asks text; name a text model with --model")
    key = [robot.fingerprint, draft.quantization, cloud.fingerprint, profile.name, flags.time_scale, flags.transport]
    key += [digest, code_digest(_CODE), [[variant.label, dataclasses.asdict(variant.decode)] for variant in variants]]
    kept = flags.cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.jsonl"
    answers = _read_answers(kept)
    with ExitStack() as stack:
        if flags.transport == "process":
            (connect, _), pause = stack.enter_context(sides(target)), PAUSE_S
        else:
            connect, pause = stack.enter_context(verifier_of(cloud, "local")), 0.0
        run = _Run(variants, robot, cloud, connect, profile, flags.time_scale, pause)
        for number, question in enumerate(parts(asked)):
            if question.number in answers:
                continue
            found = run.ask(question, lambda said, done=number: told(done / len(asked), said))
            answers[question.number] = found
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([question.number, found]) + "\n")
    if all(question.number in answers for question in asked):
        kept.unlink(missing_ok=True)  # the next run measures again
    asked = [question for question in asked if question.number in answers]
    return {
        **header("spec", _CODE, draft=robot, target=cloud, **({} if flags.draft else trained_for_text())),
        "draft_quantization": draft.quantization,
        "profile": profile.name,
        "draft_ms": None if profile.draft_s is None else rounded(1e3 * profile.draft_s),
        "time_scale": flags.time_scale,
        "transport": flags.transport,
        "questions": {
            "of": {SHA256: "Spec-Bench", OWN_SHA256: "ours"}.get(digest, "another file"),
            "sha256": digest,
            "count": len(questions),
            "asked": dict(Counter(q.task for q in asked)),
        },
        "temperature": variants[0].decode.temperature,
        "max_tokens": variants[0].decode.max_tokens,
        "exact": True,
        "rows": [_row(variant, variants, asked, answers) for variant in variants],
    }


class _Run:
    """The models with all that stays from question to question."""

    def __init__(
        self,
        variants: Sequence[Variant],
        robot: PacedModel,
        cloud: PacedModel,
        connect: Callable[[], Channel],
        profile: Profile,
        scale: float,
        pause: float,
    ) -> None:
        self._variants, self._robot = variants, robot
        self._connect, self._profile = connect, profile.stretched(scale)
        self._scale, self._pause = scale, pause
        for variant in variants:  # what happens once in a process must not be measured
            short = dataclasses.replace(variant.decode, max_tokens=WARM_UP_TOKENS)
            self._reply(short, [("user", ["Say hello."])], 0)
        hold(robot, cloud, self._profile)

    def ask(self, question: Question, say: Callable[[str], object]) -> Answers:
        """All turns of a question in every mode; BenchError for a mode with other tokens."""
        found: Answers = {variant.label: [] for variant in self._variants}
        messages: list[tuple[str, list[str]]] = []
        for turn, text in enumerate(question.turns):
            messages.append(("user", [text]))
            first: dict[object, DecodedReply] = {}
            for offset in range(len(self._variants)):
                # Each turn begins with another mode, so that the first is not always the same.
                index = (question.number + turn + offset) % len(self._variants)
                variant = self._variants[index]
                settings = dataclasses.replace(variant.decode, seed=question.number)
                reply = self._reply(settings, messages, question.number)
                say(f"question {question.number}, {variant.label}: {len(reply.tokens)} tokens in {reply.seconds:.1f} s")
                if reply.tokens != first.setdefault(settings.drawn_by, reply).tokens:
                    raise BenchError(f"question {question.number}: the tokens of {variant.label} are not the target's")
                found[variant.label].append(_answer(reply, self._scale))
                if variant.decode.mode == "ar":
                    said = reply.text
            messages.append(("assistant", [said]))
        return found

    def _reply(self, settings: DecodeSettings, messages: list[tuple[str, list[str]]], seed: int) -> DecodedReply:
        time.sleep(self._pause)
        channel = EmulatedChannel(self._connect(), self._profile.link, seed=seed)
        return decode(channel, self._robot, settings, Scene(None, Chat.of(messages)))


def _answer(reply: DecodedReply, scale: float) -> dict[str, Any]:
    return {
        "tokens": len(reply.tokens),
        "seconds": rounded(reply.seconds / scale),
        "passes": [rounded(record.verify_seconds / scale) for record in reply.records[1:]],  # prompts read
        "gained": [len(record.gained) for record in reply.records],
        "missed": [int(not record.ready) for record in reply.records[1:] if record.drafted],
        "exits": [record.first_exit for record in reply.records if record.first_exit],
        "choice": reply.choice,
    }


def _read_answers(path: Path) -> dict[int, Answers]:
    """The answers of an interrupted run; a last line that was cut off is left out."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        path.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")
    return dict(json.loads(line) for line in lines[:-1])


def _row(
    variant: Variant, variants: Sequence[Variant], asked: Sequence[Question], answers: Mapping[int, Answers]
) -> Row:
    baseline = next(one for one in variants if one.decode.mode == "ar")
    tasks = {}
    for task in (*TASKS, OVERALL):
        found = [answers[question.number] for question in asked if task in (question.task, OVERALL)]
        if found:
            tasks[task] = _figures([f[variant.label] for f in found], [f[baseline.label] for f in found])
            if not (variant.decode.needs_draft and variant.decode.predrafts):
                tasks[task]["miss_rate"] = None
    return {
        "label": variant.label,
        "mode": variant.decode.mode,
        "settings": variant.settings,
        "choice": answers[asked[-1].number][variant.label][-1]["choice"],
        "tasks": tasks,
    }


def _figures(own: Sequence[list[dict[str, Any]]], alone: Sequence[list[dict[str, Any]]]) -> Row:
    """Spec-Bench's figures over questions, each a list of turns; the interval is a bootstrap over questions."""
    speeds, base = (
        np.array([sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns) for turns in question])
        for question in (own, alone)
    )
    speedup = ratio(speeds, base)  # of the means, with its interval
    gained, missed, exits, passes = (
        [value for turns in own for turn in turns for value in turn[name]]
        for name in ("gained", "missed", "exits", "passes")
    )
    return {
        "questions": len(own),
        "tokens": sum(turn["tokens"] for turns in own for turn in turns),
        "tau": rounded(float(np.mean(gained))),
        "miss_rate": rounded(float(np.mean(missed))) if missed else None,
        "mean_exit": rounded(float(np.mean(exits))) if exits else None,
        "target_ms": rounded(1e3 * statistics.median(passes)) if passes else None,
        "tokens_per_second": rounded(float(speeds.mean())),
        "speedup": rounded(speedup["value"]),
        "speedup_95": [rounded(speedup["low"]), rounded(speedup["high"])],
    }


def _columns(report: Report) -> list[Column]:
    """Spec-Bench's table: speed-ups by task, and the mean accepted tokens."""
    tasks = [task for task in TASKS if task in report["rows"][0]["tasks"]]
    return [
        ("method", "label", ""), *((task, f"tasks/{task}/speedup", ".2f") for task in tasks),
        ("#MAT", f"tasks/{OVERALL}/tau", ".2f"), ("tokens/s", f"tasks/{OVERALL}/tokens_per_second", ".1f"),
        (OVERALL, f"tasks/{OVERALL}/speedup", ".2f"), ("missed", f"tasks/{OVERALL}/miss_rate", ".0%"),
        ("exit", f"tasks/{OVERALL}/mean_exit", ".1f"),
        *((f"{task} #MAT", f"tasks/{task}/tau", ".2f") for task in tasks),
    ]  # fmt: skip


def _notes(report: Report) -> list[str]:
    asked = report["questions"]
    count = sum(asked["asked"].values())
    what = f"{count} of {asked['count']} questions ({asked['of']})"
    return [
        f"speed-ups over ar, {what}, temperature {report['temperature']:g}, at most {report['max_tokens']} tokens a "
        f"turn, profile {report['profile']}, transport {report['transport']}; every mode decoded ar's tokens where it "
        "draws as ar does."
    ]


BENCH = Bench(measure, _columns, _notes)


def command(flags: Flags = Flags()) -> int:
    """Spec-Bench: mean accepted tokens and speed-up by category.

    Asks a text model 80 questions in Spec-Bench's categories, or those of its file, turn by turn, in every mode; prints
    its table: the speed-up over mode ar by category, and the mean accepted tokens. Ends at once when a mode's tokens
    are not the target's. After an interruption, the same command resumes.
    """
    return BENCH.run(flags)
