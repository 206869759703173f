# SPDX-License-Identifier: Apache-2.0
"""The report of `dsd-lab bench wire`: a row per proof and shape, formulas beside measurements; its text and its plot.

The plot is after Figures 3 to 6 of "Fast Collaborative Inference via Distributed Speculative Decoding" (TSLT).
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.scenes import MAX_SCENES
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.papers.acceptance import acceptance, coupled_acceptance
from dsd_lab.papers.proofs import PROOFS, Payload, payload, round_seconds
from dsd_lab.plotting import Curve, Panel, draw_panels
from dsd_lab.report import BenchError, Row, cell, check_range, header, render_template, rounded, table
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply

MODELS = ("pair", "text")
ALONE = "none"  # the target without a draft, for comparison
PAIR = 2  # children of a node in the curves of trees, as in <2,2,2>


@dataclass(frozen=True)
class Kept:
    """How many ids a truncated distribution keeps: a number, or a share of the vocabulary."""

    text: str
    amount: float
    is_share: bool

    def of(self, vocabulary: int) -> int:
        """K for a vocabulary of that size: 1 to all of it."""
        count = self.amount * vocabulary if self.is_share else self.amount
        return max(1, min(vocabulary, round(count)))


def parse_kept(text: str) -> list[Kept]:
    """``1,5,1%,10%``; BenchError."""
    found = []
    for part in _parts(text, "K is given for proof truncated; use for example 1%,10%"):
        is_share = part.endswith("%")
        amount = _number(part.rstrip("%"))
        if is_share:
            amount /= 100.0
        if not (0.0 < amount <= 1.0 if is_share else amount >= 1.0 and amount == int(amount)):
            raise BenchError(f"{part!r} is no K to keep; give whole numbers or shares as 8 or 1%")
        found.append(Kept(part, amount, is_share))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class WireShape:
    """How drafted tokens hang together. ``settings``: the decode settings that it sets, and no others."""

    label: str
    settings: tuple[tuple[str, Any], ...] = (("shape", "sequence"),)

    @property
    def draws(self) -> bool:
        """Whether its nodes are drawn, as every sampled proof but coupled needs."""
        return dict(self.settings)["shape"] != "budget"

    def config(self, draft_length: int) -> list[int]:
        """The children of every node, level by level, as the formulas take them; a budget counts as one level."""
        settings = dict(self.settings)
        if settings["shape"] == "expansion":
            return [int(children) for children in settings["tree_expansion"].split(",")]
        if settings["shape"] == "budget":
            return [settings["tree_budget"]]
        return [1] * settings.get("draft_length", draft_length)


SEQUENCE = WireShape("")


def parse_shapes(text: str) -> list[WireShape]:
    """``sequence,sequence:3,2x2x2,budget16:8``: after a colon stands gamma, or a budget's depth; BenchError."""
    parts = _parts(text, "shape is named; use for example sequence,2x2x2,budget16")
    return list(dict.fromkeys(_shape(part) for part in parts))


def _shape(text: str) -> WireShape:
    match = re.fullmatch(r"(sequence|budget(\d+))(:(\d+))?|\d+(x\d+)+", text)
    if match is None:
        forms = "sequence, sequence:3 (gamma 3), 2x2x2, budget16 or budget16:8 (depth 8)"
        raise BenchError(f"{text!r} is no shape; use {forms}")
    if match[1] is None:
        children = text.replace("x", ",")
        return WireShape(f"<{children}>", (("shape", "expansion"), ("tree_expansion", children)))
    length: list[tuple[str, Any]] = [("draft_length", int(match[4]))] if match[4] else []
    if match[2] is None:
        return WireShape(f"gamma {match[4]}" if match[4] else "", (("shape", "sequence"), *length))
    label = f"{int(match[2])} nodes" + (f", depth {match[4]}" if match[4] else "")
    return WireShape(label, (("shape", "budget"), ("tree_budget", int(match[2])), *length))


def parse_uplinks(text: str) -> list[float]:
    """Rates in Mbit/s, ascending; BenchError."""
    parts = _parts(text, "uplink rate is given; use for example 0.1,1,10,100 (Mbit/s)")
    rates = sorted({_number(part) for part in parts})
    for rate in rates:
        _check_rate("uplinks", rate)
    return rates


