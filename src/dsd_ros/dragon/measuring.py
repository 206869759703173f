"""The profiler's offline stage: how long a decoding step takes on this machine, measured once and kept as JSON.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 5.2: the decoding delay against the context's length, fitted by least squares (``profiler.DecodeDelay``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsd_ros.dragon.profiler import DecodeDelay, ProfilerError
from dsd_ros.vlm.sequence import next_logits_together

FILE = "decoding-delay.json"  # beside a store's documents
LENGTHS = (32, 128, 320)  # tokens of context
STEPS = 4  # at each of them, of which the median counts
_FORMAT = 1
_TOKEN = 1  # whichever it is, a step takes as long

_log = logging.getLogger(__name__)


def delay_of(model: Any, documents: int, folder: Path | None = None) -> DecodeDelay:
    """The line of this model on this machine, ``documents`` sequences in a pass.

    Read from FILE in ``folder``; where that is missing, of another model or machine, or damaged, it is measured and
    written there. Without a folder it is measured each time.
    """
    path = None if folder is None else folder / FILE
    kept = kept_delay(model, documents, folder)
    if kept is not None:
        return kept
    lengths, seconds = measure(model, documents)
    delay = fitted(lengths, seconds)
    if path is not None:
        content = {**_facts(model, documents), "lengths": lengths, "seconds": seconds}
        making = path.with_suffix(f".{os.getpid()}")
        try:
            making.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            making.replace(path)
        except OSError as error:  # it costs another measurement, no answer
            _log.warning("%s cannot be kept (%s); it is measured again next time", path, error)
            with contextlib.suppress(OSError):
                making.unlink()
    return delay


def kept_delay(model: Any, documents: int, folder: Path | None) -> DecodeDelay | None:
    """What ``delay_of`` would read, if there is something to read."""
    return None if folder is None else _read(folder / FILE, _facts(model, documents))


def measure(model: Any, documents: int, lengths: Sequence[int] = LENGTHS) -> tuple[list[int], list[float]]:
    """Contexts' lengths in tokens, and the seconds of a step at each: those of ``lengths`` that the model holds."""
    held = [length for length in lengths if length + STEPS <= model.max_length]
    if len(held) < 2:  # a model of few positions
        held = [model.max_length // 4, model.max_length - STEPS]
    first = model.begin()
    found = []
    for length in held:
        first.append([_TOKEN] * (length - len(first.tokens)))
        next_logits_together([first])
        together = [first.fork() for _ in range(max(1, documents))]
        taken = []
        for _ in range(STEPS):
            for sequence in together:
                sequence.append([_TOKEN])
            began = time.monotonic()
            next_logits_together(together)
            taken.append(time.monotonic() - began)
        found.append(statistics.median(taken))
    return held, found


def fitted(lengths: Sequence[int], seconds: Sequence[float]) -> DecodeDelay:
    """``DecodeDelay.fit``, with a level line through their median where they do not rise from 0 or more."""
    delay = DecodeDelay.fit(lengths, seconds)
    if delay.k_a < 0.0 or delay.k_c < 0.0:
        delay = DecodeDelay.fit(lengths, [statistics.median(seconds)] * len(lengths))
    return delay


def _facts(model: Any, documents: int) -> dict[str, Any]:
    """What a measurement holds for."""
    return {
        "format": _FORMAT,
        "model": model.fingerprint,
        "machine": f"{platform.node()} {platform.machine()}, {torch.get_num_threads()} threads",
        "device": str(getattr(model, "device", "cpu")),
        "documents": documents,
    }


def _read(path: Path, facts: dict[str, Any]) -> DecodeDelay | None:
    """The line kept in a file, if there is one for just this."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if {name: content[name] for name in facts} != facts:
            return None
        return fitted(content["lengths"], content["seconds"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ProfilerError) as error:
        _log.warning("%s cannot be used (%s); it is measured anew", path, error)
        return None
