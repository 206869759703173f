# SPDX-License-Identifier: Apache-2.0
"""Measures a reply while it is decoded: one record per round or pass, and the decoded reply at the end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dsd_ros.decoding.methods import Result
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierClient
from dsd_ros.edge.draft_model import Origin, Proposer, RoundDraft
from dsd_ros.edge.drafters import Drafter
from dsd_ros.edge.reply_client import ReplyClient
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.results import DecodedReply, RoundRecord, SpeculativeDecoding, resources
from dsd_ros.wire.messages import Outcome, VerifiedTokens

_log = logging.getLogger(__name__)


@dataclass
class Recorder:
    """Watches one reply in rounds. Make it before the reply begins."""

    request: ReplyRequest
    settings: DecodeSettings
    proposer: Proposer
    client: ReplyClient

    def __post_init__(self) -> None:
        self._records: list[RoundRecord] = []
        self._began = self._mark = self._outcome_at = time.perf_counter()
        self._traffic = self._before = self.client.traffic
        self._prefill_seconds = 0.0
        self._tokens = 0
        self._origin = Origin()

    def begun(self) -> None:
        """The draft model has read the prompt."""
        self._mark = self._outcome_at = time.perf_counter()
        self._prefill_seconds = self._mark - self._began
        self._traffic = self.client.traffic[0], self._before[1]

    def round_ended(self, draft: RoundDraft, result: Result, tokens: list[int]) -> None:
        """Record a round, and report progress; ``tokens``: all of the reply so far."""
        record = self._record(draft, result, tokens)
        self._records.append(record)
        self._origin = self.proposer.origin
        self._tokens = len(tokens)
        request = self.request
        if _log.isEnabledFor(logging.DEBUG):
            where: dict[str, float] = {"session": self.client.session, "reply": request.number, "round": draft.number}
            what = {"drafted": record.drafted, "accepted": record.accepted, "seconds": record.wait_seconds}
            _log.debug("round verified", extra=where | what)
        if request.on_progress is not None:
            request.on_progress(request.text(tokens), len(tokens), record)
        self._mark = time.perf_counter()

    def reply(self, tokens: list[int], ended: bool) -> DecodedReply:
        """The decoded reply with its figures; ``ended``: by an end token."""
        request, (up, down) = self.request, self.client.traffic
        where = {"session": self.client.session, "reply": request.number, "mode": self.settings.mode}
        _log.debug("reply verified", extra=where | {"rounds": len(self._records), "tokens": len(tokens)})
        memory, threads = resources(self.proposer.device)
        records = self._records
        speculated = SpeculativeDecoding.of(
            (r.drafted for r in records), (r.accepted for r in records), self.settings.depth
        )
        return DecodedReply(
            tokens=tokens,
            text=request.text(tokens),
            mode=self.settings.mode,
            finished=ended,
            seconds=time.perf_counter() - self._began,
            prefill_seconds=self._prefill_seconds,
            bytes_up=up - self._before[0],
            bytes_down=down - self._before[1],
            records=records,
            draft_length=self.settings.depth,
            worker_error=self.proposer.error,
            peak_memory=memory,
            threads=threads,
            speculative_decoding=speculated,
        )

    def _record(self, draft: RoundDraft, result: Result, tokens: list[int]) -> RoundRecord:
        client, tree, origin, outcome = self.client, draft.tree, self._origin, self.client.outcome
        assert outcome is not None
        accepted = set(tree.path_to(result.accepted - 1))
        ready = origin.complete and len(tree) > 0
        in_flight = origin.source == "flight"
        (up, down), (up_before, down_before) = client.traffic, self._traffic
        self._traffic = up, down
        before, self._outcome_at = self._outcome_at, client.received_at
        return RoundRecord(
            drafted=len(tree),
            accepted=len(accepted),
            draft_seconds=client.send_began - self._mark,
            wait_seconds=client.received_at - client.send_began,
            verify_seconds=outcome.compute_us * 1e-6,
            bytes_up=up - up_before,
            bytes_down=down - down_before,
            model_seconds=draft.seconds,
            exits=len(client.early),
            first_exit=_first_exit(client.early, result, outcome.layer) if self.settings.uses_exits else 0,
            source=origin.source,
            ready=ready,
            predrafts=self.proposer.origin.begun,
            sync_seconds=client.sent_at - before if ready and not in_flight else 0.0,
            depth=tree.depth,
            length=self.settings.depth,
            began_seconds=self._mark - self._began,
            gained=tuple(tokens[self._tokens :]),
            rejected=tuple(x for node, x in enumerate(tree.tokens) if node not in accepted),
            exit_layers=tuple(early.layer for early, _ in client.early),
            exit_seconds=tuple(seconds for _, seconds in client.early),
        )


def _first_exit(exits: list[tuple[Outcome, float]], result: Result, last: int) -> int:
    """The lowest layer that named the round's result; the ``last`` layer where no exit did."""
    what = result.accepted, result.next_token
    return min([*(early.layer for early, _ in exits if (early.accepted, early.next_token) == what), last])


