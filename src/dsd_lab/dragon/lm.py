# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench dragon-lm`: perplexity of a text with documents of two sides, by each way of using them.

As section 7.3 of DRAGON: the first eighth of a held-out window finds documents, and the rest is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.dragon.corpus import SOURCE, count_tokens, read_corpus, two_sides
from dsd_lab.plotting import BLUE, GREEN, GREY, YELLOW, new_figure, tidy
from dsd_lab.report import CONFIDENCE, BenchError, check_range, header, ratio, render_template, table
from dsd_ros.decoding.aggregation import eta
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.documents.retrieval import Retrieved

NONE, CRCG, DRCG, DRAGON = "none", "crcg", "drcg", "dragon"
_CODE = ("dsd_ros/dragon", "dsd_lab/dragon/lm.py")
METHODS = (NONE, CRCG, DRCG, DRAGON)
_RESAMPLED = 2000  # of windows, for standard errors


@dataclass(frozen=True)
class LmSetting:
    """Sizes in tokens. ``windows`` 0: all that are held out. ``documents``: of each side, ascending.

    ``context``: what a prompt holds, window included.
    """

    windows: int = 16
    window: int = 128
    passage: int = 64
    context: int = 384
    documents: tuple[int, ...] = (0, 1, 2, 4, 8)

    def __post_init__(self) -> None:
        check_range("windows", self.windows, 0, 10_000)
        if self.windows == 1:
            raise BenchError("one window has no standard error; use 2 or more, or 0 for all")
        check_range("window", self.window, 16, 4096, " tokens")
        check_range("passage", self.passage, 8, 1024, " tokens")
        if self.context < self.window + self.passage + 8:
            raise BenchError(
                f"a context of {self.context} tokens has no room for a window of {self.window} and a passage"
            )
        if not self.documents or list(self.documents) != sorted({*self.documents}):
            raise BenchError("the numbers of documents must ascend, for example 0,1,2,4,8")
        if not 0 <= self.documents[0] <= self.documents[-1] <= 64:
            raise BenchError("the numbers of documents must be 0 to 64")

    @property
    def query(self) -> int:
        """Tokens that find documents and are not scored."""
        return self.window // 8


class Scorer:
    """log p of a window's tokens after its query, with a text before it or none."""

    def __init__(self, model: Any, window: Sequence[int], setting: LmSetting) -> None:
        self._model = model
        self._query, self._scored = list(window[: setting.query]), list(window[setting.query :])
        self._room = setting.context - len(window) - 1  # for documents and what stands between
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def alone(self) -> np.ndarray:
        """(n,) float64."""
        return self._score([])

    def with_document(self, text: str) -> np.ndarray:
        """(n,) with one document."""
        return self._score(self._ids(text))

    def with_all(self, texts: Sequence[str]) -> np.ndarray:
        """(n,) with as many of the documents as the context holds, the best first, in one prompt."""
        ids: list[int] = []
        for text in texts:
            more = self._ids(text)
            if len(ids) + len(more) > self._room:
                break
            ids += more
        return self._score(ids)

    def _ids(self, text: str) -> list[int]:
        ids = self._model.tokenizer.encode(f"{text}\n", add_special_tokens=False).ids
        return list(ids[: self._room])

    def _score(self, front: list[int]) -> np.ndarray:
        key = tuple(front)
        if key not in self._known:
            sequence = self._model.begin()
            # Every model knows its end-of-text token: a new text begins after it.
            sequence.append([min(self._model.eos_token_ids), *front, *self._query])
            rows = sequence.verify(self._scored)[:-1].double()
            chosen = torch.log_softmax(rows, dim=1)[torch.arange(len(rows)), self._scored]
            self._known[key] = chosen.cpu().numpy()
        return self._known[key]


Scores = Sequence[tuple[np.ndarray, float]]  # of each document, log p (n,) of the tokens and its relevance


def mixture_of(scores: Scores, alone: np.ndarray) -> tuple[np.ndarray, float]:
    """One side's (n,) p of the tokens, weighted by relevance; the log-sum-exp of the relevances (-30: no documents)."""
    if not scores:
        return np.exp(alone), -30.0
    relevances = np.array([relevance for _, relevance in scores])
    shares = np.exp(relevances - relevances.max())
    p = sum(share * np.exp(score) for share, (score, _) in zip(shares, scores, strict=True))
    return p / shares.sum(), float(relevances.max() + math.log(shares.sum()))


def _both(ours: Scores, theirs: Scores, alone: np.ndarray) -> np.ndarray:
    """(n,) log p of both sides' mixture."""
    (p, weight), (other_p, other_weight) = mixture_of(ours, alone), mixture_of(theirs, alone)
    share, other_share = eta(weight, other_weight)
    return np.log(share * p + other_share * other_p)


def score_window(
    scorer: Scorer, device: Sequence[Retrieved], cloud: Sequence[Retrieved], documents: Sequence[int]
) -> dict[str, list[np.ndarray]]:
    """By method, for each number of documents a side, log p (n,) of the window's tokens."""
    alone = scorer.alone()
    read, other_read = (
        [(scorer.with_document(document.text), document.relevance) for document in side] for side in (device, cloud)
    )
    found: dict[str, list[np.ndarray]] = {method: [] for method in METHODS}
    for count in documents:
        ours, theirs = read[:count], other_read[:count]
        found[NONE].append(alone)
        found[DRAGON].append(_both(ours, theirs, alone))
        if not count:
            found[CRCG].append(alone)
            found[DRCG].append(alone)
            continue
        found[CRCG].append(scorer.with_all([d.text for d in device[:count]]))
        both = sorted([*device[:count], *cloud[:count]], key=lambda d: -d.relevance)
        found[DRCG].append(scorer.with_all([d.text for d in both]))
    return found


