# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench ahead`: runs in the demo's rooms with and without looking ahead, by one simulated clock.

Navigation's run, the safety supervisor and the simulated robot are the product's own. Time is counted, not waited for:
a reply takes as long as its tokens are said to take. So equal settings give equal runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from dsd_lab.bench.harness import Bench, Report, Told
from dsd_lab.pair.scenes import DEMO, FIRST_RUN_SEED, rooms
from dsd_lab.report import check_range, header, ratio, share
from dsd_lab.train.data import shared_offscreen
from dsd_lab.train.forward import image_tokens
from dsd_lab.train.frames import shrink
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.tokenizer import prompt_ids
from dsd_lab.worlds.expert import reply as experts
from dsd_lab.worlds.guide import View
from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, model_path
from dsd_ros.navigation.run.actions import action_in
from dsd_ros.navigation.run.controller import MotionSettings, Pose, Velocity, stands
from dsd_ros.navigation.run.records import DecodeAnswer, Moment, Phase
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.run.settings import RunOutcome, RunSettings
from dsd_ros.navigation.safety.causes import REFUSALS, Motion, Requirements, SafetyLimits, SafetyReport
from dsd_ros.navigation.safety.supervisor import Supervisor
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings

TICK_S = 0.02  # of the simulated driver's odometry
CAMERA_S = 1.0 / 15.0  # between the simulated camera's pictures
OVERHEAD_S = 0.07  # of a reply's time, not spent in the decode: docs/navigation.md
_NOBODY = Requirements(imu=False, heartbeats="", link="", robot="")
CODE = ("dsd_ros/navigation", "dsd_ros/robot/sim")


@arguments
class Flags:
    """What is compared, and where the report goes."""

    runs: int = flag(100, "rooms, each driven with and without looking ahead")
    first: int = flag(FIRST_RUN_SEED, "seed of the first room")
    token_ms: str = flag("6,23", "times of a reply's token: over Wi-Fi, and of a 60 ms target with drafts over 5G")
    delays: str = flag("1,3,6", "further delays of a reply, s, with the first of these times")
    target: str = model_option("target")
    json: Any = json_option()


class Asked(NamedTuple):
    """A question of a run: its picture and instruction."""

    picture: np.ndarray
    instruction: str


@dataclass
class Drive:
    """One run as it went. ``right``: of each reply, whether the picture was taken in motion, and its action right."""

    reached: bool = False
    outcome: str = ""
    collisions: int = 0
    seconds: float = 0.0
    standing: float = 0.0  # s, between the first action and the last one
    moved_without: int = 0  # ticks in which the robot was commanded to move and no verified action was under way
    refused: int = 0  # times that the supervisor refused what navigation did
    right: list[tuple[bool, bool]] = field(default_factory=list)


