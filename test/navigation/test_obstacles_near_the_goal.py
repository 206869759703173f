# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the expert under a supervisor with an obstacle sensor: the goal stays reachable."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from dsd_lab.worlds.expert import View, reply
from dsd_ros.navigation.run.actions import ActionKind, parse_reply
from dsd_ros.navigation.run.controller import AT_REST, MotionController, MotionSettings, Pose, Velocity
from dsd_ros.navigation.safety.causes import (
    Cause,
    DepthView,
    Motion,
    Requirements,
    SafetyLimits,
    Timeouts,
    range_reading,
)
from dsd_ros.navigation.safety.depth import DepthCorridor, Intrinsics
from dsd_ros.navigation.safety.supervisor import Supervisor
from dsd_ros.robot.sim.offscreen import Offscreen, import_mujoco
from dsd_ros.robot.sim.scene import build_mjcf
from dsd_ros.robot.sim.simulator import MAX_RANGE, MIN_RANGE, Simulator, check_arrival
from dsd_ros.robot.sim.world import World

STEP = 0.02
SENSOR_EVERY = 3  # steps: 16 readings a second
STEPS = 6000  # two minutes


@pytest.fixture(scope="module")
def offscreen() -> Iterator[Offscreen]:
    model = import_mujoco().MjModel.from_xml_string(build_mjcf(World.from_seed(0)))
    made = Offscreen(model)
    yield made
    made.close()


class Run:
    """The expert decides, the controller drives, the supervisor has the last word. Simulated time only."""

    def __init__(self, simulator: Simulator, sensor: str) -> None:
        self.simulator, self._sensor = simulator, sensor
        required = Requirements("none", imu=False, obstacle=sensor, heartbeats="", link="")
        self._supervisor = Supervisor(Timeouts(), SafetyLimits(), required)
        self._corridor: DepthCorridor | None = None
        self.now, self.actions, self.nearest = 10.0, 0, math.inf
        self.causes: set[Cause] = set()
        self._steps = 0

    def finish(self) -> bool:
        """Whether the expert said stop."""
        goal = self.simulator.world.target.name
        for _ in range(3):
            self._step(AT_REST)
        while self._steps < STEPS:
            action = parse_reply(reply(View.of(self.simulator), goal)).action
            if action.kind is ActionKind.STOP:
                return True
            self.actions += 1
            stamp = self.now
            self._supervisor.on_action(action, True, stamp - 0.01, stamp, self.now)
            control = MotionController(action, MotionSettings(), self._pose, self.now)
            while not control.finished and self._steps < STEPS:
                vx, _, wz = self.simulator.velocity
                self._step(control.update(self._pose, Velocity(vx, wz), self.now))
        return False

    @property
    def _pose(self) -> Pose:
        return Pose(*self.simulator.pose)

    def _step(self, command: Velocity) -> None:
        self._steps += 1
        self.now += STEP
        if self._steps % SENSOR_EVERY == 1:
            self._supervisor.on_distance(self._distance(), self.now)
        self._supervisor.on_odometry(self._pose, self.now, self.now)
        self._supervisor.on_navigation(Motion(command.vx, 0.0, command.wz), self.now)
        decision = self._supervisor.decide(self.now)
        self.causes |= {cause for cause, _ in decision.causes}
        motion = decision.motion
        self.simulator.step(STEP, motion.vx, motion.vy, motion.wz)

    def _distance(self) -> float | None:
        simulator = self.simulator
        if self._sensor == "range":
            distance = range_reading(simulator.range_ahead(), MIN_RANGE, MAX_RANGE)
        else:
            if self._corridor is None:
                focal, width, height = simulator.focal_length, simulator.width, simulator.height
                camera = Intrinsics(focal, focal, width / 2, height / 2, width, height)
                self._corridor = DepthCorridor(DepthView(), camera, 0.3)
            distance = self._corridor.nearest(simulator.render_with_depth()[1])
        if distance is not None:
            self.nearest = min(self.nearest, distance)
        return distance


@pytest.mark.parametrize(
    ("sensor", "seed"), [("depth", seed) for seed in (24, 1)] + [("range", seed) for seed in (0, 2, 3)]
)
def test_the_goal_is_reached_with_the_way_watched(offscreen, sensor, seed):
    instruction = "find the silver bottle" if seed == 24 else None
    with Simulator(World.from_seed(seed, instruction), offscreen=offscreen) as simulator:
        run = Run(simulator, sensor)
        assert run.finish(), run.causes
        assert run.causes == set()  # nothing held it, to the end
        arrival = check_arrival(simulator, simulator.world.instruction)
        assert arrival.arrived, arrival.message
        assert run.nearest < 0.5  # it was near enough that a greater limit would have stopped it
