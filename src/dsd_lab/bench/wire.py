# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench wire`: bytes, acceptance and seconds of each way to prove a sampled draft.

Bytes, acceptance and tau are counted without a link. Seconds at a rate are the models' time, the counted bytes over the
rate, and the round trips; with ``--timed`` replies are decoded over an emulated link of each rate, too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.bench import scenes as ask
from dsd_lab.bench.harness import Bench, Decoding, PairFlags, Report, Told, curve, given
from dsd_lab.bench.profiles import Profile, load_profile
from dsd_lab.bench.scenes import (
    MAX_SCENES,
    TEXT_TOKENS,
    Scene,
    held_out_scenes,
    said,
    text_models,
    text_scenes,
    trained_for_text,
)
from dsd_lab.bench.sweeps import Variant, parse_modes
from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_lab.papers.acceptance import acceptance, candidate_acceptance, coupled_acceptance, total_acceptance, truncate
from dsd_lab.papers.proofs import payload
from dsd_lab.parts import parts
from dsd_lab.plotting import Panel
from dsd_lab.report import BenchError, Row, check_range, header, ratio, rounded
from dsd_ros.cli.arguments import arguments, file_option, flag, part
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.generation import processed
from dsd_ros.decoding.modes import Shape
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode

_VALUE_BITS = {"truncated": 16}  # of a probability as it travels; others: float32
_CHANCE_BITS = 16  # of a probability that is sent alone


@arguments
class Flags(PairFlags):
    model: str = flag(
        "pair",
        "pair: the shipped models, or those named; text: the pretrained SmolLM2-135M and its draft, or "
        "text models named",
        choices=("pair", "text"),
    )
    modes: str = flag("dsd dssd tslt:top_k_proof=5 coupled", "as in bench modes; mode ar is always there")
    uplinks: str = flag("0.1,1,10,100", "rates to compute seconds at, Mbit/s", metavar="MBIT,...")
    downlink: float = flag(0.0, "rate of the other direction, Mbit/s; 0: that of the uplink")
    delay_ms: float = flag(20.0, "the link's delay, one way")
    images: int = flag(6, "pictures, or instructions")
    draws: int = flag(4, "replies per picture")
    timed: int = flag(0, "replies per mode and rate that are decoded over an emulated link, the models at full speed")
    profile: str = flag("", "take the models' times of this one of config/profiles.yaml (default: as measured here)")
    decoding: Decoding = part(Decoding)
    plot: Path | None = file_option("draw speed-ups by rate (.png, .svg, .pdf)")


@dataclass
class _Contender:
    """One mode with its replies, and what its acceptance should be by both distributions, position by position."""

    variant: Variant
    replies: list[DecodedReply] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    timed: dict[float, list[DecodedReply]] = field(default_factory=dict)  # by rate

    @property
    def alone(self) -> bool:
        return not self.variant.decode.needs_draft

    @property
    def config(self) -> list[int]:
        """The children of every node, level by level, as the formulas take them; a budget counts as one level."""
        decode = self.variant.decode
        if decode.shaped_by is Shape.EXPANSION:
            return [int(children) for children in decode.tree_expansion.split(",")]
        return [decode.tree_budget] if decode.shaped_by is Shape.BUDGET else [1] * decode.draft_length

    @property
    def children(self) -> int:
        """Children of every node, where all have as many and are drawn independently; else 0."""
        several = set(self.config)
        drawn = not self.variant.decode.proven_by.declared.draws_alike or several == {1}
        return several.pop() if len(several) == 1 and drawn else 0


