# SPDX-License-Identifier: Apache-2.0
"""The result of a decode: the reply, and a record of what each round, or pass of the target, cost."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.decoding.modes import streams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoundRecord:
    """One round, or in modes stream and ar a pass of the target that brought tokens.

    ``verify_seconds`` is measured by the verifier's monotonic clock, all other seconds by the robot's.
    """

    drafted: int  # tokens of the draft that were verified, all nodes of a tree
    accepted: int  # of these, the accepted ones: a path of a tree
    draft_seconds: float  # in the draft model, while nothing else ran
    wait_seconds: float  # from sending the draft to its outcome; a pass: since the pass before
    verify_seconds: float  # in the target; the first: with its prefill; 0: tokens sent again
    bytes_up: int
    bytes_down: int
    model_seconds: float = 0.0  # time spent making this draft, whenever that was; a pass: since the one before
    exits: int = 0  # early outcomes received
    first_exit: int = 0  # layer that first forecast the final outcome; 0: early exits are not used
    source: str = ""  # of the draft: "exit" or "guess" (pre-drafted), "flight" (sent ahead), "" (drafted in turn)
    ready: bool = False  # the whole draft was ready when the previous outcome arrived
    predrafts: int = 0  # begun while this round was being verified
    sync_seconds: float = 0.0  # T_r: from that outcome to sending a draft that was ready
    depth: int = 0  # passes of the draft model in model_seconds: the draft's tokens, or a tree's levels
    length: int = 0  # gamma: the depth that was asked for, had the reply not ended; 0 in mode stream
    began_seconds: float = 0.0  # from the start of the reply to the start of this round
    gained: tuple[int, ...] = ()  # its tokens of the reply: the accepted ones, then the target's
    rejected: tuple[int, ...] = ()  # rejected tokens
    exit_layers: tuple[int, ...] = ()  # layers that early outcomes came from, in order of arrival
    exit_seconds: tuple[float, ...] = ()  # from sending the draft to each of them


@dataclass(frozen=True)
class SpeculativeDecoding:
    """How drafts did, under the names of vLLM's per-request ``metrics.speculative_decoding`` (level "detailed").

    A step is a round or pass with a draft, as vLLM counts them. All nodes of a tree are draft
    tokens; its accepted path counts.
    """

    mean_acceptance_length: float  # tokens a step, the target's own included: 1 + accepted / steps
    draft_acceptance_rate: float  # accepted / drafted
    acceptance_histogram: list[int]  # [j]: steps that accepted j draft tokens; num_spec_tokens + 1 entries
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the most tokens that a step drafted, or was to draft
    per_step_accepted: list[int]
    per_step_drafted: list[int]

    @classmethod
    def of(cls, drafted: Iterable[int], accepted: Iterable[int], most: int) -> SpeculativeDecoding | None:
        """From each step's drafted and accepted tokens, and the ``most`` that it was to draft; None: nothing was."""
        steps = [(d, a) for d, a in zip(drafted, accepted, strict=True) if d]
        most = max([most, *(d for d, _ in steps)])
        if not most:
            return None
        counts = Counter(a for _, a in steps)
        total, held = sum(d for d, _ in steps), sum(a for _, a in steps)
        return cls(
            mean_acceptance_length=1.0 + held / len(steps) if steps else 1.0,
            draft_acceptance_rate=held / total if total else 0.0,
            acceptance_histogram=[counts[count] for count in range(most + 1)],
            num_spec_steps=len(steps),
            num_accepted_draft_tokens=held,
            num_draft_tokens=total,
            num_spec_tokens=most,
            per_step_accepted=[a for _, a in steps],
            per_step_drafted=[d for d, _ in steps],
        )


Progress = Callable[[str, int, RoundRecord], None]  # text so far, verified tokens, the round or pass


