# SPDX-License-Identifier: Apache-2.0
"""The blocks of the pages that show measured figures, each filled in from reports by a template of ``blocks/``.

    <!-- figures: NAME -->
    what blocks/NAME.md gives
    <!-- /figures -->

Within a line the markers stand in that line; the first must not begin it, or Markdown reads the line as HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from dsd_lab.pair.report import pair_page
from dsd_lab.report import SOURCE, BenchError, share

ROOT = SOURCE.parent
BLOCKS = Path(__file__).parent / "blocks"
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->)(\n?)(.*?)(<!-- /figures -->)", re.DOTALL)


def report_path(name: str, root: Path = ROOT) -> Path:
    """The file of the report of that name."""
    return root / "benchmarks" / f"{name}.json"


@dataclass
class Pages:
    """The pages of a checkout, and what their blocks should hold."""

    root: Path = ROOT
    used: dict[str, set[str]] = field(default_factory=dict)  # block -> its reports, of those rendered so far

    def paths(self) -> list[Path]:
        """Every page that may show figures."""
        return [
            self.root / "README.md",
            *sorted(self.root.glob("benchmarks/*.md")),
            *sorted(self.root.glob("docs/*.md")),
        ]

    def blocks(self) -> Iterator[tuple[Path, str]]:
        """Each page with each name of a block in it."""
        for path in self.paths():
            yield from ((path, found[2]) for found in _BLOCK.finditer(path.read_text(encoding="utf-8")))

    def rendered(self, name: str) -> str:
        """What the block ``name`` should hold; BenchError, naming the block and what is missing.

        A block of a report that is still to be measured says so.
        """
        reports = self.used.setdefault(name, set())

        from dsd_lab.figures.runs import load_runs  # which imports this module

        def report(wanted: str) -> Any:
            reports.add(wanted)
            return json.loads(report_path(wanted, self.root).read_text(encoding="utf-8"))

        def is_measured(wanted: str) -> bool:
            reports.add(wanted)
            return report_path(wanted, self.root).is_file()

        try:
            text = _environment(report, is_measured).get_template(f"{name}.md").render()
        except FileNotFoundError as error:
            missing = Path(error.filename)
            if missing.stem in load_runs():
                return "Not measured with the present code yet."
            raise BenchError(f"block {name} shows {missing.name}, which is not there; run `make figures`") from None
        except (TemplateError, TypeError, KeyError) as error:
            raise BenchError(f"block {name} cannot be filled in from {', '.join(reports)}: {error!r}") from error
        return "\n".join(line.rstrip() for line in text.strip().splitlines())

    def filled(self, path: Path) -> str:
        """The page's text with every block filled in."""
        return _BLOCK.sub(self._fill, path.read_text(encoding="utf-8"))

    def _fill(self, found: re.Match[str]) -> str:
        text = self.rendered(found[2])
        return f"{found[1]}\n{text}\n{found[5]}" if found[3] else f"{found[1]}{text}{found[5]}"

    def different(self) -> list[Path]:
        """Pages whose blocks are not what the reports give."""
        return [path for path in self.paths() if path.read_text(encoding="utf-8") != self.filled(path)]

    def write(self) -> list[Path]:
        """Fill in every block; the pages that changed."""
        changed = self.different()
        for path in changed:
            path.write_text(self.filled(path), encoding="utf-8")
        return changed


def _environment(report: Callable[[str], Any], is_measured: Callable[[str], bool]) -> Environment:
    from dsd_lab.figures.runs import load_runs, minutes_of  # which imports this module

    runs = list(load_runs().values())
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(BLOCKS), **options)  # noqa: S701  # Markdown
    environment.globals |= {"report": report, "pair_page": pair_page, "runs": runs, "planned": minutes_of(runs)}
    environment.globals["is_measured"] = is_measured
    environment.filters |= {
        "interval": interval, "num": number, "percent": partial(number, form=".1%"), "rows": _by_label,
        "of_questions": of_questions,
    }  # fmt: skip
    return environment


def number(value: float | None, form: str = ".2f") -> str:
    """A figure as text, shares as "12.3 %", thousands with a space; empty where there is none."""
    if value is None:
        return ""
    return format(value, form.replace("_", ",")).replace(",", " ").replace("%", " %")


def interval(figure: dict[str, Any], form: str = ".2f") -> str:
    """``1.08 [1.02, 1.15]`` of {"value", "low", "high"}; only the value where there are no bounds, or one reply."""
    value, low, high = (figure.get(key) for key in ("value", "low", "high"))
    if value is None or low is None or high is None or figure.get("of") == 1:
        return number(value, form)
    bounds = ", ".join(number(bound, form).removesuffix(" %") for bound in (low, high))
    return f"{number(value, form)} [{bounds}]"


def of_questions(row: dict[str, Any], verdict: str) -> str:
    """``81 % [57, 93]`` of {"questions", verdict: a share of them}."""
    hits = round(row[verdict] * row["questions"])
    return interval(share([place < hits for place in range(row["questions"])]), ".0%")


def _by_label(report: dict[str, Any], key: str = "label") -> dict[str, Any]:
    """A report's rows by their label."""
    return {row[key]: row for row in report["rows"]}
