# SPDX-License-Identifier: Apache-2.0
"""The robot's half of a decode: sends observation and drafts, receives outcomes, returns a verified reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from dsd_ros.decoding.constraint import Constraint, ReplyForm
from dsd_ros.decoding.methods import method_of
from dsd_ros.decoding.modes import Shape
from dsd_ros.decoding.settings import DecodeSettings, expansion_nodes
from dsd_ros.edge.ahead import Ahead
from dsd_ros.edge.client import TargetChanged, VerifierClient
from dsd_ros.edge.draft_model import DraftModel, Proposer
from dsd_ros.edge.drafters import Drafter, ModelDrafter, TextDrafter, Worth
from dsd_ros.edge.engine import DraftEngine
from dsd_ros.edge.loop import DecodeLoop
from dsd_ros.edge.observation import History, SessionPictures
from dsd_ros.edge.reply_client import ReplyClient
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.results import DecodedReply, Progress, resources
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.edge.stream import StreamDecoder
from dsd_ros.edge.translation import Translation
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel, LinkClosed
from dsd_ros.wire.client import Limits
from dsd_ros.wire.messages import MAX_EVIDENCE_BYTES, PROTOCOL_VERSION, SessionReply, SessionRequest

if TYPE_CHECKING:
    from typing_extensions import Self

_ROW_HEAD_BYTES = 16  # at most, before each distribution on its way down


class TextModel(Protocol):
    """What a mode without drafts needs of the robot's model: its tokenizer."""

    tokenizer_fingerprint: str
    vocab_size: int

    def decode_text(self, tokens: list[int]) -> str: ...


