# SPDX-License-Identifier: Apache-2.0
"""Holds a model's forward passes to given times, to measure on one machine what another would do.

The model runs for real; only the clock is stretched. A model slower than its pace keeps its own time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch

from dsd_lab.bench.profiles import Curve, at_batch
from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Feed, LayerHook


@dataclass(frozen=True)
class Pace:
    """The least time of one forward pass of a model; ValueError for a value that is negative or not finite."""

    forward_seconds: float  # of one sequence, however many tokens it feeds (a prefill too)
    batch_growth: float = 0.0  # how much longer a pass over eight takes, as a share; linear (0.15 in FSD Table 9)
    batch_curve: Curve = ()  # instead: (sequences, times one alone)

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "batch_growth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a pace is {value}; use a number of 0 or more")

    def seconds(self, batch: int = 1) -> float:
        """The least seconds of a pass over ``batch`` sequences."""
        if self.batch_curve:
            return self.forward_seconds * at_batch(self.batch_curve, batch)
        return self.forward_seconds * (1 + self.batch_growth * (batch - 1) / 7)

    def begin(self, layers: int, batch: int = 1) -> PacedPass:
        """Start the clock of one pass through ``layers`` decoder layers."""
        return PacedPass(time.monotonic(), self.seconds(batch) / layers)


@dataclass(frozen=True)
class PacedPass:
    """One pass in progress: layer i (from 1) is not done before i layers' time has passed."""

    began: float
    layer_seconds: float

    def layer_done(self, layer: int) -> None:
        """Sleep until layer ``layer``, counted from 1, would have been done at this pace."""
        due = self.began + layer * self.layer_seconds
        while (missing := due - time.monotonic()) > 0:
            time.sleep(missing)


class PacedModel(VisionLanguageModel):
    """A model whose passes last as ``pace`` says; None lets them run freely. Made by ``paced``."""

    pace: Pace | None

    def forward_tokens(
        self, tokens: Tokens[int], cache: KeyValueCache, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        return super().forward_tokens(tokens, cache, rope_delta, rows, _held(self._clock(), on_layer))

    def forward_tree(self, feed: Feed, on_layer: LayerHook | None = None) -> torch.Tensor:
        return super().forward_tree(feed, _held(self._clock(), on_layer))

    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
        # A prompt counts as a sequence of its own, even where its reply's first round is in the same pass.
        prompts = sum(feed.prompt is not None and len(feed.tokens) > 0 for feed in feeds)
        return super().forward_batch(feeds, _held(self._clock(len(feeds) + prompts), on_layer))

    def _clock(self, batch: int = 1) -> PacedPass:
        pace = Pace(0.0) if self.pace is None else self.pace
        return pace.begin(self.num_layers, batch)


def paced(model: VisionLanguageModel, pace: Pace | None = None) -> PacedModel:
    """The same weights, held to a pace that can be set at any time."""
    held = object.__new__(PacedModel)
    held.__dict__.update(model.__dict__)
    held.processors = 1 << 16  # passes that mostly sleep take none from each other
    held.pace = pace
    return held


def _held(clock: PacedPass, on_layer: LayerHook | None) -> LayerHook:
    """A layer hook that waits for the clock, then calls ``on_layer``."""

    def hook(index: int, hidden: torch.Tensor) -> None:
        clock.layer_done(index + 1)
        if on_layer is not None:
            on_layer(index, hidden)

    return hook
