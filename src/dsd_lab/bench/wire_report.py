"""The report of `dsd-lab bench wire`: a row per proof and shape, what the formulas say beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsd_lab.bench.overhead import machine
from dsd_lab.bench.wire_distances import Distances
from dsd_lab.bench.wire_setting import SEQUENCE, Kept, WireSetting, WireShape
from dsd_lab.papers.proofs import Payload, payload, round_seconds
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply

Row = dict[str, Any]
LARGE_VOCABULARY = 152_064  # Qwen2-VL-7B's
ALONE = "none"  # the target without a draft, for comparison
_VALUE_BITS = {"truncated": 16}  # of a probability as it travels; others: float32
_CHANCE_BITS = 16  # of one that is sent alone
PAIR = 2  # children of a node in the curves of trees, as <2,2,2>


@dataclass
class Contender:
    """One proof and shape with its replies: counted ones, and those over the link at each rate."""

    proof: str
    decode: DecodeSettings
    kept: Kept | None = None
    shape: WireShape = SEQUENCE
    counted: list[DecodedReply] = field(default_factory=list)
    timed: dict[float, list[DecodedReply]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The mode's name, K, and the shape."""
        kept = f"K={self.decode.top_k_proof}" if self.kept else ""
        return " ".join(filter(None, (self.decode.mode, kept, self.shape.label)))

    @property
    def children(self) -> int | None:
        """Of every node; None where that differs."""
        config = set(self.shape.config(self.decode.draft_length))
        return config.pop() if len(config) == 1 and self.shape.draws else None


def make_report(
    setting: WireSetting,
    contenders: Sequence[Contender],
    distances: Distances,
    pictures: Sequence[int],
    vocabulary: int,
) -> dict[str, Any]:
    """Everything measured, as JSON holds it. ``pictures``: bytes of each picture's or instruction's message."""
    decode = setting.decode
    differences = _differences(contenders)
    return {
        "bench": "wire",
        "model": setting.model,
        "machine": f"{machine()}, torch {torch.__version__}",
        "vocabulary": vocabulary,
        "images": setting.images,
        "draws": setting.draws,
        "seed": decode.seed,
        "temperature": decode.temperature,
        "top_k": decode.top_k,
        "top_p": decode.top_p,
        "draft_length": decode.draft_length,
        "uplinks_mbps": list(setting.uplinks),
        "downlink_mbps": setting.downlink or None,
        "delay_ms": _round(1e3 * setting.delay_s),
        "profile": setting.profile.name if setting.profile else None,
        "picture_bytes": round(statistics.fmean(pictures)),
        "exact": not differences,
        "differences": differences,
        "kept_curve": [
            {
                "kept": k,
                "mass": _round(distances.mass(k)),
                "acceptance": _figure(distances.expected("truncated", k)),
                "tree_acceptance": _figure(distances.expected("truncated", k, PAIR)),
            }
            for k in distances.kept
        ],
        "optimal_acceptance": _round(distances.optimal),
        "coupled_share": _round(distances.coupled / distances.optimal),
        "rows": [_row(one, setting, distances, pictures, vocabulary) for one in contenders],
    }


def _row(one: Contender, setting: WireSetting, distances: Distances, pictures: Sequence[int], vocabulary: int) -> Row:
    replies, decode = one.counted, one.decode
    tokens = sum(len(reply.tokens) for reply in replies)
    rounds = [record for reply in replies for record in reply.records]
    tau = tokens / len(rounds) if one.proof != ALONE else 1.0
    took = {f"{rate:g}": seconds_at(one, setting, rate) for rate in setting.uplinks}
    seen = len(pictures)
    up = sum(reply.bytes_up - pictures[i % seen] for i, reply in enumerate(replies))
    row: Row = {
        "proof": one.proof,
        "label": one.label,
        "settings": _settings(one),
        "replies": len(replies),
        "tokens_per_reply": _round(tokens / len(replies)),
        "bytes_up_per_token": _round(up / tokens),
        "bytes_down_per_token": _round(sum(reply.bytes_down for reply in replies) / tokens),
        "tau": _round(tau),
        "seconds_per_reply": {rate: _round(seconds) for rate, (seconds, _) in took.items()},
        "seconds_per_token": {rate: _round(seconds) for rate, (_, seconds) in took.items()},
        "computed_at": [f"{rate:g}" for rate in setting.uplinks if not one.timed.get(rate)],
    }
    if one.proof == ALONE:
        return row
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    # The target judges up to the first rejection only.
    judged = accepted + sum(r.accepted < (r.depth or r.drafted) for r in rounds)
    alpha = accepted / judged if judged else 0.0
    sent = _payload(one, alpha, vocabulary, distances)
    large = _payload(one, alpha, LARGE_VOCABULARY, distances)
    k, children = decode.top_k_proof, one.children
    expected = distances.expected(one.proof, k, children) if children else None
    row |= {
        "drafted_per_round": _round(drafted / len(rounds)),
        "acceptance": _round(accepted / drafted) if drafted else 0.0,
        "position_acceptance": _round(alpha),
        "expected_acceptance": _figure(expected),
        "kept_mass": _round(distances.mass(k)) if one.proof == "truncated" else None,
        "payload_up_per_token": _round(sent.up / 8 / tau),
        "payload_down_per_token": _round(sent.down / 8 / tau),
        "large_vocabulary_up_per_token": _round(large.up / 8 / tau),
        "large_vocabulary_down_per_token": _round(large.down / 8 / tau),
        "formula_seconds": {f"{rate:g}": _formula(one, setting, rate, sent, pictures) for rate in setting.uplinks},
    }
    return row


