"""The rounds of one reply: draft, have it verified, keep what holds, until the reply ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from dsd_ros.decoding.acceptance import rounded_up, split_residual
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.sampling import SamplingError, generator_for, sample
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafter import DraftedRound, Drafting
from dsd_ros.edge.errors import VerifierRefused
from dsd_ros.edge.link import Limits, VerifierLink
from dsd_ros.edge.predraft import PredraftPool, Taken
from dsd_ros.edge.results import DecodedReply, RoundRecord, resources
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.codec import WireError, pack_distributions
from dsd_ros.wire.messages import Draft, Message, Observation, Outcome, prefix_digest
from dsd_ros.wire.packing import pack_chances, pack_kept, unpack_distribution
from dsd_ros.wire.pictures import NO_PICTURE

Progress = Callable[[str, int, RoundRecord], None]


@dataclass(frozen=True)
class Request:
    """One reply to be decoded; ``text`` turns tokens into text."""

    number: int
    image: np.ndarray | None
    instruction: str
    on_progress: Progress | None
    text: Callable[[list[int]], str]
    limits: Limits


class Rounds:
    """One reply over an open session. ``model`` drafts (None: the target goes on alone), ``pool`` ahead."""

    def __init__(
        self,
        link: VerifierLink,
        settings: DecodeSettings,
        model: VisionLanguageModel | None,
        pool: PredraftPool | None,
    ) -> None:
        self._link = link
        self._settings = settings
        self._model = model
        self._pool = pool
        assert link.verifier is not None
        self._eos = frozenset(link.verifier.eos_token_ids)
        self._tokens: list[int] = []
        self._records: list[RoundRecord] = []
        self._finished = False
        self._marks = (0, 0)
        self._resampled: list[int] = []  # drawn here behind the last round's rejection

    def decode(self, request: Request, picture: bytes) -> DecodedReply:
        """See ``EdgeSession.decode``; SessionLost when the verifier forgot the session."""
        link, settings, channel = self._link, self._settings, self._link.channel
        began, up, down = time.perf_counter(), channel.bytes_up, channel.bytes_down
        height, width = request.image.shape[:2] if request.image is not None else (0, 0)
        encoding = link.settings.image_encoding if request.image is not None else NO_PICTURE
        observation = Observation(
            link.session, request.number, request.instruction, height, width, encoding, picture
        )
        link.begin_reply()
        link.post(observation)
        self._marks = channel.bytes_up, down
        # 1. Both sides read the picture at the same time.
        drafted = None
        if self._model is not None:
            drafting = Drafting(
                settings.draft_length, settings.max_tokens, settings.sampling, self._eos,
                settings.seed, request.number, settings.proven_by,
                settings.top_k_proof, settings.top_rho_proof, settings.top_float_proof,
            )  # fmt: skip
            sequence = self._model.prefill(request.image, request.instruction)
            drafted = DraftedRound.first(drafting, sequence)
        prefill_seconds = time.perf_counter() - began
        taken = Taken()
        outcome_at = time.perf_counter()
        while True:
            drafted, taken, outcome_at = self._round(
                request, observation, drafted, taken, outcome_at
            )
            if request.on_progress is not None:
                request.on_progress(
                    request.text(self._tokens), len(self._tokens), self._records[-1]
                )
            if self._finished or len(self._tokens) >= settings.max_tokens:
                break
        if self._resampled:  # there is no next round to tell of it
            link.post(
                Draft(
                    link.session,
                    request.number,
                    len(self._records),
                    len(self._tokens),
                    [],
                    resampled=self._resampled,
                )  # fmt: skip
            )
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
            draft_length=settings.draft_length if self._model is not None else 0,
            worker_error=self._pool.error if self._pool is not None else "",
            peak_memory=memory,
            threads=threads,
        )

    def _round(
        self,
        request: Request,
        observation: Observation,
        drafted: DraftedRound | None,
        taken: Taken,
        outcome_at: float,
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
        draft = self._message(request.number, number, drafted)
        if taken.sent is None and (drafted is not None or number == 1):
            link.post(draft)
        sent = time.perf_counter()
        if pool is not None and drafted is not None:
            pool.begin(drafted)
        exits: list[Outcome] = []

        def on_early(outcome: Outcome) -> None:
            exits.append(outcome)
            if pool is not None:
                pool.offer(outcome)

        again: list[Message] = [observation, draft] if number == 1 else [draft]
        outcome = link.exchange(
            request.number, number, again, limits, on_early, ahead=taken.sent is not None
        )
        outcome_at, outcome_before = time.perf_counter(), outcome_at
        if outcome.distribution:
            outcome = self._resample(drafted, outcome)
        else:
            self._resampled = []
        # 4. Keep what holds, up to the end of the reply.
        following, next_taken = self._follow(drafted, outcome)
        drafts = drafted.draft.tokens if drafted is not None else []
        for token in (*drafts[: outcome.accepted], outcome.next_token):
            self._tokens.append(token)
            self._finished = token in self._eos
            if self._finished:
                break
        channel = link.channel
        up, down = self._marks
        self._marks = channel.bytes_up, channel.bytes_down
        ready = taken.complete and bool(drafts)
        self._records.append(
            RoundRecord(
                drafted=len(drafts),
                accepted=outcome.accepted,
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
            )
        )
        return following, next_taken, outcome_at

    def _follow(
        self, drafted: DraftedRound | None, outcome: Outcome
    ) -> tuple[DraftedRound | None, Taken]:
        """The round behind an outcome, with what has been drafted of it."""
        count = len(drafted.draft.tokens) if drafted is not None else 0
        if outcome.accepted > count:
            raise VerifierRefused(
                f"the verifier accepted {outcome.accepted} of {count} drafted tokens; "
                "it does not follow the protocol",
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

    def _message(self, reply: int, number: int, drafted: DraftedRound | None) -> Draft:
        if drafted is not None:
            return draft_message(self._link.session, drafted, self._resampled)
        left = self._settings.max_tokens - len(self._tokens)
        return Draft(
            self._link.session, reply, number, len(self._tokens), [], autonomous_rounds=left
        )

    def _resample(self, drafted: DraftedRound | None, outcome: Outcome) -> Outcome:
        """Split verification: the token behind a rejection is drawn here, where q is known (DSSD)."""
        verifier = self._link.verifier
        assert verifier is not None
        rows = drafted.draft.q if drafted is not None else []
        if not self._settings.splits or drafted is None or outcome.accepted >= len(rows):
            raise VerifierRefused(
                "the verifier sent a distribution where none was rejected; it does not follow the protocol",
                "out-of-step",
            )
        try:
            p = torch.from_numpy(unpack_distribution(outcome.distribution, verifier.vocab_size))
            generator = generator_for("resample", self._settings.seed, outcome.reply, outcome.round)
            token = sample(split_residual(p, rows[outcome.accepted]), generator)
        except (WireError, SamplingError) as error:
            raise VerifierRefused(
                f"the verifier's distribution cannot be used: {error}", "bad-distribution"
            ) from error
        self._resampled = [token]
        return msgspec.structs.replace(outcome, next_token=token, distribution=b"")


def draft_message(
    session: int, drafted: DraftedRound, resampled: list[int] | None = None, ahead: bool = False
) -> Draft:
    """A round as it is sent. ``resampled``: the token drawn here behind the rejection in front of it.

    ``ahead``: the tokens in front of it are assumed, and named by their digest.
    """
    draft, proof = drafted.draft, drafted.drafting.proof
    evidence = b""
    if draft.q and proof is Proof.FULL:
        evidence = pack_distributions(torch.stack(draft.q))
    elif draft.q and proof is Proof.SPLIT:
        chances = torch.stack([q[x] for q, x in zip(draft.q, draft.tokens, strict=True)])
        evidence = pack_chances(rounded_up(chances).numpy())
    elif draft.q and proof is Proof.TRUNCATED:
        evidence = pack_kept(draft.kept, draft.sequence.model.vocab_size)
    return Draft(
        session=session,
        reply=drafted.drafting.reply,
        round=drafted.number,
        confirmed=len(drafted.prefix),
        tokens=draft.tokens,
        evidence=evidence,
        assumed=prefix_digest(drafted.prefix) if ahead else b"",
        resampled=resampled or [],
    )


def _first_exit(exits: list[Outcome], final: Outcome) -> int:
    """The lowest layer that said what the last one says."""
    said = [
        early.layer
        for early in exits
        if (early.accepted, early.next_token) == (final.accepted, final.next_token)
    ]
    return min([*said, final.layer])
