# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench gpu`: models of published sizes, with random weights, on a GPU or a CPU.

Part ``times``: each model's times on the device, for ``--profile`` of the other benches. Part ``modes``: a reply in
every mode, by a verifier in a process of its own and the draft in this one, over a websocket, from sharded files. Part
``drafts``: the target's weights as a draft in each precision, in a process each.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.bench import gpu_times
from dsd_lab.bench.gpu_models import SIZES_FILE, build_model, read_sizes
from dsd_lab.bench.harness import Bench, Report, Told
from dsd_lab.bench.overhead import verifier_child
from dsd_lab.bench.profiles import load_profile
from dsd_lab.bench.real_pair import write_pair
from dsd_lab.bench.scenes import PATIENT_LINK
from dsd_lab.parts import parts
from dsd_lab.report import BenchError, Row, check_range, header, median, rounded
from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model, model_fingerprint
from dsd_ros.wire.websocket import WebsocketChannel

PARTS = ("times", "modes", "drafts")
DTYPE = "bfloat16"
_BLOCK = 40  # pixels
_STEPS = 16  # tokens of a precision that are timed
_READ = 512  # tokens of text that it reads at once
_clock = time.monotonic


@arguments
class Flags:
    parts: str = flag("times", "what is measured: times, modes and drafts, by commas")
    device: str = flag("cuda", "where times are measured: cuda, cuda:1, cpu; the other parts run on the CPU")
    draft_size: str = flag("qwen2-vl-2b", "times: the draft's size, by its name in --sizes", metavar="NAME")
    target_size: str = flag("qwen2-vl-7b", "the target's size", metavar="NAME")
    sizes: Path | None = file_option("a JSON file of transformers configurations (default: those of the laboratory)")
    picture: str = flag("1280x720", "the picture in the prompt", metavar="WIDTHxHEIGHT")
    seconds: float = flag(420.0, "times: begin no further model after this time")
    robot: str = flag(
        "go2-a100", "times: the robot before this target, where --profile of another bench reads the JSON: a profile "
        "of config/profiles.yaml gives its link, and the draft's times unless it has none", metavar="NAME",
    )  # fmt: skip
    tokenizer: str = model_option("target")
    draft_layers: int = flag(4, "modes: decoder layers of the draft, the target's first")
    modes: str = flag(",".join(PRESETS), "modes: separated by commas; ar is always there")
    precisions: str = flag("none,int8,4bit", "drafts: quantizations, by commas")
    max_tokens: int = flag(8, "modes: tokens of a reply at most")
    threads: int = flag(1, "modes: of each model")
    folder: Path | None = flag(
        None, "modes and drafts: where the pair is, or is written (default: one that is removed)", metavar="DIR"
    )
    json: Path | None = json_option()


def measure(flags: Flags, told: Told) -> Report:
    """A row for each timing, mode or precision; BenchError for an unknown size, part, device or value.

    "agrees": whether decoding agrees with transformers' own forward. "exact": whether every reply is that of mode ar.
    """
    sizes, parts = read_sizes(flags.sizes or SIZES_FILE), flags.parts.split(",")
    width, height = _checked(flags, sizes, parts)
    picture = _picture(height, width)
    report: Report = {**header("gpu"), "draft": flags.draft_size, "target": flags.target_size, "parts": parts}
    report |= {"width": width, "height": height, "dtype": DTYPE, "ok": True, "rows": []}
    if "times" in parts:
        _measure_times(report, flags, sizes, picture, told)
    if "modes" in parts or "drafts" in parts:
        with tempfile.TemporaryDirectory() as own:
            folder = (flags.folder or Path(own)) / flags.target_size
            told(0.0, f"writing {flags.target_size}")
            _measure_files(report, flags, sizes, folder, picture, told)
    return report | {"ok": report.get("agrees", True) and report.get("exact", True)}


def _checked(flags: Flags, sizes: dict[str, Any], parts: Sequence[str]) -> tuple[int, int]:
    """Width and height of the picture; BenchError."""
    if other := [part for part in parts if part not in PARTS]:
        raise BenchError(f"there is no part {other[0]!r}; name some of {', '.join(PARTS)}")
    for name in (flags.draft_size, flags.target_size)["times" not in parts :]:
        if name not in sizes:
            raise BenchError(f"there is no model size {name!r}; choose from {', '.join(sizes)}")
    check_range("draft-layers", flags.draft_layers, 1, sizes[flags.target_size]["text_config"]["num_hidden_layers"])
    check_range("max-tokens", flags.max_tokens, 1, 256)
    check_range("seconds", flags.seconds, 1, 3600, " s")
    width, _, height = flags.picture.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise BenchError(f"--picture is {flags.picture!r}; give width and height in pixels, such as 1280x720")
    for side in (int(width), int(height)):
        check_range("a side of the picture", side, 28, 4096, " pixels")
    return int(width), int(height)


