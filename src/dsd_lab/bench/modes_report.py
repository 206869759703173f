# SPDX-License-Identifier: Apache-2.0
"""The report of `dsd-lab bench modes`: a row per mode, formulas beside measurements; its text and its plots.

Times are those of the profile's clock: what was measured, divided by the factor that stretched the clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsd_lab.bench.harness import Report, curve
from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.sweeps import Variant
from dsd_lab.papers import theory
from dsd_lab.plotting import Panel
from dsd_lab.report import CODE, Row, geometric, header, ratio, rounded
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.results import DecodedReply

_CODE = (*CODE, "dsd_lab/bench/modes.py", "dsd_lab/bench/pace.py", "dsd_lab/links/emulation.py")
LATE = 0.05  # share by which a held time may be exceeded before the report warns
FORMULA = (
    "predicted: the paper's formulas (FSD Table 4) with the figures measured in the row; they leave out reading "
    "and sending the picture, and jitter; there is none for mode stream. limit: n/tau target passes and one round trip."
)
COLUMNS = (
    ("mode", "label", ""),
    ("without", "without", ""),
    ("s/reply", "seconds_per_reply", ".3f"),
    ("speed-up", "speedup", ".2f"),
    ("±", "speedup_spread", ".2f"),
    ("tok/s", "tokens_per_second", ".2f"),
    ("tau", "tau", ".2f"),
    ("drafts", "draft_share", ".1%"),
    ("miss", "miss_rate", ".1%"),
    ("exit", "mean_exit", ".1f"),
    ("used", "predrafts_used", ".1f"),
    ("waste", "predrafts_wasted", ".1f"),
    ("read ms", "draft_prefill_ms", ".1f"),
    ("gTp ms", "draft_round_ms", ".1f"),
    ("Tq ms", "verify_round_ms", ".1f"),
    ("Tc ms", "link_delay_ms", ".1f"),
    ("Tr ms", "sync_ms", ".2f"),
    ("up B", "bytes_up_per_token", ".0f"),
    ("down B", "bytes_down_per_token", ".0f"),
    ("predicted", "predicted_seconds", ".3f"),
    ("limit", "limit_seconds", ".3f"),
)
Groups = dict[str, list[Row]]
_POLICIES = {"client_queue", "server_queue"}
_FIGURES = {"speedup": "times as fast as the target alone (ar)", "miss_rate": "pre-draft miss rate, %"}
_NAMES = {
    "draft_length": "draft length γ",
    "predraft_workers": "pre-draft workers",
    "client_queue": "client queue",
    "server_queue": "server queue",
    "predraft_source": "pre-draft source",
    "predraft_budget": "pre-drafts per round at most",
    "pipeline_depth": "rounds in flight",
}


@dataclass(frozen=True)
class Measured:
    """A variant and its replies, one per picture, in the order of the pictures."""

    variant: Variant
    replies: list[DecodedReply]


def make_report(
    measured: Sequence[Measured],
    profile: Profile,
    models: Mapping[str, Any],
    setting: dict[str, Any],
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
) -> dict[str, Any]:
    """Everything measured, as JSON; ``setting``: images, seed, transport and time_scale of the run."""
    differences = _differences(measured)
    baseline = next((m for m in measured if m.variant.decode.mode == "ar"), None)
    common, scale, link = measured[0].variant.decode, setting["time_scale"], profile.link
    rows = [_row(m, baseline, profile, scale) for m in measured]
    notes = [_clock_note(profile, scale)]
    if baseline is None:
        notes.append("speed-ups are missing: they are over mode ar, which was not measured.")
    notes += _late(rows, profile)
    notes += [FORMULA, "memory and threads in the JSON are this process's, which holds both ends."]
    return {
        **header("modes", _CODE, **models),
        "profile": profile.name,
        **setting,
        "temperature": common.temperature,
        "max_tokens": common.max_tokens,
        "sweep": {name: list(values) for name, values in sweeps},
        "link": {
            "delay_up_ms": _ms(link.delay_up_s),
            "delay_down_ms": _ms(link.delay_down_s),
            "jitter_ms": _ms(link.jitter_s),
            "up_mbps": link.rate_up_bps / 1e6,
            "down_mbps": link.rate_down_bps / 1e6,
        },
        "draft_ms": _ms(profile.draft_s),
        "target_ms": _ms(profile.target_s),
        "times": None if profile.times is None else dataclasses.asdict(profile.times),
        "limit": _limit(rows, profile),
        "exact": not differences,
        "differences": differences,
        "notes": notes,
        "rows": rows,
    }


def notes(report: Report) -> list[str]:
    """The lines below the table."""
    if not report["exact"]:
        verdict = "NOT EXACT: " + "; ".join(report["differences"])
    elif report["temperature"] > 0.0:
        verdict = "all modes that draw the same numbers decoded the same tokens."
    else:
        verdict = "every mode decoded the same tokens."
    return [title(report), verdict, *report["notes"]]


def title(report: Report) -> str:
    """The profile, and how many pictures there were, in words."""
    return f"profile {report['profile']}, {report['images']} picture" + ("s" if report["images"] != 1 else "")


def _limit(rows: Sequence[Row], profile: Profile) -> Row | None:
    """What no method that drafts sequences beats on this profile (``theory.sequence_limit``); None if unpaced."""
    drafted = next((row for row in rows if row["mode"] == "dsd" and row["draft_length"]), None)
    if profile.times is None or drafted is None:
        return None
    times, n = profile.times, drafted["tokens_per_reply"]
    prefill, t_c = times.target_prefill_s or times.target_s, (profile.link.delay_up_s + profile.link.delay_down_s) / 2
    alpha = theory.acceptance_of(tau=drafted["tau"], gamma=drafted["draft_length"])
    gamma, seconds = theory.sequence_limit(
        n=n, alpha=alpha, t_p=times.draft_s, t_q=times.target_s, t_c=t_c, prefill=prefill, longest=MAX_DRAFT_LENGTH
    )
    alone = prefill + 2 * t_c + n * times.target_s
    figures = {"alpha": alpha, "seconds": seconds, "alone_seconds": alone, "speedup": alone / seconds}
    return {"draft_length": gamma} | {name: rounded(value) for name, value in figures.items()}


def _clock_note(profile: Profile, time_scale: float) -> str:
    """What was real time in this run and what was not."""
    note = "models run at this machine's speed over an emulated link"
    if profile.draft_s is not None and profile.target_s is not None:
        note = "the clock is stretched: the models run for real, and each forward is held to "
        note += f"T_p {1e3 * profile.draft_s:g} ms (draft) and T_q {1e3 * profile.target_s:g} ms (target), "
        note += "forwards of several threads side by side"
    if time_scale != 1.0:
        note += f"; measured with every held time and delay multiplied by {time_scale:g}, "
        note += "reported times are divided by it again"
    return note + "."


def _late(rows: Sequence[Row], profile: Profile) -> list[str]:
    """A warning where this machine was too slow to keep the profile's times."""
    if profile.times is None:
        return []
    late, times = [], profile.times
    longest = times.verify_s(max((count for count, _ in times.target_tokens), default=1))
    for row in rows:
        drafted = (row["draft_length"] or 0.0) * 1e3 * times.draft_s
        # A batch of pre-drafts takes longer by design, by 15 % for eight.
        slow_draft = drafted and row["draft_round_ms"] > (1.15 + LATE) * drafted
        if slow_draft or (row["verify_round_ms"] or 0.0) > (1.0 + LATE) * 1e3 * longest:
            late.append(row["label"])
    sentence = (
        f"this machine was too busy to keep T_p and T_q in {', '.join(late)} (over {LATE:.0%} late): use a larger "
    )
    return [sentence + "--time-scale, or fewer workers."] if late else []


