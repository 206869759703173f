# SPDX-License-Identifier: Apache-2.0
"""What every bench is made of: flags, a function that measures rows, one table of them, and one plot.

A bench is a module with ``Flags`` (its command's flags), ``measure(flags, progress)`` (its report: a header as of
``report.header``, what was set, and ``rows``) and a ``BENCH`` that says how the rows are shown. Ctrl-C ends a loop over
``parts``, and the report has the rows that are done.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsd_lab.parts import kept_at_interruption, report_interruption
from dsd_lab.plotting import Curve, Panel, check_plot, draw_panels
from dsd_lab.report import BenchError, Row, cell, table
from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, model_path
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.settings import ModelSettings

Report = dict[str, Any]
Told = Callable[[float, str], object]  # the share that is done, and what was done last
Column = tuple[str, str, str]  # heading, key of a row ("a/b" for an entry of an entry), format
PROFILE = "one of config/profiles.yaml, or a JSON of bench gpu: its target's times"


def decode_flags() -> type:
    """Flags for every decode setting but the mode; None where not given."""
    hints = typing.get_type_hints(DecodeSettings)
    made = []
    for item in dataclasses.fields(DecodeSettings):
        if item.name == "mode":
            continue
        text = item.metadata["help"] + (f" (default: {item.default})" if item.default != "" else "")
        setting = dataclasses.field(default=None, metadata={**item.metadata, "help": text})
        made.append((item.name, hints[item.name] | None, setting))
    return dataclasses.make_dataclass("Decoding", made, frozen=True, namespace={"__module__": __name__})


Decoding: Any = decode_flags()


def given(settings: Any) -> dict[str, Any]:
    """What of ``Decoding`` was set."""
    return {name: value for name, value in vars(settings).items() if value is not None}


@arguments
class PairFlags:
    """A draft and a target, and where the report goes."""

    draft: str = model_option("draft")
    target: str = model_option("target")
    json: Path | None = json_option()

    @property
    def models(self) -> tuple[ModelSettings, ModelSettings]:
        """Draft and target, with one thread each: they share this machine, and their threads would wait for others."""
        paths = model_path(self.draft, "draft"), model_path(self.target, "target")
        return ModelSettings(paths[0], threads=1), ModelSettings(paths[1], threads=1)


@arguments
class HeldFlags(PairFlags):
    """The pair held to a profile's times."""

    profile: str = flag("go2-a100", PROFILE)
    time_scale: float = flag(
        1.0, "multiply every held time and delay by S while measuring, and divide what is reported by it", metavar="S"
    )


@dataclass(frozen=True)
class Bench:
    """How a bench is run and shown."""

    measure: Callable[[Any, Told], Report]
    columns: Callable[[Report], Sequence[Column]]
    notes: Callable[[Report], Sequence[str]] = lambda report: ()  # lines below the table
    panels: Callable[[Report], Sequence[Panel]] | None = None  # of its plot
    title: Callable[[Report], str] = lambda report: ""  # of its plot
    holds: str = ""  # an entry of the report; if it is False the command ends with 1
    left: int = 1  # columns that are flush left

    def run(self, flags: Any) -> int:
        """Measure, print the report, write it as JSON and draw it, as far as that was asked for; the exit code."""
        plot = getattr(flags, "plot", None)
        if plot is not None:
            check_plot(plot)
        with Progress() as bar, kept_at_interruption() as interrupted:
            report = self.measure(flags, bar.to)
        print(self.render(report))
        if interrupted.is_set():
            return report_interruption(report, flags.json)
        write_json(flags.json, report)
        if plot is not None:
            self.draw(report, plot)
        return EXIT_GOAL_MISSED if self.holds and report[self.holds] is False else EXIT_DONE

    def render(self, report: Report) -> str:
        """The rows as a table, the notes and the machine below it; columns that no row has are left out."""
        columns = [
            one for one in self.columns(report) if any(_entry(row, one[1]) is not None for row in report["rows"])
        ]
        rows = [[heading for heading, _, _ in columns]]
        rows += [[_text(_entry(row, key), form) for _, key, form in columns] for row in report["rows"]]
        return "\n".join([*table(rows, left=self.left), *filter(None, self.notes(report)), report["machine"]])

    def draw(self, report: Report, path: Path) -> None:
        """Draw the report into ``path``; BenchError, PlotError, OSError."""
        panels = self.panels(report) if self.panels is not None else ()
        if not panels:
            raise BenchError("there is nothing to draw: measure mode ar too, or one that drafts ahead")
        draw_panels(path, self.title(report), panels)


def curve(label: str, rows: Sequence[Row], x: str, y: str, times: float = 1.0) -> Curve:
    """``times`` an entry of each row over another one."""
    return Curve(label, [_entry(row, x) for row in rows], [times * _entry(row, y) for row in rows])


def _entry(row: Row, key: str) -> Any:
    value: Any = row
    for name in key.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text(value: Any, form: str) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return value if isinstance(value, str) else cell(value, form)