def _picture(height: int, width: int) -> np.ndarray:
    """Coloured blocks."""
    small = np.random.default_rng(0).integers(0, 256, (height // _BLOCK + 1, width // _BLOCK + 1, 3), dtype=np.uint8)
    return small.repeat(_BLOCK, 0).repeat(_BLOCK, 1)[:height, :width]


def _measure_times(report: Report, flags: Flags, sizes: dict[str, Any], picture: np.ndarray, told: Told) -> None:
    """Add the times of both models on the device, the target's first, and the agreement with transformers."""
    place = gpu_times.usable_device(flags.device)
    tokenizer = Path(model_path(flags.tokenizer, "target"))
    make = partial(build_model, device=place, tokenizer=tokenizer)
    report |= {"device": gpu_times.described_device(place), "robot": load_profile(flags.robot).name, "left_out": []}
    report["memory_gb"] = {}
    began = _clock()
    with torch.inference_mode():
        target = sizes[flags.target_size]
        shallow = make(target, dtype=torch.float32, layers=gpu_times.SHALLOW)
        report["agreement"] = gpu_times.agreement(shallow, picture)
        report["agrees"] = report["agreement"]["worst"] <= gpu_times.TOLERANCE
        del shallow
        for name, size, rows_of in (
            ("target", target, gpu_times.target_rows), ("draft", sizes[flags.draft_size], gpu_times.draft_rows)
        ):  # fmt: skip
            if _clock() - began > flags.seconds:
                report["left_out"].append(name)
                continue
            gpu_times.forget(place)
            for row in parts(rows_of(make(size, dtype=torch.bfloat16), picture), begun=bool(report["rows"])):
                report["rows"].append(row)
                told(len(report["rows"]) / 30, f"{name}: {row['what']}")
            report["memory_gb"][name] = gpu_times.peak_memory(place)
    report["seconds"] = round(_clock() - began, 1)


def _measure_files(
    report: Report, flags: Flags, sizes: dict[str, Any], folder: Path, picture: np.ndarray, told: Told
) -> None:
    """Add replies in every mode and the target's precisions as a draft, of a pair in ``folder``, written if need be."""
    paths = folder / "draft", folder / "target"
    if not (paths[1] / "dsd.json").is_file():
        write_pair(sizes[flags.target_size], folder, draft_layers=flags.draft_layers)
    files = [list(path.glob("*.safetensors")) for path in paths]
    report |= header("gpu", draft=model_fingerprint(paths[0]), target=model_fingerprint(paths[1])) | {
        "size": flags.target_size, "draft_layers": flags.draft_layers, "max_tokens": flags.max_tokens,
        "threads": flags.threads, "files": [len(found) for found in files], "tokens": [],
        "weights_gb": [rounded(sum(file.stat().st_size for file in found) / 1e9) for found in files],
    }  # fmt: skip
    if "modes" in report["parts"]:
        for row in parts(_mode_rows(report, flags, paths, picture), begun=bool(report["rows"])):
            report["rows"].append(row)
            told(0.5, f"mode {row['label']}")
        report["exact"] = all(row["same"] for row in report["rows"] if "same" in row)
    if "drafts" in report["parts"]:
        first: list[int] = []
        for precision in parts(filter(None, flags.precisions.split(",")), begun=bool(report["rows"])):
            told(0.9, f"draft, quantization {precision}")
            row = _in_a_process(str(paths[1]), precision, report["tokens"])
            first = first or row["best"]
            same = sum(a == b for a, b in zip(row["best"], first, strict=True))
            report["rows"].append(row | {"label": f"draft, {precision}", "same_best": same})


def _mode_rows(report: Report, flags: Flags, paths: tuple[Path, Path], picture: np.ndarray) -> Iterator[Row]:
    """A reply in each mode, ar first. "peak_gb": the verifier's memory at most until the end of that mode.

    Figures of a round are those from the second on, as the first reads the prompt.
    """
    # With an earlier picture, a model keeps what its vision tower says of the present one: it is looked at once.
    history = [(picture[:56, :56].copy(), "stop")]
    # It is started first: a process counts what its parent held then.
    with verifier_child(str(paths[1]), "--dtype", DTYPE, threads=flags.threads) as (url, pid):
        robot = load_model(ModelSettings(str(paths[0]), dtype=DTYPE, threads=flags.threads))
        report["loaded_gb"] = rounded(memory("VmHWM", pid) / 1e9)
        for mode in dict.fromkeys(["ar", *filter(None, flags.modes.split(","))]):
            settings = DecodeSettings(mode=mode, max_tokens=flags.max_tokens)
            with WebsocketChannel(url) as channel, EdgeSession(channel, robot, settings, PATIENT_LINK) as session:
                reply = session.decode(picture, gpu_times.INSTRUCTION, history=history)
            first = report["tokens"] = report["tokens"] or reply.tokens
            peak, later = rounded(memory("VmHWM", pid) / 1e9), reply.records[1:]
            report.setdefault("peak_gb", peak)
            gained = sum(len(record.gained) for record in later)
            differs = [a != b for a, b in zip(reply.tokens, first, strict=False)]
            yield {
                "label": mode, "tokens": len(reply.tokens), "rounds": reply.rounds, "tau": rounded(reply.tau),
                "same": reply.tokens == first, "differs_at": differs.index(True) if any(differs) else None,
                "prompt_s": rounded(reply.records[0].wait_seconds), "draft_prompt_s": rounded(reply.prefill_seconds),
                "round_s": median([record.draft_seconds + record.wait_seconds for record in later]),
                "draft_s": median([record.draft_seconds for record in later]),
                "verify_s": median([record.verify_seconds for record in later]),
                "token_s": rounded(sum(r.draft_seconds + r.wait_seconds for r in later) / gained) if gained else None,
                "bytes_up": reply.bytes_up, "bytes_down": reply.bytes_down, "peak_gb": peak,
            }  # fmt: skip


def _in_a_process(path: str, precision: str, tokens: Sequence[int]) -> Row:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_precision, path, precision, list(tokens)).result()


def measure_precision(path: str, precision: str, tokens: Sequence[int]) -> Row:
    """Memory and processor times of a model as a draft with this quantization, in one thread of a process of its own.

    "best": the likeliest token after each of a reply, to be compared with those of quantization none.
    """
    began = time.thread_time()
    model = load_model(ModelSettings(path, dtype=DTYPE, quantization=precision, threads=1), exits=False)
    load_s = time.thread_time() - began
    # A small picture: the vision tower keeps its precision.
    sequence = model.prefill(np.full((56, 56, 3), 127, np.uint8), gpu_times.INSTRUCTION)
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
        "quantization": precision, "load_s": rounded(load_s), "peak_gb": rounded(memory("VmHWM") / 1e9),
        "resident_gb": rounded(memory("VmRSS") / 1e9), "read_tokens": _READ, "read_s": rounded(read_s),
        "token_ms": rounded(1e3 * statistics.median(seconds)), "best": best,
    }  # fmt: skip


