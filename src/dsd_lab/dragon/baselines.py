"""The methods that DRAGON compares itself with (its section 7.2), each asked as an ``AskSession`` is.

device      the device's documents alone, mixed (what an answer is when the cloud is not asked)
cloud       the cloud's documents alone, mixed, by its model; its tokens travel
crcg        centralised: the device's documents one behind the other in one prompt
crcg-cloud  the same at the cloud, whose tokens travel
drcg-text   the cloud's documents travel as text; the device reads both sides' in one prompt
drcg-kv     they travel with their keys and values; the device mixes both sides' documents. Keys and values that were
            computed apart only fit sequences of their own, so that this one has dragon's distribution, not drcg-text's
drdg-tw     dragon without speculation: the sides go in step, one token a round trip
drdg-sw     each side makes a whole answer alone; once its own is done the device collects all of the cloud's
            distributions, and the two of a position are aggregated. Not exact: behind the first token on which the
            sides differ, each stands behind words of its own. DRAGON does not say how it combines them; this is the
            plain reading.

No document of the device's ever travels. Where the cloud serves these at all: ``baseline_service``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsd_lab.dragon.baseline_run import BaselineRun
from dsd_lab.dragon.baseline_service import (
    COLLECT,
    KEYS,
    MIXED,
    SEQUENCE,
    TEXTS,
    TOGETHER,
    alone,
    chooser,
    noise_of,
    together,
)
from dsd_lab.dragon.methods import IN_STEP, OF_AN_ORDINARY_CLOUD
from dsd_ros.decoding.aggregation import eta
from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.dragon.answers import Answer, AnswerRefused
from dsd_ros.dragon.asker import Asker
from dsd_ros.dragon.client import AskSession, OnToken
from dsd_ros.dragon.documents.retrieval import Retrieved, Retriever
from dsd_ros.dragon.evidence import unpack_evidence
from dsd_ros.dragon.mixture import KeptDocuments, Local, LocalMixture, Preempted, Relevance
from dsd_ros.dragon.profiler import DecodeDelay
from dsd_ros.dragon.prompts import Asking
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.vlm.prompts import check_instruction
from dsd_ros.wire.channel import Channel
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import EndCode, Proposal

_WANTED = {
    "device": None,
    "cloud": MIXED,
    "crcg": None,
    "crcg-cloud": TOGETHER,
    "drcg-text": TEXTS,
    "drcg-kv": KEYS,
    "drdg-sw": SEQUENCE,
}


def open_session(
    method: str,
    channel: Channel,
    model: Any,
    retriever: Retriever,
    settings: AggregationSettings | None = None,
    *,
    asking: Asking | None = None,
    relevance: Relevance | None = None,
    kept: KeptDocuments | None = None,
    delay: DecodeDelay | None = None,
) -> AskSession | BaselineSession:
    """What answers by one of ``methods.METHODS``; ValueError for another.

    The channel must be up, save for dragon and drdg-tw, which dial.
    """
    settings = settings or AggregationSettings()
    if method in OF_AN_ORDINARY_CLOUD:
        if method == IN_STEP:  # collected and aggregated on the device, as in the paper
            settings = replace(settings, window=1, schedule="device", aggregator="device")
        return AskSession(
            channel, model, retriever, settings, asking=asking, relevance=relevance, kept=kept, delay=delay
        )
    return BaselineSession(method, channel, model, retriever, settings, asking=asking, kept=kept)


class BaselineSession(Asker):
    """Answers questions by one of the methods that want no aggregation token by token.

    A lost link is not mended: what is compared is measured, not relied on. Of the settings those of the link's
    loss, of scheduling and of re-weighting mean nothing here.
    """

    def __init__(
        self,
        method: str,
        channel: Channel,
        model: Any,
        retriever: Retriever,
        settings: AggregationSettings | None = None,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
    ) -> None:
        if method not in _WANTED:
            raise ValueError(f"there is no method {method!r}; use one of {', '.join(_WANTED)}")
        super().__init__(model, retriever, settings, asking, kept)
        self.method = method
        self.channel = channel
        self.closing = False

    def close(self) -> None:
        self.closing = True

    def answer(
        self,
        question: str,
        on_token: OnToken | None = None,
        cancelled: Callable[[], bool] | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """As ``AskSession.answer``; with no steps, as nothing is aggregated token by token."""
        question = check_instruction(question)
        self.replies += 1
        run = BaselineRun(self, question, on_token, cancelled, deadline)
        wanted = _WANTED[self.method]
        try:
            if wanted is None:
                self._alone(run, run.own_documents())
            elif wanted in (TEXTS, KEYS):
                run.ask(wanted)
                self._alone(run, run.own_documents() + run.documents())
            elif wanted == SEQUENCE:
                run.ask(wanted)
                self._sequences(run)
            else:
                run.ask(wanted)
                while not run.ended:
                    run.take(run.proposal(len(run.tokens)).token)
        except BaseException as error:
            run.leave()
            if isinstance(error, Preempted):
                run.check()  # says why
            raise
        return run.told()

    # ------------------------------------------------------------------

    def _alone(self, run: BaselineRun, documents: list[Retrieved]) -> None:
        """The device's own answer."""
        if self.method in ("crcg", "drcg-text"):
            documents = together(documents)
        for token, _, _ in self._own(run, documents):
            run.take(token)

    def _own(self, run: BaselineRun, documents: list[Retrieved]) -> Any:
        mixture = LocalMixture(self.model, self.asking, run.text, documents, self.settings.temperature, self.kept)
        mixture.reserve(self.settings.max_tokens)
        run.mixtures.append(mixture)
        return alone(mixture, chooser(run.question), self.settings.max_tokens, run.eos, run.stopped)

    def _sequences(self, run: BaselineRun) -> None:
        """Both sides' sequences, made at once, collected and put together afterwards (DRAGON, section 7.3)."""
        ours = [local for _, local, _ in self._own(run, run.own_documents())]
        run.ask(COLLECT)
        while not run.ended:
            number = len(run.tokens)
            theirs = run.proposal(number) if not run.over(number) else None
            if theirs is None and number >= len(ours):
                break
            run.take(self._aggregated(run, ours[number : number + 1], theirs, number))

    def _aggregated(self, run: BaselineRun, ours: list[Local], theirs: Proposal | None, number: int) -> int:
        """The token of two sequences' distributions at a position; of one where the other has ended.

        What evidence leaves open counts as 0.
        """
        sizes = self.model.vocab_size, run.vocab_size
        p = np.zeros(max(sizes))
        noise = noise_of(run.question, number, len(p))
        share, other_share = 1.0, 1.0
        if ours and theirs is not None:
            share, other_share = eta(ours[0].log_weight, theirs.log_weight)
        if ours:
            p[: sizes[0]] += share * ours[0].p.double().numpy()
        if theirs is not None:
            try:
                known = unpack_evidence(run.question, theirs, sizes[1], noise)
            except (SamplingError, WireError) as error:
                raise AnswerRefused(str(error), EndCode.BAD_EVIDENCE) from error
            p[: sizes[1]] += other_share * known.lo
        row = torch.from_numpy(p)
        return int(row.argmax()) if noise is None else choose(row, noise)
