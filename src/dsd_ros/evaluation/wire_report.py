"""The report of `dsd bench wire`: a row per proof, what the formulas say beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.evaluation.overhead import machine
from dsd_ros.evaluation.theory_acceptance import acceptance, coupled_acceptance, truncate
from dsd_ros.evaluation.theory_proofs import Payload, payload, round_seconds
from dsd_ros.evaluation.wire_setting import Kept, WireSetting

Row = dict[str, Any]
LARGE_VOCABULARY = 152_064  # Qwen2-VL-7B's
ALONE = "none"  # the target without a draft, for comparison
_VALUE_BITS = {"truncated": 16}  # of a probability as it travels; others: float32
_CURVE_POINTS = 24


@dataclass
class Contender:
    """One proof with its replies: counted ones, and those over the link at each rate."""

    proof: str
    decode: DecodeSettings
    kept: Kept | None = None
    counted: list[DecodedReply] = field(default_factory=list)
    timed: dict[float, list[DecodedReply]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The mode's name, and K."""
        return self.decode.mode + (f" K={self.decode.top_k_proof}" if self.kept else "")


class Distances:
    """How near draft and target are, over the tokens of verified replies."""

    def __init__(self, vocabulary: int, kept: Sequence[int]) -> None:
        grid = {round(k) for k in np.geomspace(1, vocabulary, _CURVE_POINTS)}
        self.kept = sorted(grid | set(kept))
        self.tokens = 0
        self._optimal = self._coupled = self._target_kept = 0.0
        self._mass = dict.fromkeys(self.kept, 0.0)
        self._truncated = dict.fromkeys(self.kept, 0.0)

    def add(self, p: np.ndarray, q: np.ndarray) -> None:
        """Distributions (n, V) of target and draft behind the same tokens."""
        self.tokens += len(p)
        self._optimal += float(acceptance(p, q).sum())
        self._coupled += float(coupled_acceptance(p, q).sum())
        self._target_kept += float((p > 0).sum())
        for k in self.kept:
            q_hat, dropped = truncate(q, top_k=k)
            self._mass[k] += float((1.0 - dropped).sum())
            self._truncated[k] += float(acceptance(p, q_hat).sum())

    def expected(self, proof: str, k: int) -> float:
        """Acceptance of a position by the two distributions: 1 - TV, of q_hat if truncated; exact for coupled."""
        if proof == "truncated":
            return self._truncated[k] / self.tokens
        return (self._coupled if proof == "coupled" else self._optimal) / self.tokens

    def mass(self, k: int) -> float:
        """Of q, that its k likeliest tokens hold."""
        return self._mass[k] / self.tokens

    @property
    def target_kept(self) -> int:
        """Ids that p has on average."""
        return max(1, round(self._target_kept / self.tokens))


def make_report(
    setting: WireSetting,
    contenders: Sequence[Contender],
    distances: Distances,
    pictures: Sequence[int],
    vocabulary: int,
) -> dict[str, Any]:
    """Everything measured, as JSON holds it. ``pictures``: bytes of each picture's message."""
    decode = setting.decode
    differences = _differences(contenders)
    return {
        "bench": "wire",
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
                "acceptance": _round(distances.expected("truncated", k)),
            }
            for k in distances.kept
        ],
        "rows": [_row(one, setting, distances, pictures, vocabulary) for one in contenders],
    }


