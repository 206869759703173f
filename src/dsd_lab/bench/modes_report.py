"""The report of `dsd-lab bench modes`: a row per mode, with the paper's formulas beside what was measured.

Times are those of the profile's clock: what was measured, divided by the factor the clock was stretched by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsd_lab.bench.overhead import machine
from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.sweeps import Variant
from dsd_lab.papers import theory
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply

Row = dict[str, Any]
LATE = 0.05  # share by which a held time may be exceeded before the report says so
FORMULA = (
    "predicted: the paper's formulas (FSD Table 4) with the figures measured in the row; they leave out reading "
    "and sending the picture, and jitter. limit: n/tau target passes and one round trip."
)


@dataclass(frozen=True)
class Measured:
    """A variant and its replies, one per picture, in the order of the pictures."""

    variant: Variant
    replies: list[DecodedReply]


def make_report(
    measured: Sequence[Measured],
    profile: Profile,
    *,
    images: int,
    seed: int,
    time_scale: float,
    transport: str,
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
) -> dict[str, Any]:
    """Everything measured, as JSON holds it; figures that do not apply to a mode are null."""
    differences = _differences(measured)
    baseline = next((m for m in measured if m.variant.decode.mode == "ar"), None)
    decode = measured[0].variant.decode
    notes = [clock_note(profile, time_scale)]
    if baseline is None:
        notes.append("speed-ups are missing: they are over mode ar, which was not measured.")
    rows = [_row(m, baseline, profile, time_scale) for m in measured]
    notes += _late(rows, profile)
    notes += [FORMULA, "memory and threads in the JSON are this process's, which holds both ends."]
    return {
        "bench": "modes",
        "profile": profile.name,
        "machine": f"{machine()}, torch {torch.__version__}",
        "images": images,
        "seed": seed,
        "temperature": decode.temperature,
        "max_tokens": decode.max_tokens,
        "transport": transport,
        "time_scale": time_scale,
        "sweep": {name: list(values) for name, values in sweeps},
        "link": {
            "delay_up_ms": _ms(profile.link.delay_up_s),
            "delay_down_ms": _ms(profile.link.delay_down_s),
            "jitter_ms": _ms(profile.link.jitter_s),
            "up_mbps": profile.link.rate_up_bps / 1e6,
            "down_mbps": profile.link.rate_down_bps / 1e6,
        },
        "draft_ms": None if profile.draft_s is None else _ms(profile.draft_s),
        "target_ms": None if profile.target_s is None else _ms(profile.target_s),
        "exact": not differences,
        "differences": differences,
        "notes": notes,
        "rows": rows,
    }


def clock_note(profile: Profile, time_scale: float) -> str:
    """What was real time in this run and what was not, for people."""
    if profile.draft_s is None or profile.target_s is None:
        note = "models run at this machine's speed over an emulated link"
    else:
        note = (
            f"the clock is stretched: the models run for real, and each forward is held to "
            f"T_p {1e3 * profile.draft_s:g} ms (draft) and T_q {1e3 * profile.target_s:g} ms (target), "
            "forwards of several threads side by side"
        )
    if time_scale != 1.0:
        note += (
            f"; measured with every held time and delay multiplied by {time_scale:g}, "
            "reported times are divided by it again"
        )
    return note + "."


def _late(rows: Sequence[Row], profile: Profile) -> list[str]:
    """A warning where this machine was too slow for the times it should have kept."""
    if profile.target_s is None or profile.draft_s is None:
        return []
    late = []
    for row in rows:
        drafted = (row["draft_length"] or 0.0) * 1e3 * profile.draft_s
        # A batch of pre-drafts takes longer by design, by 15 % for eight.
        if (row["verify_round_ms"] or 0.0) > (1.0 + LATE) * 1e3 * profile.target_s or (
            drafted and row["draft_round_ms"] > (1.15 + LATE) * drafted
        ):
            late.append(row["label"])
    if not late:
        return []
    return [
        f"this machine was too busy to keep T_p and T_q in {', '.join(late)} (over {LATE:.0%} late): use a larger "
        "--time-scale, or fewer workers."
    ]


def render(report: dict[str, Any]) -> str:
    """The report as a table with its notes."""
    head = (
        "s/reply", "speed-up", "tok/s", "tau", "miss", "exit", "used", "waste",
        "gTp ms", "Tq ms", "Tc ms", "Tr ms", "up B", "down B", "predicted", "limit",
    )  # fmt: skip
    lines = []
    for row in report["rows"]:
        spread = "" if row["speedup"] is None else f"{row['speedup']:.2f}±{row['speedup_spread']:.2f}"
        lines.append(
            (
                f"{row['seconds_per_reply']:.3f}",
                spread or "-",
                _text(row["tokens_per_second"], ".2f"),
                _text(row["tau"], ".2f"),
                _text(row["miss_rate"], ".1%"),
                _text(row["mean_exit"], ".1f"),
                _text(row["predrafts_used"], ".1f"),
                _text(row["predrafts_wasted"], ".1f"),
                _text(row["draft_round_ms"], ".1f"),
                _text(row["verify_round_ms"], ".1f"),
                _text(row["link_delay_ms"], ".1f"),
                _text(row["sync_ms"], ".2f"),
                _text(row["bytes_up_per_token"], ".0f"),
                _text(row["bytes_down_per_token"], ".0f"),
                _text(row["predicted_seconds"], ".3f"),
                _text(row["limit_seconds"], ".3f"),
            )  # fmt: skip
        )
    widths = [max(len(cell) for cell in column) for column in zip(head, *lines, strict=True)]
    first = max(len("mode"), *(len(row["label"]) for row in report["rows"]))
    table = [f"{'mode':{first}}  " + "  ".join(f"{h:>{w}}" for h, w in zip(head, widths, strict=True))]
    for row, line in zip(report["rows"], lines, strict=True):
        cells = "  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True))
        table.append(f"{row['label']:{first}}  {cells}")
    if report["exact"]:
        exact = "every mode decoded the same tokens."
        if report["temperature"] > 0.0:
            exact = "all modes that draw the same numbers decoded the same tokens."
    else:
        exact = "NOT EXACT: " + "; ".join(report["differences"])
    about = f"profile {report['profile']}, {pictures(report)}, {report['machine']}"
    return "\n".join([*table, about, exact, *report["notes"]])


def pictures(report: dict[str, Any]) -> str:
    """How many there were, in words."""
    return f"{report['images']} picture" + ("s" if report["images"] != 1 else "")


def _row(measured: Measured, baseline: Measured | None, profile: Profile, scale: float) -> Row:
    variant, replies = measured.variant, measured.replies
    decode = variant.decode
    tokens = sum(len(reply.tokens) for reply in replies)
    rounds = sum(reply.rounds for reply in replies)
    seconds = [reply.seconds / scale for reply in replies]
    row: Row = {
        "mode": decode.mode,
        "label": variant.label,
        "settings": variant.settings,
        "own": dict(variant.own),
        "seconds_per_reply": _round(statistics.fmean(seconds)),
        **_speedup(replies, baseline),
        "tokens_per_second": _round(tokens / sum(seconds)),
        "tokens_per_reply": _round(tokens / len(replies)),
        "rounds_per_reply": _round(rounds / len(replies)),
        "tau": _round(tokens / rounds),
    }
    # Per round, as rates of few rounds count less; a mode that does not draft ahead has none of these.
    ahead = decode.needs_draft and "predraft_source" in variant.settings
    later = [max(0, reply.rounds - 1) for reply in replies]
    rounds_of = [reply.rounds for reply in replies]
    row |= {
        "miss_rate": _weighted([r.miss_rate for r in replies], later) if ahead else None,
        "mean_exit": _weighted([r.mean_exit for r in replies], rounds_of) if ahead else None,
        "exits": _mean(replies, lambda r: r.exits) if ahead else None,
        "predrafts_used": _mean(replies, lambda r: r.predrafts_used) if ahead else None,
        "predrafts_wasted": _mean(replies, lambda r: r.predrafts_wasted) if ahead else None,
    }
    t_q = _weighted([r.verify_round_seconds / scale for r in replies], later)
    t_c = _link_delay(replies, decode.needs_draft, scale)
    drafted = _weighted([r.draft_round_seconds / scale for r in replies], rounds_of)
    t_r = _weighted([r.sync_seconds / scale for r in replies], rounds_of) if ahead else None
    gamma = _weighted([r.draft_length for r in replies], rounds_of) if decode.needs_draft else None
    t_p = drafted / gamma if gamma and drafted is not None else None
    row |= {
        "draft_length": gamma,
        "draft_round_ms": None if t_p is None or drafted is None else _ms(drafted),
        "verify_round_ms": None if t_q is None else _ms(t_q),
        "cost_ratio": _round(t_p / t_q) if t_p is not None and t_q else None,
        "link_delay_ms": None if t_c is None else _ms(t_c),
        "sync_ms": None if t_r is None else _ms(t_r),
        "bytes_up_per_token": _round(sum(r.bytes_up for r in replies) / tokens),
        "bytes_down_per_token": _round(sum(r.bytes_down for r in replies) / tokens),
        "peak_memory_mb": round(max(r.peak_memory for r in replies) / 1e6, 1),
        "threads": max(r.threads for r in replies),
    }
    if decode.pipeline_depth > 1 and ahead:
        # A round sent ahead is under way while another is: its wait tells nothing of the link.
        t_c = (profile.link.delay_up_s + profile.link.delay_down_s + profile.link.jitter_s) / 2
    row |= _theory(row, gamma or 0.0, t_p, t_q, t_c, t_r)
    errors = sorted({r.worker_error for r in replies if r.worker_error})
    if errors:
        row["worker_errors"] = errors
    row["seconds"] = [_round(value) for value in seconds]
    return row


def _link_delay(replies: Sequence[DecodedReply], drafts: bool, scale: float) -> float | None:
    """T_c, seconds one way; of a target that goes on alone only the first round crosses the link both ways."""
    if drafts:
        known = [(r.link_delay_seconds, r.rounds) for r in replies if r.link_delay_seconds > 0.0]
    else:
        # The target begins to read the picture while the question is still on its way.
        first = [(reply.prefill_seconds, reply.records[0]) for reply in replies]
        known = [(max(0.0, p + r.wait_seconds - r.verify_seconds) / 2, 1) for p, r in first]
    return _weighted([value / scale for value, _ in known], [weight for _, weight in known])


def _speedup(replies: Sequence[DecodedReply], baseline: Measured | None) -> Row:
    """Over ar on the same picture: geometric mean and standard deviation over the pictures."""
    if baseline is None:
        return {"speedup": None, "speedup_spread": None}
    ratios = [slow.seconds / max(fast.seconds, 1e-9) for slow, fast in zip(baseline.replies, replies, strict=True)]
    return {"speedup": _round(statistics.geometric_mean(ratios)), "speedup_spread": _round(statistics.pstdev(ratios))}


def _theory(row: Row, gamma: float, t_p: float | None, t_q: float | None, t_c: float | None, t_r: float | None) -> Row:
    """Seconds of a mean reply by the paper's formulas, from what the row holds."""
    if t_q is None or t_c is None:
        return {"predicted_seconds": None, "limit_seconds": None}
    n, tau = row["tokens_per_reply"], row["tau"]
    if t_p is None:
        predicted = theory.ar_seconds(n=n, t_q=t_q, t_c=t_c)
    elif row["miss_rate"] is None:
        predicted = theory.sd_seconds(n=n, tau=tau, gamma=gamma, t_p=t_p, t_q=t_q, t_c=t_c)
    else:
        predicted = theory.fsd_seconds(
            n=n, tau=tau, gamma=gamma, t_p=t_p, t_q=t_q, t_c=t_c, r=row["miss_rate"], t_r=t_r or 0.0
        )
    limit = theory.limit_seconds(n=n, tau=tau, t_q=t_q, t_c=t_c)
    return {"predicted_seconds": _round(predicted), "limit_seconds": _round(limit)}


