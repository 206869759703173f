# SPDX-License-Identifier: Apache-2.0
"""Bags of made-up messages, and a recorder that can be killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.observe.ros.message_types import definition
from dsd_ros.wire.messages import PROTOCOL_VERSION

SECOND = 1_000_000_000


class Maker:
    """Makes messages of installed types from plain values, as CDR."""

    def __init__(self) -> None:
        self.store = get_typestore(Stores.EMPTY)

    def make(self, kind: str, /, **fields: Any) -> Any:
        """A message; fields that are not named are zero or empty."""
        self._learn(kind)
        values = {}
        for name, (form, about) in self.store.get_msgdef(kind).fields:
            values[name] = fields[name] if name in fields else self._empty(int(form), about)
        return self.store.types[kind](**values)

    def cdr(self, kind: str, message: Any) -> bytes:
        return bytes(self.store.serialize_cdr(message, kind))

    def stamp(self, at: int) -> Any:
        return self.make("builtin_interfaces/msg/Time", sec=at // SECOND, nanosec=at % SECOND)

    def header(self, at: int) -> Any:
        return self.make("std_msgs/msg/Header", stamp=self.stamp(at), frame_id="")

    def _learn(self, kind: str) -> None:
        if kind not in self.store.types:
            found = get_types_from_msg(definition(kind)[0], kind)
            self.store.register({n: d for n, d in found.items() if n not in self.store.types})

    def _empty(self, form: int, about: Any) -> Any:
        if form == 1:
            return {"string": "", "bool": False}.get(about[0], 0)
        if form == 2:
            return self.make(about)
        inner, length = about
        length = length if form == 3 else 0  # of a sequence it is the most there may be
        if inner[0] == 1 and inner[1][0] != "string":
            kind = {"float32": "f4", "float64": "f8", "bool": "?"}.get(inner[1][0])
            return np.zeros(length, dtype=kind or np.dtype(inner[1][0].replace("byte", "uint8")))
        return []


def text_bag(folder: Path, count: int) -> list[bytes]:
    """A bag of ``count`` strings, one a millisecond; their bytes."""
    maker = Maker()
    kind = "std_msgs/msg/String"
    writer = BagWriter(folder, definition)
    writer.set_metadata("versions", '{"dsd_ros": "x"}')
    sent = []
    for number in range(count):
        data = maker.cdr(kind, maker.make(kind, data=f"{number:06d} " + "x" * (number % 40)))
        writer.write("/words", kind, (), SECOND + number * 1_000_000, data)
        sent.append(data)
        if number % 100 == 99:
            writer.save()
    writer.close()
    return sent


_KILLED = """
import sys
from pathlib import Path
from bag_maker import Maker
from dsd_ros.observe.ros.message_types import definition
from dsd_ros.observe.bag.writer import BagWriter
maker, kind = Maker(), "std_msgs/msg/String"
writer = BagWriter(Path(sys.argv[1]), definition)
writer.set_metadata("versions", "{}")
number = 0
while True:
    data = maker.cdr(kind, maker.make(kind, data=f"{number:06d} " + "y" * 300))
    writer.write("/words", kind, (), 10**9 + number * 10**6, data)
    number += 1
    if number % 50 == 0:
        writer.save()
        print(number, flush=True)
"""


def killed_bag(folder: Path) -> int:
    """A bag whose writer is killed in full flight; how many messages it had saved by then, at least."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{_KILLED}"
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        saved = 0
        for line in process.stdout:
            saved = int(line)
            if saved >= 1000:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        return max([saved, *(int(line) for line in process.stdout if line.endswith("\n"))])


