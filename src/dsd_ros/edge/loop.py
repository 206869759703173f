"""The rounds of one reply: draft, have it verified, keep what holds, until the reply ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from dsd_ros.decoding.sampling import SamplingError, generator_for
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree, finish_split_tree, remaining_nodes
from dsd_ros.edge.ahead import PredraftPool, Taken
from dsd_ros.edge.client import VerifierLink
from dsd_ros.edge.draft_length import Plan, Tuner
from dsd_ros.edge.draft_model import DraftedRound, Drafting
from dsd_ros.edge.errors import VerifierRefused
from dsd_ros.edge.limits import Limits
from dsd_ros.edge.observation import History, Pictures
from dsd_ros.edge.outgoing import draft_message
from dsd_ros.edge.results import DecodedReply, RoundRecord, resources
from dsd_ros.edge.translation import TranslatedRound, Translation
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import Draft, Message, Observation, Outcome
from dsd_ros.wire.packing import count_rows, unpack_distribution, unpack_rows

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, RoundRecord], None]
_NO_TREE = TokenTree((), ())


@dataclass(frozen=True)
class Request:
    """One reply to be decoded; ``text`` turns tokens into text."""

    number: int
    image: np.ndarray | None
    instruction: str
    on_progress: Progress | None
    text: Callable[[list[int]], str]
    limits: Limits
    history: History = ()


class Rounds:
    """One reply over an open session. ``model`` drafts (None: the target goes on alone), ``pool`` ahead.

    ``translation``: from the model's vocabulary into the target's, where they differ.
    ``tuner``: chooses what is drafted, None where the settings do.
    """

    def __init__(
        self,
        link: VerifierLink,
        pictures: Pictures,
        settings: DecodeSettings,
        model: VisionLanguageModel | None,
        pool: PredraftPool | None,
        translation: Translation | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self._link = link
        self._pictures = pictures
        self._settings = settings
        self._model = model
        self._pool = pool
        self._translation = translation
        self._tuner = tuner
        # The round before, as the tuner wants it: its draft, the outcome's end, and what it cost.
        self._lesson: tuple[DraftedRound, tuple[int, int], RoundRecord] | None = None
        assert link.verifier is not None
        self._eos = frozenset(link.verifier.eos_token_ids)
        self._tokens: list[int] = []
        self._records: list[RoundRecord] = []
        self._finished = False
        self._marks = (0, 0)
        self._began = 0.0  # of the reply
        self._resampled: list[int] = []  # determined here behind the last round's rejection

    def decode(self, request: Request) -> DecodedReply:
        """See ``EdgeSession.decode``; TargetChanged when another target answers before anything is verified."""
        link, settings, channel = self._link, self._settings, self._link.channel
        began, up, down = time.perf_counter(), channel.bytes_up, channel.bytes_down
        self._began = began
        link.begin_reply()
        link.post(self._observation(request))
        self._marks = channel.bytes_up, down
        # 1. Both sides read the picture at the same time.
        drafted: DraftedRound | None = None
        if self._model is not None:
            if self._tuner is not None:
                self._tuner.begin_reply()
            drafting = Drafting.of(settings, self._eos, request.number, self._tuner)
            sequence = self._model.prefill(request.image, request.instruction, request.history)
            if self._translation is None:
                drafted = DraftedRound.first(drafting, sequence)
            else:
                reply = self._translation.begin(sequence, self._eos)
                drafted = TranslatedRound.begin(drafting, reply)
        prefill_seconds = time.perf_counter() - began
        taken = Taken()
        outcome_at = time.perf_counter()
        while True:
            drafted, taken, outcome_at = self._round(request, drafted, taken, outcome_at)
            if request.on_progress is not None:
                request.on_progress(request.text(self._tokens), len(self._tokens), self._records[-1])
            if self._finished or len(self._tokens) >= settings.max_tokens:
                break
        if self._resampled:  # there is no next round to tell of it
            link.post(
                Draft(
                    link.session, request.number, len(self._records), len(self._tokens), [], resampled=self._resampled
                )  # fmt: skip
            )
        self._learn()
        figures = {"rounds": len(self._records), "tokens": len(self._tokens)}
        where = {"session": link.session, "reply": request.number, "mode": settings.mode}
        _log.debug("reply verified", extra=where | figures)
        memory, threads = resources(self._model.device if self._model is not None else None)
        return DecodedReply(
            tokens=self._tokens,
            text=request.text(self._tokens),
            mode=settings.mode,
            finished=self._finished,
            seconds=time.perf_counter() - began,
            prefill_seconds=prefill_seconds,
            bytes_up=channel.bytes_up - up,
            bytes_down=channel.bytes_down - down,
            records=self._records,
            draft_length=self._mean_length(),
            worker_error=self._pool.error if self._pool is not None else "",
            peak_memory=memory,
            threads=threads,
        )

    def _round(
        self, request: Request, drafted: DraftedRound | None, taken: Taken, outcome_at: float
    ) -> tuple[DraftedRound | None, Taken, float]:
        """One round; ``drafted`` is it, its draft possibly incomplete, and ``taken`` where that is from.

        Returns the same of the next round, and when the outcome was there.
        """
        link, limits, pool = self._link, request.limits, self._pool
        limits.check()
        number = len(self._records) + 1
        began = time.perf_counter()
        # 2. Draft what is not there yet.
        if drafted is not None:
            drafted.draft.finish()
        draft_end = time.perf_counter()
        # 3. Have it verified. Without drafts the target goes on alone: asking once is enough.
        if taken.sent is None and (drafted is not None or number == 1):
            link.post(self._message(request.number, number, drafted, self._resampled))
        sent = time.perf_counter()
        if self._tuner is not None:
            # Behind sending, which it is not to delay, and in front of what is drafted for the next round.
            self._learn()
            self._tuner.plan(request.number, number + 1)
        if pool is not None and drafted is not None:
            pool.begin(drafted)
        exits: list[Outcome] = []
        exit_times: list[float] = []

        def on_early(outcome: Outcome) -> None:
            exits.append(outcome)
            exit_times.append(time.perf_counter() - sent)
            if pool is not None:
                pool.offer(outcome)

        def again(whole: bool) -> list[Message]:
            if not (whole or number == 1):
                return [self._message(request.number, number, drafted, self._resampled)]
            # A verifier that knows nothing of the reply is told all of it, so that there is nothing else to tell.
            so_far = msgspec.structs.replace(
                self._observation(request, everything=whole or number > 1),
                verified=list(self._tokens),
                rounds=number - 1,
            )
            return [so_far, self._message(request.number, number, drafted, [])]

        outcome = link.exchange(request.number, number, again, limits, on_early, ahead=taken.sent is not None)
        outcome_at, outcome_before = time.perf_counter(), outcome_at
        self._pictures.arrived(link.session)
        if outcome.distribution:
            outcome = self._resample(drafted, outcome)
        else:
            self._resampled = []
        # 4. Keep what holds, up to the end of the reply.
        following, next_taken = self._follow(drafted, outcome)
        tree = drafted.draft.tree if drafted is not None else _NO_TREE
        before = len(self._tokens)
        accepted = self._keep(tree, outcome)
        held = set(tree.path_to(outcome.accepted - 1))
        channel = link.channel
        up, down = self._marks
        self._marks = channel.bytes_up, channel.bytes_down
        ready = taken.complete and len(tree) > 0
        plan = drafted.drafting.plan(number) if drafted is not None else Plan(0)
        self._records.append(
            RoundRecord(
                drafted=len(tree),
                accepted=accepted,
                draft_seconds=draft_end - began if drafted is not None else 0.0,
                wait_seconds=outcome_at - draft_end,
                verify_seconds=outcome.compute_us * 1e-6,
                bytes_up=self._marks[0] - up,
                bytes_down=self._marks[1] - down,
                model_seconds=drafted.draft.seconds if drafted is not None else 0.0,
                exits=len(exits),
                first_exit=_first_exit(exits, outcome) if pool is not None else 0,
                source=taken.source,
                ready=ready,
                predrafts=next_taken.begun,
                sync_seconds=sent - outcome_before if ready and taken.sent is None else 0.0,
                depth=tree.depth,
                length=plan.length,
                budget=plan.nodes,
                began_seconds=began - self._began,
                gained=tuple(self._tokens[before:]),
                rejected=tuple(x for node, x in enumerate(tree.tokens) if node not in held),
                exit_layers=tuple(early.layer for early in exits),
                exit_seconds=tuple(exit_times),
            )
        )
        if _log.isEnabledFor(logging.DEBUG):
            where: dict[str, float] = {"session": link.session, "reply": request.number, "round": number}
            what = {"drafted": len(tree), "accepted": accepted, "seconds": outcome_at - draft_end}
            _log.debug("round verified", extra=where | what)
        if drafted is not None and self._tuner is not None:
            verdict = outcome.accepted, outcome.next_token
            self._lesson = drafted, verdict, self._records[-1]
        return following, next_taken, outcome_at

    def _observation(self, request: Request, everything: bool = False) -> Observation:
        session = self._link.session
        return self._pictures.observation(session, request.number, request.instruction, everything)

    def _learn(self) -> None:
        """Tell the tuner of the round that ended last."""
        if self._tuner is None or self._lesson is None:
            return
        (drafted, verdict, record), self._lesson = self._lesson, None
        plan = Plan(record.length, record.budget)
        ranks = drafted.draft.ranks(*verdict) if plan.nodes else []
        self._tuner.learn(plan, record, ranks)

    def _mean_length(self) -> float:
        lengths = [record.length for record in self._records]
        if self._tuner is None or not lengths:
            return self._settings.depth if self._model is not None else 0
        return sum(lengths) / len(lengths)

    def _follow(self, drafted: DraftedRound | None, outcome: Outcome) -> tuple[DraftedRound | None, Taken]:
        """The round behind an outcome, with what has been drafted of it."""
        count = len(drafted.draft.tree) if drafted is not None else 0
        if outcome.accepted > count:
            raise VerifierRefused(
                f"the verifier accepted {outcome.accepted} of {count} drafted tokens; it does not follow the protocol",
                "out-of-step",
            )
        if drafted is None:
            return None, Taken()
        verdict = outcome.accepted, outcome.next_token
        taken = self._pool.take(*verdict) if self._pool is not None else Taken()
        if taken.sent is not None:
            return taken.sent, taken
        # What workers may still be looking at is left as it is.
        draft = taken.draft or drafted.next_draft(*verdict, fork=self._pool is not None)
        return drafted.followed_by(*verdict, draft), taken

    def _keep(self, tree: TokenTree, outcome: Outcome) -> int:
        """Extend the reply by what an outcome says, up to its end; how many drafted tokens hold."""
        path = tree.path_to(outcome.accepted - 1)
        gained = [*tree.tokens_of(path), outcome.next_token]
        end = next((count for count, token in enumerate(gained, 1) if token in self._eos), None)
        self._finished = end is not None
        known = len(gained) - len(self._resampled)  # to the verifier
        self._resampled = gained[known:end]
        self._tokens += gained[:end]
        return len(path)

    def _message(self, reply: int, number: int, drafted: DraftedRound | None, resampled: list[int]) -> Draft:
        if drafted is not None:
            return draft_message(self._link.session, drafted, resampled)
        left = self._settings.max_tokens - len(self._tokens)
        return Draft(self._link.session, reply, number, len(self._tokens), [], autonomous_rounds=left)

    def _resample(self, drafted: DraftedRound | None, outcome: Outcome) -> Outcome:
        """Split verification: what follows a rejection is determined here, where q is known (DSSD)."""
        tree = drafted.draft.tree if drafted is not None else _NO_TREE
        node = outcome.accepted - 1
        if drafted is None or not self._settings.splits or not (node < len(tree) and tree.children(node)):
            raise VerifierRefused(
                "the verifier sent a distribution where none was rejected; it does not follow the protocol",
                "out-of-step",
            )
        try:
            p = self._distributions(outcome.distribution, tree, node)
            generator = generator_for("resample", self._settings.seed, outcome.reply, outcome.round)
            verdict = finish_split_tree(tree, node, torch.stack(drafted.draft.q), p, generator)
        except (WireError, SamplingError) as error:
            raise VerifierRefused(f"the verifier's distribution cannot be used: {error}", "bad-distribution") from error
        added = verdict.path[len(tree.path_to(node)) :]
        self._resampled = [*tree.tokens_of(added), verdict.next_token]
        return msgspec.structs.replace(
            outcome, accepted=verdict.last + 1, next_token=verdict.next_token, distribution=b""
        )

    def _distributions(self, data: bytes, tree: TokenTree, node: int) -> torch.Tensor:
        """The target's behind the node whose first child is rejected, and behind what is left there."""
        assert self._link.verifier is not None
        size = self._link.verifier.vocab_size
        if not tree.branches:
            return torch.from_numpy(unpack_distribution(data, size)[None])
        # Fewer where the verifier has cut the tree for want of room.
        count = count_rows(data, 1 + len(remaining_nodes(tree, node)))
        rows = unpack_rows(data, count, size)
        return torch.from_numpy(np.stack(rows))


def _first_exit(exits: list[Outcome], final: Outcome) -> int:
    """The lowest layer that said what the last one says."""
    said = [early.layer for early in exits if (early.accepted, early.next_token) == (final.accepted, final.next_token)]
    return min([*said, final.layer])
