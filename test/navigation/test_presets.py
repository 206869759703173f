# SPDX-License-Identifier: Apache-2.0
"""Each preset drives the simulator: replies as its model writes them, held to the grammar, under the supervisor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from reciting_model import RecitingModel, byte_level

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.constraint import Constrainer, ReplyForm
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import PRESETS, Grammar, parse_reply, read_grammar
from dsd_ros.navigation.run.controller import MotionSettings, Pose, Velocity
from dsd_ros.navigation.run.points import locate
from dsd_ros.navigation.run.records import DecodeAnswer, Moment, Phase
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.run.settings import PointSettings, RunOutcome, RunSettings
from dsd_ros.navigation.safety.causes import Cause, Motion, Requirements, SafetyLimits, SafetyReport
from dsd_ros.navigation.safety.depth import Intrinsics
from dsd_ros.navigation.safety.supervisor import Supervisor
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.wire.channel import LocalChannel

STEP = 0.02
NUMBERS = {
    "marks": ["Action:"],
    "forward": {"phrases": ["forward {} cm"], "amounts": "20..300"},
    "turn_left": {"phrases": ["left {}"], "amounts": "1..90"},
    "go_to": {"phrases": ["go to ({x}, {y})"], "picture": [1000, 1000]},
    "stop": {"phrases": ["stop"]},
    "most": 3,
    "between": ", ",
}
# Written by hand: NaVILA's as in its paper (arXiv 2412.04453), StreamVLN's and InternVLA-N1's as their evaluations'
# parse_actions reads them (InternRobotics/StreamVLN streamvln_eval.py, InternRobotics/InternNav
# internvla_n1_policy.py: arrows, or "x y" in the picture of the camera that looks down).
TRANSCRIPTS = {
    "dsd": ["It is left. Action: turn left 30 degrees", "It is ahead. Action: forward 75 cm", "There. Action: stop"],
    "navila": [
        "The next action is turn left 30 degrees.",
        "The next action is move forward 75 cm.",
        "I think I should stop because I have finished the instruction.",
    ],
    "streamvln": ["←←↑↑", "↑", "STOP"],
    "internvla-n1": ["←←↓", "320 330", "STOP"],
    "numbers": ["Free. Action: left 30, forward 52 cm, forward 23 cm", "Action: stop"],
    "points": ["Over there. Action: go to (499, 720)", "Action: stop"],
}
NAMED = PRESETS | {name: Grammar.of(NUMBERS, name) for name in ("numbers", "points")}


class Drive:
    """The simulator's robot, a run and a supervisor; ``replies`` answer the pictures that the run waits for."""

    def __init__(self, simulator: Simulator, grammar: Grammar, replies: list[str]) -> None:
        self.simulator, self.replies, self.now = simulator, list(replies), 50.0
        required = Requirements("none", imu=False, obstacle="none", heartbeats="", link="")
        limits = SafetyLimits(action_distance=3.0, action_angle=math.pi / 2)
        self.supervisor = Supervisor(limits=limits, required=required)
        self.run = NavigationRun(
            RunSettings(look_ahead=False), MotionSettings(), self.moment, None, grammar, self._locate
        )
        self.causes: set[Cause] = set()
        self.announced: list[str] = []
        self.start = simulator.pose

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.now + 1000.0)

    def _locate(self, point, picture, stamp):
        height, pitch = self.simulator.world.camera
        focal, width, rows = self.simulator.focal_length, self.simulator.width, self.simulator.height
        camera = Intrinsics(focal, focal, (width - 1) / 2, (rows - 1) / 2, width, rows)
        return locate(point, picture, camera, PointSettings(height, pitch, CAMERA_AHEAD))

    def finish(self) -> NavigationRun:
        while not self.run.ended:
            assert self.now < 150.0
            self._step()
        return self.run

    def _step(self) -> None:
        self.now += STEP
        pose, (vx, _, wz) = Pose(*self.simulator.pose), self.simulator.velocity
        self.supervisor.on_odometry(pose, self.now, self.now)
        command = self.run.on_odometry(pose, Velocity(vx, wz), self.moment)
        self._tell()
        self.supervisor.on_navigation(Motion(command.vx, 0.0, command.wz), self.now)
        decision = self.supervisor.decide(self.now)
        causes = [(cause, text) for cause, text in decision.causes if cause is not Cause.NO_ACTION]
        self.causes |= {cause for cause, _ in causes}
        self.run.on_safety(SafetyReport(tuple(c for c, _ in causes), tuple(t for _, t in causes)), self.now)
        self.run.on_time(self.moment)
        self.simulator.step(STEP, decision.motion.vx, decision.motion.vy, decision.motion.wz)
        request = self.run._pending.request
        if request is not None and self.run.phase is Phase.DECODING:
            answer = DecodeAnswer(self.replies.pop(0), request.not_before)
            self.run.on_answer(request.number, answer, self.moment)
            self._tell()

    def _tell(self) -> None:
        announced = self.run.take_announcement()
        if announced is not None:
            self.announced.append(announced.action.kind.value)
            observed, stamp = self.run.steps[-1].observed_at, self.moment.stamp
            self.supervisor.on_action(announced.action, announced.verified, observed, stamp, self.now)

    @property
    def went(self) -> tuple[float, float]:
        """Metres along, and to the left of, the first heading."""
        (x, y, yaw), (then_x, then_y, _) = self.start, self.simulator.pose
        ahead, aside = then_x - x, then_y - y
        return ahead * math.cos(yaw) + aside * math.sin(yaw), aside * math.cos(yaw) - ahead * math.sin(yaw)


