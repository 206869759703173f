# SPDX-License-Identifier: Apache-2.0
"""Holds a model's forward passes to given times, to measure on one machine what another would do.

The model runs for real; only the clock is stretched. A model slower than its pace keeps its own time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dsd_lab.bench.profiles import TABLE_9, Curve, Profile, at_batch
from dsd_ros.vlm.cache import KeyValueCache
from dsd_ros.vlm.exits import ExitAdapters, ExitBackbone
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Feed, LayerHook


@dataclass(frozen=True)
class Pace:
    """The least time of a model's work; ValueError for a value that is negative or not finite."""

    forward_seconds: float  # a pass over one sequence, however many tokens it feeds
    batch_growth: float = 0.0  # how much longer a pass over eight takes, as a share; linear (0.15 in FSD Table 9)
    batch_curve: Curve = ()  # instead: (sequences, times one alone)
    token_curve: Curve = ()  # (tokens read of each sequence, times one alone); none: a pass takes as long for any
    prefill_seconds: float | None = None  # a pass over one prompt; None: as any other
    exit_seconds: float = 0.0  # what an early exit adds to its pass
    thread_growth: float = 0.0  # how much longer a pass takes beside each other that is under way, as a share

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "batch_growth", "prefill_seconds", "exit_seconds", "thread_growth"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a pace is {value}; use a number of 0 or more")

    def seconds(self, batch: int = 1, prompts: int = 0, beside: int = 0, tokens: float = 1) -> float:
        """The least seconds of a pass over ``batch`` sequences and ``prompts``, with ``beside`` others under way.

        ``tokens``: read of each of these sequences.
        """
        if self.prefill_seconds is None:
            batch, prompts = batch + prompts, 0
        seconds = prompts * (self.prefill_seconds or 0.0)
        if batch:
            growth = at_batch(self.batch_curve, batch) if self.batch_curve else 1 + self.batch_growth * (batch - 1) / 7
            seconds += self.forward_seconds * growth * (at_batch(self.token_curve, tokens) if self.token_curve else 1)
        return seconds * (1 + self.thread_growth * beside)

    def begin(self, layers: int, batch: int = 1, prompts: int = 0, beside: int = 0, tokens: float = 1) -> PacedPass:
        """Start the clock of one pass through ``layers`` decoder layers."""
        return PacedPass(time.monotonic(), self.seconds(batch, prompts, beside, tokens) / layers, self.exit_seconds)


@dataclass
class PacedPass:
    """One pass in progress: layer i (from 1) is not done before i layers' time has passed, and that of the exits."""

    began: float
    layer_seconds: float
    exit_seconds: float = 0.0

    def layer_done(self, layer: int) -> None:
        """Sleep until layer ``layer``, counted from 1, would have been done at this pace."""
        _sleep_until(self.began + layer * self.layer_seconds)

    def exit_done(self, began: float) -> None:
        """Sleep until an exit that began then would have been done; the layers after it are as much later."""
        _sleep_until(began + self.exit_seconds)
        self.began += self.exit_seconds


def _sleep_until(due: float) -> None:
    while (missing := due - time.monotonic()) > 0:
        time.sleep(missing)


class PacedModel(VisionLanguageModel):
    """A model whose passes last as ``pace`` says; None lets them run freely. Made by ``paced``."""

    passes: _Passes
    _pace: Pace | None

    @property
    def pace(self) -> Pace | None:
        return self._pace

    @pace.setter
    def pace(self, pace: Pace | None) -> None:
        self._pace = pace
        # Passes that mostly sleep take no processor from each other; those that run freely share this process's.
        # Threads that slow each other down share a processor.
        self.processors = None if pace is None else 1 if pace.thread_growth else 1 << 16

    def forward_tokens(
        self, tokens: Tokens[int], cache: KeyValueCache, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        with self.passes.begin(self, fed=len(tokens)) as clock:
            return super().forward_tokens(tokens, cache, rope_delta, rows, _held(clock, on_layer))

    def forward_tree(self, feed: Feed, on_layer: LayerHook | None = None) -> torch.Tensor:
        with self.passes.begin(self, [feed]) as clock:
            return super().forward_tree(feed, _held(clock, on_layer))

    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
        with self.passes.begin(self, feeds) as clock:
            return super().forward_batch(feeds, _held(clock, on_layer))


class _Passes:
    """The passes of a paced model that are under way, on all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._mine = threading.local()

    @contextmanager
    def begin(self, model: PacedModel, feeds: Tokens[Feed] = (), fed: int = 0) -> Iterator[PacedPass]:
        """Start the clock of a pass over these feeds, or ``fed`` tokens of one sequence."""
        pace = Pace(0.0) if model.pace is None else model.pace
        read = sum(feed.prompt is not None and feed.prompt.ends for feed in feeds)
        # A prompt counts as a sequence of its own, even where its reply's first round is in the same pass; one that is
        # read in parts counts with its last part, the others as a sequence each.
        others = sum(bool(feed.tokens) or (feed.prompt is not None and not feed.prompt.ends) for feed in feeds)
        batch = others if feeds else 1
        tokens = (fed + sum(len(feed.tokens) for feed in feeds)) / max(1, batch)
        with self._lock:
            beside = self._running
            self._running += 1
        clock = pace.begin(model.num_layers, batch, read, beside, tokens)
        self._mine.clock = clock
        try:
            yield clock
        finally:
            with self._lock:
                self._running -= 1

    @property
    def mine(self) -> PacedPass:
        """This thread's newest pass."""
        clock: PacedPass = self._mine.clock
        return clock


class _PacedExits(ExitAdapters):
    """Early exits that add to the pass which they listen to."""

    def logits(self, model: ExitBackbone, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        found = super().logits(model, layer, hidden)
        if isinstance(model, PacedModel):
            model.passes.mine.exit_done(began)
        return found


def paced(model: VisionLanguageModel, pace: Pace | None = None) -> PacedModel:
    """The same weights, held to a pace that can be set at any time."""
    held = object.__new__(PacedModel)
    held.__dict__.update(model.__dict__)
    held.pace, held.passes = pace, _Passes()
    if model.exits is not None:
        held.exits = object.__new__(_PacedExits)
        held.exits.__dict__.update(model.exits.__dict__)
    return held


def hold(robot: PacedModel, cloud: PacedModel | None, profile: Profile) -> None:
    """Hold both models to the profile's times, if it gives any."""
    times = profile.times
    if times is None:
        return
    robot.pace = Pace(
        times.draft_s, times.batch_growth, prefill_seconds=times.draft_prefill_s, thread_growth=times.thread_growth
    )
    if cloud is not None:
        cloud.pace = Pace(
            times.target_s, batch_curve=times.target_batch or (TABLE_9 if times.batch_growth else ()),
            token_curve=times.target_tokens, prefill_seconds=times.target_prefill_s, exit_seconds=times.exit_s,
        )  # fmt: skip


def _held(clock: PacedPass, on_layer: LayerHook | None) -> LayerHook:
    """A layer hook that waits for the clock, then calls ``on_layer``."""

    def hook(index: int, hidden: torch.Tensor) -> None:
        clock.layer_done(index + 1)
        if on_layer is not None:
            on_layer(index, hidden)

    return hook