def parse_proofs(text: str) -> list[str]:
    """Names out of PROOFS; BenchError."""
    proofs = list(dict.fromkeys(_parts(text, f"proof is named; choose from {', '.join(PROOFS)}")))
    for proof in proofs:
        if proof not in PROOFS:
            raise BenchError(f"unknown proof {proof!r}; choose from {', '.join(PROOFS)}")
    return proofs


@dataclass(frozen=True)
class WireSetting:
    """What is measured, besides the models; BenchError."""

    decode: DecodeSettings  # sampling, draft length, token limit and seed of all proofs
    proofs: Sequence[str] = PROOFS
    kept: Sequence[Kept] = ()
    uplinks: Sequence[float] = (0.1, 1.0, 10.0, 100.0)  # Mbit/s
    downlink: float = 0.0  # Mbit/s; 0: as fast as the uplink
    delay_s: float = 0.020  # one way
    images: int = 6  # or instructions, for a text model
    draws: int = 4  # replies to each question that are counted
    timed: int | None = None  # questions of which one reply is decoded over the link too; None: all
    longest_s: float = 120.0  # a reply that would take longer is computed
    shapes: Sequence[WireShape] = (SEQUENCE,)
    model: str = "pair"  # or "text"
    profile: Profile | None = None  # whose model times are kept; None: this machine's

    def __post_init__(self) -> None:
        if self.decode.sampling.greedy:
            raise BenchError("greedy drafts need no proof, ids alone are sent; use a temperature above 0")
        if self.model not in MODELS:
            raise BenchError(f"unknown model {self.model!r}; choose from {', '.join(MODELS)}")
        check_range("images", self.images, 1, MAX_SCENES)
        check_range("draws", self.draws, 1, 1000)
        if self.timed is not None and not 0 <= self.timed <= self.images:
            raise BenchError(f"timed is {self.timed}; use 0 to the number of images, {self.images}")
        check_range("longest", self.longest_s, 0, 1_000_000, " s")
        for shape in self.shapes:  # SettingsError for one that cannot be
            dataclasses.replace(self.decode, mode="coupled", **dict(shape.settings))
        if "coupled" not in self.proofs and not any(shape.draws for shape in self.shapes):
            raise BenchError("a budget draws no nodes, which only proof coupled can do with; name it, or another shape")
        check_range("delay-ms", 1e3 * self.delay_s, 0, 60_000)
        if self.downlink:
            _check_rate("downlink", self.downlink)
        if self.profile is not None and not self.profile.paced:
            raise BenchError(
                f"profile {self.profile.name} gives no times of models; leave --profile out, or use one with "
                "draft_ms and target_ms"
            )

    @property
    def timed_count(self) -> int:
        """How many replies of each contender are timed at each rate."""
        return self.images if self.timed is None else self.timed

    def link(self, uplink: float) -> LinkProfile:
        """The link at one uplink rate."""
        down = self.downlink or uplink
        return LinkProfile(self.delay_s, self.delay_s, 0.0, 1e6 * uplink, 1e6 * down)


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
        """Children of every node; None where that differs."""
        config = set(self.shape.config(self.decode.draft_length))
        return config.pop() if len(config) == 1 and self.shape.draws else None


