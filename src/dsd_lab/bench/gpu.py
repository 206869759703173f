# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench gpu`: the times of real model sizes on one device, and whether decoding agrees with transformers.

The models have random weights: a pass takes as long as with trained ones, and nothing is downloaded. What they say
means nothing, so acceptance is not measured here.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.bench.gpu_models import SIZES_FILE, build_model, four_bit, read_sizes
from dsd_lab.bench.profiles import ROBOT, load_profile
from dsd_lab.report import BenchError, check_range, header, rounded, table
from dsd_ros.cloud.exits import ExitListener, ExitRules, RoundExits
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence, TreeCheck, next_logits_together, verify_trees_together

_clock = time.monotonic
_INSTRUCTION = "find the silver bottle"
_DRAFT_LENGTHS = (1, 2, 4, 8, 16)
_GAMMA = 4  # tokens of a draft where the length is not what is measured
_TREE = (-1, -1, 0, 0, 1, 2)  # parents
_BATCHES = (1, 2, 4, 8, 16, 32)  # sequences
_SHALLOW = 3  # decoder layers of the float32 models that are compared with transformers
_TOLERANCE = 1e-3  # of float32 logits, as a share of the largest
_WARM_UP, _LEAST, _MOST = 2, 5, 50  # passes
_ENOUGH_S = 0.4  # of a timing

Figures = dict[str, Any]


def measure_gpu(
    device: str,
    draft: str,
    target: str,
    tokenizer: str,
    *,
    seconds: float = 420.0,
    height: int = 720,
    width: int = 1280,
    sizes: Path = SIZES_FILE,
    robot: str = ROBOT,
    progress: Callable[[float, str], object] | None = None,
) -> Figures:
    """The times of two sizes by name, on a device such as "cuda" or "cpu"; BenchError.

    tokenizer: a model directory. height, width: of the picture in the prompt, in pixels. No part is begun after
    ``seconds``; what was left out is listed. robot: the profile of the robot before this target, for
    ``profiles.load_profile``, which reads the report.
    """
    known = read_sizes(sizes)
    for name in (draft, target):
        if name not in known:
            raise BenchError(f"there is no model size {name!r}; choose from {', '.join(known)}")
    check_range("seconds", seconds, 1, 3600, " s")
    for side in (height, width):
        check_range("a side of the picture", side, 28, 4096, " pixels")
    place = _usable(device)
    report = header("gpu") | {"device": _described(place), "draft": draft, "target": target, "height": height}
    report |= {"width": width, "robot": load_profile(robot).name, "left_out": []}
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    make = partial(build_model, device=place, tokenizer=Path(tokenizer))
    parts: dict[str, Callable[[], Figures]] = {
        "agreement": lambda: _agreement(make(known[target], dtype=torch.float32, layers=_SHALLOW), picture),
        "target_times": lambda: _target_times(make(known[target], dtype=torch.bfloat16), picture),
        "draft_times": lambda: _draft_times(make(known[draft], dtype=torch.bfloat16), picture),
        "draft_4bit_times": lambda: _four_bit_times(make(known[draft], dtype=torch.bfloat16), picture),
    }
    began = _clock()
    for number, (name, measure) in enumerate(parts.items()):
        if _clock() - began > seconds:
            report["left_out"].append(name)
            continue
        if progress is not None:
            progress(number / len(parts), name.replace("_", " "))
        _forget(place)
        with torch.inference_mode():
            report[name] = measure()
    report["seconds"] = round(_clock() - began, 1)
    report["agrees"] = report["agreement"]["worst"] <= _TOLERANCE
    return report


def _usable(device: str) -> torch.device:
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise BenchError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try cuda or cpu") from error
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is compared as float32
    return place


def _described(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)


def _forget(place: torch.device) -> None:
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)


