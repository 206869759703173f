# SPDX-License-Identifier: Apache-2.0
"""The times of real model sizes on one device, and whether decoding agrees with transformers.

The models have random weights: a pass takes as long as with trained ones, and nothing is downloaded. What they say
means nothing, so acceptance is not measured here.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from dsd_lab.report import BenchError, Row, rounded
from dsd_ros.cloud.exits import ExitListener, ExitRules, RoundExits
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence, TreeCheck, next_logits_together, verify_trees_together

INSTRUCTION = "find the silver bottle"
_DRAFT_LENGTHS = (1, 2, 4, 8, 16)
_GAMMA = 4  # tokens of a draft where the length is not what is measured
_TREE = (-1, -1, 0, 0, 1, 2)  # parents
_BATCHES = (1, 2, 4, 8, 16, 32)  # sequences
SHALLOW = 3  # decoder layers of the float32 models that are compared with transformers
TOLERANCE = 1e-3  # of float32 logits, as a share of the largest
_WARM_UP, _LEAST, _MOST = 2, 5, 50  # passes
_ENOUGH_S = 0.4  # of a timing


def usable_device(device: str) -> torch.device:
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise BenchError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try cuda or cpu") from error
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is compared as float32
    return place


def described_device(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)


def forget(place: torch.device) -> None:
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)


def peak_memory(place: torch.device) -> float:
    """GB at most since ``forget``; on a CPU, of the process since its start."""
    if place.type == "cuda":
        return rounded(torch.cuda.max_memory_allocated(place) / 1e9)
    return rounded(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _time(place: torch.device, act: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Row:
    """Milliseconds of ``act``, between ``undo`` and the next: median, 10th and 90th percentile, and how many."""
    taken: list[float] = []
    while len(taken) < _WARM_UP + _LEAST or (sum(taken) < _ENOUGH_S and len(taken) < _WARM_UP + _MOST):
        _wait(place)
        began = time.perf_counter()
        act()
        _wait(place)
        taken.append(time.perf_counter() - began)
        undo()
    counted = [1e3 * seconds for seconds in taken[_WARM_UP:]]
    tenths = statistics.quantiles(counted, n=10, method="inclusive")
    return {"ms": rounded(statistics.median(counted)), "p10": rounded(tenths[0]), "p90": rounded(tenths[-1]),
            "passes": len(counted)}  # fmt: skip


def _tokens(model: VisionLanguageModel, count: int) -> list[int]:
    """Ordinary tokens to feed; which ones does not matter."""
    return [token % 50 + 100 for token in range(count)]


def draft_rows(model: VisionLanguageModel, picture: np.ndarray) -> Iterator[Row]:
    """The work of a draft model: its prompt, and one token at a time, alone and in batches (T_p)."""
    sequence = model.prefill(picture, INSTRUCTION)
    prefill = _time(model.device, lambda: model.prefill(picture, INSTRUCTION))
    yield {"model": "draft", "what": "prefill", "count": sequence.prompt_length, **prefill}

    def step(sequences: list[Sequence]) -> None:
        for each in sequences:
            each.append(_tokens(model, 1))
        next_logits_together(sequences)

    for batch in _BATCHES:
        several = [sequence.fork() for _ in range(batch)]
        found = _time(model.device, partial(step, several), partial(_rolled_back, several))
        yield {"model": "draft", "what": "step", "count": batch, **found}


def target_rows(model: VisionLanguageModel, picture: np.ndarray) -> Iterator[Row]:
    """The work of a target: its prompt, drafts by length (T_q), a tree, a pass with every exit, drafts in batches."""
    sequence = model.prefill(picture, INSTRUCTION)
    prefill = _time(model.device, lambda: model.prefill(picture, INSTRUCTION))
    yield {"model": "target", "what": "prefill", "count": sequence.prompt_length, **prefill}
    sequence.append(_tokens(model, 1))
    undo = partial(_rolled_back, [sequence], tuple(_tokens(model, 1)))
    for length in (0, *_DRAFT_LENGTHS):
        found = _time(model.device, partial(sequence.verify, _tokens(model, length)), undo)
        yield {"model": "target", "what": "verify", "count": length, **found}
    tree = _time(model.device, lambda: sequence.verify_tree(_tokens(model, len(_TREE)), _TREE), undo)
    yield {"model": "target", "what": "tree", "count": len(_TREE), **tree}
    yield {"model": "target", "what": "exits", **_exit_times(model, sequence, undo)}
    for batch in _BATCHES:
        several = [sequence.fork() for _ in range(batch)]
        checks = [TreeCheck(each, _tokens(model, _GAMMA), range(-1, _GAMMA - 1)) for each in several]
        again = partial(_rolled_back, several, tuple(_tokens(model, 1)))
        found = _time(model.device, partial(verify_trees_together, checks), again)
        yield {"model": "target", "what": "batch", "count": batch, **found}


def _rolled_back(sequences: list[Sequence], tokens: tuple[int, ...] = ()) -> None:
    """Back to the prompt, and these tokens after it."""
    for each in sequences:
        each.rollback(0)
        each.append(list(tokens))


def _exit_times(model: VisionLanguageModel, sequence: Sequence, undo: Callable[[], object]) -> Row:
    """A pass in which an exit after every layer but the last speaks; and when each outcome is known."""
    exits = ExitAdapters.untrained(model).to(model.device, next(model.hf.parameters()).dtype)
    model.exits = exits.eval().requires_grad_(False)
    rules = ExitRules(exits.layers, 0.0, float("inf"))
    known: list[list[float]] = []

    def verify() -> None:
        began = time.perf_counter()
        known.append([])

        def judge(rows: torch.Tensor) -> DraftVerdict:
            chosen = rows.argmax(-1).tolist()
            known[-1].append(1e3 * (time.perf_counter() - began))
            return DraftVerdict(0, chosen[0])

        listener = ExitListener(model, [RoundExits(rules, judge, lambda *_: None)])
        sequence.verify(_tokens(model, _GAMMA), lambda index, hidden: listener(index, [hidden]))
        listener.harvest()

    found = _time(model.device, verify, undo)
    counted = known[_WARM_UP:]
    in_time = min(len(times) for times in counted)  # those after it came with the final outcome, or later
    medians = [
        rounded(statistics.median(column)) for column in zip(*(times[:in_time] for times in counted), strict=True)
    ]
    return found | {"count": len(exits.layers), "known_ms": medians, "parameters": exits.parameters_count}


def agreement(model: VisionLanguageModel, picture: np.ndarray) -> Row:
    """The largest difference from transformers' own forward, as a share of its largest logit, by what was decoded."""
    sequence = model.prefill(picture, INSTRUCTION)
    draft = _tokens(model, len(_TREE))
    seen: dict[int, torch.Tensor] = {}
    whole = _Reference(model, picture)
    logits, states = whole(draft)
    rows = sequence.fork().verify(draft, lambda index, hidden: seen.update({index: hidden}))
    found = {"prefill": _difference(sequence.next_logits()[None], logits[:1]), "draft": _difference(rows, logits)}
    # The last of transformers' hidden states has been through the final norm.
    found["layers"] = max(_difference(seen[index], states[index]) for index in range(len(states) - 1))
    exits = ExitAdapters.untrained(model, seed=1).to(model.device)
    found["exits"] = max(
        _difference(exits.logits(model, at, seen[at - 1]), exits.logits(model, at, states[at - 1]))
        for at in exits.layers
    )
    tree = sequence.fork().verify_tree(draft, _TREE)
    paths = [_path(node) for node in range(len(_TREE))]
    found["tree"] = max(
        _difference(tree[node + 1 : node + 2], whole([draft[step] for step in path])[0][-1:])
        for node, path in enumerate(paths)
    )
    several = [sequence.fork() for _ in range(3)]
    checks = [
        TreeCheck(several[0], draft, _TREE),
        TreeCheck(several[1], draft[:2], range(-1, 1)),
        TreeCheck(several[2], draft, range(-1, len(draft) - 1)),
    ]
    together = verify_trees_together(checks)
    found["batch"] = max(
        _difference(rows, expected) for rows, expected in zip(together, (tree, logits[:3], logits), strict=True)
    )
    return found | {"worst": max(found.values()), "layers_compared": len(model.hf.model.language_model.layers)}