def _parts(text: str, missing: str) -> list[str]:
    """The parts of a list; BenchError "no ``missing``" where there are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise BenchError(f"no {missing}")
    return parts


def _number(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise BenchError(f"{text!r} is no number to measure with; give a finite one")


def _check_rate(name: str, rate: float) -> None:
    if not 0.001 <= rate <= 1e6:  # false for a NaN too
        raise BenchError(f"{name} has {rate:g} Mbit/s; use 0.001 to 1000000")


LARGE_VOCABULARY = 152_064  # Qwen2-VL-7B's
_VALUE_BITS = {"truncated": 16}  # of a probability as it travels; others: float32
_CHANCE_BITS = 16  # of a probability that is sent alone
_COLUMNS = (  # heading, key of a row, format
    ("up B", "bytes_up_per_token", ".1f"),
    ("formula", "payload_up_per_token", ".1f"),
    ("down B", "bytes_down_per_token", ".1f"),
    ("formula", "payload_down_per_token", ".1f"),
    ("accepted", "acceptance", ".3f"),
    ("position", "position_acceptance", ".3f"),
    ("expected", "expected_acceptance", ".3f"),
    ("tau", "tau", ".2f"),
)


_CURVE_POINTS = 24


class Distances:
    """Means over positions: acceptance by the two distributions, and the mass that K tokens hold."""

    def __init__(self, vocabulary: int, kept: Sequence[int], children: Sequence[int] = ()) -> None:
        """``kept``: values of K besides those of a curve over the vocabulary; ``children``: of the nodes of trees."""
        grid = {round(k) for k in np.geomspace(1, vocabulary, _CURVE_POINTS)}
        self.kept = sorted(grid | set(kept))
        self.tokens = 0
        self._children = sorted({1, *children})
        self._coupled = self._optimal = self._target_kept = 0.0
        self._mass = dict.fromkeys((*self.kept, vocabulary), 0.0)
        self._accepted = dict.fromkeys([(k, n) for k in self._mass for n in self._children], 0.0)
        self._vocabulary = vocabulary

    def add(self, p: np.ndarray, q: np.ndarray) -> None:
        """Add the distributions (n, V) of target and draft after the same tokens."""
        self.tokens += len(p)
        self._optimal += float(acceptance(p, q).sum())
        self._coupled += float(coupled_acceptance(p, q).sum())
        self._target_kept += float((p > 0).sum())
        # By q, the likeliest first and among equals the lower id, the order in which ``acceptance.truncate`` keeps.
        order = np.argsort(-q, axis=-1, kind="stable")
        p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
        masses = np.cumsum(q, -1)
        for k in self._mass:
            mass = masses[:, min(k, q.shape[-1]) - 1]
            self._mass[k] += float((mass / masses[:, -1]).sum())
            totals = _total_acceptance(p[:, :k], q[:, :k] / mass[:, None], max(self._children))
            for n in self._children:
                self._accepted[k, n] += float(totals[n - 1].sum())

    @property
    def optimal(self) -> float:
        """1 - TV: the most that any proof of one candidate can have."""
        return self._optimal / self.tokens

    @property
    def coupled(self) -> float:
        """The part of it that shared randomness keeps, exactly."""
        return self._coupled / self.tokens

    def expected(self, proof: str, k: int, children: int = 1) -> float | None:
        """Acceptance of a position, or of a tree's level of ``children`` candidates: 1 - TV, or theta (TSLT 39).

        None for several candidates of shared randomness, which are not drawn independently.
        """
        if proof == "coupled":
            return self.coupled if children == 1 else None
        k = k if proof == "truncated" else self._vocabulary
        return self._accepted[k, children] / self.tokens

    def mass(self, k: int) -> float:
        """The share of q that its k likeliest tokens hold."""
        return self._mass[k] / self.tokens

    @property
    def target_kept(self) -> int:
        """How many ids p has on average."""
        return max(1, round(self._target_kept / self.tokens))


def _total_acceptance(p: np.ndarray, q: np.ndarray, count: int) -> list[np.ndarray]:
    """theta of 1 to ``count`` candidates, (n,) each: TSLT equations 25, 29 and 39 where q (n, K) has all its mass."""
    found, left, total = [], np.ones(len(p)), np.zeros(len(p))
    for _ in range(count):
        beta = np.minimum(p, q).sum(-1)
        total = total + left * beta
        left = left * (1.0 - beta)
        found.append(np.minimum(total, 1.0))
        p = np.maximum(p - q, 0.0) / np.maximum(1.0 - beta, 1e-12)[:, None]
    return found


def make_report(
    setting: WireSetting,
    contenders: Sequence[Contender],
    distances: Distances,
    pictures: Sequence[int],
    models: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything measured, as JSON holds it. ``pictures``: bytes of each picture's or instruction's message."""
    decode, vocabulary = setting.decode, models["draft"].vocab_size
    differences = _differences(contenders)
    return {
        **header("wire", **models),
        "model": setting.model,
        "vocabulary": vocabulary,
        "images": setting.images,
        "draws": setting.draws,
        **{name: getattr(decode, name) for name in ("seed", "temperature", "top_k", "top_p", "draft_length")},
        "uplinks_mbps": list(setting.uplinks),
        "downlink_mbps": setting.downlink or None,
        "delay_ms": rounded(1e3 * setting.delay_s),
        "profile": setting.profile.name if setting.profile else None,
        "picture_bytes": round(statistics.fmean(pictures)),
        "exact": not differences,
        "differences": differences,
        "kept_curve": [
            {
                "kept": k,
                "mass": rounded(distances.mass(k)),
                "acceptance": _figure(distances.expected("truncated", k)),
                "tree_acceptance": _figure(distances.expected("truncated", k, PAIR)),
            }
            for k in distances.kept
        ],
        "optimal_acceptance": rounded(distances.optimal),
        "coupled_share": rounded(distances.coupled / distances.optimal),
        "rows": [_row(one, setting, distances, pictures, vocabulary) for one in contenders],
    }