def _differences(measured: Sequence[Measured]) -> list[str]:
    """Where a mode's tokens are not what they must be: a sentence each.

    Greedy, all modes decode what the target would. Sampled, those whose draws the same settings decide do.
    """
    found = []
    first: dict[object, Measured] = {}
    for one in sorted(measured, key=lambda m: m.variant.decode.mode != "ar"):
        decode = one.variant.decode
        group = _draws(decode)
        reference = first.setdefault(group, one)
        for number, (ours, theirs) in enumerate(zip(one.replies, reference.replies, strict=True)):
            if ours.tokens != theirs.tokens:
                found.append(f"{one.variant.label} differs from {reference.variant.label} on picture {number}")
    return found


def _draws(decode: DecodeSettings) -> object:
    """What decides a mode's tokens: equal values, equal tokens."""
    if decode.sampling.greedy:
        return "greedy"
    if decode.proven_by is Proof.COUPLED:
        return "coupled"  # shared noise: whoever drafts, and ar
    if decode.tunes:
        return object()  # by the clock: the same distribution, and other draws
    shape = decode.shaped_by, decode.depth, decode.expansion
    return decode.proven_by, shape, decode.top_k_proof, decode.top_rho_proof


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float | None:
    total = sum(weights)
    if not total:
        return None
    return _round(sum(v * w for v, w in zip(values, weights, strict=True)) / total)


def _mean(replies: Sequence[DecodedReply], figure: Callable[[DecodedReply], float]) -> float:
    return _round(statistics.fmean(figure(reply) for reply in replies))


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _round(value: float) -> float:
    """Six digits; infinities and NaNs have no place in JSON."""
    if not math.isfinite(value):
        raise ValueError(f"a figure came out as {value}; the run cannot be reported")
    return float(f"{value:.6g}")