@pytest.fixture
def simulator():
    with Simulator(World.from_seed(0)) as made:
        made.pose = next(
            (x / 4, y / 4, heading * math.pi / 4)
            for x in range(-8, 9) for y in range(-8, 9) for heading in range(8)
            if all(made.world.clearance(x / 4 + d * math.cos(heading * math.pi / 4 + a),
                                        y / 4 + d * math.sin(heading * math.pi / 4 + a)) > 0.05
                   for d in (0.0, 0.5, 1.0, 1.3) for a in (0.0, 0.3, 0.6))
        )  # fmt: skip
        yield made


TOKENIZER = byte_level("".join(text for texts in TRANSCRIPTS.values() for text in texts), 400)


def held(text: str, grammar: Grammar) -> str:
    """What a target says that wants to say ``text`` and is held to the grammar."""
    target = RecitingModel(TOKENIZER, text)
    target.constrainer = Constrainer(TOKENIZER)
    form = ReplyForm(**grammar.written, limit=160)
    settings = DecodeSettings(mode="dsd", max_tokens=160)
    with VerifierEngine(target) as engine:
        link = LinkSettings(response_timeout_s=10)
        with EdgeSession(LocalChannel(engine), target, settings, link, form=form) as session:
            return session.decode(np.zeros((28, 28, 3), np.uint8), "go").text


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_preset_drives_the_simulator(simulator, name):
    grammar = NAMED[name]
    replies = [held(text, grammar) for text in TRANSCRIPTS[name]]
    assert replies == TRANSCRIPTS[name]  # a model that keeps to its grammar loses nothing
    drive = Drive(simulator, grammar, replies)
    run = drive.finish()
    assert run.outcome is RunOutcome.ARRIVED, (run.sentence, drive.causes)
    assert not drive.causes and simulator.collisions == 0 and not drive.replies
    ahead, left = drive.went
    if name == "points":
        place = drive._locate((499, 720), (1000, 1000), 0.0)
        assert (ahead, left) == pytest.approx((place[0], 0.0), abs=0.04) and drive.announced == ["go to", "stop"]
    else:
        distance = {"internvla-n1": drive._locate((320, 330), (640, 480), 0.0)[0]}.get(name, 0.75)
        assert math.hypot(ahead, left) == pytest.approx(distance, abs=0.04)
        assert math.degrees(math.atan2(left, ahead)) == pytest.approx(30.0, abs=3.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dsd", "Action: forward 30 cm"),
        ("navila", "The next action is move backward 25 cm."),
        ("streamvln", "↑↑↑↑↑"),
        ("streamvln", "I go on: ↑"),
        ("internvla-n1", "↓"),
        ("internvla-n1", "640 100"),
        ("internvla-n1", "320 10"),
        ("numbers", "Action: forward 301 cm"),
        ("numbers", "Action: forward 25 cm, forward 25 cm, forward 25 cm, forward 25 cm"),
    ],
)
def test_a_reply_outside_its_grammar_stops_the_robot_and_says_so(simulator, name, said):
    drive = Drive(simulator, NAMED[name], [TRANSCRIPTS[name][0], said])
    run = drive.finish()
    assert run.outcome is RunOutcome.UNPARSABLE_REPLY and run.sentence.startswith("The robot stays where it is: ")
    assert drive.simulator.velocity == (0.0, 0.0, 0.0) and len(drive.announced) == len(run.steps) >= 1


@pytest.mark.parametrize("name", ["streamvln", "internvla-n1", "numbers"])
def test_a_model_that_would_say_something_else_is_held_to_its_grammar(name):
    for said in ("I do not know where to go.", "Action: forward 999 cm", "↑ and then ↑"):
        assert parse_reply(held(said, NAMED[name]), NAMED[name])


def test_the_presets_are_found_by_their_names():
    assert [read_grammar(name).name for name in PRESETS] == ["dsd", "navila", "streamvln", "internvla-n1"]
