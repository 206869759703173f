"""What `dsd-lab bench wire` measures: proofs, shapes of drafts, ids kept by truncation, rates of the link."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.scenes import MAX_SCENES
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.papers.proofs import PROOFS
from dsd_lab.report import BenchError, check_range
from dsd_ros.decoding.settings import AUTO_LENGTH, DecodeSettings
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
        if self.decode.draft_length == AUTO_LENGTH:
            raise BenchError("automatic lengths cannot be compared with formulas; give a draft_length")
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