def seconds_at(one: Contender, setting: WireSetting, rate: float) -> tuple[float, float]:
    """Seconds of a reply and of a token over the link: as measured, or else by ``computed_seconds``."""
    timed = one.timed.get(rate)
    replies = timed or one.counted[: setting.timed_count] or one.counted
    seconds = [r.seconds if timed else computed_seconds(one, r, setting, rate) for r in replies]
    return statistics.fmean(seconds), sum(seconds) / sum(len(reply.tokens) for reply in replies)


def computed_seconds(one: Contender, reply: DecodedReply, setting: WireSetting, rate: float) -> float:
    """What a reply would take at a rate: its time without a link, and what its bytes and round trips add.

    Where a profile says what the models take, its times are put in place of the time without a link. Tokens of the
    target alone come down while it makes the next ones.
    """
    link, profile = setting.link(rate), setting.profile
    trips = reply.rounds if one.proof != ALONE else 1
    models = reply.seconds
    if profile is not None and profile.draft_s is not None and profile.target_s is not None:
        depth = sum(record.depth or record.drafted for record in reply.records)
        passes = trips if one.proof != ALONE else len(reply.tokens)
        models = depth * profile.draft_s + passes * profile.target_s
    up, down = 8 * reply.bytes_up / link.rate_up_bps, 8 * reply.bytes_down / link.rate_down_bps
    busy = max(models, down) if one.proof == ALONE else models + down
    return busy + up + 2 * trips * setting.delay_s


def _settings(one: Contender) -> dict[str, Any]:
    names = ["mode"]
    if one.proof != ALONE:
        names += [name for name, _ in one.shape.settings]
        names += [] if one.decode.shape == "expansion" else ["draft_length"]
    names += ["top_k_proof"] if one.kept else []
    return {name: getattr(one.decode, name) for name in dict.fromkeys(names)}


def _payload(one: Contender, alpha: float, vocabulary: int, distances: Distances) -> Payload:
    """Bits of a full round by theory_proofs.payload, values as they travel here."""
    sampling, config = one.decode.sampling, one.shape.config(one.decode.draft_length)
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0
    if one.proof == "split" and len(config) < sum(config):  # of its first child only
        alpha = distances.optimal
    return payload(
        one.proof,
        config=config,
        alpha=alpha,
        vocabulary=vocabulary,
        b_prob=_VALUE_BITS.get(one.proof, 32),
        b_chance=_CHANCE_BITS,
        kept=one.kept.of(vocabulary) if one.kept else 0,
        target_kept=distances.target_kept if truncates else 0,
    )


def _formula(one: Contender, setting: WireSetting, rate: float, sent: Payload, pictures: Sequence[int]) -> float:
    """Rounds of DSSD equation 6 with the payload, and the picture's way up; no headers, no prefill."""
    link = setting.link(rate)
    replies = one.timed.get(rate) or one.counted
    t_comm = sent.up / link.rate_up_bps + sent.down / link.rate_down_bps + 2 * setting.delay_s
    gamma = one.decode.depth
    one_round = round_seconds(
        gamma=gamma,
        t_p=statistics.fmean(r.draft_round_seconds for r in replies) / gamma,
        t_q=statistics.fmean(r.verify_round_seconds for r in replies),
        t_comm=t_comm,
    )
    rounds = statistics.fmean(reply.rounds for reply in replies)
    return _round(rounds * one_round + 8 * statistics.fmean(pictures) / link.rate_up_bps)


