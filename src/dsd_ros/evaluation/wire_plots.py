"""Plots of `dsd bench wire`: kept mass and acceptance by K, and seconds by uplink rate.

After Figures 3, 4 and 6 of "Fast Collaborative Inference via Distributed Speculative Decoding" (TSLT).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsd_ros.evaluation.modes_plots import check_plot
from dsd_ros.evaluation.wire_report import ALONE

_COLOURS = {
    ALONE: "#4a4a4a",
    "full": "#c8553d",
    "split": "#1f5fa8",
    "truncated": "#b58900",
    "coupled": "#3b8f5a",
}
_DASHES = {"full": "-", "split": "--", "coupled": "-."}  # full and split often lie on one line
_LINES = ("-", "--", "-.", ":")
_NAMES = {ALONE: "the target alone (ar)"}


def draw_wire(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``evaluation.wire_report`` into ``path``; BenchError, OSError."""
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    canvas = Figure(figsize=(14.0, 4.3), layout="constrained", dpi=130)
    mass, accepted, seconds = canvas.subplots(1, 3)
    curve = report["kept_curve"]
    ks = [point["kept"] for point in curve]
    mass.semilogx(ks, [point["mass"] for point in curve], color=_COLOURS["truncated"])
    mass.set(ylabel="mass of the draft's distribution that is kept")

    label = "truncated, 1 - TV of q_hat"
    accepted.semilogx(
        ks, [point["acceptance"] for point in curve], color=_COLOURS["truncated"], label=label
    )
    truncated = [row for row in report["rows"] if row["proof"] == "truncated"]
    if truncated:
        xs = [row["settings"]["top_k_proof"] for row in truncated]
        look = {"color": _COLOURS["truncated"], "linestyle": "none"}
        accepted.plot(
            xs, [row["position_acceptance"] for row in truncated], marker="o", label="truncated, measured", **look
        )  # fmt: skip
        accepted.plot(
            xs, [row["acceptance"] for row in truncated], marker="x", label="truncated, of all drafted", **look
        )  # fmt: skip
    for row in report["rows"]:
        if row["proof"] in ("full", "split", "coupled"):
            accepted.axhline(
                row["position_acceptance"],
                color=_COLOURS[row["proof"]],
                linestyle=_DASHES[row["proof"]],
                linewidth=1.2,
                label=f"{row['proof']}, measured",
            )
    accepted.set(ylabel="acceptance of a position")
    for axes in (mass, accepted):
        low = axes.get_ylim()[0]
        axes.set_ylim(max(0.0, low - 0.1 * (1.0 - low)), 1.01)
        axes.set_xlabel(f"K, ids kept of {report['vocabulary']}")

    counts: dict[str, int] = {}
    for row in report["rows"]:
        proof = row["proof"]
        number = counts[proof] = counts.get(proof, -1) + 1
        seconds.loglog(
            report["uplinks_mbps"],
            list(row["seconds_per_reply"].values()),
            color=_COLOURS[proof],
            linestyle=":" if proof == ALONE else _LINES[number % len(_LINES)],
            marker="o",
            markersize=4,
            label=_NAMES.get(proof, row["label"]),
        )
    down = report["downlink_mbps"]
    seconds.set(
        xlabel=f"uplink, Mbit/s ({'downlink the same' if down is None else f'downlink {down:g}'}, "
        f"{report['delay_ms']:g} ms one way)",
        ylabel="seconds per reply, picture included",
    )
    seconds.set_xticks(report["uplinks_mbps"], [f"{rate:g}" for rate in report["uplinks_mbps"]])
    seconds.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    seconds.yaxis.set_major_formatter("{x:g}")
    seconds.yaxis.set_minor_formatter("")
    for axes in (mass, accepted, seconds):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (accepted, seconds):
        axes.legend(frameon=False, fontsize=8)
    canvas.suptitle(
        f"temperature {report['temperature']:g}, {report['draft_length']} tokens drafted a round, "
        f"{report['images']} pictures",
        fontsize=10,
    )
    canvas.savefig(path)
