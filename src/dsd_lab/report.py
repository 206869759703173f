# SPDX-License-Identifier: Apache-2.0
"""What every bench shares: a report's header, its tables, and the error for what cannot be measured."""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class BenchError(ValueError):
    """A bench cannot measure what its settings ask for; one sentence."""


def check_range(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    """BenchError for a value outside ``low`` to ``high``, NaN included."""
    if not low <= value <= high:
        raise BenchError(f"{name} is {value:g}{unit}; use {low} to {high}{unit}")


def header(bench: str, **models: Any) -> dict[str, Any]:
    """What a report's figures were measured with; ``models`` by role, each a loaded model or its path."""
    return {
        "bench": bench,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "dsd-lab"), *sys.argv[1:]]),
        "machine": machine() + (f", torch {sys.modules['torch'].__version__}" if "torch" in sys.modules else ""),
        "models": {role: _fingerprint(model) for role, model in models.items()},
    }


def machine() -> str:
    """This machine in words: processor, cores, system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = found.group(1) if found else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"


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


def print_table(rows: Sequence[Sequence[str]]) -> None:
    print("\n".join(table(rows)))


def render_template(name: str, **values: Any) -> str:
    """A text file of this package, a Jinja template such as "pair/card.md", filled in."""
    from jinja2 import Environment, FileSystemLoader

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), **options)  # noqa: S701  # Markdown
    return environment.get_template(name).render(values)


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


def _commit() -> str:
    """The commit of the source tree, with "-dirty" after changes; "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _fingerprint(model: Any) -> str:
    if not isinstance(model, (str, Path)):
        return str(model.fingerprint)
    from dsd_ros.vlm.loading import model_fingerprint

    return model_fingerprint(Path(model)) if Path(model).is_dir() else str(model)
