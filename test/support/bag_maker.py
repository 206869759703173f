# SPDX-License-Identifier: Apache-2.0
"""Bags of made-up messages, and a recorder that can be killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from builtin_interfaces.msg import Time
from nav_msgs.msg import Odometry
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Header, String

from dsd_msgs import msg
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.observe.ros.message_types import definition
from dsd_ros.wire.messages import PROTOCOL_VERSION

SECOND = 1_000_000_000


def put(writer: BagWriter, topic: str, at: int, message: Any) -> bytes:
    """Write a message of rclpy, received at ``at`` (ns); its bytes."""
    data = bytes(serialize_message(message))
    package, form, *_ = type(message).__module__.split(".")
    writer.write(topic, f"{package}/{form}/{type(message).__name__}", (), at, data)
    return data


def stamp(at: int) -> Time:
    return Time(sec=at // SECOND, nanosec=at % SECOND)


def text_bag(folder: Path, count: int) -> list[bytes]:
    """A bag of ``count`` strings, one a millisecond; their bytes."""
    writer = BagWriter(folder, definition)
    writer.set_metadata("versions", '{"dsd_ros": "x"}')
    sent = []
    for number in range(count):
        text = String(data=f"{number:06d} " + "x" * (number % 40))
        sent.append(put(writer, "/words", SECOND + number * 1_000_000, text))
        if number % 100 == 99:
            writer.save()
    writer.close()
    return sent


def killed_bag(folder: Path) -> int:
    """A bag whose writer is killed in full flight; how many messages it had saved by then, at least."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        writer = BagWriter(folder, definition)
        writer.set_metadata("versions", "{}")
        number = 0
        while True:
            put(writer, "/words", SECOND + number * 1_000_000, String(data=f"{number:06d} " + "y" * 300))
            number += 1
            if number % 50 == 0:
                writer.save()
                os.write(writing, f"{number}\n".encode())
    os.close(writing)
    with open(reading) as lines:  # noqa: PTH123  # a descriptor
        saved = next(number for number in map(int, lines) if number >= 1000)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return max([saved, *map(int, lines)])


def png(seed: int, height: int = 28, width: int = 42) -> tuple[np.ndarray, bytes]:
    """A random RGB picture, and it as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pixels, cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()


REPLY = "A bottle ahead. Action: forward 25 cm"
DRAFTS = msg.SpeculativeDecoding(
    mean_acceptance_length=3.0, draft_acceptance_rate=1.0, acceptance_histogram=[0, 0, 1], num_spec_steps=1,
    num_accepted_draft_tokens=2, num_draft_tokens=2, num_spec_tokens=2, per_step_accepted=[2], per_step_drafted=[2],
)  # fmt: skip


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
    writer = BagWriter(folder, definition)
    if parameters is not None:
        writer.set_metadata("parameters", json.dumps({"/go2_1/draft_node": parameters}))
    now = 100 * SECOND

    def add(topic, message):
        nonlocal now
        now += SECOND // 10
        put(writer, f"/go2_1/{topic}", now, message)

    add("odom", Odometry())
    if grammar:
        add("dsd/grammar", String(data=grammar))
    if answer:
        source = msg.AnswerSource(sentence=answer, side=2, document="things.md")
        told = msg.MemoryAnswer(goal="find mine", answer=f"{answer} Go: find it", sources=[source])
        add("dsd/memory_answer", told)
    request = msg.SessionRequest(protocol_version=protocol, mode="dsd", max_tokens=96, top_p=1.0, proof="full", seed=3)
    request.temperature = temperature
    add("dsd/session_request", request)
    add("dsd/session_reply", msg.SessionReply(session=1, target_name="big", target_fingerprint="f"))
    add("dsd/safety_state", msg.SafetyState(stopped=True))
    for number, reply in enumerate(replies, 1):
        seen = stamp((50 + number) * SECOND + 7)
        if number != 2:
            picture = CompressedImage(header=Header(stamp=seen), format="bgr8; png compressed bgr8")
            picture.data.frombytes(png(number)[1])
            add("camera/image_raw/compressed", picture)
        add("dsd/observation", msg.Observation(session=1, reply=reply, instruction="find it"))
        rounds = msg.RoundStats(drafted=2, accepted=2, bytes_up=11)
        progress = msg.ReplyProgress(header=Header(stamp=seen), text=reply_text, rounds=1, last_round=rounds)
        add("dsd/reply_progress", progress)
        progress.done = True
        add("dsd/reply_progress", progress)
        stats = msg.DecodeStats(observation_stamp=seen, mode="dsd", transport="dds", rounds=1, tokens=3, tau=3.0)
        stats.draft_share, stats.speculative_decoding = 2 / 3, DRAFTS
        add("dsd/decode_stats", stats)
        action = msg.NavAction(kind=1, distance=0.25, step=number, verified=True, observation_stamp=seen)
        add("dsd/nav_action", action)
    writer.close()
    return open_bag(folder)