def _row(measured: Measured, baseline: Measured | None, profile: Profile, scale: float) -> Row:
    variant, replies, decode = measured.variant, measured.replies, measured.variant.decode
    tokens, rounds = sum(len(reply.tokens) for reply in replies), sum(reply.rounds for reply in replies)
    seconds = [reply.seconds / scale for reply in replies]
    ahead = decode.needs_draft and "predraft_source" in variant.settings

    def per_round(figure: Callable[[DecodedReply], float], later: bool = False) -> float | None:
        """Mean over the rounds of all replies; ``later``: over those after each reply's first."""
        weights = [max(0, reply.rounds - 1) if later else reply.rounds for reply in replies]
        return _weighted([figure(reply) for reply in replies], weights)

    def mean(figure: Callable[[DecodedReply], float]) -> float | None:
        return rounded(statistics.fmean(map(figure, replies))) if ahead else None

    t_q = per_round(lambda r: r.verify_round_seconds / scale, later=True)
    t_c = _link_delay(replies, decode.needs_draft, scale)
    t_r = per_round(lambda r: r.sync_seconds / scale) if ahead else None
    gamma = per_round(lambda r: r.draft_length) if decode.needs_draft else None
    drafted = per_round(lambda r: r.draft_round_seconds / scale) if gamma else None
    t_p = drafted / gamma if gamma and drafted is not None else None
    row: Row = {
        "mode": decode.mode,
        "label": variant.label,
        "settings": variant.settings,
        "own": dict(variant.own),
        "seconds_per_reply": rounded(statistics.fmean(seconds)),
        "seconds_interval": ratio(seconds),
        **_speedup(replies, baseline),
        "tokens_per_second": rounded(tokens / sum(seconds)),
        "tokens_per_reply": rounded(tokens / len(replies)),
        "rounds_per_reply": rounded(rounds / len(replies)),
        "tau": rounded(tokens / rounds),
        "draft_share": rounded(sum(sum(reply.accepted) for reply in replies) / tokens) if decode.needs_draft else None,
        "miss_rate": per_round(lambda r: r.miss_rate, later=True) if ahead else None,
        "mean_exit": (per_round(lambda r: r.mean_exit) or None) if ahead else None,
        "exits": mean(lambda r: r.exits),
        "predrafts_used": mean(lambda r: r.predrafts_used),
        "predrafts_wasted": mean(lambda r: r.predrafts_wasted),
        "draft_length": gamma,
        "draft_prefill_ms": _ms(_prefill(replies, scale)) if decode.needs_draft else None,
        "draft_round_ms": _ms(drafted),
        "verify_round_ms": _ms(t_q),
        "cost_ratio": rounded(t_p / t_q) if t_p is not None and t_q else None,
        "link_delay_ms": _ms(t_c),
        "sync_ms": _ms(t_r),
        "bytes_up_per_token": rounded(sum(r.bytes_up for r in replies) / tokens),
        "bytes_down_per_token": rounded(sum(r.bytes_down for r in replies) / tokens),
        "peak_memory_mb": round(max(r.peak_memory for r in replies) / 1e6, 1),
        "threads": max(r.threads for r in replies),
    }
    if decode.pipeline_depth > 1 and ahead:
        # A round sent ahead is under way while another is: its wait says nothing about the link.
        t_c = (profile.link.delay_up_s + profile.link.delay_down_s + profile.link.jitter_s) / 2
    row |= _theory(row, gamma or 0.0, t_p, t_q, t_c, t_r)
    if errors := sorted({r.worker_error for r in replies if r.worker_error}):
        row["worker_errors"] = errors
    return row | {"seconds": [rounded(value) for value in seconds]}


