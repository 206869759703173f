# SPDX-License-Identifier: Apache-2.0
"""Figures of the papers' formulas: FSD's and DRAGON's speed-ups, the proofs compared, DRAGON's pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.papers.acceptance import coupled_acceptance, coupled_bound, total_variation
from dsd_lab.papers.dragon_simulator import SEQUENCE_WISE, STRATEGIES, TOKEN_WISE, Comparison, Event, speedup
from dsd_lab.papers.proofs import predict_proof
from dsd_lab.papers.theory import SETUPS, fsd_speedup
from dsd_lab.plotting import new_figure

GAMMAS = (4, 7, 10)  # as in FSD's Figure 6
_BIG_MODELS = 0.3  # c that FSD expects of 66B targets with a draft on a Jetson
_MOST = 1.0  # the largest c drawn
_ACCEPTANCES = (0.5, 0.8, 0.95)  # of the cloud's drafts
_RATES = np.geomspace(1e5, 1e8, 121)  # bit/s
_COLOURS = {"full": "C3", "split": "C0", "truncated": "C1", "coupled": "C2"}


def speedups(gamma: int, steps: int = 201) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Miss rates (steps,), cost ratios c (steps,) and FSD's equation 9 over both, (steps of c, steps of r)."""
    r, c = np.linspace(0, 1, steps), np.linspace(0, _MOST, steps)
    return r, c, np.array([[fsd_speedup(gamma=gamma, c=row, r=column) for column in r] for row in c])


def draw_speedups(path: Path, c: float, r: float) -> None:
    """What pre-drafting gains (FSD equation 9), with a star at (``r``, ``c``) and dots for the paper's own systems."""
    from matplotlib.colors import LogNorm

    figure = new_figure(path, 12, 4.9)
    axes = figure.subplots(1, len(GAMMAS), sharex=True, sharey=True)
    norm = LogNorm(1, 1 + max(GAMMAS) * _MOST)
    for ax, gamma in zip(axes, GAMMAS, strict=True):
        rates, ratios, grid = speedups(gamma)
        mesh = _heat_map(ax, 100 * rates, ratios, grid, (1.1, 1.2, 1.5, 2.0, 5.0), norm=norm)
        label = "66B on a Jetson, expected" if ax is axes[0] else None
        ax.axhline(_BIG_MODELS, color="gold", linestyle="--", label=label)
        ax.set(title=f"$\\gamma$ = {gamma}", xlabel="miss rate r, %")
        if c <= _MOST:
            label = "the given setting" if ax is axes[0] else None
            ax.plot(100 * r, c, "*", color="red", markersize=18, label=label)
    jetsons = [setup for setup in SETUPS if setup.name.endswith(("Jetson", "Go2"))]
    for setup, marker in zip(jetsons, "os^D", strict=True):
        at = 100 * setup.r, setup.draft_round / 4 / setup.t_q
        axes[0].plot(*at, marker, color="white", markeredgecolor="black", label=setup.name)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, facecolor="0.8")
    axes[0].set_ylabel("$c = T_p / T_q$")
    bar = figure.colorbar(mesh, ax=list(axes), label="speed-up of FSD over SD, equation 9")
    ticks = [1, 1.5, 2, 3, 5, 10]
    bar.set_ticks(ticks, labels=[f"{tick:g}x" for tick in ticks], minor=False)
    bar.ax.minorticks_off()
    figure.savefig(path)


def _heat_map(ax: Any, x: np.ndarray, y: np.ndarray, grid: np.ndarray, levels: Sequence[float], **scale: Any) -> Any:
    mesh = ax.pcolormesh(x, y, grid, cmap="viridis", rasterized=True, **scale)
    lines = ax.contour(x, y, grid, levels=levels, colors="white")
    ax.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=9)
    return mesh


