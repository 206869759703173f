"""The report of `dsd-lab bench wire`: a row per proof and shape, what the formulas say beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dsd_lab.bench.wire_distances import Distances
from dsd_lab.bench.wire_setting import ALONE, PAIR, Contender, WireSetting
from dsd_lab.papers.proofs import Payload, payload, round_seconds
from dsd_lab.report import Row, cell, header, rounded, table
from dsd_ros.edge.results import DecodedReply

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
    """What a reply would take at a rate: its time without a link, and what its bytes and round trips add.

    Where a profile gives the models' times, these replace the time without a link. Tokens of the target alone travel
    down while it makes the next ones.
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
    if full := [row for row in report["rows"] if row["proof"] == "full"]:
        size = full[0][large[0]] / 1e3
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
    return "\n".join([*table(rows), about, verdict, *notes])


def models_speed(report: dict[str, Any]) -> str:
    """Whose times the models have, as a clause."""
    if report["profile"] is None:
        return "models at this machine's speed"
    return f"models at the times of profile {report['profile']}"


def _figure(value: float | None) -> float | None:
    return None if value is None else rounded(value)