class _Reference:
    """Transformers' own forward over the prompt and some tokens, from nothing each time."""

    def __init__(self, model: VisionLanguageModel, picture: np.ndarray) -> None:
        self._model = model
        self._pixels, self._grid = model.images(picture)
        self._prompt = model.prompt_tokens(INSTRUCTION, model.images.image_tokens(*picture.shape[:2]))

    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits (tokens + 1, vocabulary) and, of each decoder layer, hidden states (tokens + 1, hidden size)."""
        model = self._model
        ids = torch.tensor([[*self._prompt, *tokens]], device=model.device)
        pictures = (ids == model.hf.config.image_token_id).int()
        out = model.hf(
            input_ids=ids, pixel_values=self._pixels.to(model.device), image_grid_thw=self._grid.to(model.device),
            mm_token_type_ids=pictures, output_hidden_states=True, use_cache=False,
        )  # fmt: skip
        rows = len(tokens) + 1
        logits = out.logits[0, -rows:].float()
        logits[:, model.tokenizer.get_vocab_size(with_added_tokens=True) :] = -torch.inf
        return logits, [states[0, -rows:] for states in out.hidden_states[1:]]


def _path(node: int) -> list[int]:
    """The nodes from the root's child down to ``node``."""
    path = [node]
    while _TREE[path[0]] >= 0:
        path.insert(0, _TREE[path[0]])
    return path


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("inf")
    return rounded(float((found - expected)[finite].abs().max() / expected[finite].abs().max()))