def png(seed: int, height: int = 28, width: int = 42) -> tuple[np.ndarray, bytes]:
    """A random RGB picture, and it as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pixels, cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()


REPLY = "A bottle ahead. Action: forward 25 cm"


def make_bag(
    folder,
    parameters=None,
    temperature=0.0,
    replies=(1, 2),
    reply_text=REPLY,
    grammar="",
    answer="",
    protocol=PROTOCOL_VERSION,
):
    """A run of two steps, in a namespace; the second step's picture is missing."""
    maker = Maker()
    writer = BagWriter(folder, definition)
    if parameters is not None:
        writer.set_metadata("parameters", json.dumps({"/go2_1/draft_node": parameters}))
    now = 100 * SECOND

    def put(topic, type_name, /, **fields):
        nonlocal now
        now += SECOND // 10
        message = maker.make(type_name, **fields)
        writer.write(f"/go2_1/{topic}", type_name, (), now, maker.cdr(type_name, message))

    put("odom", "nav_msgs/msg/Odometry")
    if grammar:
        put("dsd/grammar", "std_msgs/msg/String", data=grammar)
    if answer:
        told = maker.make("dsd_msgs/msg/AnswerSource", sentence=answer, side=2, document="things.md")
        put(
            "dsd/memory_answer",
            "dsd_msgs/msg/MemoryAnswer",
            goal="find mine",
            answer=f"{answer} Go: find it",
            sources=[told],
        )
    put(
        "dsd/session_request",
        "dsd_msgs/msg/SessionRequest",
        protocol_version=protocol,
        mode="dsd",
        max_tokens=96,
        temperature=temperature,
        top_p=1.0,
        proof="full",
        seed=3,
    )
    put("dsd/session_reply", "dsd_msgs/msg/SessionReply", session=1, target_name="big", target_fingerprint="f")
    put(
        "dsd/safety_state",
        "dsd_msgs/msg/SafetyState",
        stopped=True,
        causes=maker.make("dsd_msgs/msg/SafetyState").causes,
    )
    for number, reply in enumerate(replies, 1):
        stamp = (50 + number) * SECOND + 7
        _pixels, data = png(number)
        if number != 2:
            put(
                "camera/image_raw/compressed",
                "sensor_msgs/msg/CompressedImage",
                header=maker.header(stamp),
                format="bgr8; png compressed bgr8",
                data=np.frombuffer(data, np.uint8),
            )
        put("dsd/observation", "dsd_msgs/msg/Observation", session=1, reply=reply, instruction="find it")
        put("dsd/draft", "dsd_msgs/msg/Draft", session=1, reply=reply, round=1, tokens=np.array([4, 5], np.uint32))
        put(
            "dsd/outcome",
            "dsd_msgs/msg/Outcome",
            session=1,
            reply=reply,
            round=1,
            accepted=2,
            next_token=6,
            is_final=True,
        )
        rounds = maker.make("dsd_msgs/msg/RoundStats", drafted=2, accepted=2, bytes_up=11)
        for done in (False, True):
            put(
                "dsd/reply_progress",
                "dsd_msgs/msg/ReplyProgress",
                header=maker.header(stamp),
                text=reply_text,
                rounds=1,
                verified_tokens=3,
                last_round=rounds,
                done=done,
            )
        drafts = maker.make(
            "dsd_msgs/msg/SpeculativeDecoding",
            mean_acceptance_length=3.0,
            draft_acceptance_rate=1.0,
            acceptance_histogram=np.array([0, 0, 1], np.uint16),
            num_spec_steps=1,
            num_accepted_draft_tokens=2,
            num_draft_tokens=2,
            num_spec_tokens=2,
            per_step_accepted=np.array([2], np.uint16),
            per_step_drafted=np.array([2], np.uint16),
        )
        put(
            "dsd/decode_stats",
            "dsd_msgs/msg/DecodeStats",
            observation_stamp=maker.stamp(stamp),
            mode="dsd",
            transport="dds",
            rounds=1,
            tokens=3,
            tau=3.0,
            draft_share=2 / 3,
            speculative_decoding=drafts,
        )
        put(
            "dsd/nav_action",
            "dsd_msgs/msg/NavAction",
            kind=1,
            distance=0.25,
            step=number,
            verified=True,
            observation_stamp=maker.stamp(stamp),
        )
    writer.close()
    return open_bag(folder)  # fmt: skip
