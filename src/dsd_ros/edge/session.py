"""The robot's half of a decode: observation out, drafts out, outcomes in, a verified reply at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from dsd_ros.decoding.sampling import generator_for
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafter import DraftedTokens, Drafter
from dsd_ros.edge.errors import SessionLost, VerifierRefused
from dsd_ros.edge.link import Limits, LinkSettings, VerifierLink
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel, LinkClosed
from dsd_ros.wire.codec import pack_distributions
from dsd_ros.wire.messages import (
    MAX_DISTRIBUTION_BYTES,
    PROTOCOL_VERSION,
    Draft,
    Message,
    Observation,
    Outcome,
    SessionReply,
    SessionRequest,
)
from dsd_ros.wire.pictures import encode_picture

Progress = Callable[[str, int], None]


class TextModel(Protocol):
    """What a mode without drafts needs of the robot's model: its tokenizer."""

    tokenizer_fingerprint: str
    vocab_size: int

    def decode_text(self, tokens: list[int]) -> str: ...


class EdgeSession:
    """Decodes replies, one at a time, over a channel that stays the caller's.

    ``draft_model`` is needed by modes that draft; in others it only turns tokens into text and may be
    None. After any failure the session can be used for the next decode.
    """

    def __init__(
        self,
        channel: Channel,
        draft_model: VisionLanguageModel | TextModel | None,
        settings: DecodeSettings,
        link: LinkSettings | None = None,
    ) -> None:
        """ValueError when the mode needs a draft model, or distributions too large for the wire."""
        self.settings = settings
        self._text_model = draft_model
        self._draft_model: VisionLanguageModel | None = None
        if settings.needs_draft:
            if draft_model is None or not hasattr(draft_model, "prefill"):
                raise ValueError(
                    f"mode {settings.mode} needs a draft model; give one, or use mode ar"
                )
            self._draft_model = cast(VisionLanguageModel, draft_model)
            row = 4 * draft_model.vocab_size
            if (
                not settings.sampling.greedy
                and settings.draft_length * row > MAX_DISTRIBUTION_BYTES
            ):
                raise ValueError(
                    f"draft_length {settings.draft_length} is too long for a vocabulary of "
                    f"{draft_model.vocab_size}; use {MAX_DISTRIBUTION_BYTES // row} or less"
                )
        self._link = VerifierLink(channel, self._request, link or LinkSettings())
        self._reply = 0

    @property
    def verifier(self) -> SessionReply | None:
        """What the verifier said of itself when the session opened; None before."""
        return self._link.verifier

    def open(self, deadline: float | None = None) -> None:
        """Connect and agree with the verifier; ``decode`` does it where it has not been done.

        LinkRefused (token, certificate), VerifierRefused (tokenizer, version, too many sessions),
        LinkClosed or LinkTimeout (not there).
        """
        self._open(Limits(deadline))

    def decode(
        self,
        image: np.ndarray,
        instruction: str,
        on_progress: Progress | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> DecodedReply:
        """One reply about ``image`` (RGB uint8, (H, W, 3)), exactly as the target alone would give it.

        on_progress(text so far, verified tokens) is called after each verified round. ``deadline`` is a
        time.monotonic() instant; ``cancelled`` is polled. Raises PromptError, ImageError or WireError
        (ValueErrors) for an input that cannot be used, LinkError when link or verifier fail for good,
        DeadlineExceeded, DecodeCancelled.
        """
        limits = Limits(deadline, cancelled)
        check_instruction(instruction)
        picture = encode_picture(image, self._link.settings.image_encoding)
        self._reply += 1
        for _ in range(self._link.settings.attempts):
            try:
                self._open(limits)
                return self._decode(image, picture, instruction, on_progress, limits)
            except SessionLost:
                # Same reply number and seed: starting over draws the same tokens again.
                continue
        raise LinkClosed("the verifier keeps forgetting the session; is it being restarted?")

    def close(self) -> None:
        """End the session at the verifier. The channel stays open and is the caller's to close."""
        self._link.close()

    def __enter__(self) -> EdgeSession:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, limits: Limits) -> None:
        if self._link.session:
            return
        self._link.open(limits)

    def _request(self, number: int, resume: bytes) -> SessionRequest:
        model, settings = self._text_model, self.settings
        return SessionRequest(
            request=number,
            protocol_version=PROTOCOL_VERSION,
            mode=settings.mode,
            tokenizer_fingerprint=model.tokenizer_fingerprint if model is not None else "",
            vocab_size=model.vocab_size if model is not None else 0,
            temperature=float(settings.temperature),
            top_k=settings.top_k,
            top_p=float(settings.top_p),
            seed=settings.seed,
            resume=resume,
        )

    def _decode(
        self,
        image: np.ndarray,
        picture: bytes,
        instruction: str,
        on_progress: Progress | None,
        limits: Limits,
    ) -> DecodedReply:
        link, settings, reply = self._link, self.settings, self._reply
        assert link.verifier is not None
        channel = link.channel
        eos = frozenset(link.verifier.eos_token_ids)
        began, up, down = time.perf_counter(), channel.bytes_up, channel.bytes_down
        height, width = image.shape[:2]
        observation = Observation(
            link.session, reply, instruction, height, width, link.settings.image_encoding, picture
        )
        link.begin_reply()
        link.post(observation)
        # 1. Both sides read the picture at the same time.
        drafter = None
        if self._draft_model is not None:
            drafter = Drafter(self._draft_model, settings.sampling, eos)
            drafter.start(image, instruction)
        prefill_seconds = time.perf_counter() - began
        tokens: list[int] = []
        records: list[RoundRecord] = []
        finished = False
        while not finished and len(tokens) < settings.max_tokens:
            limits.check()
            number = len(records) + 1
            round_began, round_up, round_down = _now(channel)
            left = settings.max_tokens - len(tokens)
            # 2. Draft; one token of the round is always the target's own.
            drafted = DraftedTokens([], None)
            if drafter is not None:
                generator = generator_for("draft", settings.seed, reply, number)
                drafted = drafter.draft(min(settings.draft_length, left - 1), generator)
            draft_end = time.perf_counter()
            # 3. Have it verified.
            draft = Draft(
                session=link.session,
                reply=reply,
                round=number,
                confirmed=len(tokens),
                tokens=drafted.tokens,
                distributions=b"" if drafted.q is None else pack_distributions(drafted.q),
                autonomous_rounds=0 if drafter is not None else left,
            )
            # Without drafts the target goes on alone: asking once is enough.
            first: list[Message] = [draft] if drafter is not None or number == 1 else []
            again: list[Message] = [observation, draft] if number == 1 else [draft]
            outcome = link.exchange(reply, number, first, again, limits)
            _check(outcome, drafted)
            # 4. Keep what holds, up to the end of the reply.
            if drafter is not None:
                drafter.confirm(outcome.accepted, outcome.next_token)
            for token in (*drafted.tokens[: outcome.accepted], outcome.next_token):
                tokens.append(token)
                finished = token in eos
                if finished:
                    break
            ended = time.perf_counter()
            records.append(
                RoundRecord(
                    drafted=len(drafted.tokens),
                    accepted=outcome.accepted,
                    draft_seconds=draft_end - round_began if drafter is not None else 0.0,
                    wait_seconds=ended - draft_end,
                    verify_seconds=outcome.compute_us * 1e-6,
                    bytes_up=channel.bytes_up - round_up,
                    bytes_down=channel.bytes_down - round_down,
                )
            )
            if on_progress is not None:
                on_progress(self._text(tokens), len(tokens))
        return DecodedReply(
            tokens=tokens,
            text=self._text(tokens),
            mode=settings.mode,
            finished=finished,
            seconds=time.perf_counter() - began,
            prefill_seconds=prefill_seconds,
            bytes_up=channel.bytes_up - up,
            bytes_down=channel.bytes_down - down,
            records=records,
        )

    def _text(self, tokens: list[int]) -> str:
        return self._text_model.decode_text(tokens) if self._text_model is not None else ""


def _now(channel: Channel) -> tuple[float, int, int]:
    return time.perf_counter(), channel.bytes_up, channel.bytes_down


def _check(outcome: Outcome, drafted: DraftedTokens) -> None:
    if outcome.accepted > len(drafted.tokens):
        raise VerifierRefused(
            f"the verifier accepted {outcome.accepted} of {len(drafted.tokens)} drafted tokens; "
            "it does not follow the protocol",
            "out-of-step",
        )