def measure(flags: Flags, told: Told) -> Report:
    """Ask the same questions in every mode; ValueErrors, ModelError, LinkError.

    "exact": whether every mode that draws with shared noise says what the target alone does.
    """
    rates, profile, contenders = _checked(flags)
    scenes = (text_scenes if flags.model == "text" else held_out_scenes)(flags.images)
    own = flags.model == "text" and not flags.target
    settings = text_models(flags.draft, flags.target) if flags.model == "text" else flags.models
    robot, cloud = map(load_model, settings)
    asked = [(draw, number) for draw in range(flags.draws) for number in range(flags.images)]
    seed = contenders[0].variant.decode.seed
    with VerifierEngine(cloud) as engine:
        pictures = _observation_bytes(engine, scenes)
        for one in contenders:  # what happens once in a process must not be measured
            short = dataclasses.replace(one.variant.decode, max_tokens=ask.WARM_UP_TOKENS)
            ask.decode(LocalChannel(engine), robot, short, scenes[0])
        for place, (draw, number) in enumerate(parts(asked)):
            for one in contenders:
                decode = dataclasses.replace(one.variant.decode, seed=seed + draw * flags.images + number)
                one.replies.append(ask.decode(LocalChannel(engine), robot, decode, scenes[number]))
                told(place / len(asked), said(one.variant.label, one.replies[-1]))
        _time(contenders, robot, engine, scenes, rates, flags, told)
    optimal, shared, left = _compare_distributions(contenders, robot, cloud, scenes)
    differences = _differences(contenders)
    rows = [_row(one, flags, rates, profile, pictures, robot.vocab_size, left) for one in contenders]
    for row in rows:
        base = rows[0]["seconds_per_token"]  # sampled replies are not of one length
        row["speedup"] = {rate: rounded(base[rate] / each) for rate, each in row["seconds_per_token"].items()}
        row["speedup_95"] = {
            rate: [rounded(base[rate] / high), rounded(base[rate] / low)]
            for rate, (low, high) in row["seconds_per_token_95"].items()
        }
    for row, one in zip(rows, contenders, strict=True):
        row["timed"] = {f"{rate:g}": _timed(one, contenders[0], rate) for rate in one.timed}
    decode = contenders[0].variant.decode
    return {
        **header("wire", draft=robot, target=cloud, **(trained_for_text() if own else {})),
        **{name: getattr(flags, name) for name in ("model", "images", "draws", "timed", "delay_ms")},
        **{name: getattr(decode, name) for name in ("seed", "temperature", "top_k", "top_p", "draft_length")},
        "vocabulary": robot.vocab_size,
        "uplinks_mbps": rates,
        "downlink_mbps": flags.downlink or None,
        "profile": profile.name if profile else None,
        "picture_bytes": round(statistics.fmean(pictures)),
        "exact": not differences,
        "differences": differences,
        "optimal_acceptance": rounded(optimal),
        "coupled_share": rounded(shared / optimal),
        "rows": rows,
    }


def _checked(flags: Flags) -> tuple[list[float], Profile | None, list[_Contender]]:
    """The rates, the profile and what is compared; BenchError."""
    check_range("images", flags.images, 1, MAX_SCENES)
    check_range("draws", flags.draws, 1, 1000)
    check_range("timed", flags.timed, 0, 1000)
    check_range("delay-ms", flags.delay_ms, 0, 60_000)
    try:
        rates = sorted({float(text) for text in flags.uplinks.split(",")})
    except ValueError:
        raise BenchError(f"uplinks is {flags.uplinks!r}; use numbers as 0.1,1,10 (Mbit/s)") from None
    for name, rate in (*(("uplinks", rate) for rate in rates), ("downlink", flags.downlink or 1.0)):
        check_range(name, rate, 0.001, 1e6, " Mbit/s")
    profile = load_profile(flags.profile) if flags.profile else None
    if profile is not None and not profile.paced:
        raise BenchError(f"profile {profile.name} gives no times of models; leave it out, or use one with draft_ms")
    usual = {"temperature": 1.0} | ({"max_tokens": TEXT_TOKENS} if flags.model == "text" else {})
    common = usual | given(flags.decoding)
    if common["temperature"] == 0.0:
        raise BenchError("greedy drafts need no proof, ids alone are sent; use a temperature above 0")
    # The target alone draws with the shared noise: modes that draw so too must say the same.
    alone = Variant(DecodeSettings(mode="ar", **common | {"proof": "coupled"}))
    variants = [one for one in parse_modes(flags.modes, common) if one.decode.needs_draft]
    if streams := [one.label for one in variants if one.decode.preset.streams]:
        raise BenchError(f"{streams[0]} has no rounds, and always draws with shared noise; name modes in rounds")
    return rates, profile, [_Contender(one) for one in (alone, *variants)]