def memory(name: str, pid: int | str = "self") -> int:
    """Bytes of a process: VmRSS, now; VmHWM, at most since it started."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise BenchError(f"process {pid} has no {name}; measure on Linux")


def _notes(report: Report) -> list[str]:
    lines = [f"{report['dtype']}, random weights, a picture of {report['width']} x {report['height']}"]
    if "agreement" in report:
        memories = ", ".join(f"{name} {gb:.2f} GB" for name, gb in report["memory_gb"].items())
        found = ", ".join(f"{k} {v:.1e}" for k, v in report["agreement"].items() if isinstance(v, float))
        lines.append(f"{report['device']}: draft {report['draft']}, target {report['target']}; at most {memories}")
        lines.append(f"difference from transformers' forward, float32, of the largest value: {found}")
        lines += [f"left out for lack of time: {name}" for name in report["left_out"]]
    if "peak_gb" in report:
        weights = report["weights_gb"][1]
        lines.append(
            f"the verifier of {report['size']}, {weights:.2f} GB in {report['files'][1]} files, took "
            f"{report['loaded_gb']:.2f} GB loaded, {report['peak_gb']:.2f} GB at most in ar: "
            f"{report['peak_gb'] / weights:.2f} times the weights"
        )
        lines += [f"{row['label']}: not as ar from token {row['differs_at']} on"
                  for row in report["rows"] if row.get("same") is False]  # fmt: skip
    return lines


_COLUMNS = (
    ("", "model", ""), ("what", "what", ""), ("of", "count", "d"), ("ms", "ms", ".2f"), ("10 %", "p10", ".2f"),
    ("90 %", "p90", ".2f"), ("", "label", ""), ("tokens", "tokens", "d"), ("tau", "tau", ".2f"),
    ("prompt s", "prompt_s", ".2f"), ("round s", "round_s", ".2f"), ("draft s", "draft_s", ".2f"),
    ("verify s", "verify_s", ".2f"), ("s a token", "token_s", ".2f"), ("GB at most", "peak_gb", ".2f"),
    ("GB after", "resident_gb", ".2f"), ("load s", "load_s", ".2f"), (f"{_READ} tokens s", "read_s", ".2f"),
    ("ms a token", "token_ms", ".0f"), (f"same best of {_STEPS}", "same_best", "d"),
)  # fmt: skip
BENCH = Bench(measure, lambda report: _COLUMNS, _notes, holds="ok", left=2)


def command(flags: Flags = Flags()) -> int:
    """Models of published sizes with random weights: T_p, T_q, exits, batches; memory; every mode; drafts' precisions.

    times: builds both models on the device and checks that what they decode agrees with transformers' own forward; a
    JSON of it is a --profile of the other benches. modes: writes a draft and a target that agree on most tokens, unless
    the folder has them (6 GB at 2B), and decodes a reply over a websocket in every mode. drafts: the target's weights
    as a draft in each precision. Exits with 1 where a reply is not that of mode ar, or decoding does not agree.
    """
    return BENCH.run(flags)