def _prefill(replies: Sequence[DecodedReply], scale: float) -> float:
    """Seconds that the draft model took to read picture and instruction: the median."""
    return statistics.median(reply.prefill_seconds for reply in replies) / scale


def _link_delay(replies: Sequence[DecodedReply], drafts: bool, scale: float) -> float | None:
    """T_c, seconds one way; where the target goes on alone only the first round crosses the link both ways."""
    if drafts:
        known = [(r.link_delay_seconds, r.rounds) for r in replies if r.link_delay_seconds > 0.0]
    else:
        # The target begins to read the picture while the question is still on its way.
        first = [(reply.prefill_seconds, reply.records[0]) for reply in replies]
        known = [(max(0.0, p + r.wait_seconds - r.verify_seconds) / 2, 1) for p, r in first]
    return _weighted([value / scale for value, _ in known], [weight for _, weight in known])


def _speedup(replies: Sequence[DecodedReply], baseline: Measured | None) -> Row:
    """Over ar on the same picture: geometric mean, its interval, and standard deviation over the pictures."""
    if baseline is None:
        return {"speedup": None, "speedup_spread": None, "speedup_interval": None}
    ratios = [slow.seconds / max(fast.seconds, 1e-9) for slow, fast in zip(baseline.replies, replies, strict=True)]
    return {
        "speedup": rounded(statistics.geometric_mean(ratios)),
        "speedup_spread": rounded(statistics.pstdev(ratios)),
        "speedup_interval": geometric(ratios),
    }