def _time(
    contenders: Sequence[_Contender], robot: VisionLanguageModel, engine: VerifierEngine, scenes: Sequence[Scene],
    rates: Sequence[float], flags: Flags, told: Told,
) -> None:  # fmt: skip
    """Decode ``timed`` replies over a link of each rate with every contender, seeds as for the counted ones."""
    delay, seed = flags.delay_ms / 1e3, contenders[0].variant.decode.seed
    for number in parts(range(flags.timed)):
        for rate in rates:
            link = LinkProfile(delay, delay, 0.0, rate * 1e6, (flags.downlink or rate) * 1e6)
            for one in contenders:
                decode = dataclasses.replace(one.variant.decode, seed=seed + number)
                channel = EmulatedChannel(LocalChannel(engine), link)
                one.timed.setdefault(rate, []).append(ask.decode(channel, robot, decode, scenes[number % len(scenes)]))
                told(number / flags.timed, said(f"{one.variant.label} at {rate:g} Mbit/s", one.timed[rate][-1]))


def _timed(one: _Contender, alone: _Contender, rate: float) -> Row:
    """Tokens a second over the link, and the ratio to the target alone with its bootstrap interval over replies."""
    own, base = ([len(reply.tokens) / reply.seconds for reply in each.timed[rate]] for each in (one, alone))
    speedup = ratio(own, base)
    return {
        "replies": len(own),
        "tokens_per_second": rounded(statistics.fmean(own)),
        "speedup": rounded(speedup["value"]),
        "speedup_95": [rounded(speedup["low"]), rounded(speedup["high"])],
    }


def _observation_bytes(engine: VerifierEngine, scenes: Sequence[Scene]) -> list[int]:
    """Bytes of each message with the picture, as it travels to this verifier, and the instruction."""
    with EdgeSession(LocalChannel(engine), None, DecodeSettings(mode="ar")) as session:
        pictures, sizes = SessionPictures(ask.PATIENT_LINK), []
        for scene in scenes:
            pictures.begin(scene.image, (), session.verifier)
            sizes.append(len(encode(pictures.observation(1, 1, scene.instruction))))
    return sizes


def _compare_distributions(
    contenders: Sequence[_Contender], robot: VisionLanguageModel, cloud: VisionLanguageModel, scenes: Sequence[Scene]
) -> tuple[float, float, int]:
    """Fill in what each contender's acceptance should be; 1 - TV, shared randomness's part of it, and ids left in p.

    Over the replies of the target alone.
    """
    optimal: list[float] = []
    shared: list[float] = []
    left: list[float] = []
    for index, reply in enumerate(contenders[0].replies):
        asked = scenes[index % len(scenes)], reply.tokens, contenders[0].variant.decode
        p, q = _rows(cloud, *asked, whole=True), _rows(robot, *asked, whole=False)  # an int8 draft rounds longer passes
        size = min(p.shape[1], q.shape[1])  # models may pad their vocabularies differently
        p, q = (rows[:, :size] / rows[:, :size].sum(-1, keepdims=True) for rows in (p, q))
        coupled = coupled_acceptance(p, q).tolist()
        optimal, shared, left = optimal + acceptance(p, q).tolist(), shared + coupled, left + (p > 0).sum(-1).tolist()
        for one in contenders[1:]:
            decode = one.variant.decode
            if decode.proven_by.declared.draws_alike:
                one.expected += coupled if one.children else []
            elif one.children:
                sent = truncate(q, top_k=decode.top_k_proof)[0] if decode.proven_by.declared.truncates else q
                found = (candidate_acceptance(*rows, one.children) for rows in zip(p, sent, strict=True))
                one.expected += [total_acceptance(np.minimum(rates, 1.0)) for rates in found]
    return statistics.fmean(optimal), statistics.fmean(shared), max(1, round(statistics.fmean(left)))