class _Room:
    """A robot, its supervisor and its run in one room."""

    def __init__(self, world: World, offscreen: Offscreen, settings: RunSettings) -> None:
        self.world, self.simulator = world, Simulator(world, offscreen=offscreen)
        limits = SafetyLimits(observation_age_s=settings.max_observation_age_s)
        self.supervisor = Supervisor(limits=limits, required=_NOBODY)
        self.now = self.camera = 0.0
        self.run = NavigationRun(settings, MotionSettings(), self.moment)
        self.drive = Drive()
        self.command = Motion()
        self._waiting = 0.0  # s of standing that no action has ended yet

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.now)

    def tick(self) -> bool:
        """One odometry sample and what follows; returns whether the camera has just taken a picture."""
        self.now += TICK_S
        self.simulator.step(TICK_S, self.command.vx, self.command.vy, self.command.wz)
        vx, vy, wz = self.simulator.velocity
        pose, twist = Pose(*self.simulator.pose), Velocity(float(np.hypot(vx, vy)), wz)
        supervisor, run, drive = self.supervisor, self.run, self.drive
        picture = self.now >= self.camera
        if picture:
            self.camera += CAMERA_S
            supervisor.on_picture(self.now, self.now)
        supervisor.on_odometry(pose, self.now, self.now)
        decision = supervisor.decide(self.now)
        causes = tuple(cause for cause, _ in decision.causes)
        drive.refused += not REFUSALS.isdisjoint(causes)
        run.on_safety(SafetyReport(causes, tuple(text for _, text in decision.causes), decision.waived), self.now)
        command = run.on_odometry(pose, twist, self.moment)
        run.on_time(self.moment)
        announced = run.take_announcement()
        if announced is not None:
            step = run.steps[-1]
            supervisor.on_action(announced.action, announced.verified, step.observed_at, self.now, self.now)
            drive.standing += self._waiting if len(run.steps) > 1 else 0.0
            self._waiting = 0.0
        supervisor.on_navigation(Motion(command.vx, 0.0, command.wz), self.now)
        self.command = supervisor.decide(self.now).motion
        verified = run.phase is Phase.EXECUTING and run.steps[-1].verified
        drive.moved_without += self.command.moving and not verified
        self._waiting += TICK_S * stands(Velocity(twist.vx, abs(wz)))
        return picture

    def finish(self) -> Drive:
        drive, run = self.drive, self.run
        for _ in range(50):
            self.simulator.step(TICK_S, 0.0, 0.0, 0.0)
        drive.collisions, drive.seconds, drive.outcome = self.simulator.collisions, self.now, run.outcome.name
        drive.reached = run.outcome is RunOutcome.ARRIVED and self.simulator.reached()
        return drive


def drive_room(
    world: World, offscreen: Offscreen, settings: RunSettings, token_s: float, delay_s: float
) -> Generator[Asked, tuple[str, int], Drive]:
    """One run; yields each question, and is sent its reply with the number of its tokens."""
    room = _Room(world, offscreen, settings)
    run, simulator = room.run, room.simulator
    request = due = None
    while not run.ended:
        taken = room.tick()
        new = run.take_request()
        if new is not None:
            request, due = new, None  # a newer request cancels the earlier one
        if request is not None and due is None and taken and room.now >= request.not_before:
            view, moving = View.at(world, simulator.pose), not stands(_speed(simulator))
            text, tokens = yield Asked(simulator.render(), world.instruction)
            right = action_in(text) == action_in(experts(view, world.goal))
            room.drive.right.append((moving, right))
            answer = request.number, DecodeAnswer(text, room.now, True, len(room.drive.right))
            due = room.now + OVERHEAD_S + tokens * token_s + delay_s
        if due is not None and room.now >= due:
            run.on_answer(*answer, room.moment)
            request = due = None
    return room.finish()


def _speed(simulator: Simulator) -> Velocity:
    vx, vy, wz = simulator.velocity
    return Velocity(float(np.hypot(vx, vy)), abs(wz))


class _Speaker:
    """The target's greedy replies to many questions at once."""

    def __init__(self, path: str) -> None:
        model = load_model(ModelSettings(path, threads=1))
        self._hf, self._tokenizer = model.hf, model.tokenizer

    def answer(self, asked: Sequence[Asked]) -> list[tuple[str, int]]:
        features = image_tokens(self._hf.model.visual, np.stack([shrink(one.picture) for one in asked]))
        replies = greedy_replies(self._hf, features, prompt_ids(self._tokenizer, [one.instruction for one in asked]))
        return [(str(self._tokenizer.decode(ids, skip_special_tokens=True)), len(ids)) for ids in replies]


def measure(flags: Flags, told: Told) -> Report:
    """Drive every room by both ways at each time of a reply; BenchError for values out of range."""
    check_range("runs", flags.runs, 1, 1000)
    check_range("first", flags.first, 0, 1_000_000)
    times = [float(one) for one in flags.token_ms.split(",") if one]
    given = [(ms, 0.0) for ms in times] + [(times[0], float(one)) for one in flags.delays.split(",") if one]
    for ms, delay in given:
        check_range("token_ms", ms, 0.0, 1000.0, " ms")
        check_range("delays", delay, 0.0, 60.0, " s")
    path = model_path(flags.target, "target")
    speaker, worlds = _Speaker(path), list(islice(rooms(DEMO, flags.first), flags.runs))
    rows: list[dict[str, Any]] = []
    for number, (ms, delay) in enumerate(given):
        rows += compare(speaker.answer, worlds, ms, delay)
        told((number + 1) / len(given), f"{ms:g} ms a token, {delay:g} s more")
    return {**header("ahead", CODE, target=path), "runs": flags.runs, "first": flags.first, "rows": rows}


