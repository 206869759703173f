# SPDX-License-Identifier: Apache-2.0
"""Summarize a recorded run: text, tables of steps and of passes or rounds, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from dsd_ros.decoding.modes import unit_of
from dsd_ros.edge.results import SpeculativeDecoding
from dsd_ros.observe.bag.run import Run
from dsd_ros.observe.view.figures import percent
from dsd_ros.shown import counted


def summary(run: Run) -> dict[str, Any]:
    """The run as plain values, in seconds, metres and bytes."""
    stats = [step.stats for step in run.steps]
    tokens, rounds = sum(s["tokens"] for s in stats), sum(s["rounds"] for s in stats)
    compared = [s for s in stats if s["sooner"]]
    compared_seconds = sum(s["seconds"] for s in compared)
    drafts = [r for step in run.steps for r in step.rounds[1:] if r.get("drafted")]
    missed = sum(not r.get("ready") for r in drafts)
    predrafts = any(s.get("exits") or s.get("predrafts_used") for s in stats)
    return {
        "bag": str(run.bag.path),
        "recorded": datetime.fromtimestamp(run.began * 1e-9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "seeds": {
            what: run.parameters_of(node)[name]
            for what, node, name in (("world", "simulator_node", "seed"), ("sampling", "draft_node", "decode.seed"))
            if name in run.parameters_of(node)
        },
        "notes": run.bag.notes,
        "whole": run.bag.whole,
        "seconds": round(run.seconds, 3),
        "messages": sum(run.bag.counts.values()),
        "instructions": _unique(step.instruction for step in run.steps),
        "modes": _unique(s["mode"] for s in stats),
        "transports": _unique(s["transport"] for s in stats),
        "targets": _unique(v.target_name for v in run.verifiers if v.target_name),
        "steps": len(run.steps),
        "parsed": sum(bool(step.action) for step in run.steps),
        "tokens": tokens,
        "rounds": rounds,
        "tau": round(tokens / rounds, 3) if rounds else 0.0,
        "draft_share": round(sum(s["draft_share"] * s["tokens"] for s in stats) / max(1, tokens), 4),
        "sooner_estimate": round(sum(s["sooner"] * s["seconds"] for s in compared) / compared_seconds, 3)
        if compared_seconds
        else None,
        "speculative_decoding": _drafts_of(stats),
        "miss_rate": round(missed / len(drafts), 4) if drafts and predrafts else None,
        "reply_seconds": round(_mean(s["seconds"] for s in stats), 4),
        "seconds_per_action": round(_mean(_gaps(run)), 3),
        "bytes_up": sum(s["bytes_up"] for s in stats),
        "bytes_down": sum(s["bytes_down"] for s in stats),
        "sessions": sum(not v.error for v in run.verifiers),
        "refusals": [{"at": _since(run, at), "code": c, "sentence": s} for at, c, s in run.refusals],
        "stops": [
            {"causes": stop.causes, "sentences": stop.sentences}
            | {"at": _since(run, stop.began), "seconds": round((stop.ended - stop.began) * 1e-9, 3)}
            for stop in run.stops
        ],
        "distance_m": round(sum(math.dist(a[1:3], b[1:3]) for a, b in pairwise(run.path)), 3),
        "ends": [{"at": _since(run, at), "outcome": what} for at, what in run.ends],
        "versions": run.versions,
        "topics": dict(sorted(run.bag.counts.items())),
    }  # fmt: skip


def _drafts_of(stats: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How the drafts of all replies did, without a list by steps; None where the bag does not say."""
    drafts = [found for s in stats if (found := s.get("speculative_decoding"))]
    drafted, accepted = ([n for d in drafts for n in d[f"per_step_{name}"]] for name in ("drafted", "accepted"))
    # A damaged bag's lists may differ in length.
    steps = list(zip(drafted, accepted, strict=False))
    most = max((len(d["acceptance_histogram"]) - 1 for d in drafts), default=0)
    total = SpeculativeDecoding.of([d for d, _ in steps], [a for _, a in steps], most)
    return {k: v for k, v in asdict(total).items() if not k.startswith("per_step")} if total is not None else None


def unit_of_run(run: Run) -> str:
    """What the run's replies are counted in: "pass" or "round"."""
    return unit_of(run.steps[-1].stats["mode"] if run.steps else "")


def gained(s: Mapping[str, Any], unit: str) -> str:
    """Tokens, passes or rounds, and what drafts gave, of a run or a reply."""
    text = f"{s['tokens']} tokens in {counted(s['rounds'], unit)}, "
    text += f"tau {s['tau']:.2f}, " if unit == "round" else ""
    return f"{text}{percent(s['draft_share'])} from drafts"


