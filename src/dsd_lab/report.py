# SPDX-License-Identifier: Apache-2.0
"""What every bench shares: a report's header, its tables, and the error for what cannot be measured."""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import importlib.metadata
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsd_ros.shown import machine

Row = dict[str, Any]
SOURCE = Path(__file__).resolve().parents[1]
CODE = ("dsd_ros/decoding", "dsd_ros/vlm", "dsd_ros/wire", "dsd_ros/edge", "dsd_ros/cloud")  # decodes a reply
CONFIDENCE = 0.95  # of every interval
_RESAMPLES = 2000
_MEASURED = ("src", "config", "launch", "models")  # changes elsewhere change no figure


class BenchError(ValueError):
    """A bench cannot measure what its settings ask for; one sentence."""


def check_range(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    """BenchError for a value outside ``low`` to ``high``, NaN included."""
    if not low <= value <= high:
        raise BenchError(f"{name} is {value:g}{unit}; use {low} to {high}{unit}")


def header(bench: str, /, code: Sequence[str] = CODE, **models: Any) -> dict[str, Any]:
    """What a report's figures were measured with, the first keys of every report.

    ``models``: by role, each a loaded model, or the path or fingerprint of one. ``code``: what is measured, as files or
    folders under src; ``code_digest`` of them tells whether a report is of the present code.
    """
    return {
        "bench": bench,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "tree": _git("rev-parse", "--short=12", "HEAD:src"),  # of src: kept where its commit is not, as after a rebase
        "dirty": bool(_git("status", "--porcelain", "--", *_MEASURED)),
        "code": {"of": list(code), "digest": code_digest(code)},
        "command": command_line(sys.argv),
        "machine": machine(),
        "torch": importlib.metadata.version("torch"),
        "models": {role: _described(model) for role, model in models.items()},
    }


def shipped(root: Path = SOURCE.parent) -> dict[str, str]:
    """The fingerprint of each model that ships, by name, and of each file of SmolLM2's draft."""
    from dsd_ros.vlm.adapters import ADAPTER_FILE
    from dsd_ros.vlm.loading import file_fingerprint, model_fingerprint

    homes = {path.parent for file in ("config.json", ADAPTER_FILE) for path in root.glob(f"models/*/{file}")}
    files = root.glob("models/draft-smollm2/**/*.safetensors")
    return {home.name: model_fingerprint(home) for home in sorted(homes)} | {f.name: file_fingerprint(f) for f in files}


def other_weights(report: Any, ships: dict[str, str]) -> str:
    """Why a report is not of the models that ship, as a clause; "" if it is. Models from elsewhere do not count."""
    if not isinstance(report, dict) or "models" not in report:
        return "does not say which models it measured"
    for role, model in report["models"].items():
        name = model["name"]
        if name in ships and model["fingerprint"] != ships[name]:
            return f"measured another {role} than the one that ships"
    return ""


def command_line(argv: Sequence[str]) -> str:
    """The command as it can be typed again: without the files that it writes, nor folders of this machine."""
    program = Path(argv[0]).name
    words = ["dsd-lab" if program in ("__main__.py", "-c") else program]  # python -m, and `make figures`
    given = iter(argv[1:])
    for word in given:
        flag, equals, value = word.partition("=")
        if flag in ("--json", "--plot", "--folder"):
            if not equals:
                next(given, None)
        elif equals and Path(value).is_absolute():
            words.append(f"{flag}={_relative(Path(value))}")
        else:
            words.append(_relative(Path(word)) if Path(word).is_absolute() else word)
    return shlex.join(words)


@functools.cache
def _source_digest(path: Path) -> str:
    """16 hex digits of a Python file, comments, docstrings and layout left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def code_digest(code: Sequence[str]) -> str:
    """16 hex digits of the Python code under these files and folders of src; docstrings do not count."""
    patterns = [name if name.endswith(".py") else f"{name}/**/*.py" for name in code]
    paths = sorted({path for pattern in patterns for path in SOURCE.glob(pattern)})
    lines = [f"{path.relative_to(SOURCE)} {_source_digest(path)}" for path in paths]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def share(values: Sequence[bool]) -> dict[str, Any]:
    """{"value", "low", "high", "of"} of a share (E. B. Wilson, 1927); the value of nothing is None."""
    from scipy.stats import binomtest

    hits, of = sum(map(bool, values)), len(values)
    if of == 0:
        return {"value": None, "low": 0.0, "high": 1.0, "of": 0}
    low, high = binomtest(hits, of).proportion_ci(CONFIDENCE, method="wilson")
    return {"value": hits / of, "low": float(low), "high": float(high), "of": of}


def ratio(tops: Sequence[float], bottoms: Sequence[float] | None = None) -> dict[str, Any]:
    """The same of a mean, or of sum(tops) / sum(bottoms): 2000 seeded resamples of the pairs (B. Efron, 1979)."""
    import numpy as np

    if len(tops) == 0:
        return {"value": None, "low": None, "high": None, "of": 0}
    above = np.asarray(tops, dtype=np.float64)
    below = np.ones(len(above)) if bottoms is None else np.asarray(bottoms, dtype=np.float64)
    rng = np.random.default_rng([0, 80])
    rows = (rng.integers(len(above), size=len(above)) for _ in range(_RESAMPLES))
    found = [above[some].sum() / max(below[some].sum(), 1e-12) for some in rows]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    value = above.sum() / max(below.sum(), 1e-12)
    return {"value": float(value), "low": float(low), "high": float(high), "of": len(tops)}


def geometric(ratios: Sequence[float]) -> dict[str, Any]:
    """The same of a geometric mean of positive numbers, such as speed-ups picture by picture."""
    found = ratio([math.log(one) for one in ratios])
    return {key: math.exp(found[key]) if key != "of" and found[key] is not None else found[key] for key in found}


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines with aligned columns, the first ``left`` columns flush left; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def render_template(name: str, **values: Any) -> str:
    """A text file of this package, a Jinja template such as "pair/card.md", filled in."""
    from jinja2 import Environment, FileSystemLoader

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)  # noqa: S701  # Markdown
    return environment.get_template(name).render(verdict=verdict, **values)


def verdict(bar: dict[str, Any]) -> str:
    """Whether a figure meets its bar, unless the bar lies within the figure's interval (its "low" and "high")."""
    limits = [bar[name] for name in ("below", "at_least", "at_most") if bar[name] is not None]
    if bar["low"] is not None and any(bar["low"] < limit < bar["high"] for limit in limits):
        return "too few runs to say"
    return {None: "not measured", True: "met", False: "missed"}[bar["met"]]


def cell(value: float | None, form: str) -> str:
    """A figure as text; "-" where there is none."""
    return "-" if value is None else format(value, form)


def rounded(value: float) -> float:
    """Six significant digits. ValueError for infinities and NaNs, which JSON cannot hold."""
    if not math.isfinite(value):
        raise ValueError(f"a figure came out as {value}; the run cannot be reported")
    return float(f"{value:.6g}")


def median(values: Sequence[float]) -> float | None:
    """The median to three decimals; None for no values."""
    return round(statistics.median(values), 3) if values else None


def _git(*words: str) -> str:
    """What git says of the source tree; "" outside a checkout."""
    try:
        command = ["git", "-C", str(SOURCE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _relative(path: Path) -> str:
    """A path within the checkout, or only the name of one elsewhere."""
    root = SOURCE.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def _described(model: Any) -> dict[str, str]:
    """{"name", "fingerprint"} of a loaded model, a model's folder or file, or a bare fingerprint."""
    from dsd_ros.vlm.loading import file_fingerprint, model_fingerprint

    if not isinstance(model, (str, Path)):
        return {"name": Path(model.name).name, "fingerprint": model.fingerprint}
    path = Path(model)
    if path.is_dir():
        return {"name": path.resolve().name, "fingerprint": model_fingerprint(path)}
    if path.is_file():
        return {"name": path.name, "fingerprint": file_fingerprint(path)}
    return {"name": "", "fingerprint": str(model)}
