"""Early outcomes while the pass goes on: the Listener of FSD's Algorithm 2.

Each exit judges the whole draft as the final layer will, with the same random numbers, so its outcome is a forecast
of the final one. Whatever fails here, the pass and its final outcome go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import SessionRequest

_log = logging.getLogger(__name__)
_POLL_S = 50e-6

Judge = Callable[[torch.Tensor], DraftVerdict]
Say = Callable[[DraftVerdict, int, float], object]


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


class ExitListener:
    """The layer hook of one pass: an outcome from every exit that speaks, before the deeper layers have run.

    On a CPU an exit delays the pass. One is skipped when those before it took more than the rules' share of the
    pass's time so far; the first always runs. On a GPU the exits run on a stream of their own, and ``harvest``
    collects them while the CPU waits for the pass anyway.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        rules: ExitRules,
        judge: Judge,
        say: Say,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``say(verdict, layer, confidence)`` is called with each new verdict; layers count from 1."""
        assert model.exits is not None
        self._model = model
        self._exits = model.exits
        self._rules = rules
        self._judge = judge
        self._say = say
        self._clock = clock
        self._began = clock()
        self._spent = 0.0
        self._ran = 0
        self._said: set[DraftVerdict] = set()
        self._broken = False
        self._stream: torch.cuda.Stream | None = None
        self._pending: list[tuple[int, torch.Tensor, torch.cuda.Event]] = []

    def __call__(self, index: int, hidden: torch.Tensor) -> None:
        """After decoder layer ``index`` (0-based): ``hidden`` (rows, hidden size), one row per verdict."""
        layer = index + 1
        if self._broken or layer not in self._rules.layers:
            return
        try:
            if hidden.is_cuda:
                self._launch(layer, hidden)
                return
            began = self._clock()
            if self._ran and self._spent > self._rules.share * (began - self._began):
                return
            self._speak(layer, self._logits(layer, hidden))
            self._ran += 1
            self._spent += self._clock() - began
        except Exception:
            self._give_up(layer)

    def harvest(self) -> None:
        """On a GPU: report what the exits found, in order, until the pass is over. Elsewhere nothing is left to do."""
        if self._stream is None:
            return
        pass_over = torch.cuda.current_stream(self._stream.device).record_event()
        layer = 0
        try:
            for layer, logits, ready in self._pending:
                while not ready.query():
                    if pass_over.query():
                        return
                    time.sleep(_POLL_S)
                # The verdict waits for this stream only.
                with torch.cuda.stream(self._stream):
                    self._speak(layer, logits)
        except Exception:
            self._give_up(layer)

    def _launch(self, layer: int, hidden: torch.Tensor) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        self._stream.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(self._stream):
            # The allocator must not reuse this memory before the exit has read it.
            hidden.record_stream(self._stream)
            logits = self._logits(layer, hidden)
            self._pending.append((layer, logits, self._stream.record_event()))

    def _logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._exits.logits(self._model, layer, hidden)

    def _speak(self, layer: int, logits: torch.Tensor) -> None:
        verdict = self._judge(logits)
        if verdict in self._said:
            return
        confidence = confidence_of(logits[verdict.accepted])
        if confidence >= self._rules.min_confidence:
            self._said.add(verdict)
            self._say(verdict, layer, confidence)

    def _give_up(self, layer: int) -> None:
        self._broken = True
        _log.exception("exit %d failed; the round goes on without exits", layer)
