# SPDX-License-Identifier: Apache-2.0
"""Questions over documents of two sides with their right answers, and the verdict on what a reader says to them.

``held_out.json`` holds questions whose words, names and sentences no training draws (those of the templates are in
held_out.toml); ``shipped.json`` twelve about the documents in ``config/documents``, which are not repeated there. Each
is an object with the fields of ``HeldOut``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from dsd_lab.report import BenchError, header
from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.documents.chunking import chunks, read_document
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.documents.retrieval import TEMPERATURE, Retrieved
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.paths import config_directory
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings

SIDES = ("device", "cloud")
NEEDS = ("both", *SIDES, "none")
_LONGEST = 48  # tokens of an answer
_NUMBER = re.compile(r"\d+|\w+teen|\w+ty|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred")
_IGNORANT = re.compile(r"\b(do not know|don't know|unknown|not known|cannot tell|no information|not told)\b")
_CONTRADICTS = re.compile(r"\b(elsewhere|disagree|contradict\w*)\b")


@dataclass(frozen=True)
class HeldOut:
    """One question.

    ``needs``: the sides without which it cannot be answered; "none" where nothing tells. ``answers``: what the right
    answer ends in, in any of these words; none where "I do not know" is right. ``disagree``: the documents contradict
    each other without dates, so that the answer must say so.
    """

    id: str
    kind: str
    question: str
    device: tuple[str, ...]
    cloud: tuple[str, ...]
    answers: tuple[str, ...]
    needs: str
    by: str  # "hand" or "template"
    disagree: bool = False

    def __post_init__(self) -> None:
        if self.needs not in NEEDS or (self.needs == "none") != (not self.answers):
            raise ValueError(f"question {self.id} needs {self.needs!r}; only one that nothing tells has no answers")
        if not self.question or bool(self.device) != bool(self.cloud):
            raise ValueError(f"question {self.id} lacks its words or the documents of a side")


def load_questions(name: str = "held_out") -> tuple[HeldOut, ...]:
    """The questions of a file of this folder; ValueError for one that is not as ``HeldOut`` says."""
    rows = json.loads(files("dsd_lab.pair").joinpath(f"{name}.json").read_text(encoding="utf-8"))
    found = tuple(
        HeldOut(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in rows
    )
    if len({one.id for one in found}) < len(found):
        raise ValueError(f"two questions of {name}.json have the same id")
    return found


def verdict(item: HeldOut, text: str) -> str:
    """ "right", "unknown" (it says that it does not know) or "wrong" (it says something else, with confidence)."""
    said = normal(text)
    if _IGNORANT.search(said):
        return "right" if not item.answers else "unknown"
    if not item.answers:
        return "wrong"
    if item.disagree:
        return "right" if _CONTRADICTS.search(said) else "wrong"
    last = normal(re.sub(r"\([^)]*\)", " ", text).rstrip().rstrip(".!").rpartition(". ")[2])
    if _CONTRADICTS.search(last):
        return "wrong"
    for answer in map(normal, item.answers):
        *words, noun = last.split(" ")
        counted = _NUMBER.fullmatch(answer) and noun.isalpha() and not _NUMBER.fullmatch(noun)
        end = " ".join(words) if counted else last  # "has thirteen seats"
        before = end.removesuffix(answer)
        if (end == answer or end.endswith(f" {answer}")) and ("not" not in before.split() or "not" in answer.split()):
            return "right"
    return "wrong"


def normal(text: str) -> str:
    """Lower case, without punctuation and articles."""
    words = re.findall(r"[\w:'-]+", text.lower())
    return " ".join(word for word in (word.strip(":'-") for word in words) if word and word not in ("a", "an", "the"))


def relevant(encoder: Encoder | None, question: str, texts: Sequence[str], count: int) -> list[Retrieved]:
    """The ``count`` texts nearest to a question, weighed as a store weighs them; without an encoder all alike."""
    if encoder is None:
        return [Retrieved(text, text, 0.0) for text in texts[:count]]
    vectors = encoder.encode([question, *texts])
    cosines = vectors[1:] @ vectors[0]
    best = sorted(range(len(texts)), key=lambda n: -cosines[n])[:count]
    return [Retrieved(texts[n], texts[n], float(cosines[n]) / TEMPERATURE) for n in best]


def aggregated(
    model: Any, question: str, sides: Sequence[Sequence[Retrieved]], kept: KeptDocuments | None = None
) -> str:
    """The greedy answer of one side, or of two that aggregate: what DRAGON says, without the link."""
    asking = DocumentPrompt(model)
    mixed = [LocalMixture(model, asking, question, found, 0.0, kept) for found in sides]
    said: list[int] = []
    while len(said) < _LONGEST and not (said and said[-1] in model.eos_token_ids):
        local = [one.next() for one in mixed]
        p = local[0].p
        if len(local) > 1:
            p = mixture(local[0].p, local[1].p, local[0].log_weight, local[1].log_weight)
        said.append(int(p.argmax()))
        for one in mixed:
            one.follow(said)
    return str(model.decode_text(said))


def read_all(
    model: Any,
    questions: Iterable[HeldOut],
    encoder: Encoder | None = None,
    documents: int = 2,
    sides: Sequence[str] = SIDES,
    report: Callable[[HeldOut, str, str], object] | None = None,
) -> dict[str, dict[str, float]]:
    """Questions, share right and share wrong with confidence, by kind and over "all"; by ``needs``, too."""
    counts: dict[str, list[str]] = defaultdict(list)
    for item in questions:
        found = [relevant(encoder, item.question, getattr(item, side), documents) for side in sides]
        text = aggregated(model, item.question, found)
        how = verdict(item, text)
        for name in (item.kind, f"needs {item.needs}", "all"):
            counts[name].append(how)
        if report is not None:
            report(item, text, how)
    return {
        name: {
            "questions": len(hows),
            "right": hows.count("right") / len(hows),
            "wrong": hows.count("wrong") / len(hows),
        }
        for name, hows in sorted(counts.items())
    }


def measure_sides(
    settings: ModelSettings,
    items: Sequence[HeldOut],
    documents: int,
    side: str,
    progress: Callable[[float, str], object],
    report: Callable[[HeldOut, str, str], object],
) -> dict[str, Any]:
    """The report of `dsd-lab evaluate questions`: ``read_all`` of both sides, of one, or of "each" of these in turn.

    BenchError for another ``side``.
    """
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    asked: dict[str, Sequence[str]] = {"both": SIDES, **{name: (name,) for name in SIDES}}
    if side not in (*asked, "each"):
        raise BenchError(f"--side is both, device, cloud or each, not {side!r}")
    who = asked if side == "each" else {side: asked[side]}
    model, encoder = load_model(settings), SentenceEncoder()
    answers: list[dict[str, Any]] = []  # of who is asked first
    figures: dict[str, Any] = {}
    done: list[str] = []

    def take(item: HeldOut, text: str, how: str) -> None:
        if not figures:
            about = {"id": item.id, "question": item.question, "answers": item.answers}
            answers.append({**about, "text": text, "verdict": how})
        done.append(item.id)
        progress(len(done) / (len(who) * len(items)), item.id)
        report(item, text, how)

    for name, sides in who.items():
        figures[name] = read_all(model, items, encoder, documents, sides, take)
    code = ("dsd_ros/dragon", "dsd_ros/vlm", "dsd_lab/pair/held_out.py")
    setting = {"documents": documents, "questions": len(items)}
    return {**header("questions", code, both=model), "setting": setting, "figures": figures, "answers": answers}


def render_sides(report: dict[str, Any]) -> str:
    """The report of ``measure_sides`` as a table for each who answers."""
    lines = []
    for who, figures in report["figures"].items():
        lines += [f"{who}:"] if len(report["figures"]) > 1 else []
        for name, found in figures.items():
            shares = f"right {found['right']:6.1%}  wrong {found['wrong']:6.1%}"
            lines.append(f"{name:15} {found['questions']:4.0f}  {shares}")
    return "\n".join(lines)


def shipped_questions() -> tuple[HeldOut, ...]:
    """The twelve questions over the documents that ship, which are cut into chunks as a store cuts them."""
    chunked = {}
    for side, folder in zip(SIDES, ("robot", "cloud"), strict=True):
        paths = sorted((config_directory() / "documents" / folder).glob("*.md"))
        cut = [chunks(read_document(path).text, lambda text: len(text.split())) for path in paths]
        chunked[side] = tuple(chunk.text for some in cut for chunk in some)
    return tuple(replace(item, **chunked) for item in load_questions("shipped"))
