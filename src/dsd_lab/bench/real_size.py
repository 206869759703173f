# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench real-size`: a pair of a published size on this CPU, from sharded files to replies in every mode.

A verifier in a process of its own and the draft in this one talk over a websocket, both models in bfloat16. Then the
target's weights as a draft in each precision, in a process each: memory, and time of a token.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dsd_lab.bench.gpu_models import SIZES_FILE, read_sizes
from dsd_lab.bench.overhead import verifier_child
from dsd_lab.bench.real_pair import write_pair
from dsd_lab.bench.scenes import PATIENT_LINK
from dsd_lab.report import BenchError, check_range, header, median, rounded, table
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model, model_fingerprint
from dsd_ros.wire.websocket import WebsocketChannel

ALONE = "ar"
MODES = (ALONE, *(name for name in PRESETS if name != ALONE))
DTYPE = "bfloat16"
_INSTRUCTION = "find the silver bottle"
_BLOCK = 40  # pixels
_STEPS = 16  # tokens of a precision that are timed
_READ = 512  # tokens of text that it reads at once
Figures = dict[str, Any]
Begins = Callable[[int, str], object]
Keep = Callable[[Figures], object]


def measure_real_size(
    size: str,
    folder: Path,
    *,
    draft_layers: int = 4,
    modes: Sequence[str] = MODES,
    precisions: Sequence[str] = ("none", "int8", "4bit"),
    max_tokens: int = 8,
    threads: int = 1,
    height: int = 720,
    width: int = 1280,
    sizes: Path = SIZES_FILE,
    progress: Callable[[float, str], object] | None = None,
    keep: Keep = lambda report: None,
) -> Figures:
    """Decode with a pair of that size in every mode; the pair is written to ``folder``/size where it is not there.

    BenchError for an unknown size or value. modes: none of them if it is empty, else with ar. height, width: of the
    picture, in pixels. "exact": whether every reply is that of mode ar. ``keep`` gets the report after each row.
    """
    known = read_sizes(sizes)
    if size not in known:
        raise BenchError(f"there is no model size {size!r}; choose from {', '.join(known)}")
    check_range("draft-layers", draft_layers, 1, known[size]["text_config"]["num_hidden_layers"])
    check_range("max-tokens", max_tokens, 1, 256)
    tell = progress or (lambda share, said: None)
    paths = draft, target = folder / size / "draft", folder / size / "target"
    if not (target / "dsd.json").is_file():
        tell(0.0, f"writing {size}")
        write_pair(known[size], folder / size, draft_layers=draft_layers)
    files = [list(path.glob("*.safetensors")) for path in paths]
    report = header("real-size", draft=model_fingerprint(draft), target=model_fingerprint(target)) | {
        "size": size, "dtype": DTYPE, "draft_layers": draft_layers, "height": height, "width": width,
        "max_tokens": max_tokens, "threads": threads,
        "files": [len(found) for found in files],
        "weights_gb": [rounded(sum(file.stat().st_size for file in found) / 1e9) for found in files],
    }  # fmt: skip
    steps = len(modes) + len(precisions)
    picture = _picture(height, width)
    report |= {"rows": [], "exact": True, "tokens": [], "drafts": []}
    if modes:
        _modes(report, modes, paths, picture, lambda n, mode: tell(n / steps, f"mode {mode}"), keep)
    for number, precision in enumerate(precisions, len(modes)):
        tell(number / steps, f"draft, quantization {precision}")
        report["drafts"].append(_in_a_process(str(target), precision, report["tokens"]))
        keep(report)
    return report


def _modes(
    report: Figures, modes: Sequence[str], paths: tuple[Path, Path], picture: np.ndarray, begins: Begins, keep: Keep
) -> None:
    """Add a reply in each mode, ar first. "peak_gb": the verifier's memory at most until the end of that mode."""
    # With an earlier picture, a model keeps what its vision tower says of the present one: it is looked at once.
    history = [(picture[:56, :56].copy(), "stop")]
    # It is started first: a process counts what its parent held then.
    with verifier_child(str(paths[1]), "--dtype", DTYPE, threads=report["threads"]) as (url, pid):
        robot = load_model(ModelSettings(str(paths[0]), dtype=DTYPE, threads=report["threads"]))
        report["loaded_gb"] = rounded(_memory("VmHWM", pid) / 1e9)
        for number, mode in enumerate((ALONE, *(mode for mode in modes if mode != ALONE))):
            begins(number, mode)
            settings = DecodeSettings(mode=mode, max_tokens=report["max_tokens"])
            with WebsocketChannel(url) as channel, EdgeSession(channel, robot, settings, PATIENT_LINK) as session:
                reply = session.decode(picture, _INSTRUCTION, history=history)
            report["tokens"] = report["tokens"] or reply.tokens
            row = _row(mode, reply, report["tokens"]) | {"peak_gb": rounded(_memory("VmHWM", pid) / 1e9)}
            report.setdefault("peak_gb", row["peak_gb"])
            report["rows"].append(row)
            report["exact"] = report["exact"] and row["same"]
            keep(report)