def summary_lines(run: Run) -> list[str]:
    """The summary as text."""
    s = summary(run)
    miss = "" if s["miss_rate"] is None else f", miss rate {100 * s['miss_rate']:.1f} %"
    sooner = (
        ""
        if s["sooner_estimate"] is None
        else f" (about {s['sooner_estimate']:.1f} times as fast as the target alone, an estimate)"
    )
    lines = [
        f"{s['bag']}: {s['seconds']:.1f} s, {s['messages']} messages on {len(s['topics'])} topics",
        f"recorded {s['recorded']} by dsd_ros {s['versions'].get('dsd_ros', 'of an unknown version')} on "
        f"{s['versions'].get('machine', 'an unknown machine')}"
        + "".join(f", seed of the {what} {seed}" for what, seed in s["seeds"].items()),
        *(f"note: {note}" for note in s["notes"]),
        f"instruction: {'; '.join(s['instructions']) or 'none'}",
        f"mode {', '.join(s['modes']) or 'unknown'} over {', '.join(s['transports']) or 'nothing'}, "
        f"target {', '.join(s['targets']) or 'unknown'}, {counted(s['sessions'], 'session')}",
        f"{s['steps']} replies, {gained(s, unit_of_run(run))}{miss}; {s['parsed']} end in an action",
        f"{s['reply_seconds']:.3f} s a reply{sooner}, {s['seconds_per_action']:.2f} s an action, "
        f"{_bytes(s['bytes_up'])} up, {_bytes(s['bytes_down'])} down, {s['distance_m']:.2f} m walked",
    ]
    lines += [f"{e['at']:8.2f} s  refused: {e['code']}: {e['sentence']}" for e in s["refusals"]]
    replied = _since(run, run.steps[0].at) if run.steps else 0.0
    for number, e in enumerate(s["stops"]):
        held = "held" if number or e["at"] + e["seconds"] > replied else "starting"
        lines.append(
            f"{e['at']:8.2f} s  {held} for {e['seconds']:.2f} s: {', '.join(e['causes'])}: {' '.join(e['sentences'])}"
        )
    lines += [f"{e['at']:8.2f} s  {e['outcome']}" for e in s["ends"]]
    return lines


def step_lines(run: Run) -> list[str]:
    """One line per reply."""
    units = counted(2, unit_of_run(run)).removeprefix("2 ")
    lines = [f"{'step':>4}  {'at':>7}  {'action':<22} tokens {units} drafts  seconds      up    down  reply"]
    for step in run.steps:
        s = step.stats
        lines.append(
            f"{step.number:4}  {_since(run, step.at):6.2f}s  {step.action or '-':<22} {s['tokens']:6} "
            f"{s['rounds']:6} {percent(s['draft_share']):>6}  {s['seconds']:7.3f} {_bytes(s['bytes_up']):>7} "
            f"{_bytes(s['bytes_down']):>7}  {step.text.partition('Action:')[0].strip()}"
        )
    return lines


def round_lines(run: Run) -> list[str]:
    """One line per pass or round; durations in ms."""
    rounds = [(step.number, found) for step in run.steps for found in step.rounds]
    table = aligned(table_of((found for _, found in rounds), unit_of_run(run)))
    return [f"{step:>4}  {line}" for step, line in zip(("step", *(number for number, _ in rounds)), table, strict=True)]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line per row, its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]


_COUNTS = ("drafted", "accepted")
_TIMES = ("draft", "wait", "verify", "sync")
_EMPTY = ("", "-", "0", "0.00", "no")


def table_of(rounds: Iterable[Mapping[str, Any]], unit: str) -> list[list[str]]:
    """Titles and a row per pass or round as text, durations in ms; without the columns that are empty."""
    table = [[unit, *_COUNTS, *_TIMES, "up", "down", "exits", "from", "ready"]]
    for found in rounds:
        times = [f"{1e3 * found.get(f'{name}_seconds', 0.0):.2f}" for name in _TIMES]
        number, drafted, accepted, *rest = (
            str(found.get(name, 0)) for name in ("round", *_COUNTS, "bytes_up", "bytes_down", "exits")
        )
        ready = "yes" if found.get("ready") else "no"
        table.append([number, drafted, accepted, *times, *rest, found.get("source") or "-", ready])
    used = [any(cell not in _EMPTY for cell in column) for column in zip(*table[1:], strict=True)]
    return [[cell for cell, wanted in zip(row, used, strict=False) if wanted] for row in table]


def as_json(run: Run) -> dict[str, Any]:
    """The summary, with the steps and their rounds."""
    steps = [
        {
            "step": step.number, "stamp_ns": step.stamp, "at": _since(run, step.at), "text": step.text,
            "instruction": step.instruction, "action": step.action, "executed": step.executed,
            "taken_at": step.taken_at, "begun_at": step.begun_at,
            "verified": step.verified, "tokens": step.tokens, "stats": step.stats, "rounds": step.rounds,
        }
        for step in run.steps
    ]  # fmt: skip
    return summary(run) | {"parameters": run.parameters, "replies": steps}


def _since(run: Run, at: int) -> float:
    return round((at - run.began) * 1e-9, 3)


def _gaps(run: Run) -> Iterable[float]:
    """Seconds from one reply to the next within a run."""
    for a, b in pairwise(run.steps):
        if not any(a.at < end < b.at for end, _ in run.ends):
            yield (b.at - a.at) * 1e-9


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f}MB" if count >= 1e6 else f"{count / 1e3:.1f}kB"