def measure_lm(
    setting: LmSetting, model: Any, encoder: Encoder, progress: Callable[[float, str], object] | None = None
) -> dict[str, Any]:
    """Perplexities of windows of held-out text, by method and number of documents. BenchError."""
    # One token is left for the line break that ends a passage.
    corpus = read_corpus(count_tokens(model), setting.passage - 1)
    windows = [
        ids[at : at + setting.window]
        for ids in (list(model.tokenizer.encode(text, add_special_tokens=False).ids) for text in corpus.held_out)
        for at in range(0, len(ids) - setting.window + 1, setting.window)
    ]
    setting = setting if setting.windows else replace(setting, windows=len(windows))
    if len(windows) < setting.windows:
        raise BenchError(f"the held-out text has {len(windows)} windows of {setting.window} tokens; ask for no more")
    chosen = np.linspace(0, len(windows) - 1, setting.windows).round().astype(int)
    device, cloud = two_sides(encoder, corpus.passages)
    sums: dict[str, list[list[float]]] = {method: [[] for _ in setting.documents] for method in METHODS}
    for number, index in enumerate(chosen):
        window = windows[index]
        query = model.decode_text(window[: setting.query])
        ours, theirs = (side.retrieve(query, setting.documents[-1]) for side in (device, cloud))
        found = score_window(Scorer(model, window, setting), ours, theirs, setting.documents)
        for method, rows in found.items():
            for place, row in enumerate(rows):
                sums[method][place].append(float(row.mean()))
        if progress is not None:
            progress((number + 1) / setting.windows, f"window {number + 1}")
    return make_report(setting, model, len(corpus.passages), sums)


def make_report(setting: LmSetting, model: Any, passages: int, sums: dict[str, list[list[float]]]) -> dict[str, Any]:
    """``sums``: by method, for each number of documents, the mean log p of each window."""
    draws = np.random.default_rng(0).integers(0, setting.windows, (_RESAMPLED, setting.windows))
    rows = []
    for method in METHODS:
        for place, count in enumerate(setting.documents):
            means = np.array(sums[method][place])
            ahead = means - np.array(sums[DRCG][place])
            rows.append(
                {
                    "method": method,
                    "documents": count,
                    "perplexity": math.exp(-means.mean()),
                    "log_p_above_drcg": float(ahead.mean()),
                    "log_p_above_drcg_standard_error": float(ahead[draws].mean(axis=1).std()),
                }
            )
    # In nats a token at the most documents, window by window.
    gained = {method: np.array(sums[method][-1]) - np.array(sums[NONE][-1]) for method in METHODS}
    second = max((CRCG, DRCG), key=lambda method: float(gained[method].mean()))
    return {
        **header("dragon-lm", _CODE, both=model),
        "corpus": SOURCE,
        "passages": passages,
        "model": model.name,
        **{name: getattr(setting, name) for name in ("windows", "window", "query", "passage", "context")},
        "rows": rows,
        "gains": {method: ratio(values) for method, values in gained.items()},
        # By the nats that retrieval saves: what the distributed mixture gains for what the best single prompt gains.
        "second": second,
        "gain_to_second": _times(gained[DRAGON][draws].mean(axis=1), gained[second][draws].mean(axis=1))
        | {"value": _over(gained[DRAGON].mean(), gained[second].mean()), "of": setting.windows},
        "reached": bool(gained[DRAGON].mean() >= max(gained[method].mean() for method in (CRCG, DRCG))),
    }


def _over(gain: float, other: float) -> float | None:
    return float(gain / other) if other > 0 else None


def _times(gains: np.ndarray, others: np.ndarray) -> dict[str, float | None]:
    """The 95 % interval of resampled ratios; where a resample gains nothing to compare with, "high" is None."""
    ratios = np.where(others > 0, gains / np.where(others > 0, others, 1.0), np.inf)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return {name: float(bound) if np.isfinite(bound) else None for name, bound in (("low", low), ("high", high))}


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    counts = sorted({row["documents"] for row in report["rows"]})
    rows = [["documents a side", *map(str, counts)]]
    rows += [[m, *(f"{row['perplexity']:.2f}" for row in report["rows"] if row["method"] == m)] for m in METHODS]
    last = next(row for row in report["rows"] if row["method"] == DRAGON and row["documents"] == counts[-1])
    return render_template("dragon/lm.txt", r=report, table="\n".join(table(rows)), last=last).rstrip("\n")


def draw_lm(report: dict[str, Any], path: Path) -> None:
    """Perplexity over the number of documents a side; PlotError, OSError."""
    canvas = new_figure(path, 5.6, 4.0)
    axes = canvas.subplots()
    for method, colour in zip(METHODS, (GREY, YELLOW, GREEN, BLUE), strict=True):
        rows = [row for row in report["rows"] if row["method"] == method]
        counts, values = [row["documents"] for row in rows], [row["perplexity"] for row in rows]
        axes.plot(counts, values, marker="o", markersize=4, color=colour, label=method)
    axes.set(xlabel="documents a side", ylabel="perplexity")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"{report['model']}, {report['windows']} windows of {report['window']} tokens", fontsize=9)
    canvas.savefig(path)