def _rows(model: VisionLanguageModel, scene: Scene, tokens: list[int], decode: DecodeSettings, whole: bool) -> Any:
    """A model's distributions over a reply, (n, V), in one pass (``whole``) or token by token."""
    sequence, said = model.prefill(scene.image, scene.instruction), tokens[:-1]
    logits = list(sequence.verify(said)) if whole else [sequence.next_logits()]
    for token in () if whole else said:
        sequence.append([token])
        logits.append(sequence.next_logits())
    rows = processed(torch.stack(logits), sequence.processor, None, (), said, range(-1, len(said) - 1))
    return transform(rows, decode.sampling).double().cpu().numpy()


def _row(
    one: _Contender, flags: Flags, rates: Sequence[float], profile: Profile | None, pictures: Sequence[int],
    vocabulary: int, left: int,
) -> Row:  # fmt: skip
    replies, decode = one.replies, one.variant.decode
    tokens = sum(len(reply.tokens) for reply in replies)
    rounds = [record for reply in replies for record in reply.records]
    tau = tokens / len(rounds) if not one.alone else 1.0
    seconds = {f"{rate:g}": [_seconds(one, reply, flags, rate, profile) for reply in replies] for rate in rates}
    paces = {rate: ratio(each, [len(reply.tokens) for reply in replies]) for rate, each in seconds.items()}
    up = sum(reply.bytes_up - pictures[i % len(pictures)] for i, reply in enumerate(replies))
    row: Row = {
        "mode": decode.mode,
        "label": one.variant.label,
        "settings": one.variant.settings,
        "replies": len(replies),
        "tokens_per_reply": rounded(tokens / len(replies)),
        "bytes_up_per_token": rounded(up / tokens),
        "bytes_down_per_token": rounded(sum(reply.bytes_down for reply in replies) / tokens),
        "tau": rounded(tau),
        "seconds_per_reply": {rate: rounded(statistics.fmean(each)) for rate, each in seconds.items()},
        "seconds_per_token": {rate: rounded(found["value"]) for rate, found in paces.items()},
        "seconds_per_token_95": {rate: [found["low"], found["high"]] for rate, found in paces.items()},
    }
    if one.alone:
        return row
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    # The target judges up to the first rejection only.
    judged = accepted + sum(r.accepted < (r.depth or r.drafted) for r in rounds)
    alpha = accepted / max(1, judged)
    proof = str(decode.proven_by)
    sent = payload(
        proof, config=one.config, alpha=alpha, vocabulary=vocabulary, b_prob=_VALUE_BITS.get(proof, 32),
        b_chance=_CHANCE_BITS, kept=min(vocabulary, decode.top_k_proof) if decode.proven_by.declared.truncates else 0,
        target_kept=left if decode.top_k > 0 or decode.top_p < 1.0 else 0,
    )  # fmt: skip
    return row | {
        "drafted_per_round": rounded(drafted / len(rounds)),
        "acceptance": rounded(accepted / max(1, drafted)),
        "position_acceptance": rounded(alpha),
        "expected_acceptance": rounded(statistics.fmean(one.expected)) if one.expected else None,
        "payload_up_per_token": rounded(sent.up / 8 / tau),
        "payload_down_per_token": rounded(sent.down / 8 / tau),
    }


def _seconds(one: _Contender, reply: DecodedReply, flags: Flags, rate: float, profile: Profile | None) -> float:
    """Seconds of a reply: the models' time (the profile's where there is one), its bytes and round trips.

    Tokens of the target alone travel down while it makes the next ones.
    """
    trips = reply.rounds if not one.alone else 1
    models = reply.seconds
    if profile is not None and (times := profile.times) is not None:
        depth = sum(record.depth or record.drafted for record in reply.records)
        passes = trips if not one.alone else len(reply.tokens)
        # Both sides read the prompt at the same time.
        read = max(times.target_prefill_s or 0.0, 0.0 if one.alone else times.draft_prefill_s or 0.0)
        fed = 1 + sum(record.drafted for record in reply.records) / passes
        models = read + depth * times.draft_s + passes * times.verify_s(fed)
    up, down = 8e-6 * reply.bytes_up / rate, 8e-6 * reply.bytes_down / (flags.downlink or rate)
    busy = max(models, down) if one.alone else models + down
    return busy + up + 2e-3 * trips * flags.delay_ms