def _row(one: Contender, setting: WireSetting, distances: Distances, pictures: Sequence[int], vocabulary: int) -> Row:
    replies, decode = one.counted, one.decode
    tokens = sum(len(reply.tokens) for reply in replies)
    rounds = [record for reply in replies for record in reply.records]
    tau = tokens / len(rounds) if one.proof != ALONE else 1.0
    took = {f"{rate:g}": _seconds_at(one, setting, rate) for rate in setting.uplinks}
    up = sum(reply.bytes_up - pictures[i % len(pictures)] for i, reply in enumerate(replies))
    row: Row = {
        "proof": one.proof,
        "label": one.label,
        "settings": _settings(one),
        "replies": len(replies),
        "tokens_per_reply": rounded(tokens / len(replies)),
        "bytes_up_per_token": rounded(up / tokens),
        "bytes_down_per_token": rounded(sum(reply.bytes_down for reply in replies) / tokens),
        "tau": rounded(tau),
        "seconds_per_reply": {rate: rounded(seconds) for rate, (seconds, _) in took.items()},
        "seconds_per_token": {rate: rounded(seconds) for rate, (_, seconds) in took.items()},
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
    return row | {
        "drafted_per_round": rounded(drafted / len(rounds)),
        "acceptance": rounded(accepted / drafted) if drafted else 0.0,
        "position_acceptance": rounded(alpha),
        "expected_acceptance": _figure(distances.expected(one.proof, k, children) if children else None),
        "kept_mass": rounded(distances.mass(k)) if one.proof == "truncated" else None,
        "payload_up_per_token": rounded(sent.up / 8 / tau),
        "payload_down_per_token": rounded(sent.down / 8 / tau),
        "large_vocabulary_up_per_token": rounded(large.up / 8 / tau),
        "large_vocabulary_down_per_token": rounded(large.down / 8 / tau),
        "formula_seconds": {f"{rate:g}": _formula(one, setting, rate, sent, pictures) for rate in setting.uplinks},
    }


def _seconds_at(one: Contender, setting: WireSetting, rate: float) -> tuple[float, float]:
    """Seconds of a reply and of a token over the link: as measured, or else by ``computed_seconds``."""
    timed = one.timed.get(rate)
    replies = timed or one.counted[: setting.timed_count] or one.counted
    seconds = [r.seconds if timed else computed_seconds(one, r, setting, rate) for r in replies]
    return statistics.fmean(seconds), sum(seconds) / sum(len(reply.tokens) for reply in replies)


def computed_seconds(one: Contender, reply: DecodedReply, setting: WireSetting, rate: float) -> float:
    """Seconds of a reply at a rate: the models' time (the profile's where there is one), its bytes and round trips.

    Tokens of the target alone travel down while it makes the next ones.
    """
    link, profile = setting.link(rate), setting.profile
    trips = reply.rounds if one.proof != ALONE else 1
    models = reply.seconds
    if profile is not None and (times := profile.times) is not None:
        depth = sum(record.depth or record.drafted for record in reply.records)
        passes = trips if one.proof != ALONE else len(reply.tokens)
        # Both sides read the prompt at the same time.
        read = max(times.target_prefill_s or 0.0, 0.0 if one.proof == ALONE else times.draft_prefill_s or 0.0)
        fed = 1 + sum(record.drafted for record in reply.records) / passes
        models = read + depth * times.draft_s + passes * times.verify_s(fed)
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
    """Bits of a full round by ``proofs.payload``, values as they travel here."""
    sampling, config = one.decode.sampling, one.shape.config(one.decode.draft_length)
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0
    if one.proof == "split" and len(config) < sum(config):  # of a node's first child only
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
    link, gamma = setting.link(rate), one.decode.depth
    replies = one.timed.get(rate) or one.counted
    one_round = round_seconds(
        gamma=gamma,
        t_p=statistics.fmean(r.draft_round_seconds for r in replies) / gamma,
        t_q=statistics.fmean(r.verify_round_seconds for r in replies),
        t_comm=sent.up / link.rate_up_bps + sent.down / link.rate_down_bps + 2 * setting.delay_s,
    )
    rounds = statistics.fmean(reply.rounds for reply in replies)
    return rounded(rounds * one_round + 8 * statistics.fmean(pictures) / link.rate_up_bps)


def _differences(contenders: Sequence[Contender]) -> list[str]:
    """Replies that are not what they must be: the link changes none, and coupled says what the target alone does."""
    found = []
    for one in contenders:
        others = [(f" at {rate:g} Mbit/s differs", replies, one.counted, False) for rate, replies in one.timed.items()]
        if one.proof == "coupled":
            others.append((" differs from the target alone", one.counted, contenders[0].counted, True))
        for what, ours, theirs, strict in others:
            for number, (one_reply, other) in enumerate(zip(ours, theirs, strict=strict)):
                if one_reply.tokens != other.tokens:
                    found.append(f"{one.label}{what} in reply {number}")
    return found


def render(report: dict[str, Any]) -> str:
    """The report as a table with its notes."""
    rates = [f"{rate:g}" for rate in report["uplinks_mbps"]]
    large = ("large_vocabulary_up_per_token", "large_vocabulary_down_per_token")
    rows = [["proof", *(heading for heading, _, _ in _COLUMNS), *(f"s at {rate}" for rate in rates)]]
    rows[0] += [f"up B, V={LARGE_VOCABULARY}", "down B"]
    for row in report["rows"]:
        seconds = [
            ("~" if rate in row["computed_at"] else "") + f"{row['seconds_per_reply'][rate]:.2f}" for rate in rates
        ]
        line = [row["label"], *(cell(row.get(key), form) for _, key, form in _COLUMNS), *seconds]
        rows.append(line + [cell(row.get(key), ".0f") for key in large])
    full = [row[large[0]] / 1e3 for row in report["rows"] if row["proof"] == "full"]
    values = {
        "thing": "picture" if report["model"] == "pair" else "instruction",
        "computed": any(row["computed_at"] for row in report["rows"]),
        "coupled": any(row["proof"] == "coupled" for row in report["rows"]),
        "size": full[0] if full else None, "large": LARGE_VOCABULARY, "speed": models_speed(report),
    }  # fmt: skip
    return render_template("bench/wire.txt", r=report, table="\n".join(table(rows)), **values).rstrip("\n")


def models_speed(report: dict[str, Any]) -> str:
    """Whose times the models have, as a clause."""
    if report["profile"] is None:
        return "models at this machine's speed"
    return f"models at the times of profile {report['profile']}"


def _figure(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def draw_wire(report: dict[str, Any], path: Path) -> None:
    """Kept mass and acceptance by K, and the speed-up by uplink rate; PlotError, OSError."""
    curve, rates = report["kept_curve"], report["uplinks_mbps"]
    kept, drafted = [point["kept"] for point in curve], [row for row in report["rows"] if row["proof"] != ALONE]
    accepted = [Curve("1 - TV", kept, [point["acceptance"] for point in curve])]
    if curve[0]["tree_acceptance"] is not None:
        found = [point["tree_acceptance"] for point in curve]
        accepted.append(Curve("a level of two candidates", kept, found))
    down = report["downlink_mbps"]
    link = f"uplink, Mbit/s (downlink {down or 'the same'}, {report['delay_ms']:g} ms one way)"
    speeds = [Curve(row["label"], rates, _speed_ups(row, report)) for row in drafted]
    ids = f"K, ids kept of {report['vocabulary']}"
    panels = [
        Panel(ids, "mass of the draft's distribution", [Curve("", kept, [p["mass"] for p in curve])], "x"),
        Panel(ids, "acceptance of a position, or of a tree's level", accepted, "x"),
        Panel(link, "speed-up over the target alone", speeds, "x", 1.0),
    ]
    draw_panels(path, f"temperature {report['temperature']:g}; {models_speed(report)}", panels)


def _speed_ups(row: Row, report: dict[str, Any]) -> list[float]:
    (alone,) = (other for other in report["rows"] if other["proof"] == ALONE)
    base = alone["seconds_per_token"]  # sampled replies are not of one length
    return [base[rate] / seconds for rate, seconds in row["seconds_per_token"].items()]