@dataclass(frozen=True)
class DecodedReply:
    """One verified reply.

    ``tokens`` are the target's in every mode, with the token that ends the reply; ``text`` is their text without
    special tokens ("" without a tokenizer). ``finished`` is False if max_tokens cut the reply off. ``seconds`` is the
    whole decode, ``prefill_seconds`` the draft model's prefill. ``worker_error`` is the first failure of a pre-draft
    or of a draft engine, "" if none; it costs time and changes no token. ``peak_memory`` in bytes is that of the draft
    model's GPU, else of this process; ``threads`` are this process's.
    """

    tokens: list[int]
    text: str
    mode: str
    finished: bool
    seconds: float
    prefill_seconds: float
    bytes_up: int
    bytes_down: int
    records: list[RoundRecord] = field(default_factory=list)
    draft_length: int = 0  # gamma, or a tree's depth; 1 in mode stream; 0: no drafting
    worker_error: str = ""
    peak_memory: int = 0
    threads: int = 0
    speculative_decoding: SpeculativeDecoding | None = None  # None: nothing was to be drafted
    choice: str = ""  # mode stream: why drafting rests, if it does
    verified: bool = True  # False: the draft model's alone, see ``EdgeSession.decode_alone``

    @property
    def rounds(self) -> int:
        """How many times the target was asked."""
        return len(self.records)

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens accepted, per round or pass."""
        return [record.accepted for record in self.records]

    @property
    def tau(self) -> float:
        """Tokens gained per round or pass."""
        return len(self.tokens) / max(1, self.rounds)

    @property
    def passes_per_token(self) -> float:
        """Rounds, or passes, that a token took."""
        return self.rounds / max(1, len(self.tokens))

    @property
    def draft_share(self) -> float:
        """Share of the reply's tokens that came from drafts."""
        return min(1.0, sum(self.accepted) / max(1, len(self.tokens)))

    @property
    def sooner(self) -> float:
        """Mode stream, an estimate: how many times as fast as the target alone; 0: unknown.

        The target's passes follow each other without a pause, so each token from a draft saved one: as long as the
        least of this reply's, since drafts make a pass longer, and so do other robots and a busy machine.
        """
        passes = [record.verify_seconds for record in self.records[1:] if record.verify_seconds]
        if not (passes and self.draft_length and streams(self.mode)):
            return 0.0
        return 1.0 + sum(self.accepted) * min(passes) / self.seconds

    @property
    def draft_seconds(self) -> float:
        """In the draft model, after its prefill, while nothing else ran."""
        return sum(record.draft_seconds for record in self.records)

    @property
    def wait_seconds(self) -> float:
        """Waiting for the verifier."""
        return sum(record.wait_seconds for record in self.records)

    @property
    def verify_seconds(self) -> float:
        """In the target model, with its prefill, as the verifier measured it."""
        return sum(record.verify_seconds for record in self.records)

    @property
    def miss_rate(self) -> float:
        """r, in rounds: share of the drafts after the first that were not ready in time."""
        return 0.0 if streams(self.mode) else _mean(not r.ready for r in self.records[1:] if r.drafted)

    @property
    def drafted_ahead(self) -> bool:
        """Whether any draft was begun before the outcome that it follows."""
        return any(r.predrafts or r.source for r in self.records)

    @property
    def mean_exit(self) -> float:
        """Mean layer that first forecast the final outcome, the last layer where no exit did; 0: no exits are used."""
        return _mean(r.first_exit for r in self.records if r.first_exit)

    @property
    def exits(self) -> int:
        """Early outcomes received."""
        return sum(record.exits for record in self.records)

    @property
    def predrafts_used(self) -> int:
        """Pre-drafts that fitted the final outcome, in whole or in part."""
        return sum(bool(record.source) for record in self.records)

    @property
    def predrafts_wasted(self) -> int:
        """Pre-drafts thrown away."""
        return max(0, sum(record.predrafts for record in self.records) - self.predrafts_used)

    @property
    def draft_round_seconds(self) -> float:
        """gamma T_p: to draft a whole round's tokens, or levels of a tree; in mode stream a token."""
        per_pass = _mean(r.model_seconds / r.depth for r in self.records if r.depth)
        return self.draft_length * per_pass

    @property
    def verify_round_seconds(self) -> float:
        """T_q: one round or pass in the target, without its prefill; 0 when the reply took one."""
        return _mean(record.verify_seconds for record in self.records[1:] if record.verify_seconds)

    @property
    def cost_ratio(self) -> float:
        """c = T_p / T_q; 0 when either is unknown."""
        if not self.draft_length or not self.verify_round_seconds:
            return 0.0
        return self.draft_round_seconds / self.draft_length / self.verify_round_seconds

    @property
    def link_delay_seconds(self) -> float:
        """T_c, in rounds: one way, with everything outside the two models; rounds sent ahead do not count."""
        waits = [] if streams(self.mode) else [r for r in self.records[1:] if r.source != "flight"]
        return _mean(max(0.0, r.wait_seconds - r.verify_seconds) / 2 for r in waits)

    @property
    def sync_seconds(self) -> float:
        """T_r: from an outcome to sending a draft that was ready."""
        return _mean(r.sync_seconds for r in self.records if r.sync_seconds > 0.0)

    def as_json(self) -> dict[str, Any]:
        """All fields and figures in plain types."""
        return asdict(self) | {name: getattr(self, name) for name in _FIGURES}

    def summary(self) -> str:
        """One line for a log."""
        passes = streams(self.mode)
        line = f"{self.mode}: {len(self.tokens)} tokens in {self.rounds} {'passes' if passes else 'rounds'}, "
        line += f"{self.seconds:.3f} s, "
        if passes and self.draft_length:
            line += f"{100 * self.draft_share:.0f} % from drafts, "
        if self.sooner:
            line += f"about {self.sooner:.1f} times as fast as the target alone (estimate), "
        line += "" if passes else f"tau {self.tau:.2f}, T_c {_ms(self.link_delay_seconds)}, "
        line += f"T_q {_ms(self.verify_round_seconds)}, {self.bytes_up} bytes up, {self.bytes_down} down"
        if self.draft_length:
            line += f", {'' if passes else 'gamma '}T_p {_ms(self.draft_round_seconds)}, c {self.cost_ratio:.3f}"
        if self.drafted_ahead:
            line += (
                f", miss rate {100 * self.miss_rate:.1f} %, {self.predrafts_used} pre-drafts used and "
                f"{self.predrafts_wasted} wasted, T_r {_ms(self.sync_seconds)}"
            )
        if self.mean_exit:
            line += f", mean exit {self.mean_exit:.1f}, {self.exits} early outcomes"
        line += f"; {self.choice}" if self.choice else ""
        line += f", peak memory {self.peak_memory / 1e6:.0f} MB, {self.threads} threads"
        return line + (f"; {self.worker_error}" if self.worker_error else "")


_FIGURES = [name for name, value in vars(DecodedReply).items() if isinstance(value, property)]


def resources(device: torch.device | None) -> tuple[int, int]:
    """Peak memory in bytes (of ``device`` if it is a GPU, else of this process; 0: unknown), and live threads."""
    if device is not None and device.type == "cuda":
        import torch  # here: bags are read without it

        return torch.cuda.max_memory_allocated(device), threading.active_count()
    status = Path("/proc/self/status")  # of Linux
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="ascii")) if status.exists() else None
    return int(peak[1]) * 1024 if peak else 0, threading.active_count()


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
