# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes --transport process` and ``one-process``: modes at the speed of the models.

``process``: robot and verifier are processes with a core each and talk over a websocket on loopback. ``one-process``:
both are in this process, as in ``dsd decode`` without a verifier. The profile's link is emulated on the robot's side.
Beside the modes runs transformers' own ``generate`` with the target in the robot's process: no link, no verifier.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from dsd_lab.bench.harness import Told
from dsd_lab.bench.modes_report import Measured, make_report
from dsd_lab.bench.overhead import verifier_process
from dsd_lab.bench.profiles import Profile
from dsd_lab.bench.scenes import PATIENT_LINK, WARM_UP_TOKENS, Scene, decode, held_out_scenes, said, text_scenes
from dsd_lab.bench.sweeps import Variant
from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_lab.parts import parts
from dsd_lab.report import geometric, ratio
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

REAL = ("process", "one-process")  # transports
SETTLED = 2  # replies after which a session has found its way
# The verifier lets robots go first whose next round is about to come (wire/turns.py), and a mode that has just decoded
# looks like one. On a robot nothing else decodes.
PAUSE_S = 0.2


def measure_real(
    profile: Profile,
    variants: Sequence[Variant],
    images: int,
    draft: ModelSettings,
    target: ModelSettings,
    prompts: Sequence[str] = (),
    *,
    transport: str = "process",
    seed: int = 0,
    sweeps: Sequence[tuple[str, Sequence[Any]]] = (),
    told: Told,
) -> dict[str, Any]:
    """Decode ``images`` held-out pictures with every variant in turn, each in a session that stays open.

    The report of ``modes_report``, whose rows have ``settled`` too: figures from the third reply on.
    """
    robot, alone = load_model(draft), load_model(target)
    stock = _stock(alone, target)
    scenes = held_out_scenes(images) if alone.reads_pictures else text_scenes(images, prompts)
    measured = [Measured(variant, []) for variant in variants]
    with ExitStack() as stack:
        connect, cores = stack.enter_context(_one_process(target) if transport == "one-process" else sides(target))
        sessions = []
        for index, variant in enumerate(variants):
            settings = dataclasses.replace(variant.decode, max_tokens=WARM_UP_TOKENS)
            decode(connect(), robot, settings, scenes[0])  # what happens once in a process
            channel = connect()
            if transport == "process" or profile.link != LinkProfile():
                channel = EmulatedChannel(channel, profile.link, seed=seed + index)
            stack.enter_context(channel)
            settings = dataclasses.replace(variant.decode, seed=seed)
            sessions.append(stack.enter_context(EdgeSession(channel, robot, settings, PATIENT_LINK)))
        longest = variants[0].decode.max_tokens
        greedy = variants[0].decode.sampling.greedy  # generate draws with other numbers
        if greedy:
            generate(alone, scenes[0], WARM_UP_TOKENS, stock)
        generated: list[float] = []
        same = True
        done = 0
        for number, scene in enumerate(parts(scenes)):
            for index in ((number + offset) % len(variants) for offset in range(len(variants))):
                time.sleep(PAUSE_S)
                reply = sessions[index].decode(scene.image, scene.instruction)
                measured[index].replies.append(reply)
                done += 1
                told(done / (images * len(variants)), said(variants[index].label, reply))
            if greedy:
                seconds, tokens = generate(alone, scene, longest, stock)
                generated.append(seconds)
                same &= tokens == measured[0].replies[-1].tokens
    setting = {"images": done // len(variants), "seed": seed, "transport": transport, "cores": cores, "time_scale": 1.0}
    report = make_report(measured, profile, {"draft": robot, "target": alone}, setting, sweeps)
    report["generate"] = ratio(generated[_settled(generated) :]) | {"same_tokens": same} if generated else None
    for row, one in zip(report["rows"], measured, strict=True):
        row["settled"] = _settled_figures([reply.seconds for reply in one.replies], measured, generated)
    return report


def _settled(replies: Sequence[Any]) -> int:
    """The first reply that counts: the third, or the first where there are no more."""
    return SETTLED if len(replies) > SETTLED else 0


def _settled_figures(
    seconds: Sequence[float], measured: Sequence[Measured], generated: Sequence[float]
) -> dict[str, Any]:
    """Seconds a reply and speed-ups, with their intervals, from the third reply on; of all where there are no more."""
    first = _settled(seconds)
    mine = seconds[first:]
    found = {"seconds": ratio(mine), "over_generate": _over(generated[first:], mine) if generated else None}
    baseline = next((m for m in measured if m.variant.decode.mode == "ar"), None)
    if baseline is not None:
        found["over_ar"] = _over([reply.seconds for reply in baseline.replies[first:]], mine)
    return found


def _over(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    return geometric([a / b for a, b in zip(slow, fast, strict=True)])


def _stock(model: VisionLanguageModel, settings: ModelSettings) -> Any:
    """The model as transformers loads it, where ours differs in more than how it is called."""
    if not model.reads_pictures:
        return model.hf
    return type(model.hf).from_pretrained(settings.path, dtype=model.hf.dtype, local_files_only=True).eval()


@torch.inference_mode()
def generate(model: VisionLanguageModel, scene: Scene, max_tokens: int, stock: Any = None) -> tuple[float, list[int]]:
    """Seconds and tokens of a greedy reply by transformers' ``generate``, the picture's preparation included.

    ``stock``: the transformers model, if it is not ``model.hf``.
    """
    began = time.perf_counter()
    hf = model.hf if stock is None else stock
    given: dict[str, Any] = {}
    count = 0
    if scene.image is not None:
        pixels, grid = model.images(scene.image)
        count = int(grid.prod()) // model.images.merge_size**2
        given = {"pixel_values": pixels, "image_grid_thw": grid}
    ids = torch.tensor([model.prompt_tokens(scene.instruction, count, [])])
    if given:
        given["mm_token_type_ids"] = (ids == hf.config.image_token_id).int()
        hf.model.rope_deltas = None  # of the picture before
    ends = sorted(model.eos_token_ids)
    said = hf.generate(
        ids, **given, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=ends, pad_token_id=ends[0],
    )  # fmt: skip
    return time.perf_counter() - began, said[0, ids.shape[1] :].tolist()


@contextmanager
def _one_process(target: ModelSettings) -> Iterator[tuple[Callable[[], Channel], list[int]]]:
    """A verifier in this process: what opens channels to it, and no cores of its own."""
    with VerifierEngine(load_model(target)) as engine:
        yield lambda: LocalChannel(engine), []


@contextmanager
def sides(target: ModelSettings) -> Iterator[tuple[Callable[[], Channel], list[int]]]:
    """A verifier of its own process and core: what opens channels to it, and both cores."""
    with two_cores(verifier_process(target.path)) as (url, cores):
        yield lambda: WebsocketChannel(url), cores


@contextmanager
def two_cores(process: AbstractContextManager[str]) -> Iterator[tuple[str, list[int]]]:
    """A ``process`` on one core and this one on another, where there are two: its address, and the cores."""
    before = sorted(os.sched_getaffinity(0))
    if len(before) < 2:
        with process as url:
            yield url, []
        return
    _pin({before[1]})
    try:
        with process as url:
            _pin({before[0]})
            yield url, before[:2]
    finally:
        _pin(set(before))


def _pin(cores: set[int]) -> None:
    """Let every thread of this process, and processes that it starts, run on these cores."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has ended
            continue