def draw_proofs(
    path: Path, ranges: Mapping[str, tuple[float, float]], setting: Mapping[str, Any], down_over_up: float
) -> None:
    """The proofs' speed-ups by uplink rate, and what shared randomness keeps of acceptance.

    ranges: proof -> least and most acceptance; setting: the other arguments of ``predict_proof``.
    """
    figure = new_figure(path, 12, 4.6)
    left, right = figure.subplots(1, 2)
    for proof, (least, most) in ranges.items():
        name = f"{proof} to {setting['kept']}" if proof == "truncated" else proof
        label = f"{name}, acceptance {least:.2f}" + (f" to {most:.2f}" if most > least else "")
        low, high = (
            [predict_proof(proof, alpha=at, rate_up=r, rate_down=down_over_up * r, **setting).speedup for r in _RATES]
            for at in (least, most)
        )
        left.semilogx(_RATES / 1e6, low, color=_COLOURS[proof], label=label)
        left.fill_between(_RATES / 1e6, low, high, color=_COLOURS[proof], alpha=0.15)
    left.axhline(1, color="0.4", linestyle=":", label="the target alone")
    link = f"uplink, Mbit/s; downlink {down_over_up:g} times that"
    left.set(xlabel=link, ylabel="speed-up over the target alone", ylim=(0, None))

    tv = np.linspace(0, 1, 101)
    right.plot(tv, 1 - tv, color="black", label="1 - TV, the optimum")
    bound = [coupled_bound(float(at)) for at in tv]
    right.plot(tv, bound, color="C2", linestyle="--", label="(1 - TV) / (1 + TV), the coupling's bound")
    right.plot(*_random_pairs(400), ".", color="C2", markersize=4, label="coupled, random pairs (exact)")
    right.set(xlabel="TV of draft and target", ylabel="acceptance", xlim=(0, 1), ylim=(0, 1))
    for axes in (left, right):
        axes.legend(fontsize=9)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _random_pairs(count: int, vocabulary: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """TV and exact coupled acceptance, (count,) each, of random softmax distributions near and far apart."""
    rng = np.random.default_rng(1)
    shared = rng.normal(size=(count, vocabulary)) * rng.uniform(0.3, 4, (count, 1))
    logits = shared + rng.normal(size=(2, count, vocabulary)) * rng.uniform(0, 3, (count, 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    p, q = weights / weights.sum(-1, keepdims=True)
    return total_variation(p, q), coupled_acceptance(p, q)


def draw_dragon_speedup(path: Path, c_device: float, c_cloud: float, rtt: float) -> None:
    """DRAGON's equation 9 over device's delay and round trip, in units of the cloud's delay (Figure 4), with a star."""
    figure = new_figure(path, 12, 4.4)
    axes = figure.subplots(1, len(_ACCEPTANCES), sharex=True, sharey=True)
    device, trips = np.linspace(0.01, 8, 161), np.linspace(0.0, 8, 161)
    for ax, acceptance in zip(axes, _ACCEPTANCES, strict=True):
        grid = np.array([[speedup(c, 1.0, trip, acceptance) for c in device] for trip in trips])
        mesh = _heat_map(ax, device, trips, grid, (1.2, 1.5, 2, 3, 5), vmin=1, vmax=7)
        ax.set(title=f"the cloud's acceptance: {acceptance:.0%}", xlabel="device's decoding step / cloud's")
        if c_cloud > 0 and max(c_device, rtt) <= 8 * c_cloud:
            ax.plot(c_device / c_cloud, rtt / c_cloud, "*", color="red", markersize=14)
    axes[0].set_ylabel("round trip / cloud's decoding step")
    figure.colorbar(mesh, ax=list(axes), label="speed-up over token-wise synchronisation")
    figure.savefig(path)


def draw_scheduling(path: Path, found: Sequence[Comparison], title: str) -> None:
    """Seconds of an answer over the extra latency, by strategy (Figure 8), and beside the best side's."""
    figure = new_figure(path, 12, 4.6)
    left, right = figure.subplots(1, 2)
    extras = [1e3 * one.extra for one in found]
    for strategy, style in zip(STRATEGIES, ("o-", "s--", "^-", "v-", "x:"), strict=True):
        seconds = [one.seconds[strategy] for one in found]
        label = "$\\Delta Z$ (the paper's rule)" if strategy == "delta-z" else strategy
        left.plot(extras, seconds, style, label=label)
        if strategy in ("auto", "delta-z"):
            shares = [100 * (one.over_best_side(strategy) - 1) for one in found]
            right.plot(extras, shares, style, label=label, color=left.lines[-1].get_color())
    for baseline, colour in ((TOKEN_WISE, "0.3"), (SEQUENCE_WISE, "0.6")):
        left.plot(extras, [one.seconds[baseline] for one in found], "-.", color=colour, label=baseline)
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set_ylabel("longer (+) or shorter (-) than with the best fixed side, %")
    left.set(ylabel="seconds an answer", ylim=(0, None))
    for ax in (left, right):
        ax.set_xlabel("extra latency of the round trip, ms")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def draw_pipeline(path: Path, events: Sequence[Event], title: str) -> None:
    """Both sides' decoding and what is under way, the round trip, delta Z and the acceptances (Figure 9)."""
    figure = new_figure(path, 13, 8.5)
    pipeline, trip, score, rates = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1, 1, 1]})
    _draw_lanes(pipeline, events)
    found = [event for event in events if event.kind == "aggregated"]
    times = [event.seconds for event in found]
    trip.plot(times, [1e3 * event.rtt for event in found], ".-")
    trip.set_ylabel("rtt, ms")
    score.plot(times, [1e3 * event.delta_z for event in found], ".-")
    score.axhline(0, color="0.4", linewidth=0.8)
    score.set_ylabel("$\\Delta Z$, ms")
    for side, name in enumerate(("device", "cloud")):
        rates.plot(times, [event.rates[side] for event in found], ".-", label=name)
    rates.set(ylabel="acceptance", ylim=(0, 1), xlabel="seconds")
    rates.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _draw_lanes(axes: Any, events: Sequence[Event]) -> None:
    """The cloud's lane above the device's: drafts as bars, transfers as lines between, aggregations as marks."""
    accepted = _accepted(events)
    colours = {True: "tab:green", False: "tab:red", None: "0.75"}
    for number, event in enumerate(events):
        lane = ("cloud", "device").index(event.side)
        inwards = 1 - 2 * lane
        if event.kind == "drafted":
            look = {"height": 0.3, "color": colours[accepted.get(number)], "edgecolor": "white"}
            axes.barh(-lane, event.seconds - event.begun, left=event.begun, **look)
            middle = (event.begun + event.seconds) / 2
            axes.text(middle, -lane, str(event.position), ha="center", va="center", fontsize=7)
        elif event.kind in ("draft arrives", "verdict arrives"):
            draft = event.kind == "draft arrives"
            colour = "tab:orange" if event.switch else "tab:blue" if draft else "black"
            ends = (-1 + lane + 0.17 * inwards, -lane - 0.17 * inwards)
            axes.plot((event.begun, event.seconds), ends, color=colour, linewidth=0.6 if draft else 1.3)
        elif event.kind == "aggregated":
            axes.plot(event.seconds, -lane + 0.24 * inwards, "kv" if lane == 0 else "k^")
    axes.set_yticks((0, -1), ("cloud", "device"))
    axes.set(ylim=(-1.45, 0.45), xlim=(0, max(event.seconds for event in events) * 1.02))
    for fate, label in ((True, "decoding an accepted draft"), (False, "rejected"), (None, "dropped unseen")):
        axes.bar(0, 0, color=colours[fate], label=label)
    for colour, label in (("tab:blue", "draft under way"), ("black", "verdict"), ("tab:orange", "verdict and switch")):
        axes.plot([], [], color=colour, label=label)
    axes.plot([], [], "kv", label="aggregated")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))


def _accepted(events: Sequence[Event]) -> dict[int, bool]:
    """Whether each draft that was verified was accepted, by the index of its event."""
    found: dict[int, bool] = {}
    latest: dict[tuple[str, int], int] = {}
    for number, event in enumerate(events):
        if event.kind == "drafted":
            latest[event.side, event.position] = number
        elif event.kind == "aggregated" and event.accepted is not None:
            for side, held in zip(("device", "cloud"), event.accepted, strict=True):
                found[latest[side, event.position]] = held
    return found