def _row(mode: str, reply: DecodedReply, first: Sequence[int]) -> Figures:
    """Figures of a reply; those of a round from the second on, as the first reads the prompt."""
    later = reply.records[1:]
    gained = sum(len(record.gained) for record in later)
    same = [a == b for a, b in zip(reply.tokens, first, strict=False)]
    return {
        "label": mode, "tokens": len(reply.tokens), "rounds": reply.rounds, "tau": rounded(reply.tau),
        "same": reply.tokens == list(first), "differs_at": None if all(same) else same.index(False),
        "prompt_s": rounded(reply.records[0].wait_seconds), "draft_prompt_s": rounded(reply.prefill_seconds),
        "round_s": median([record.draft_seconds + record.wait_seconds for record in later]),
        "draft_s": median([record.draft_seconds for record in later]),
        "verify_s": median([record.verify_seconds for record in later]),
        "token_s": rounded(sum(r.draft_seconds + r.wait_seconds for r in later) / gained) if gained else None,
        "bytes_up": reply.bytes_up, "bytes_down": reply.bytes_down,
    }  # fmt: skip


def _in_a_process(path: str, precision: str, tokens: Sequence[int]) -> Figures:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_precision, path, precision, list(tokens)).result()


def measure_precision(path: str, precision: str, tokens: Sequence[int]) -> Figures:
    """Memory and processor times of a model as a draft with this quantization, in one thread of a process of its own.

    "best": the likeliest token after each of a reply, to be compared with those of quantization none.
    """
    began = time.thread_time()
    model = load_model(ModelSettings(path, dtype=DTYPE, quantization=precision, threads=1), exits=False)
    load_s = time.thread_time() - began
    # A small picture: the vision tower keeps its precision.
    sequence = model.prefill(np.full((56, 56, 3), 127, np.uint8), _INSTRUCTION)
    sequence.append([token % 200 for token in range(_READ)])
    began = time.thread_time()
    sequence.next_logits()
    read_s = time.thread_time() - began
    seconds, best = [], []
    fed = (list(tokens or range(1000)) * _STEPS)[:_STEPS]
    for token in fed:
        sequence.append([token])
        began = time.thread_time()
        best.append(int(sequence.next_logits().argmax()))
        seconds.append(time.thread_time() - began)
    return {
        "quantization": precision, "load_s": rounded(load_s), "peak_gb": rounded(_memory("VmHWM") / 1e9),
        "resident_gb": rounded(_memory("VmRSS") / 1e9), "read_tokens": _READ, "read_s": rounded(read_s),
        "token_ms": rounded(1e3 * statistics.median(seconds)), "best": best,
    }  # fmt: skip


def _memory(name: str, pid: int | str = "self") -> int:
    """Bytes of a process: VmRSS, now; VmHWM, at most since it started."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise BenchError(f"process {pid} has no {name}; measure on Linux")


def _picture(height: int, width: int) -> np.ndarray:
    """Coloured blocks."""
    small = np.random.default_rng(0).integers(0, 256, (height // _BLOCK + 1, width // _BLOCK + 1, 3), dtype=np.uint8)
    return small.repeat(_BLOCK, 0).repeat(_BLOCK, 1)[:height, :width]


def render(report: Figures) -> str:
    """The report as text."""
    draft, target = report["weights_gb"]
    lines = [
        f"{report['size']}, {report['dtype']}, a picture of {report['width']} x {report['height']}; draft of "
        f"{report['draft_layers']} layers, {draft:.2f} GB, target {target:.2f} GB in {report['files'][1]} files"
    ]
    if report["rows"]:
        lines.append(
            f"the verifier took {report['loaded_gb']:.2f} GB loaded, {report['peak_gb']:.2f} GB at most in ar: "
            f"{report['peak_gb'] / target:.2f} times the weights; {report['rows'][-1]['peak_gb']:.2f} GB in all"
        )
    rows = [["mode", "tokens", "as ar", "tau", "prompt s", "round s", "draft s", "verify s", "s a token"]]
    for row in report["rows"]:
        figures = [row[key] for key in ("prompt_s", "round_s", "draft_s", "verify_s", "token_s")]
        said = "same" if row["same"] else f"not from {row['differs_at']} on"
        cells = ["-" if value is None else f"{value:.2f}" for value in figures]
        rows.append([row["label"], str(row["tokens"]), said, f"{row['tau']:.2f}", *cells])
    lines += table(rows) if report["rows"] else []
    if report["drafts"]:
        best = report["drafts"][0]["best"]
        rows = [["draft", "GB at most", "GB after", "load s", f"{_READ} tokens s", "ms a token", "same best"]]
        for row in report["drafts"]:
            same = sum(a == b for a, b in zip(row["best"], best, strict=True))
            numbers = [row[key] for key in ("peak_gb", "resident_gb", "load_s", "read_s")]
            cells = [*(f"{value:.2f}" for value in numbers), f"{row['token_ms']:.0f}", f"{same} of {len(best)}"]
            rows.append([row["quantization"], *cells])
        lines += table(rows)
    return "\n".join([*lines, report["machine"]])
