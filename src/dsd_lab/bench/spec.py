# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench spec`: Spec-Bench (Xia et al., Findings of ACL 2024, arXiv 2401.07851) in the product's modes.

Its questions are asked turn by turn. All modes get the same conversation, and their tokens must be equal. As there, a
speed-up is a ratio of mean tokens a second, and the mean accepted tokens (tau) are those that a round adds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.harness import PROFILE, Bench, Column, Decoding, Report, Told, given
from dsd_lab.bench.modes import verifier_of
from dsd_lab.bench.pace import PacedModel, hold, paced
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.scenes import TEXT_MODEL, WARM_UP_TOKENS, Scene, decode, text_models
from dsd_lab.bench.sweeps import Variant, parse_modes
from dsd_lab.links.emulation import EmulatedChannel
from dsd_lab.parts import parts
from dsd_lab.report import CODE, BenchError, Row, check_range, code_digest, header, ratio, rounded
from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, part
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.prompts import PromptTemplate
from dsd_ros.wire.channel import Channel

SOURCE = "data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench (Apache-2.0)"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
COUNT = 480
MODES_GREEDY = "ar stream dsd fsd dsd:shape=budget"
# With shared noise all of these draw the same tokens; dsd draws its own.
MODES_SAMPLED = "ar stream coupled fsd:proof=coupled coupled:shape=budget dsd"
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


@dataclass(frozen=True)
class Conversation(PromptTemplate):
    """Prompts of whole conversations: an instruction is the key of one in ``told``, as both sides know it.

    An instruction as the robot sends it has no earlier turns, and is shorter than some questions.
    """

    told: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def render(self, instruction: str, image_tokens: int, past: Sequence[tuple[int, str]] = ()) -> str:
        """See ``PromptTemplate.render``."""
        return self.render_messages(self.told[instruction])


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
    questions: Path = flag(Path("question.jsonl"), "Spec-Bench's data/spec_bench/question.jsonl", metavar="FILE")
    per_category: int = flag(0, "questions of each category, evenly spread; 0: all", metavar="N")
    modes: str = flag("", "as in bench modes (default: dsd, fsd and a tree; sampled: with proof coupled)")
    model: str = flag("text", TEXT_MODEL, metavar="DIR")
    draft: str = model_option("draft")
    profile: str = flag("loopback", PROFILE)
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
    questions, digest = read_questions(flags.questions)
    asked = chosen(questions, per_task)
    robot, cloud = paced(load_model(draft)), paced(load_model(target))
    key = [robot.fingerprint, draft.quantization, cloud.fingerprint, profile.name, digest, code_digest(_CODE)]
    key += [[variant.label, dataclasses.asdict(variant.decode)] for variant in variants]
    kept = flags.cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.jsonl"
    answers = _read_answers(kept)
    with verifier_of(cloud, "local") as connect:
        run = _Run(variants, robot, cloud, connect, profile)
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
    rows = [_row(variant, variants, asked, answers) for variant in variants]
    return {
        **header("spec", _CODE, draft=robot, target=cloud),
        "draft_quantization": draft.quantization,
        "profile": profile.name,
        "questions": {"sha256": digest, "spec_bench": digest == SHA256, "asked": dict(Counter(q.task for q in asked))},
        "temperature": variants[0].decode.temperature,
        "max_tokens": variants[0].decode.max_tokens,
        "exact": True,
        "rows": rows,
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
    ) -> None:
        for model in (robot, cloud):
            if model.reads_pictures:
                raise BenchError(
                    f"{model.name} reads pictures, and Spec-Bench asks text; name a text model with --model"
                )
            own = {item.name: getattr(model.template, item.name) for item in dataclasses.fields(PromptTemplate)}
            model.template = Conversation(**own)
        self._variants, self._robot, self._cloud = variants, robot, cloud
        self._connect, self._profile = connect, profile
        for variant in variants:  # what happens once in a process must not be measured
            short = dataclasses.replace(variant.decode, max_tokens=WARM_UP_TOKENS)
            self._reply(short, [{"role": "user", "content": "Say hello."}], 0)
        hold(robot, cloud, profile)

    def ask(self, question: Question, say: Callable[[str], object]) -> Answers:
        """All turns of a question in every mode; BenchError for a mode with other tokens."""
        found: Answers = {variant.label: [] for variant in self._variants}
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
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
                found[variant.label].append(_answer(reply))
                if variant.decode.mode == "ar":
                    said = reply.text
            messages.append({"role": "assistant", "content": said})
        return found

    def _reply(self, settings: DecodeSettings, messages: list[dict[str, str]], seed: int) -> DecodedReply:
        told = {"conversation": messages}
        for model in (self._robot, self._cloud):
            model.template = dataclasses.replace(model.template, told=told)
        channel = EmulatedChannel(self._connect(), self._profile.link, seed=seed)
        return decode(channel, self._robot, settings, Scene(None, "conversation"))


def _answer(reply: DecodedReply) -> dict[str, Any]:
    return {
        "tokens": len(reply.tokens),
        "seconds": rounded(reply.seconds),
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
    every = [turn for question in asked for turn in answers[question.number][variant.label]]
    missed, exits = ([value for turn in every for value in turn[name]] for name in ("missed", "exits"))
    ahead = variant.decode.needs_draft and variant.decode.predrafts
    return {
        "label": variant.label,
        "mode": variant.decode.mode,
        "settings": variant.settings,
        "miss_rate": rounded(float(np.mean(missed))) if missed and ahead else None,
        "mean_exit": rounded(float(np.mean(exits))) if exits else None,
        "choice": every[-1]["choice"],
        "tasks": tasks,
    }


def _figures(own: Sequence[list[dict[str, Any]]], alone: Sequence[list[dict[str, Any]]]) -> Row:
    """Spec-Bench's figures over questions, each a list of turns; the interval is a bootstrap over questions."""
    speeds, base = (
        np.array([sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns) for turns in question])
        for question in (own, alone)
    )
    speedup = ratio(speeds, base)  # of the means, with its interval
    gained = [count for turns in own for turn in turns for count in turn["gained"]]
    return {
        "questions": len(own),
        "tokens": sum(turn["tokens"] for turns in own for turn in turns),
        "tau": rounded(float(np.mean(gained))),
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
        (OVERALL, f"tasks/{OVERALL}/speedup", ".2f"), *((f"{task} #MAT", f"tasks/{task}/tau", ".2f") for task in tasks),
    ]  # fmt: skip


def _notes(report: Report) -> list[str]:
    asked = report["questions"]
    count = sum(asked["asked"].values())
    what = f"{count} of Spec-Bench's {COUNT} questions" if asked["spec_bench"] else f"{count} questions of another file"
    return [
        f"speed-ups over ar, {what}, temperature {report['temperature']:g}, at most {report['max_tokens']} tokens a "
        f"turn, profile {report['profile']}; every mode decoded ar's tokens where it draws as ar does."
    ]


BENCH = Bench(measure, _columns, _notes)


def command(flags: Flags = Flags()) -> int:
    """Spec-Bench: mean accepted tokens and speed-up by category.

    Asks a text model Spec-Bench's questions, turn by turn, in every mode; prints its table: the speed-up over mode ar
    by category, and the mean accepted tokens. Ends at once when a mode's tokens are not the target's. After an
    interruption, the same command resumes.
    """
    return BENCH.run(flags)
