# SPDX-License-Identifier: Apache-2.0
"""What a pair costs: milliseconds on one CPU thread; and how well its exits predict the last layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dsd_lab.report import ratio
from dsd_ros.vlm.model import VisionLanguageModel

VERIFIED = 5  # tokens of a timed verification, after the one that is pending
REPEATS = 30
_WARM_UP = 3


def time_model(
    model: VisionLanguageModel, picture: np.ndarray, instruction: str, repeats: int = REPEATS
) -> dict[str, Any]:
    """Medians in milliseconds of a token's step, a five-token verification and an image prefill, on one thread.

    ``cpu_ms`` is the thread's own time (None on a GPU), ``wall_ms`` the clock's.
    """
    spoken = model.prefill(picture, instruction)
    for _ in range(VERIFIED + 1):  # the beginning of the model's own reply
        spoken.append([int(spoken.next_logits().argmax())])
    tokens = list(spoken.tokens)

    def prefill() -> Any:
        return model.prefill(picture, instruction)

    begun = prefill()

    def prepared() -> Any:
        sequence = begun.fork()
        sequence.append(tokens[:1])  # the token that a round leaves pending
        return sequence

    with _one_thread():
        return {
            "step": _median(prepared, lambda s: s.next_logits(), repeats, model),
            "verify": _median(prepared, lambda s: s.verify(tokens[1:]), repeats, model),
            "prefill": _median(lambda: None, lambda _: prefill(), repeats, model),
            "repeats": repeats,
        }


def exit_agreement(
    model: VisionLanguageModel,
    pictures: Sequence[np.ndarray],
    instructions: Sequence[str],
    replies: Sequence[Sequence[int]],
) -> dict[str, Any] | None:
    """Each exit's agreement with the last layer on a model's own replies; None for a model without exits."""
    exits = model.exits
    if exits is None:
        return None
    counts: dict[int, list[tuple[int, int]]] = {layer: [] for layer in exits.layers}
    for picture, instruction, reply in zip(pictures, instructions, replies, strict=True):
        if len(reply) < 2:
            continue
        said: dict[int, torch.Tensor] = {}

        def note(index: int, hidden: torch.Tensor, said: dict[int, torch.Tensor] = said) -> None:
            if index + 1 in counts:
                said[index + 1] = exits.logits(model, index + 1, hidden).argmax(-1)

        last = model.prefill(picture, instruction).verify(list(reply)[:-1], note).argmax(-1)
        for layer, guess in said.items():
            counts[layer].append((int((guess == last).sum()), len(last)))
    rows = [
        {
            "layer": layer,
            "agreement": ratio([a for a, _ in some], [of for _, of in some]),
            "tokens": sum(of for _, of in some),
        }
        for layer, some in counts.items()
    ]
    return {"layers": model.num_layers, "exits": rows}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _median(
    prepare: Callable[[], Any], work: Callable[[Any], Any], repeats: int, model: VisionLanguageModel
) -> dict[str, float | None]:
    on_cuda = model.device.type == "cuda"
    cpu, wall = [], []
    for number in range(_WARM_UP + repeats):
        subject = prepare()
        if on_cuda:
            torch.cuda.synchronize(model.device)
        began, busy = time.perf_counter(), time.thread_time()
        work(subject)
        if on_cuda:
            torch.cuda.synchronize(model.device)
        if number >= _WARM_UP:
            cpu.append(1e3 * (time.thread_time() - busy))
            wall.append(1e3 * (time.perf_counter() - began))
    return {"cpu_ms": None if on_cuda else statistics.median(cpu), "wall_ms": statistics.median(wall)}