def _differences(contenders: Sequence[Contender]) -> list[str]:
    """Replies that are not what they must be: the link changes none, and coupled says what the target alone does."""
    found = []
    alone = contenders[0]
    for one in contenders:
        for rate, replies in one.timed.items():
            for number, (ours, theirs) in enumerate(zip(replies, one.counted, strict=False)):
                if ours.tokens != theirs.tokens:
                    found.append(f"{one.label} at {rate:g} Mbit/s differs in reply {number}")
        if one.proof == "coupled":
            for number, (ours, theirs) in enumerate(zip(one.counted, alone.counted, strict=True)):
                if ours.tokens != theirs.tokens:
                    found.append(f"{one.label} differs from the target alone in reply {number}")
    return found


def render(report: dict[str, Any]) -> str:
    """The report as a table with its notes."""
    rates = [f"{rate:g}" for rate in report["uplinks_mbps"]]
    head = ["proof", "up B", "formula", "down B", "formula", "accepted", "position", "expected", "tau"]  # fmt: skip
    head += [f"s at {rate}" for rate in rates]
    head += [f"up B, V={LARGE_VOCABULARY}", "down B"]
    lines = [head]
    for row in report["rows"]:
        line = [row["label"], _text(row, "bytes_up_per_token", ".1f")]
        line += [_text(row, "payload_up_per_token", ".1f")]
        line += [_text(row, "bytes_down_per_token", ".1f")]
        line += [_text(row, "payload_down_per_token", ".1f")]
        line += [_text(row, "acceptance", ".3f"), _text(row, "position_acceptance", ".3f")]
        line += [_text(row, "expected_acceptance", ".3f"), f"{row['tau']:.2f}"]
        line += [
            ("~" if rate in row["computed_at"] else "") + f"{row['seconds_per_reply'][rate]:.2f}" for rate in rates
        ]
        line += [_text(row, "large_vocabulary_up_per_token", ".0f")]
        line += [_text(row, "large_vocabulary_down_per_token", ".0f")]
        lines.append(line)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(
            f"{cell:>{width}}" if n else f"{cell:{width}}"
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    down = report["downlink_mbps"]
    thing = "picture" if report["model"] == "pair" else "instruction"
    notes = [
        f"bytes per generated token, {thing} and handshake apart; formula: the payload without messages' headers.",
        "accepted: of all drafted tokens; position: of those (in trees: levels) the target judged; expected: by both "
        f"distributions, of which 1 - TV is {report['optimal_acceptance']:.3f} and shared randomness keeps "
        f"{100 * report['coupled_share']:.1f} %.",
        f"s at R: seconds per reply with R Mbit/s up, {'the same' if down is None else f'{down:g}'} down, "
        f"{report['delay_ms']:g} ms one way, {models_speed(report)}; the {thing}'s {report['picture_bytes']} bytes "
        "go up first.",
    ]
    if any(row["computed_at"] for row in report["rows"]):
        notes.append("~ computed: the models' time, and what the bytes counted and the round trips add.")
    full = [row for row in report["rows"] if row["proof"] == "full"]
    if full:
        size = full[0]["large_vocabulary_up_per_token"] / 1e3
        notes.append(
            f"DSD at V = {LARGE_VOCABULARY} would send {size:.0f} kB up per token in float32, "
            f"{size / 2:.0f} kB in float16."
        )
    about = f"{report['images']} {thing}s, {report['draws']} replies of each counted, V = {report['vocabulary']}, "
    about += f"temperature {report['temperature']:g}, {report['draft_length']} drafted a round, {report['machine']}"
    exact = "the link changed no token"
    if any(row["proof"] == "coupled" for row in report["rows"]):
        exact += "; coupled said what the target alone says"
    verdict = exact + "." if report["exact"] else "NOT EXACT: " + "; ".join(report["differences"])
    return "\n".join([*table, about, verdict, *notes])


def models_speed(report: dict[str, Any]) -> str:
    """Whose times the models have, as a clause."""
    if report["profile"] is None:
        return "models at this machine's speed"
    return f"models at the times of profile {report['profile']}"


def _text(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if row.get(name) is not None else "-"


def _figure(value: float | None) -> float | None:
    return None if value is None else _round(value)


def _round(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")