def _memory(place: torch.device) -> float:
    """GB at most since ``_forget``; on a CPU, of the process since its start."""
    if place.type == "cuda":
        return rounded(torch.cuda.max_memory_allocated(place) / 1e9)
    return rounded(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _time(place: torch.device, act: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Figures:
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


def _prefill_time(model: VisionLanguageModel, picture: np.ndarray) -> tuple[Sequence, Figures]:
    found = _time(model.device, lambda: model.prefill(picture, _INSTRUCTION))
    sequence = model.prefill(picture, _INSTRUCTION)
    return sequence, found | {"tokens": sequence.prompt_length}


def _step_times(model: VisionLanguageModel, sequence: Sequence) -> Figures:
    """One token at a time, alone and in batches: the work of a draft model, T_p."""

    def step(sequences: list[Sequence]) -> None:
        for each in sequences:
            each.append(_tokens(model, 1))
        next_logits_together(sequences)

    def undo(sequences: list[Sequence]) -> None:
        for each in sequences:
            each.rollback(0)

    found = {}
    for batch in _BATCHES:
        several = [sequence.fork() for _ in range(batch)]
        found[str(batch)] = _time(model.device, partial(step, several), partial(undo, several))
    return found


def _target_times(model: VisionLanguageModel, picture: np.ndarray) -> Figures:
    sequence, prefill = _prefill_time(model, picture)
    sequence.append(_tokens(model, 1))

    def verify(length: int) -> None:
        sequence.verify(_tokens(model, length))

    def undo() -> None:
        sequence.rollback(0)
        sequence.append(_tokens(model, 1))

    lengths = {str(n): _time(model.device, partial(verify, n), undo) for n in (0, *_DRAFT_LENGTHS)}
    tree = _time(model.device, lambda: sequence.verify_tree(_tokens(model, len(_TREE)), _TREE), undo)
    exits = _exit_times(model, sequence, undo)
    batches = {}
    for batch in _BATCHES:
        several = [sequence.fork() for _ in range(batch)]
        checks = [TreeCheck(each, _tokens(model, _GAMMA), range(-1, _GAMMA - 1)) for each in several]

        def again(sequences: list[Sequence] = several) -> None:
            for each in sequences:
                each.rollback(0)
                each.append(_tokens(model, 1))

        batches[str(batch)] = _time(model.device, partial(verify_trees_together, checks), again)
    return {"prefill": prefill, "verify": lengths, "tree": tree, "exits": exits, "batch": batches,
            "memory_gb": _memory(model.device)}  # fmt: skip


def _exit_times(model: VisionLanguageModel, sequence: Sequence, undo: Callable[[], object]) -> Figures:
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
    return found | {"exits": len(exits.layers), "known_ms": medians, "parameters": exits.parameters_count}


def _draft_times(model: VisionLanguageModel, picture: np.ndarray) -> Figures:
    sequence, prefill = _prefill_time(model, picture)
    steps = _step_times(model, sequence)
    return {"prefill": prefill, "step": steps, "memory_gb": _memory(model.device)}


def _four_bit_times(model: VisionLanguageModel, picture: np.ndarray) -> Figures:
    if why := four_bit(model):
        return {"left_out": why}
    _forget(model.device)
    return _draft_times(model, picture)


def _agreement(model: VisionLanguageModel, picture: np.ndarray) -> Figures:
    """The largest difference from transformers' own forward, as a share of its largest logit, by what was decoded."""
    sequence = model.prefill(picture, _INSTRUCTION)
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
        self._prompt = model.prompt_tokens(_INSTRUCTION, model.images.image_tokens(*picture.shape[:2]))

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


def render(report: Figures) -> str:
    """The report as text."""
    lines = [f"{report['device']}; draft {report['draft']}, target {report['target']}, bfloat16, random weights; "
             f"a picture of {report['width']} x {report['height']}; {report['seconds']:.0f} s"]  # fmt: skip
    rows = [["", "ms", "10 % to 90 %"]]

    def add(name: str, times: Figures) -> None:
        rows.append([name, f"{times['ms']:.2f}", f"{times['p10']:.2f} to {times['p90']:.2f}"])

    if target := report.get("target_times"):
        add(f"target: prefill of {target['prefill']['tokens']} tokens", target["prefill"])
        for length, times in target["verify"].items():
            add(f"target: draft of {length}, T_q", times)
        add(f"target: tree of {len(_TREE)} nodes", target["tree"])
        add(f"target: draft of {_GAMMA} with {target['exits']['exits']} exits", target["exits"])
        for batch, times in target["batch"].items():
            add(f"target: {batch} drafts of {_GAMMA} in a pass", times)
    for name, key in (("draft", "draft_times"), ("draft in 4 bits", "draft_4bit_times")):
        if "step" in (draft := report.get(key, {})):
            add(f"{name}: prefill of {draft['prefill']['tokens']} tokens", draft["prefill"])
            for batch, times in draft["step"].items():
                add(f"{name}: a token of {batch} sequences, T_p", times)
    lines += table(rows)
    memory = {
        key.removesuffix("_times").replace("_", " "): value["memory_gb"]
        for key, value in report.items()
        if isinstance(value, dict) and "memory_gb" in value
    }
    lines.append("memory at most: " + ", ".join(f"{name} {gb:.2f} GB" for name, gb in memory.items()))
    agreement = {key: value for key, value in report["agreement"].items() if isinstance(value, float)}
    said = ", ".join(f"{name} {value:.1e}" for name, value in agreement.items())
    lines.append(f"difference from transformers' forward, float32, of the largest value: {said}")
    for name in report["left_out"]:
        lines.append(f"left out for lack of time: {name.replace('_', ' ')}")
    return "\n".join(lines)