class EdgeSession:
    """Decodes replies, one at a time, over a channel that the caller owns.

    ``draft_model`` is needed by modes that draft, and may be an engine; in others it only turns tokens into text and
    may be None. After any failure the session can be used for the next decode.
    """

    def __init__(
        self,
        channel: Channel,
        draft_model: VisionLanguageModel | DraftEngine | TextModel | None,
        settings: DecodeSettings,
        link: LinkSettings | None = None,
        vocabulary: Vocabulary | None = None,
        form: ReplyForm | None = None,
        worth: Worth | None = None,
    ) -> None:
        """``vocabulary``: the target's, if the draft model may have another (``target_tokenizer``). ``form``: what
        replies are held to, on both sides; None: any. ``worth``: an earlier session's, which knows whether drafting is
        worth its energy.

        ValueError as from :func:`check_settings`.
        """
        check_settings(settings, draft_model, vocabulary, form)
        self._form = form
        self.settings = settings
        self._text_model = draft_model
        self._draft_model: VisionLanguageModel | DraftEngine | None = None
        self._translation: Translation | None = None
        if settings.needs_draft and draft_model is not None:
            self._draft_model = cast("VisionLanguageModel | DraftEngine", draft_model)
        if vocabulary is not None and _translates(draft_model, vocabulary):
            self._text_model = vocabulary
            if self._draft_model is not None:
                self._translation = Translation(vocabulary, self._draft_model)
        self._link = VerifierClient(channel, self._request, link or LinkSettings())
        self._pictures = SessionPictures(self._link.settings)
        self._reply = 0
        self._decoder = self._make_decoder(worth or Worth())

    @property
    def verifier(self) -> SessionReply | None:
        """The verifier's description of itself, from the session's opening; None before."""
        return self._link.verifier

    def open(self, deadline: float | None = None, cancelled: Callable[[], bool] | None = None) -> None:
        """Connect and open the session; ``decode`` does so if needed.

        LinkRefused (token, certificate), VerifierRefused (tokenizer, version, too many sessions), LinkClosed or
        LinkTimeout (no verifier), DeadlineExceeded, DecodeCancelled.
        """
        if not self._link.session:
            self._link.open(Limits(deadline, cancelled))

    def reconnect(self, deadline: float | None = None, cancelled: Callable[[], bool] | None = None) -> None:
        """After a failed decode: dial once, and resume the session or open another. Raises what ``open`` raises."""
        self._link.reconnect(Limits(deadline, cancelled))

    def decode(
        self,
        image: np.ndarray | None,
        instruction: str,
        on_progress: Progress | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        history: History = (),
        patience: float | None = None,
        on_trouble: Callable[[str], object] | None = None,
    ) -> DecodedReply:
        """The target's own reply about ``image`` (RGB uint8, (H, W, 3); None for models that read text alone).

        Both models see a picture as it travels (``LinkSettings.image_size``, ``image_encoding``). ``history``: up to
        eight pictures of earlier steps, each with the action taken after it, oldest first. ``instruction`` may be a
        ``Chat``, whose pictures are those of ``history``, with empty actions, and ``image``.
        on_progress(text so far, verified tokens, that round) is called after each verified round. ``deadline`` is a
        time.monotonic() instant; ``cancelled`` is polled. PromptError, ImageError or WireError (ValueErrors) for an
        input that cannot be used, LinkError when link or verifier fail for good, DeadlineExceeded, DecodeCancelled,
        LinkSilent after ``patience`` seconds of silence. ``on_trouble`` is called with a sentence when an answer is
        overdue or the link is down, and with "" when the verifier is heard again.
        """
        limits = Limits(deadline, cancelled, patience, on_trouble=on_trouble)
        check_instruction(instruction)
        self._pictures.check(image, history)
        self._reply += 1
        try:
            for _ in range(self._link.settings.attempts):
                try:
                    if not self._link.session:
                        self._link.open(limits)
                    seen, past = self._pictures.begin(image, history, self.verifier)
                    return self._decoder.decode(self._about(seen, instruction, past, on_progress, limits))
                except TargetChanged:
                    self._decoder.reset()
        finally:
            self._decoder.reset()
        raise LinkClosed("the verifier's target keeps changing; is it being restarted?")

    @property
    def can_decode_alone(self) -> bool:
        """Whether there is a draft model."""
        return self._draft_model is not None

    def decode_alone(
        self,
        image: np.ndarray | None,
        instruction: str,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        history: History = (),
    ) -> DecodedReply:
        """The draft model's own, unverified reply (``verified`` is False), without the link.

        For a robot that may continue while the link is lost, after a ``decode`` that failed. ValueError without a draft
        model, or for an input that cannot be used; DeadlineExceeded, DecodeCancelled; LinkClosed if the engine fails.
        """
        model = self._draft_model
        if model is None:
            raise ValueError(f"mode {self.settings.mode} has no draft model that could go on alone")
        check_instruction(instruction)
        known = self._link.verifier if self._translation is None else None
        ends = frozenset(known.eos_token_ids if known is not None else model.eos_token_ids)
        request = self._about(image, instruction, history, None, Limits(deadline, cancelled))
        drafter = ModelDrafter(model, self.settings, longest=self.settings.max_tokens)
        try:
            return _decode_alone(drafter, self.settings, ends, request, model.decode_text)
        finally:
            drafter.close()

    def draft_again(self) -> Drafter:
        """The drafter of mode stream, at the beginning of the reply that was decoded last; close it."""
        assert isinstance(self._decoder, StreamDecoder)
        return self._decoder.begin_again()

    def close(self) -> None:
        """End the session at the verifier, and the worker threads. The caller closes the channel."""
        self._decoder.close()
        self._link.close()

    def _about(
        self, image: np.ndarray | None, instruction: str, history: History, progress: Progress | None, limits: Limits
    ) -> ReplyRequest:
        constrain = self._constrain if self._form is not None else None
        sampled = not self.settings.sampling.greedy
        return ReplyRequest(self._reply, image, instruction, progress, self.text, limits, history, constrain, sampled)

    def _constrain(self, ends: frozenset[int]) -> Constraint:
        """What holds the draft model's tokens to the form; ``ends``: the target's end tokens."""
        model = self._draft_model
        assert model is not None and self._form is not None
        return model.constrainer.of(self._form, model.eos_token_ids if self._translation is not None else ends)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            max_tokens=settings.max_tokens,
            resume=resume,
            exits=settings.uses_exits,
            exit_layers=list(settings.exits or ()) if settings.uses_exits else [],
            min_exit_confidence=float(settings.min_exit_confidence),
            proof=settings.proven_by,
            grammar=self._form.text if self._form is not None else "",
        )

    def _make_decoder(self, worth: Worth) -> StreamDecoder | DecodeLoop:
        """What decodes replies under these settings."""
        model, settings = self._draft_model, self.settings
        if settings.preset.streams:
            drafter: Drafter | None = None
            if model is not None and self._translation is not None:
                drafter = TextDrafter(model, settings, self._translation)
            elif model is not None:
                drafter = ModelDrafter(model, settings)
            return StreamDecoder(self._link, self._pictures, drafter, settings, worth)
        assert model is not None
        method = method_of(settings.proven_by, settings.sampling.greedy)
        client = ReplyClient(self._link, self._pictures, method)
        proposer: Proposer
        if settings.predrafts:
            assert not isinstance(model, DraftEngine)  # ``_check_engine``
            proposer = Ahead(model, settings, client.send_ahead)
        else:
            proposer = DraftModel(model, settings)
        return DecodeLoop(proposer, client, method, settings)

    def text(self, tokens: list[int]) -> str:
        """The text of reply tokens; "" without a tokenizer."""
        return self._text_model.decode_text(tokens) if self._text_model is not None else ""


