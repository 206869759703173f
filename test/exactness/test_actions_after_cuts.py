# SPDX-License-Identifier: Apache-2.0
"""A run whose link is cut, doubled, or loses its verifier at any message: what is carried out is a prefix of the
undisturbed run's actions, and all of it where the link comes back."""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings as profile, strategies as st
from reciting_model import RecitingModel, byte_level
from restarting_channel import RestartingChannel
from run_bench import SETTINGS, Bench, say
from table_model import _Tokens

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import format_action
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.channel import LinkError

ACTIONS = (
    "forward 25 cm", "turn left 15 degrees", "forward 50 cm", "turn right 30 degrees", "turn left 45 degrees",
)  # fmt: skip
TEXTS = [say(action) for action in ACTIONS]
TOKENIZER = byte_level("\n".join(TEXTS))


class Guide(RecitingModel):
    """Says what to do by the picture, in which the robot's pose is; ``misled`` by so much."""

    def __init__(self, misled: int = 0) -> None:
        super().__init__(TOKENIZER, "")
        self._misled = misled

    def prefill(self, image: np.ndarray | None, instruction: str, history=()) -> Sequence:
        assert image is not None
        seen = int(image[0, 0] @ np.array([3, 5, 7])) + self._misled
        return Sequence(self, _Tokens([seen % len(TEXTS)]), 0, 0, self._go_on(seen, []))

    def forward_tokens(self, tokens, cache, rope_delta, rows, on_layer=None) -> torch.Tensor:
        if cache.length + len(tokens) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens")
        cache.ids.extend(tokens)
        seen, said = cache.ids[0], cache.ids[1:]
        ends = range(cache.length - rows, cache.length)
        return torch.stack([self._go_on(seen, said[:end]) for end in ends])

    def _go_on(self, seen: int, said: list[int]) -> torch.Tensor:
        self.text = TEXTS[seen % len(TEXTS)]
        return self._behind(said)


def picture(pose: Pose) -> np.ndarray:
    """What a robot there sees: its pose, in steps of 12.5 cm and 15 degrees."""
    steps = (pose.x / 0.125, pose.y / 0.125, math.degrees(pose.yaw) / 15.0)
    return np.full((2, 2, 3), [round(step) + 128 for step in steps], np.uint8)


def carried_out(mode: str, channel: RestartingChannel, attempts: int = 60) -> tuple[list[str], RunOutcome]:
    """The actions of one run over that link, and how it ended."""
    bench = Bench(SETTINGS)
    link = LinkSettings(response_timeout_s=0.1, attempts=attempts)
    chosen = DecodeSettings(mode=mode, max_tokens=40)
    session = EdgeSession(channel, Guide(misled=1), chosen, link)
    with channel, contextlib.closing(session):
        for _ in range(SETTINGS.max_steps + 1):
            bench.until_request()
            if bench.run.ended:
                break
            try:
                reply = session.decode(picture(bench.pose), "go on")
            except LinkError as error:
                bench.fail(RunOutcome.LINK_LOST, str(error))
            else:
                assert reply.verified
                bench.answer(session.text(reply.tokens))
    return [format_action(made.action) for made in bench.announcements], bench.finish()


@functools.cache
def undisturbed(mode: str) -> list[str]:
    actions, outcome = carried_out(mode, RestartingChannel(Guide(), lambda boundary, message: ""))
    assert outcome is RunOutcome.STEP_BUDGET and len(set(actions)) > 2
    return actions


MODES = ["stream", "dsd", "fsd"]


@profile(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(MODES),
    events=st.dictionaries(
        st.integers(0, 90), st.sampled_from(["cut", "restart", "restart and cut", "double"]), max_size=8
    ),
    dead=st.none() | st.integers(0, 120),
)
@example(mode="stream", events={}, dead=30)
@example(mode="fsd", events={}, dead=30)
@example(mode="stream", events={2: "restart", 9: "cut", 10: "double"}, dead=None)
@example(mode="dsd", events={2: "restart", 9: "cut", 10: "double"}, dead=None)
def test_what_is_carried_out_is_a_prefix_of_the_undisturbed_run(mode, events, dead):
    """``dead``: from that message on nothing passes any more."""

    def happens(boundary, message):
        return "cut" if dead is not None and boundary >= dead else events.get(boundary, "")

    channel = RestartingChannel(Guide(), happens)
    actions, outcome = carried_out(mode, channel, 60 if dead is None else 3)
    whole = undisturbed(mode)
    assert actions == whole[: len(actions)]
    if dead is None:
        assert actions == whole and outcome is RunOutcome.STEP_BUDGET
    else:
        assert actions == whole or outcome is RunOutcome.LINK_LOST
