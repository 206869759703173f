"""Plots of `dsd-lab bench wire`: kept mass and acceptance by K, and speed-up by uplink rate.

After Figures 3 to 6 of "Fast Collaborative Inference via Distributed Speculative Decoding" (TSLT).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsd_lab.bench.modes_plots import check_plot
from dsd_lab.bench.wire_report import ALONE, models_speed

_COLOURS = {"full": "#c8553d", "split": "#1f5fa8", "truncated": "#b58900", "coupled": "#3b8f5a"}
_LINES = ("-", "--", "-.", ":")
_MARKS = ("o", "s", "^", "D", "v", "P")


def draw_wire(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``evaluation.wire_report`` into ``path``; BenchError, OSError."""
    check_plot(path)
    from matplotlib.figure import Figure

    drafted = [row for row in report["rows"] if row["proof"] != ALONE]
    sequences = [row for row in drafted if not _is_tree(row)]
    trees = [row for row in drafted if _is_tree(row)]
    shown = [rows for rows in (sequences, trees) if rows]
    size = (10.5, 8.2) if len(shown) == 2 else (14.0, 4.3)
    canvas = Figure(figsize=size, layout="constrained", dpi=130)
    panels = canvas.subplots(2, 2).flat if len(shown) == 2 else canvas.subplots(1, 3)
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
    for axes in (mass, accepted, *speeds):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (accepted, *speeds):
        axes.legend(frameon=False, fontsize=7)
    things = "instructions" if report["model"] == "text" else "pictures"
    canvas.suptitle(
        f"temperature {report['temperature']:g}, {report['draft_length']} tokens drafted a round where no more "
        f"is said, {report['images']} {things}; {models_speed(report)}",
        fontsize=10,
    )
    canvas.savefig(path)


def _draw_acceptance(
    axes: Any, report: dict[str, Any], sequences: list[dict[str, Any]], trees: list[dict[str, Any]]
) -> None:
    """By the distributions as curves, as measured as marks; of other proofs as lines across."""
    curve, colour = report["kept_curve"], _COLOURS["truncated"]
    ks = [point["kept"] for point in curve]
    pairs = [row for row in trees if _is_pair(row)]
    axes.semilogx(ks, [point["acceptance"] for point in curve], color=colour, label="truncated, 1 - TV")
    if pairs:
        theta = [point["tree_acceptance"] for point in curve]
        axes.semilogx(ks, theta, color=colour, linestyle="--", label="truncated, a level of two candidates")
    for rows, mark, name in ((sequences, "o", "sequence"), (pairs, "s", "tree of twos")):
        found = [row for row in rows if row["proof"] == "truncated"]
        if found:
            axes.plot(
                [row["settings"]["top_k_proof"] for row in found],
                [row["position_acceptance"] for row in found],
                color=colour,
                linestyle="none",
                marker=mark,
                label=f"truncated, {name}, measured",
            )
        for proof in ("full", "coupled"):
            for row in [row for row in rows if row["proof"] == proof][:1]:
                axes.axhline(
                    row["position_acceptance"],
                    color=_COLOURS[proof],
                    linestyle="-" if mark == "o" else "--",
                    linewidth=1.2,
                    label=f"{row['label']}, measured",
                )
    axes.set(ylabel="acceptance of a position, or of a tree's level")


def _draw_speed_up(axes: Any, report: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    counts: dict[str, int] = {}
    for row in rows:
        proof = row["proof"]
        number = counts[proof] = counts.get(proof, -1) + 1
        axes.semilogx(
            report["uplinks_mbps"],
            _speed_ups(row, report),
            color=_COLOURS[proof],
            linestyle=_LINES[number % len(_LINES)],
            marker=_MARKS[number % len(_MARKS)],
            markersize=4,
            label=row["label"],
        )
    axes.axhline(1.0, color="#4a4a4a", linewidth=1.0)
    down = report["downlink_mbps"]
    axes.set(
        xlabel=f"uplink, Mbit/s ({'downlink the same' if down is None else f'downlink {down:g}'}, "
        f"{report['delay_ms']:g} ms one way)",
        ylabel="speed-up over the target alone",
    )
    axes.set_xticks(report["uplinks_mbps"], [f"{rate:g}" for rate in report["uplinks_mbps"]])


def _speed_ups(row: dict[str, Any], report: dict[str, Any]) -> list[float]:
    (alone,) = (other for other in report["rows"] if other["proof"] == ALONE)
    base = alone["seconds_per_token"]  # sampled replies are not of one length
    return [base[rate] / seconds for rate, seconds in row["seconds_per_token"].items()]


def _is_tree(row: dict[str, Any]) -> bool:
    return bool(row["settings"]["shape"] != "sequence")


def _is_pair(row: dict[str, Any]) -> bool:
    """Whether every node has two children."""
    return set(row["settings"].get("tree_expansion", "").split(",")) == {"2"}