def check_settings(
    settings: DecodeSettings,
    draft_model: VisionLanguageModel | DraftEngine | TextModel | None,
    vocabulary: Vocabulary | None = None,
    form: ReplyForm | None = None,
) -> None:
    """Check whether a session with these models can have the settings, and hold replies to ``form``.

    :raises ValueError: when the mode needs a draft model, or one that shares the target's tokenizer, or distributions
        too large for a message, or when the draft model's tokens cannot write the form's actions.
    """
    if not settings.needs_draft:
        return
    if draft_model is None or not hasattr(draft_model, "prefill"):
        raise ValueError(f"mode {settings.mode} needs a draft model; give one, or use mode ar")
    _check_engine(settings, draft_model)
    _check_room(settings, draft_model.vocab_size)
    if form is not None:
        model = cast("VisionLanguageModel | DraftEngine", draft_model)
        model.constrainer.of(form, model.eos_token_ids)
    if _translates(draft_model, vocabulary) and not settings.preset.streams:
        raise ValueError(
            f"mode {settings.mode} needs a draft model with the target's tokenizer; use mode stream, or such a model"
        )


def _translates(
    draft_model: VisionLanguageModel | DraftEngine | TextModel | None, vocabulary: Vocabulary | None
) -> bool:
    """Whether the draft model has another tokenizer than the target."""
    own = draft_model.tokenizer_fingerprint if draft_model is not None else ""
    return vocabulary is not None and vocabulary.tokenizer_fingerprint != own


def _check_engine(settings: DecodeSettings, draft_model: object) -> None:
    """ValueError for an engine in a mode that needs more of a draft model than its tokens."""
    plain = settings.shaped_by is Shape.SEQUENCE and not (settings.draws or settings.predrafts)
    if isinstance(draft_model, DraftEngine) and not plain:
        raise ValueError(
            f"mode {settings.mode} needs the draft's distributions, and a draft engine gives tokens alone; use stream, "
            "coupled, or dsd with temperature 0, or leave out the engine"
        )


def _check_room(settings: DecodeSettings, vocab_size: int) -> None:
    """ValueError when a draft's distributions would not fit into one message; truncated ones always do."""
    whole = settings.draws and settings.proven_by.declared.sends_rows
    if not (whole or settings.splits):
        return
    most = MAX_EVIDENCE_BYTES // (4 * vocab_size + (_ROW_HEAD_BYTES if settings.splits else 0))
    if settings.shaped_by is not Shape.EXPANSION:
        if whole and settings.draft_length > most:
            raise ValueError(
                f"draft_length {settings.draft_length} is too long for a vocabulary of {vocab_size}; use {most} or less"
            )
        return
    expansion = settings.expansion
    # Up: one row per inner node. Down: one for a rejected first child's parent, and those of its siblings' subtrees.
    rows = 1 + expansion_nodes(expansion[:-1])
    if settings.splits:
        rows = 1 + expansion_nodes(expansion) // expansion[0] * (expansion[0] - 1)
    if rows > most:
        raise ValueError(
            f"tree_expansion {settings.tree_expansion!r} takes {rows} distributions in one message, and with a "
            f"vocabulary of {vocab_size} at most {most} fit; use a smaller one, or proof truncated or coupled"
        )


def _decode_alone(
    drafter: Drafter,
    settings: DecodeSettings,
    ends: frozenset[int],
    request: ReplyRequest,
    text: Callable[[list[int]], str],
) -> DecodedReply:
    """A reply by ``drafter`` alone, with the noise that the target would have used; errors as in
    ``EdgeSession.decode_alone``.
    """
    began = time.perf_counter()
    drafter.begin(request, ends)
    prefill_seconds = time.perf_counter() - began
    tokens: list[int] = []
    while len(tokens) < settings.max_tokens and not (tokens and tokens[-1] in ends):
        request.limits.check()
        drafted = drafter.next()
        if not drafted and drafter.far_enough:
            if drafter.error:
                raise LinkClosed(drafter.error)
            break
        tokens += drafted
        drafter.follow(tokens)
    memory, threads = resources(drafter.device)
    return DecodedReply(
        tokens=tokens,
        text=text(tokens),
        mode=settings.mode,
        finished=bool(tokens) and tokens[-1] in ends,
        seconds=time.perf_counter() - began,
        prefill_seconds=prefill_seconds,
        bytes_up=0,
        bytes_down=0,
        peak_memory=memory,
        threads=threads,
        verified=False,
    )
