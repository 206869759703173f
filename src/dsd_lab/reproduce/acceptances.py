# SPDX-License-Identifier: Apache-2.0
"""Rounds and bytes of a pretrained pair from its distributions, for many draft lengths and truncations at once.

Replies are sampled from the target alone, 64 in one pass, and the draft model reads them along. Speculative sampling
emits x with probability p(x) and has accepted it with min(p(x), q(x)): where x is the reply's token, it was accepted
with min(1, q(x)/p(x)). So the expected number of rounds of a given reply follows exactly, for every gamma, without
decoding it again; sizes are those of the product's own messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.bench.scenes import INSTRUCTIONS, text_models, trained_for_text
from dsd_lab.report import Row, header
from dsd_lab.reproduce.measure import NARRATIVE, write
from dsd_ros.decoding.methods import split
from dsd_ros.decoding.packing import pack_distributions, pack_kept
from dsd_ros.decoding.sampling import sample, transform
from dsd_ros.decoding.settings import MAX_KEPT, SamplingSettings
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import next_logits_together
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Draft, Outcome

REPLIES, TOKENS = 32, 32
GAMMAS = (1, 2, 3, 4, 6, 8)
SHARES = {"K 10 %": 0.1, "K 1 %": 0.01, "K 0.1 %": 0.001}
NUCLEI = {"rho 0.99": 0.99, "rho 0.9": 0.9, "rho 0.8": 0.8}
WHOLE = "all of V"


@dataclass
class Proved:
    """What is counted of one way to prove a draft: q as it is, or truncated."""

    accepted: list[list[float]]  # of each reply's tokens, with which probability
    mass: list[list[float]]  # of each of its draft distributions, how much is kept
    expected: list[float] = field(default_factory=list)  # sum min(p, q) at each position
    evidence: list[int] = field(default_factory=list)  # bytes up for each drafted token

    def note(self, reply: int, p: torch.Tensor, q: torch.Tensor, x: int, mass: float, size: int) -> None:
        self.accepted[reply].append(min(1.0, float(q[x] / p[x])))
        self.expected.append(float(torch.minimum(p, q).sum()))
        self.mass[reply].append(mass)
        self.evidence.append(size)


def expected_rounds(accepted: Sequence[float], gamma: int) -> tuple[float, float]:
    """Rounds that a reply takes and rejections in them, on average, if token i is accepted with ``accepted[i]``."""
    count = len(accepted)
    rounds, rejections = np.zeros(count + 1), np.zeros(count + 1)
    for start in range(count - 1, -1, -1):
        rounds[start], held = 1.0, 1.0
        for place in range(start, min(count, start + gamma)):
            rejected = held * (1.0 - accepted[place])
            rounds[start] += rejected * rounds[place + 1]
            rejections[start] += rejected * (1.0 + rejections[place + 1])
            held *= accepted[place]
        after = min(count, start + gamma + 1)  # all accepted: the bonus token, or the reply's end
        rounds[start] += held * rounds[after]
        rejections[start] += held * rejections[after]
    return float(rounds[0]), float(rejections[0])


def measure_text(out: Path, progress: Callable[[float, str], None] | None = None) -> dict[str, Any]:
    """DSSD's sampling (top-k 10) and TSLT's (all of V) with SmolLM2-135M and its draft; the report."""
    robot, cloud = map(load_model, text_models("", ""))
    report = {
        **header("papers", draft=robot, target=cloud, **trained_for_text()), "study": "text", "model": "text",
        "replies": REPLIES, "tokens_a_reply": TOKENS, "vocabulary": cloud.vocab_size,
    }  # fmt: skip
    settings = {"dssd": ([NARRATIVE], SamplingSettings(1.0, 10)), "tslt": (INSTRUCTIONS, SamplingSettings(1.0))}
    for number, (name, (prompts, sampling)) in enumerate(settings.items()):

        def told(share: float, name: str = name, number: int = number) -> None:
            if progress is not None:
                progress((number + share) / len(settings), name)

        report[name] = _counted(robot, cloud, prompts, sampling, told)
        write(out, report)
    return report


def _counted(
    robot: VisionLanguageModel,
    cloud: VisionLanguageModel,
    prompts: Sequence[str],
    sampling: SamplingSettings,
    told: Callable[[float], None],
) -> Row:
    sides = []
    for model in (cloud, robot):
        read = [model.prefill(None, prompt) for prompt in prompts]
        sides.append([read[number % len(read)].fork() for number in range(REPLIES)])
    targets, drafts = sides
    names = (WHOLE,) if sampling.top_k else (WHOLE, *SHARES, *NUCLEI)
    proved = {name: Proved([[] for _ in range(REPLIES)], [[] for _ in range(REPLIES)]) for name in names}
    rng, going, down = np.random.default_rng(11), list(range(REPLIES)), []
    for position in range(TOKENS):
        told(position / TOKENS)
        rows = transform(torch.stack(next_logits_together([targets[reply] for reply in going])), sampling)
        for reply, p in zip(list(going), rows, strict=True):
            # One by one: the draft is in int8, which rounds by all that a pass holds.
            q = transform(drafts[reply].next_logits()[None], sampling)[0]
            x = sample(p, rng)
            for name, one in proved.items():
                _note(one, reply, p, q, name, x)
            down.append(len(split.pack_target(p[None], False)))
            targets[reply].append([x])
            drafts[reply].append([x])
            if x in cloud.eos_token_ids:
                going.remove(reply)
    return {
        "down_bytes": float(np.mean(down)),
        "header_up_bytes": {str(g): _header(g) for g in GAMMAS},
        "header_down_bytes": len(encode(Outcome(1, 1, 2, 30, 2, 5, 0.5, True, 60_000))),
        "rows": [_row(name, one) for name, one in proved.items()],
    }


def _note(one: Proved, reply: int, p: torch.Tensor, q: torch.Tensor, name: str, x: int) -> None:
    if name == WHOLE:
        one.note(reply, p, q, x, 1.0, len(pack_distributions(q[None])))
        return
    kept = truncate(q, MAX_KEPT, NUCLEI[name]) if name in NUCLEI else truncate(q, max(1, round(SHARES[name] * len(q))))
    one.note(reply, p, restored(*kept, len(q)), x, float(q[kept[0]].sum()), len(pack_kept([kept], len(q))))


def _header(gamma: int) -> int:
    """Bytes of a round's message without its evidence."""
    return len(encode(Draft(1, 1, 2, 20, [30_000] * gamma)))


def _row(name: str, one: Proved) -> Row:
    tokens = sum(map(len, one.accepted))
    row: Row = {
        "label": name,
        "tokens": tokens,
        **_mean("acceptance", one.accepted),
        **_mean("mass", one.mass),
        "expected_acceptance": float(np.mean(one.expected)),
        "evidence_bytes": float(np.mean(one.evidence)),
        "gammas": {},
    }
    for gamma in GAMMAS:
        found = np.array([expected_rounds(reply, gamma) for reply in one.accepted])
        taus = np.array([len(reply) for reply in one.accepted]) / found[:, 0]
        row["gammas"][str(gamma)] = {
            "rounds": float(found[:, 0].sum()),
            "rejections": float(found[:, 1].sum()),
            "tau_standard_error": _standard_error(taus),
        }
    return row


def _mean(name: str, replies: Sequence[Sequence[float]]) -> Row:
    """The mean over all tokens, and its standard error over the replies."""
    error = _standard_error(np.array([np.mean(reply) for reply in replies]))
    return {name: float(np.mean(np.concatenate(replies))), f"{name}_standard_error": error}


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))
