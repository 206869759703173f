"""Plots of `dsd-lab bench wire`: kept mass and acceptance by K, and speed-up by uplink rate.

After Figures 3 to 6 of "Fast Collaborative Inference via Distributed Speculative Decoding" (TSLT).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dsd_lab.bench.wire_report import models_speed
from dsd_lab.bench.wire_setting import ALONE
from dsd_lab.plotting import BLUE, GREEN, RED, YELLOW, new_figure, tidy
from dsd_lab.report import Row

_COLOURS = {"full": RED, "split": BLUE, "truncated": YELLOW, "coupled": GREEN}
_LINES = ("-", "--", "-.", ":")
_MARKS = ("o", "s", "^", "D", "v", "P")


def draw_wire(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``wire_report`` into ``path``; PlotError, OSError."""
    drafted = [row for row in report["rows"] if row["proof"] != ALONE]
    sequences = [row for row in drafted if row["settings"]["shape"] == "sequence"]
    trees = [row for row in drafted if row["settings"]["shape"] != "sequence"]
    shown = [rows for rows in (sequences, trees) if rows]
    canvas = new_figure(path, *((10.5, 8.2) if len(shown) == 2 else (14.0, 4.3)))
    panels = list(canvas.subplots(*((2, 2) if len(shown) == 2 else (1, 3))).flat)
    mass, accepted, *speeds = panels
    curve = report["kept_curve"]
    mass.semilogx([point["kept"] for point in curve], [point["mass"] for point in curve], color=_COLOURS["truncated"])
    mass.set(ylabel="mass of the draft's distribution that is kept")
    _draw_acceptance(accepted, report, sequences, trees)
    for axes in (mass, accepted):
        low = axes.get_ylim()[0]
        axes.set_ylim(max(0.0, low - 0.1 * (1.0 - low)), 1.01)
        axes.set_xlabel(f"K, ids kept of {report['vocabulary']}")
    top = 1.08 * max(max(_speed_ups(row, report)) for row in drafted)
    for axes, rows in zip(speeds, shown, strict=True):
        _draw_speed_up(axes, report, rows)
        axes.set_ylim(0.0, max(top, 1.08))
    tidy(*panels)
    for axes in (accepted, *speeds):
        axes.legend(frameon=False, fontsize=7)
    things = "instructions" if report["model"] == "text" else "pictures"
    canvas.suptitle(
        f"temperature {report['temperature']:g}, {report['draft_length']} tokens drafted a round unless a label says "
        f"otherwise, {report['images']} {things}; {models_speed(report)}",
        fontsize=10,
    )
    canvas.savefig(path)


def _draw_acceptance(axes: Any, report: dict[str, Any], sequences: list[Row], trees: list[Row]) -> None:
    """Curves by the distributions, marks as measured; horizontal lines for the other proofs."""
    curve, colour = report["kept_curve"], _COLOURS["truncated"]
    ks = [point["kept"] for point in curve]
    pairs = [row for row in trees if set(row["settings"].get("tree_expansion", "").split(",")) == {"2"}]
    axes.semilogx(ks, [point["acceptance"] for point in curve], color=colour, label="truncated, 1 - TV")
    if pairs:
        theta = [point["tree_acceptance"] for point in curve]
        axes.semilogx(ks, theta, color=colour, linestyle="--", label="truncated, a level of two candidates")
    for rows, mark, line, name in ((sequences, "o", "-", "sequence"), (pairs, "s", "--", "tree of twos")):
        found = [row for row in rows if row["proof"] == "truncated"]
        if found:
            kept = [row["settings"]["top_k_proof"] for row in found]
            measured, label = [row["position_acceptance"] for row in found], f"truncated, {name}, measured"
            axes.plot(kept, measured, color=colour, linestyle="none", marker=mark, label=label)
        for proof in ("full", "coupled"):
            for row in [row for row in rows if row["proof"] == proof][:1]:
                look = {"color": _COLOURS[proof], "linestyle": line, "linewidth": 1.2}
                axes.axhline(row["position_acceptance"], label=f"{row['label']}, measured", **look)
    axes.set(ylabel="acceptance of a position, or of a tree's level")


def _draw_speed_up(axes: Any, report: dict[str, Any], rows: list[Row]) -> None:
    counts: Counter[str] = Counter()
    rates, down = report["uplinks_mbps"], report["downlink_mbps"]
    for row in rows:
        number = counts[row["proof"]]
        counts[row["proof"]] += 1
        line, mark = _LINES[number % len(_LINES)], _MARKS[number % len(_MARKS)]
        look = {"color": _COLOURS[row["proof"]], "linestyle": line, "marker": mark, "markersize": 4}
        axes.semilogx(rates, _speed_ups(row, report), label=row["label"], **look)
    axes.axhline(1.0, color="#4a4a4a", linewidth=1.0)
    below = "downlink the same" if down is None else f"downlink {down:g}"
    axes.set_xlabel(f"uplink, Mbit/s ({below}, {report['delay_ms']:g} ms one way)")
    axes.set_ylabel("speed-up over the target alone")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])


def _speed_ups(row: Row, report: dict[str, Any]) -> list[float]:
    (alone,) = (other for other in report["rows"] if other["proof"] == ALONE)
    base = alone["seconds_per_token"]  # sampled replies are not of one length
    return [base[rate] / seconds for rate, seconds in row["seconds_per_token"].items()]
