"""The report of `dsd-lab bench modes`: a row per mode, with the paper's formulas beside what was measured.

Times are those of the profile's clock: what was measured, divided by the factor that stretched the clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.sweeps import Variant
from dsd_lab.papers import theory
from dsd_lab.report import Row, cell, header, rounded, table
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply

LATE = 0.05  # share by which a held time may be exceeded before the report warns
FORMULA = (
    "predicted: the paper's formulas (FSD Table 4) with the figures measured in the row; they leave out reading "
    "and sending the picture, and jitter. limit: n/tau target passes and one round trip."
)
_COLUMNS = (  # heading, key of a row, format
    ("s/reply", "seconds_per_reply", ".3f"),
    ("speed-up", "speedup", ".2f"),
    ("±", "speedup_spread", ".2f"),
    ("tok/s", "tokens_per_second", ".2f"),
    ("tau", "tau", ".2f"),
    ("miss", "miss_rate", ".1%"),
    ("exit", "mean_exit", ".1f"),
    ("used", "predrafts_used", ".1f"),
    ("waste", "predrafts_wasted", ".1f"),
    ("gTp ms", "draft_round_ms", ".1f"),
    ("Tq ms", "verify_round_ms", ".1f"),
    ("Tc ms", "link_delay_ms", ".1f"),
    ("Tr ms", "sync_ms", ".2f"),
    ("up B", "bytes_up_per_token", ".0f"),
    ("down B", "bytes_down_per_token", ".0f"),
    ("predicted", "predicted_seconds", ".3f"),
    ("limit", "limit_seconds", ".3f"),
)


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
    """Everything measured, as JSON holds it; figures that do not apply to a mode are null.

    ``setting``: images, seed, transport and time_scale of the run.
    """
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
        **header("modes", **models),
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
        "exact": not differences,
        "differences": differences,
        "notes": notes,
        "rows": rows,
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table with its notes."""
    rows = [["mode", *(heading for heading, _, _ in _COLUMNS)]]
    rows += [[row["label"], *(cell(row[key], form) for _, key, form in _COLUMNS)] for row in report["rows"]]
    if not report["exact"]:
        verdict = "NOT EXACT: " + "; ".join(report["differences"])
    elif report["temperature"] > 0.0:
        verdict = "all modes that draw the same numbers decoded the same tokens."
    else:
        verdict = "every mode decoded the same tokens."
    about = f"profile {report['profile']}, {pictures(report)}, {report['machine']}"
    return "\n".join([*table(rows), about, verdict, *report["notes"]])


def pictures(report: dict[str, Any]) -> str:
    """How many pictures there were, in words."""
    return f"{report['images']} picture" + ("s" if report["images"] != 1 else "")


def _clock_note(profile: Profile, time_scale: float) -> str:
    """What was real time in this run and what was not."""
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
    """A warning where this machine was too slow to keep the profile's times."""
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
        **_speedup(replies, baseline),
        "tokens_per_second": rounded(tokens / sum(seconds)),
        "tokens_per_reply": rounded(tokens / len(replies)),
        "rounds_per_reply": rounded(rounds / len(replies)),
        "tau": rounded(tokens / rounds),
        "miss_rate": per_round(lambda r: r.miss_rate, later=True) if ahead else None,
        "mean_exit": per_round(lambda r: r.mean_exit) if ahead else None,
        "exits": mean(lambda r: r.exits),
        "predrafts_used": mean(lambda r: r.predrafts_used),
        "predrafts_wasted": mean(lambda r: r.predrafts_wasted),
        "draft_length": gamma,
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
    """Over ar on the same picture: geometric mean and standard deviation over the pictures."""
    if baseline is None:
        return {"speedup": None, "speedup_spread": None}
    ratios = [slow.seconds / max(fast.seconds, 1e-9) for slow, fast in zip(baseline.replies, replies, strict=True)]
    return {"speedup": rounded(statistics.geometric_mean(ratios)), "speedup_spread": rounded(statistics.pstdev(ratios))}


def _theory(row: Row, gamma: float, t_p: float | None, t_q: float | None, t_c: float | None, t_r: float | None) -> Row:
    """Seconds of a mean reply by the paper's formulas, from the figures of the row."""
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
    return {"predicted_seconds": rounded(predicted), "limit_seconds": rounded(limit)}


def _differences(measured: Sequence[Measured]) -> list[str]:
    """A sentence for each reply whose tokens are not what they must be.

    Greedy, all modes decode what the target would. Sampled, modes whose draws are decided alike agree.
    """
    found = []
    first: dict[object, Measured] = {}
    for one in sorted(measured, key=lambda m: m.variant.decode.mode != "ar"):
        reference = first.setdefault(_draws(one.variant.decode), one)
        for number, (ours, theirs) in enumerate(zip(one.replies, reference.replies, strict=True)):
            if ours.tokens != theirs.tokens:
                found.append(f"{one.variant.label} differs from {reference.variant.label} on picture {number}")
    return found


def _draws(decode: DecodeSettings) -> object:
    """What decides a mode's tokens: equal values, equal tokens."""
    if decode.sampling.greedy:
        return "greedy"
    if decode.proven_by is Proof.COUPLED:
        return "coupled"  # shared noise: the same whoever drafts, and in ar
    if decode.tunes:
        return object()  # lengths depend on the clock: the same distribution, other draws
    shape = decode.shaped_by, decode.depth, decode.expansion
    return decode.proven_by, shape, decode.top_k_proof, decode.top_rho_proof


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float | None:
    return rounded(statistics.fmean(values, weights)) if sum(weights) else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