def compare(answer: Any, worlds: Sequence[World], token_ms: float, delay_s: float) -> list[dict[str, Any]]:
    """A row without looking ahead and one with it; every room is driven by both ways side by side."""
    # Older pictures are allowed where a delay alone would make every one too old.
    base = RunSettings(max_observation_age_s=5.0 + delay_s)
    arms = [replace(base, look_ahead=ahead) for ahead in (False, True)]
    with closing(shared_offscreen()) as offscreen:
        drives = [
            drive_room(world, offscreen, settings, token_ms / 1e3, delay_s) for world in worlds for settings in arms
        ]
        done = run_side_by_side(drives, answer)
    without, ahead = done[::2], done[1::2]
    rows = []
    for name, some in (("at rest", without), ("ahead", ahead)):
        both = [n for n in range(len(worlds)) if without[n].reached and ahead[n].reached]
        row = {
            "looks": name, "token_ms": token_ms, "delay_s": delay_s,
            "reached": share([one.reached for one in some]),
            "collisions": sum(one.collisions for one in some),
            "unverified_motion": sum(one.moved_without for one in some),
            "refused": sum(one.refused for one in some),
            "standing": ratio([one.standing for one in some], [one.seconds for one in some]),
            "seconds": ratio([some[n].seconds for n in both]),
            "replies": ratio([len(one.right) for one in some]),
            "right_at_rest": share([right for one in some for moving, right in one.right if not moving]),
            "right_in_motion": share([right for one in some for moving, right in one.right if moving]),
            "outcomes": {name: sum(one.outcome == name for one in some) for name in {one.outcome for one in some}},
        }  # fmt: skip
        if some is ahead:
            row["time"] = ratio([ahead[n].seconds for n in both], [without[n].seconds for n in both])
        rows.append(row)
    return rows


def run_side_by_side(drives: Sequence[Generator[Asked, tuple[str, int], Drive]], answer: Any) -> list[Drive]:
    """Advance all runs from question to question; ``answer`` replies to many at once."""
    done: dict[int, Drive] = {}
    asked: dict[int, Asked] = {}
    said: dict[int, tuple[str, int] | None] = dict.fromkeys(range(len(drives)))
    while said:
        for number, text in said.items():
            try:
                asked[number] = drives[number].send(text)  # type: ignore[arg-type]  # None begins one
            except StopIteration as end:
                done[number] = end.value
        said = dict(zip(asked, answer(list(asked.values())), strict=True)) if asked else {}
        asked = {}
    return [done[number] for number in range(len(drives))]


BENCH = Bench(
    measure,
    lambda report: (
        ("looks", "looks", ""), ("ms a token", "token_ms", "g"), ("more s", "delay_s", "g"),
        ("reached", "reached/value", ".3f"), ("collisions", "collisions", "d"), ("refused", "refused", "d"),
        ("unverified", "unverified_motion", "d"), ("standing", "standing/value", ".3f"),
        ("s to the goal", "seconds/value", ".2f"), ("of the time", "time/value", ".3f"),
        ("replies", "replies/value", ".1f"), ("right at rest", "right_at_rest/value", ".3f"),
        ("in motion", "right_in_motion/value", ".3f"),
    ),
    lambda report: [
        "{runs} rooms from seed {first} on, each by both ways; s to the goal where both reached it".format(**report)
    ],
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """Runs with and without looking ahead: goals reached, collisions, standing, seconds to the goal.

    Drives the demo's rooms with the target's replies by a simulated clock, and judges every reply by the expert's.
    """
    return BENCH.run(flags)
