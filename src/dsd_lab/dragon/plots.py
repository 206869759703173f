"""Figures of DRAGON's theory: its speed-up, its scheduling strategies, and one answer's two pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.dragon.simulator import Event
from dsd_lab.papers.dragon import SEQUENCE_WISE, STRATEGIES, TOKEN_WISE, Comparison, speedup
from dsd_lab.papers.theory import TheoryError

_ACCEPTANCES = (0.5, 0.8, 0.95)  # of the cloud's drafts
_SIDES = ("cloud", "device")  # rows of the pipeline, from above
_NAMES = {"auto": "auto", "delta-z": "$\\Delta Z$ (the paper's rule)"}


def _figure(**settings: Any) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib; pip install -r requirements/train.txt") from error
    return Figure(layout="constrained", **settings)


def _save(figure: Any, path: Path) -> None:
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise TheoryError(f"a plot cannot be written as {path}; name it *.png, *.svg or *.pdf")
    figure.savefig(path, dpi=110)


def draw_speedup(path: Path, c_device: float, c_cloud: float, rtt: float) -> None:
    """Equation 9 over the device's delay and the round trip, both in units of the cloud's delay (Figure 4).

    A star stands at the delays given, if they are within.
    """
    figure = _figure(figsize=(12, 4.4))
    axes = figure.subplots(1, len(_ACCEPTANCES), sharex=True, sharey=True)
    device, trips = np.linspace(0.01, 8, 161), np.linspace(0.0, 8, 161)
    meshes = []
    for ax, acceptance in zip(axes, _ACCEPTANCES, strict=True):
        found = np.array([[speedup(c, 1.0, trip, acceptance) for c in device] for trip in trips])
        meshes.append(ax.pcolormesh(device, trips, found, vmin=1, vmax=7, cmap="viridis", rasterized=True))
        lines = ax.contour(device, trips, found, levels=(1.2, 1.5, 2, 3, 5), colors="white")
        ax.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=9)
        ax.set_title(f"the cloud's drafts hold: {acceptance:.0%}")
        ax.set_xlabel("device's decoding step / cloud's")
        if c_cloud > 0 and max(c_device, rtt) <= 8 * c_cloud:
            ax.plot(c_device / c_cloud, rtt / c_cloud, "*", color="red", markersize=14)
    axes[0].set_ylabel("round trip / cloud's decoding step")
    figure.colorbar(meshes[0], ax=list(axes), label="speed-up over token-wise synchronisation")
    _save(figure, path)


def draw_scheduling(path: Path, found: Sequence[Comparison], title: str) -> None:
    """Seconds of an answer against the extra latency, by strategy (Figure 8), and beside the best side's."""
    figure = _figure(figsize=(12, 4.6))
    left, right = figure.subplots(1, 2)
    extras = [1e3 * one.extra for one in found]
    styles = dict(zip(STRATEGIES, ("o-", "s--", "^-", "v-", "x:"), strict=True))
    for strategy, style in styles.items():
        seconds = [one.seconds[strategy] for one in found]
        static = [min(one.seconds["device"], one.seconds["cloud"]) for one in found]
        label = _NAMES.get(strategy, strategy)
        left.plot(extras, seconds, style, label=label)
        if strategy in ("auto", "delta-z"):
            shares = [100 * (a / b - 1) for a, b in zip(seconds, static, strict=True)]
            right.plot(extras, shares, style, label=label, color=left.lines[-1].get_color())
    for baseline, colour in ((TOKEN_WISE, "0.3"), (SEQUENCE_WISE, "0.6")):
        left.plot(extras, [one.seconds[baseline] for one in found], "-.", color=colour, label=baseline)
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set_ylabel("longer (+) or shorter (-) than with the best fixed side, %")
    left.set_ylabel("seconds an answer")
    left.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set_xlabel("extra latency of the round trip, ms")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_pipeline(path: Path, events: Sequence[Event], title: str) -> None:
    """Both sides' decoding and what is under way, the round trip, delta Z and the acceptances (Figure 9)."""
    figure = _figure(figsize=(13, 8.5))
    pipeline, trip, score, rates = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1, 1, 1]})
    colours = {True: "tab:green", False: "tab:red"}
    fates = _fates(events)
    for number, event in enumerate(events):
        row = _SIDES.index(event.side)
        if event.kind == "drafted":
            fate = fates.get(number)
            colour = "0.75" if fate is None else colours[fate]
            pipeline.barh(
                -row, event.seconds - event.begun, left=event.begun, height=0.3, color=colour, edgecolor="white"
            )
            pipeline.text(
                (event.begun + event.seconds) / 2, -row, str(event.position), ha="center", va="center", fontsize=7
            )
        elif event.kind in ("draft arrives", "verdict arrives"):
            colour = "tab:blue" if event.kind == "draft arrives" else "black"
            if event.switch:
                colour = "tab:orange"
            width = 0.6 if event.kind == "draft arrives" else 1.3
            ends = (-1 + row + 0.17 * (1 - 2 * row), -row - 0.17 * (1 - 2 * row))
            pipeline.plot((event.begun, event.seconds), ends, color=colour, linewidth=width)
        elif event.kind == "aggregated":
            pipeline.plot(event.seconds, -row + 0.24 * (1 - 2 * row), "kv" if row == 0 else "k^")
    pipeline.set_yticks((0, -1), _SIDES)
    pipeline.set_ylim(-1.45, 0.45)
    pipeline.set_xlim(0, max(event.seconds for event in events) * 1.02)
    for colour, label in (
        ("tab:green", "decoding a draft that held"),
        ("tab:red", "rejected"),
        ("0.75", "dropped unseen"),
    ):
        pipeline.bar(0, 0, color=colour, label=label)
    for colour, label in (
        ("tab:blue", "draft under way"),
        ("black", "verdict"),
        ("tab:orange", "verdict that hands over"),
    ):
        pipeline.plot([], [], color=colour, label=label)
    pipeline.plot([], [], "kv", label="aggregated")
    pipeline.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    found = [event for event in events if event.kind == "aggregated"]
    times = [event.seconds for event in found]
    trip.plot(times, [1e3 * event.rtt for event in found], ".-")
    trip.set_ylabel("rtt, ms")
    score.plot(times, [1e3 * event.delta_z for event in found], ".-")
    score.axhline(0, color="0.4", linewidth=0.8)
    score.set_ylabel("$\\Delta Z$, ms")
    for side, name in enumerate(("device", "cloud")):
        rates.plot(times, [event.rates[side] for event in found], ".-", label=name)
    rates.set_ylabel("acceptance")
    rates.set_ylim(0, 1)
    rates.legend(fontsize=8)
    rates.set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _fates(events: Sequence[Event]) -> dict[int, bool]:
    """Whether the drafts that were looked at held, by the index of their event."""
    found: dict[int, bool] = {}
    latest: dict[tuple[str, int], int] = {}
    for number, event in enumerate(events):
        if event.kind == "drafted":
            latest[event.side, event.position] = number
        elif event.kind == "aggregated" and event.accepted is not None:
            for side, held in zip(("device", "cloud"), event.accepted, strict=True):
                found[latest[side, event.position]] = held
    return found