class StreamRecorder:
    """The same for mode stream: a record for each pass that the verifier tells of. Make it before the reply begins."""

    def __init__(
        self, request: ReplyRequest, settings: DecodeSettings, link: VerifierClient, drafter: Drafter | None
    ) -> None:
        self._request, self._settings, self._link, self._drafter = request, settings, link, drafter
        self._records: list[RoundRecord] = []
        self._tokens: list[int] = []
        self._drafts: deque[tuple[int, float]] = deque()  # tokens and seconds of the draft model since the last record
        self._began = self._mark = time.perf_counter()
        self._before = self._traffic = self._bytes

    @property
    def _bytes(self) -> tuple[int, int]:
        return self._link.channel.bytes_up, self._link.channel.bytes_down

    def begun(self) -> None:
        """The observation is sent."""
        self._traffic = self._bytes[0], self._before[1]

    def drafted(self, tokens: int, seconds: float) -> None:
        """The draft model has drafted that many tokens more; from any thread."""
        self._drafts.append((max(0, tokens), seconds))

    def passed(self, verified: VerifiedTokens, rejected: Sequence[int]) -> None:
        """Record a pass of the target, and report progress; ``rejected``: drafted tokens that it did not take."""
        now, bytes_now = time.perf_counter(), self._bytes
        new, accepted = verified.tokens, verified.accepted
        drafts = [self._drafts.popleft() for _ in range(len(self._drafts))]
        record = RoundRecord(
            drafted=verified.drafted,
            accepted=accepted,
            draft_seconds=0.0,  # the target does not wait for it
            wait_seconds=now - self._mark,
            verify_seconds=verified.compute_us * 1e-6,
            bytes_up=bytes_now[0] - self._traffic[0],
            bytes_down=bytes_now[1] - self._traffic[1],
            model_seconds=sum(seconds for _, seconds in drafts),
            depth=sum(tokens for tokens, _ in drafts),
            began_seconds=self._mark - self._began,
            gained=tuple(new),
            rejected=tuple(rejected),
        )
        self._records.append(record)
        self._tokens += new
        self._mark, self._traffic = now, bytes_now
        request = self._request
        if _log.isEnabledFor(logging.DEBUG):
            where: dict[str, float] = {"session": self._link.session, "reply": request.number, "at": verified.at}
            _log.debug("tokens verified", extra=where | {"drafted": record.drafted, "accepted": accepted})
        if request.on_progress is not None:
            request.on_progress(request.text(self._tokens), len(self._tokens), record)

    def reply(self, tokens: list[int], prefill_seconds: float, choice: str) -> DecodedReply:
        """The decoded reply with its figures; ``prefill_seconds``: until the draft model had read the prompt."""
        request, (up, down), records = self._request, self._bytes, self._records
        memory, threads = resources(self._drafter.device if self._drafter is not None else None)
        most = max((record.drafted for record in records), default=0)
        return DecodedReply(
            tokens=tokens,
            text=request.text(tokens),
            mode=self._settings.mode,
            finished=bool(tokens) and tokens[-1] in self._link.eos_token_ids,
            seconds=time.perf_counter() - self._began,
            prefill_seconds=prefill_seconds,
            bytes_up=up - self._before[0],
            bytes_down=down - self._before[1],
            records=records,
            draft_length=1 if self._drafter is not None else 0,
            choice=choice,
            worker_error=self._drafter.error if self._drafter is not None else "",
            peak_memory=memory,
            threads=threads,
            speculative_decoding=SpeculativeDecoding.of(
                (r.drafted for r in records), (r.accepted for r in records), most
            ),
        )