def _row(
    one: Contender,
    setting: WireSetting,
    distances: Distances,
    pictures: Sequence[int],
    vocabulary: int,
) -> Row:
    replies, decode, rates = one.counted, one.decode, setting.uplinks
    tokens = sum(len(reply.tokens) for reply in replies)
    rounds = [record for reply in replies for record in reply.records]
    tau = tokens / len(rounds) if one.proof != ALONE else 1.0
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
        "seconds_per_reply": {
            f"{rate:g}": _round(statistics.fmean(reply.seconds for reply in one.timed[rate]))
            for rate in rates
        },
    }
    if one.proof == ALONE:
        return row
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    # The target judges up to the first rejection only.
    judged = accepted + sum(r.accepted < r.drafted for r in rounds)
    alpha = accepted / judged if judged else 0.0
    sent = _payload(one, decode, alpha, vocabulary, distances)
    large = _payload(one, decode, alpha, LARGE_VOCABULARY, distances)
    k = decode.top_k_proof
    row |= {
        "acceptance": _round(accepted / drafted) if drafted else 0.0,
        "position_acceptance": _round(alpha),
        "expected_acceptance": _round(distances.expected(one.proof, k)),
        "kept_mass": _round(distances.mass(k)) if one.proof == "truncated" else None,
        "payload_up_per_token": _round(sent.up / 8 / tau),
        "payload_down_per_token": _round(sent.down / 8 / tau),
        "large_vocabulary_up_per_token": _round(large.up / 8 / tau),
        "large_vocabulary_down_per_token": _round(large.down / 8 / tau),
        "formula_seconds": {
            f"{rate:g}": _formula(one.timed[rate], setting, rate, sent, pictures) for rate in rates
        },
    }
    return row


def _settings(one: Contender) -> dict[str, Any]:
    names = ["mode", "draft_length"] if one.proof != ALONE else ["mode"]
    names += ["top_k_proof"] if one.kept else []
    return {name: getattr(one.decode, name) for name in names}


def _payload(
    one: Contender, decode: DecodeSettings, alpha: float, vocabulary: int, distances: Distances
) -> Payload:
    """Bits of a full round by theory_proofs.payload, values as they travel here."""
    sampling = decode.sampling
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0
    return payload(
        one.proof,
        config=[1] * decode.draft_length,
        alpha=alpha,
        vocabulary=vocabulary,
        b_prob=_VALUE_BITS.get(one.proof, 32),
        kept=one.kept.of(vocabulary) if one.kept else 0,
        target_kept=distances.target_kept if truncates else 0,
    )


def _formula(
    replies: Sequence[DecodedReply],
    setting: WireSetting,
    rate: float,
    sent: Payload,
    pictures: Sequence[int],
) -> float:
    """Rounds of DSSD equation 6 with the payload, and the picture's way up; no headers, no prefill."""
    link = setting.link(rate)
    t_comm = sent.up / link.rate_up_bps + sent.down / link.rate_down_bps + 2 * setting.delay_s
    gamma = setting.decode.draft_length
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
                    found.append(f"{one.label} at {rate:g} Mbit/s differs on picture {number}")
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
        line += [f"{row['seconds_per_reply'][rate]:.2f}" for rate in rates]
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
    notes = [
        "bytes per generated token, picture and handshake apart; formula: the payload without messages' headers.",
        "accepted: of all drafted tokens; position: of those the target judged; expected: by both distributions.",
        f"s at R: seconds per reply with R Mbit/s up, {'the same' if down is None else f'{down:g}'} down, "
        f"{report['delay_ms']:g} ms one way, {_speed(report)}; the picture's {report['picture_bytes']} bytes "
        "go up first.",
    ]
    full = [row for row in report["rows"] if row["proof"] == "full"]
    if full:
        size = full[0]["large_vocabulary_up_per_token"] / 1e3
        notes.append(
            f"DSD at V = {LARGE_VOCABULARY} would send {size:.0f} kB up per token in float32, "
            f"{size / 2:.0f} kB in float16."
        )
    about = f"{report['images']} pictures, {report['draws']} replies of each counted, V = {report['vocabulary']}, "
    about += f"temperature {report['temperature']:g}, {report['draft_length']} drafted a round, {report['machine']}"
    exact = "the link changed no token"
    if any(row["proof"] == "coupled" for row in report["rows"]):
        exact += "; coupled said what the target alone says"
    verdict = exact + "." if report["exact"] else "NOT EXACT: " + "; ".join(report["differences"])
    return "\n".join([*table, about, verdict, *notes])


def _speed(report: dict[str, Any]) -> str:
    if report["profile"] is None:
        return "models at this machine's speed"
    return f"models held to the times of profile {report['profile']}"


def _text(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"


def _round(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")