def _differences(contenders: Sequence[_Contender]) -> list[str]:
    """Replies of modes with shared noise that are not those of the target alone."""
    return [
        f"{one.variant.label} differs from the target alone in reply {number}"
        for one in contenders[1:] if one.variant.decode.proven_by.declared.draws_alike
        for number, (ours, theirs) in enumerate(zip(one.replies, contenders[0].replies, strict=True))
        if ours.tokens != theirs.tokens
    ]  # fmt: skip


def _notes(report: Report) -> list[str]:
    thing = "picture" if report["model"] == "pair" else "instruction"
    down = f"{report['downlink_mbps'] or 'as many'} down, {report['delay_ms']:g} ms one way"
    return [
        f"{report['images']} {thing}s, {report['draws']} replies of each, V = {report['vocabulary']}, temperature "
        f"{report['temperature']:g}, {report['draft_length']} drafted a round",
        "coupled said what the target alone says." if report["exact"] else "NOT EXACT: "
        + "; ".join(report["differences"]),
        f"bytes per generated token, {thing} and handshake apart; payload: by formula, without messages' headers.",
        "accepted: of all drafted tokens; position: of those (in trees: levels) the target judged; expected: by both "
        f"distributions, of which 1 - TV is {report['optimal_acceptance']:.3f} and shared randomness keeps "
        f"{100 * report['coupled_share']:.1f} %.",
        f"s at R: seconds per reply, computed, with R Mbit/s up, {down}, models "
        + (f"at the times of profile {report['profile']}" if report["profile"] else "at this machine's speed")
        + f"; the {thing}'s {report['picture_bytes']} bytes go up first.",
        f"timed x at R: tokens a second over the target alone's, {report['timed']} replies over an emulated link of R "
        "Mbit/s, both models in this process at its speed." if report["timed"] else "",
    ]  # fmt: skip


def _panels(report: Report) -> list[Panel]:
    rates = report["uplinks_mbps"]
    speeds = [
        curve(
            row["label"], [{"rate": rate, "speedup": row["speedup"][f"{rate:g}"]} for rate in rates], "rate", "speedup"
        )
        for row in report["rows"][1:]
    ]
    return [Panel("uplink, Mbit/s", "speed-up over the target alone", speeds, "x", 1.0)]


_COLUMNS = (
    ("mode", "label", ""),
    ("up B", "bytes_up_per_token", ".1f"),
    ("payload", "payload_up_per_token", ".1f"),
    ("down B", "bytes_down_per_token", ".1f"),
    ("payload", "payload_down_per_token", ".1f"),
    ("accepted", "acceptance", ".3f"),
    ("position", "position_acceptance", ".3f"),
    ("expected", "expected_acceptance", ".3f"),
    ("tau", "tau", ".2f"),
)
BENCH = Bench(
    measure,
    lambda report: (
        *_COLUMNS,
        *((f"s at {rate:g}", f"seconds_per_reply/{rate:g}", ".2f") for rate in report["uplinks_mbps"]),
        *((f"timed x at {rate:g}", f"timed/{rate:g}/speedup", ".2f") for rate in report["uplinks_mbps"]),
    ),
    _notes,
    _panels,
    lambda report: f"temperature {report['temperature']:g}",
    holds="exact",
)


def command(flags: Flags = Flags()) -> int:
    """Bytes, acceptance and seconds of each proof and shape of a draft.

    Samples replies about the same held-out pictures, or to a text model's instructions, in every mode; prints bytes per
    generated token, acceptance, tokens per round, and seconds per reply at each uplink rate, beside what the papers'
    formulas predict. Exits with 1 if a reply drawn with shared noise is not the target's.
    """
    return BENCH.run(flags)
