# SPDX-License-Identifier: Apache-2.0
"""Early outcomes while the pass goes on: the Listener of FSD's Algorithm 2.

Each exit judges the whole draft as the final layer will, with the same random numbers, so its outcome is a forecast
of the final one. Whatever fails here, the pass and its final outcome go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import SessionRequest

_log = logging.getLogger(__name__)
_POLL_S = 50e-6
_SURE = 0.95  # confidence of an exit after which the deeper ones would hardly ever say anything else

Judge = Callable[[torch.Tensor], DraftVerdict]
Say = Callable[[DraftVerdict, int, float], object]
Mask = Callable[[torch.Tensor], torch.Tensor]


def unmasked(logits: torch.Tensor) -> torch.Tensor:
    """The mask of a session whose replies are not constrained."""
    return logits


def confidence_of(logits: torch.Tensor) -> float:
    """The largest softmax probability of one row of logits (V,), at temperature 1."""
    return 1.0 / float((logits - logits.amax()).exp_().sum())


@dataclass(frozen=True)
class ExitRules:
    """Which exits speak in a session, and when they stay silent."""

    layers: tuple[int, ...]
    min_confidence: float
    share: float

    @classmethod
    def of(cls, request: SessionRequest, available: Sequence[int], share: float) -> ExitRules | None:
        """The rules for a session's request; None when no exit speaks. A request that names no layers wants all."""
        wanted = request.exit_layers
        layers = tuple(layer for layer in available if not wanted or layer in wanted)
        return cls(layers, request.min_exit_confidence, share) if request.exits and share > 0.0 and layers else None


class RoundExits(NamedTuple):
    """A round that exits speak for: ``say(verdict, layer, confidence)`` gets each new verdict; layers count from 1.

    ``mask`` takes what the reply's constraint does not allow out of logits (nodes + 1, V).
    """

    rules: ExitRules
    judge: Judge
    say: Say
    mask: Mask = unmasked


class ExitListener:
    """The layer hook of one pass: an outcome of each round from every exit that speaks, before deeper layers have run.

    On a CPU an exit delays the pass. The first always runs. Unless the rules' share is 1, another is skipped when those
    before it took more than that share of the pass's time so far, when one was sure of the round's outcome, and when
    the pass, at its pace so far, ends before another would have spoken. On a GPU the exits run on a stream of their
    own, and ``harvest`` collects them while the CPU waits for the pass anyway.
    """

    def __init__(
        self, model: VisionLanguageModel, voices: Sequence[RoundExits], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        assert model.exits is not None
        self._model = model
        self._exits = model.exits
        self._voices = voices
        self._share = min(voice.rules.share for voice in voices)
        self._clock = clock
        self._began = clock()
        self._spent = 0.0
        self._ran = 0
        self._said: list[set[DraftVerdict]] = [set() for _ in voices]
        self._sure: set[int] = set()
        self._broken: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        self._pending: list[tuple[int, list[int], list[torch.Tensor], torch.cuda.Event]] = []

    def __call__(self, index: int, hidden: Sequence[torch.Tensor]) -> None:
        """After decoder layer ``index`` (0-based): each voice's ``hidden`` (rows, hidden size), a row per verdict."""
        layer = index + 1
        speaking = [i for i, voice in enumerate(self._voices) if layer in voice.rules.layers and i not in self._broken]
        if not speaking:
            return
        try:
            if hidden[0].is_cuda:
                self._launch(layer, speaking, [hidden[i] for i in speaking])
                return
            began = self._clock()
            if self._ran and self._spent > self._share * (began - self._began):
                return
            if self._share < 1.0:
                speaking = [] if self._late(layer, began) else [i for i in speaking if i not in self._sure]
            if not speaking:
                return
            heard = [hidden[i] for i in speaking]
            logits = self._logits(layer, heard)
        except Exception:
            self._give_up(layer, speaking)
            return
        self._speak(layer, speaking, logits)
        self._ran += 1
        self._spent += self._clock() - began

    def harvest(self) -> None:
        """On a GPU: report what the exits found, in order, until the pass is over. Elsewhere nothing is left to do."""
        if self._stream is None:
            return
        pass_over = torch.cuda.current_stream(self._stream.device).record_event()
        for layer, speaking, logits, ready in self._pending:
            while not ready.query():
                if pass_over.query():
                    return
                time.sleep(_POLL_S)
            # The verdict waits for this stream only.
            with torch.cuda.stream(self._stream):
                self._speak(layer, speaking, logits)

    def _late(self, layer: int, now: float) -> bool:
        """Whether the layers that are left take less time than an exit."""
        a_layer = (now - self._began - self._spent) / layer
        return self._ran > 0 and (self._model.num_layers - layer) * a_layer <= self._spent / self._ran

    def _launch(self, layer: int, speaking: list[int], heard: list[torch.Tensor]) -> None:
        device = heard[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for hidden in heard:
                # The allocator must not reuse this memory before the exit has read it.
                hidden.record_stream(self._stream)
            logits = self._logits(layer, heard)
            self._pending.append((layer, speaking, logits, self._stream.record_event()))

    def _logits(self, layer: int, heard: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(heard) == 1:
            return [self._exits.logits(self._model, layer, heard[0])]
        logits = self._exits.logits(self._model, layer, torch.cat(heard))
        return list(logits.split([len(hidden) for hidden in heard]))

    def _speak(self, layer: int, speaking: list[int], logits: list[torch.Tensor]) -> None:
        for i, rows in zip(speaking, logits, strict=True):
            voice = self._voices[i]
            try:
                rows = voice.mask(rows)
                verdict = voice.judge(rows)
                if verdict in self._said[i]:
                    continue
                confidence = confidence_of(rows[verdict.accepted])
                if confidence >= _SURE:
                    self._sure.add(i)
                if confidence >= voice.rules.min_confidence:
                    self._said[i].add(verdict)
                    voice.say(verdict, layer, confidence)
            except Exception:
                self._give_up(layer, [i])

    def _give_up(self, layer: int, voices: list[int]) -> None:
        self._broken.update(voices)
        _log.exception("exit %d failed; the round goes on without exits", layer)