def _theory(row: Row, gamma: float, t_p: float | None, t_q: float | None, t_c: float | None, t_r: float | None) -> Row:
    """Seconds of a mean reply by the paper's formulas, from the figures of the row."""
    if t_q is None or t_c is None or row["mode"] == "stream":
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
    return {"predicted_seconds": rounded(predicted), "limit_seconds": rounded(limit)}


def _differences(measured: Sequence[Measured]) -> list[str]:
    """A sentence for each wrong reply: greedy, all modes agree; sampled, those whose draws are decided alike."""
    found = []
    first: dict[object, Measured] = {}
    for one in sorted(measured, key=lambda m: m.variant.decode.mode != "ar"):
        reference = first.setdefault(one.variant.decode.drawn_by, one)
        for number, (ours, theirs) in enumerate(zip(one.replies, reference.replies, strict=True)):
            if ours.tokens != theirs.tokens:
                found.append(f"{one.variant.label} differs from {reference.variant.label} on picture {number}")
    return found


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float | None:
    return rounded(statistics.fmean(values, weights)) if sum(weights) else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def panels(report: Report) -> list[Panel]:
    """Lines over the first swept number, else a bar per mode; none where neither ar nor a miss rate was measured."""
    rows, sweep = report["rows"], report["sweep"]
    swept = next((name for name, values in sweep.items() if all(isinstance(v, int | float) for v in values)), "")
    found = []
    for figure, text in _FIGURES.items():
        shown, times = [row for row in rows if row[figure] is not None], 100.0 if figure == "miss_rate" else 1.0
        groups = _groups(shown, swept) if swept else {"": shown}
        x = f"settings/{swept}" if swept else "label"
        curves = [curve(label, points, x, figure, times) for label, points in groups.items() if points]
        if curves:
            found.append(Panel(_NAMES.get(swept, swept), text, curves, level=1.0 if figure == "speedup" else None))
    return found


def _groups(rows: Sequence[Row], name: str) -> Groups:
    """Rows that were swept over ``name``, by what else sets them apart."""
    swept = [row for row in rows if name in row["own"]]
    several = len({row["mode"] for row in swept}) > 1
    groups: Groups = {}
    for row in swept:
        own = {key: value for key, value in row["own"].items() if key != name}
        parts = [row["mode"]] if several or not own else []
        if own.keys() >= _POLICIES:  # named as in the paper's Table 7
            parts.append(f"{own.pop('client_queue')} / {own.pop('server_queue')}")
        parts += [f"{_NAMES.get(key, key)} {value}" for key, value in own.items()]
        groups.setdefault(", ".join(parts), []).append(row)
    for points in groups.values():
        points.sort(key=lambda row: row["settings"][name])
    return groups
