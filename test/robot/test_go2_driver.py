# SPDX-License-Identifier: Apache-2.0
"""The Go2's driver against the stand-in in one process: what is confirmed, held, refused and stopped."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from dataclasses import replace

import pytest

from dsd_lab.robot.go2_standin import Go2Standin, StandinFault
from dsd_ros.robot.driver import DriverError, FaultCause, MotionLimits, Posture, RobotState, wait_until
from dsd_ros.robot.go2 import driver as go2_driver
from dsd_ros.robot.go2.driver import Go2Driver, Go2Settings
from dsd_ros.robot.go2.protocol import (
    API_VERSION,
    OBSTACLES_AVOID,
    SPORT,
    AvoidApi,
    Code,
    ServiceRequest,
    SportApi,
    StateError,
    avoid_move_parameter,
    decode_state,
    encode_state,
    move_parameter,
    read_parameter,
)
from dsd_ros.robot.sim.driver import SimulatedDriver
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World

QUICK = {"REQUEST_S": 0.15, "STATE_S": 0.25, "COMMAND_S": 0.3, "POSTURE_S": 3.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setattr(go2_driver, name, value)


class Robot:
    """A stand-in whose services and state are a thread away instead of a network."""

    def __init__(self, **options) -> None:
        self.standin = Go2Standin(Simulator(World.from_seed(0)), **options)
        self.requests: list[tuple[float, str, ServiceRequest]] = []
        self.answers_moves = True
        self.listening = True
        self.driver: Go2Driver | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def send(self, service: str, request: ServiceRequest) -> bool:
        self.requests.append((time.monotonic(), service, request))
        if self.listening:
            silent = request.api_id == SportApi.MOVE and not self.answers_moves
            self.standin.receive(service, replace(request, noreply=silent))
        return self.listening

    def asked(self, api: int, service: str = SPORT) -> list[tuple[float, ServiceRequest]]:
        return [(at, r) for at, name, r in self.requests if name == service and r.api_id == api]

    @property
    def velocity(self) -> tuple[float, float, float]:
        return self.standin.driver.simulator.velocity

    def still(self) -> bool:
        return max(map(abs, self.velocity)) < 1e-6

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.standin.advance()
            for service, answer in self.standin.answers():
                self.driver.on_response(service, answer)
            data = self.standin.state()
            if data is not None:
                self.driver.on_state(data)


@pytest.fixture
def make():
    made = []

    def build(settings=None, lying=False, **options):
        robot = Robot(lying=lying, **options)
        robot.driver = Go2Driver(robot, settings)
        robot._thread.start()
        made.append(robot)
        assert wait_until(lambda: robot.driver.state() is not None, 20.0)
        return robot, robot.driver

    yield build
    for robot in made:
        robot.driver.close(0.1)
        robot._stop.set()
        robot._thread.join()


def keep_moving(driver, seconds, *velocity):
    """Ask again and again, as cmd_vel does; the moment of the last time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        driver.move(*velocity)
        time.sleep(0.03)
    return time.monotonic()


def until_moving(robot, driver):
    assert wait_until(lambda: keep_moving(driver, 0.1, 0.0, 0.0, 0.5) and not robot.still(), 20.0)


def test_postures_are_confirmed_by_the_state(make):
    _robot, driver = make(lying=True)
    assert driver.state().posture is Posture.LYING
    began = time.monotonic()
    driver.stand_up()
    assert time.monotonic() - began > 0.9  # acknowledged at once, seen when it stands
    assert driver.state().posture is Posture.LOCKED
    driver.balance()
    assert driver.state().posture is Posture.STANDING
    driver.damp()
    assert driver.state().posture is Posture.DAMPED
    with pytest.raises(DriverError) as refused:
        driver.balance()
    assert refused.value.fault.cause is FaultCause.REJECTED
    assert refused.value.fault.code == Code.NOT_READY


def test_a_move_is_sent_again_within_the_hold_and_ends_in_an_acknowledged_stop(make):
    robot, driver = make()
    last = keep_moving(driver, 0.4, 0.0, 0.0, 0.5)
    assert wait_until(lambda: not driver.moving, 20.0)
    moves = [at for at, _ in robot.asked(SportApi.MOVE)]
    assert len(moves) >= 4 and max(b - a for a, b in itertools.pairwise(moves)) < 0.9
    stopped = robot.asked(SportApi.STOP_MOVE)
    assert stopped and stopped[0][0] - last < QUICK["COMMAND_S"] + 0.3
    assert wait_until(robot.still, 20.0)
    assert driver.fault() is None


def test_zero_and_stop_end_the_motion_at_once(make):
    robot, driver = make()
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    driver.move(0.0, 0.0, 0.0)
    assert wait_until(lambda: not driver.moving, 20.0)
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    driver.stop()
    assert not driver.moving and len(robot.asked(SportApi.STOP_MOVE)) == 2
    count = len(robot.requests)
    time.sleep(0.2)
    assert len(robot.requests) == count  # a robot at rest is left alone


def test_velocities_are_limited_and_gained_slowly(make):
    robot, driver = make()
    keep_moving(driver, 0.5, -9.0, 0.0, 9.0)
    values = [read_parameter(r.parameter) for _, r in robot.asked(SportApi.MOVE)]
    limits = driver.limits
    assert min(v["x"] for v in values) == limits.vx_min and max(v["z"] for v in values) <= 1.5
    steps = [b["z"] - a["z"] for a, b in itertools.pairwise(values)]
    assert values[0]["z"] <= 0.6 + 1e-9 and max(steps) <= 0.6 + 1e-9


def test_slowing_down_is_never_delayed():
    limits = MotionLimits()
    assert limits.approach((1.0, 0.0, 0.0), (0.2, 0.0, 0.0), 0.05) == (0.2, 0.0, 0.0)
    assert limits.approach((0.5, 0.0, 1.0), (-0.5, 0.0, -1.0), 0.05) == (-0.1, 0.0, pytest.approx(-0.3))
    with pytest.raises(ValueError, match="finite"):
        MotionLimits(vx_max=float("nan"))


def test_a_frozen_robot_gets_no_motion_and_may_move_again_after_its_stop_is_acknowledged(make):
    robot, driver = make()
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    robot.standin.fault = StandinFault.FREEZE
    keep_moving(driver, 0.4, 0.0, 0.0, 0.5)
    assert driver.fault().cause is FaultCause.NO_STATE
    begun = robot.asked(SportApi.STOP_MOVE)[0][0]
    assert not [at for at, _ in robot.asked(SportApi.MOVE) if at > begun]
    with pytest.raises(DriverError):
        driver.stop(0.2)
    assert wait_until(robot.still, 1.5)  # the firmware holds the last Move for a second
    robot.standin.fault = StandinFault.NONE
    assert wait_until(lambda: not driver.moving, 10.0) and wait_until(lambda: not driver.fault(), 10.0)
    until_moving(robot, driver)


def test_a_dead_service_under_a_living_state_is_noticed(make):
    robot, driver = make()
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    robot.standin.fault = StandinFault.DIE
    died = time.monotonic()
    while driver.fault() is None and time.monotonic() - died < 2.0:
        keep_moving(driver, 0.05, 0.0, 0.0, 0.5)
    assert driver.fault().cause in (FaultCause.NO_ANSWER, FaultCause.STOP_UNCONFIRMED)
    assert time.monotonic() - died < 1.0
    keep_moving(driver, 0.4, 0.0, 0.0, 0.5)
    assert driver.fault().cause is FaultCause.STOP_UNCONFIRMED and driver.moving
    with pytest.raises(DriverError, match="has not answered"):
        driver.request(SPORT, SportApi.STAND_UP)


def test_a_rejecting_robot_is_quoted(make):
    robot, driver = make()
    robot.standin.fault = StandinFault.REJECT
    with pytest.raises(DriverError, match="3202") as refused:
        driver.stand_up()
    assert refused.value.fault.cause is FaultCause.REJECTED
    with pytest.raises(DriverError, match="3202") as refused:
        driver.stop(0.3)
    assert refused.value.fault.cause is FaultCause.STOP_UNCONFIRMED
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    known = (FaultCause.REJECTED, FaultCause.STOP_UNCONFIRMED)
    assert wait_until(lambda: driver.fault().cause in known, 10.0)
    assert robot.still()


def test_a_slow_robot_confirms_late_and_does_not_move_on_meanwhile(make):
    robot, driver = make()
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    robot.standin.fault = StandinFault.SLOW
    with pytest.raises(DriverError):
        driver.stop(0.3)
    assert driver.moving
    assert wait_until(lambda: driver.fault().cause is FaultCause.STOP_UNCONFIRMED, 10.0)
    count = len(robot.asked(SportApi.MOVE))
    assert wait_until(lambda: not driver.moving, 20.0)  # what was sent is acknowledged at last
    assert len(robot.asked(SportApi.MOVE)) == count


def test_an_absent_service_differs_from_a_silent_one(make):
    robot, driver = make()
    robot.listening = False
    with pytest.raises(DriverError) as refused:
        driver.stand_up()
    assert refused.value.fault.cause is FaultCause.NO_SERVICE


def test_a_lying_robot_is_not_moved(make):
    robot, driver = make(lying=True)
    keep_moving(driver, 0.2, 0.3, 0.0, 0.0)
    assert driver.fault().cause is FaultCause.WRONG_POSTURE and not robot.asked(SportApi.MOVE)


def test_a_robot_that_answers_no_moves_still_moves(make):
    robot, driver = make()
    robot.answers_moves = False
    keep_moving(driver, 0.7, 0.0, 0.0, 0.5)
    assert not robot.still() and driver.fault() is None
    driver.stop()


def test_moves_that_do_not_move_it_are_noticed_even_where_they_are_not_answered(make, monkeypatch):
    robot, driver = make()
    robot.answers_moves = False
    monkeypatch.setattr(go2_driver, "_UNMOVED_S", 0.3)
    monkeypatch.setattr(robot.standin, "_move", lambda _: Code.OK)
    keep_moving(driver, 0.7, 0.0, 0.0, 0.5)
    assert driver.fault().cause is FaultCause.UNCONFIRMED and robot.asked(SportApi.STOP_MOVE)


def test_obstacle_avoidance_is_taken_over_and_given_back(make):
    robot, driver = make()
    assert driver.start_avoidance() and robot.standin.avoiding and robot.standin.taken_over
    until_moving(robot, driver)
    assert not robot.asked(SportApi.MOVE) and robot.asked(AvoidApi.MOVE, OBSTACLES_AVOID)
    driver.close()
    assert wait_until(lambda: not robot.standin.taken_over, 20.0) and wait_until(robot.still, 20.0)


def test_a_robot_without_avoidance_is_driven_without_unless_it_is_required(make, monkeypatch):
    robot, driver = make(Go2Settings(avoidance="required"))
    monkeypatch.setattr(robot.standin, "_avoid", lambda *_: (Code.NOT_IMPLEMENTED, ""))
    with pytest.raises(DriverError, match="3203"):
        driver.start_avoidance()
    keep_moving(driver, 0.2, 0.0, 0.0, 0.5)
    assert robot.still() and driver.fault().cause is FaultCause.REJECTED
    _, driver = make()
    monkeypatch.setattr(Go2Standin, "_avoid", lambda *_: (Code.NOT_IMPLEMENTED, ""))
    assert not driver.start_avoidance() and not driver.avoiding


def test_a_velocity_that_is_no_number_and_a_closed_driver_are_refused(make):
    _robot, driver = make()
    with pytest.raises(DriverError) as refused:
        driver.move(float("nan"), 0.0, 0.0)
    assert refused.value.fault.cause is FaultCause.BAD_COMMAND
    driver.close()
    driver.close()
    for call in (driver.stop, lambda: driver.move(0.1, 0, 0), driver.stand_up):
        with pytest.raises(DriverError) as refused:
            call()
        assert refused.value.fault.cause is FaultCause.CLOSED


def test_bytes_that_are_no_state_are_a_named_fault(make):
    robot, driver = make()
    robot._stop.set()
    robot._thread.join()
    time.sleep(QUICK["STATE_S"])
    driver.on_state(b"\x00\x01\x00\x00" + bytes(100))
    assert driver.fault().cause is FaultCause.BAD_STATE and "104 bytes" in str(driver.fault())


STATE = RobotState(
    received=0.0, stamp=12.5, error_code=1013, orientation=(0.5, 0.5, -0.5, 0.5), gyroscope=(0.25, -0.5, 1.0),
    accelerometer=(0.5, 0.25, 9.75), rpy=(0.125, 0.25, 1.5), posture=Posture.MOVING, mode=3,
    position=(1.5, -2.5, 0.25), body_height=0.25, velocity=(0.5, -0.25, 0.125), yaw_rate=-0.75,
)  # fmt: skip


@pytest.mark.parametrize("with_path", [False, True])
def test_both_layouts_of_the_state_are_read(with_path):
    data = encode_state(STATE, with_path)
    assert len(data) == 4 + (512 if with_path else 232)
    assert decode_state(data) == STATE
    assert decode_state(data + b"\0\0") == STATE  # filled up by the writer


def test_big_endian_states_are_read():
    little = encode_state(STATE)
    size = struct.calcsize("<iII4f3f3f3fbB")
    values = struct.unpack("<iII4f3f3f3fbB", little[4 : 4 + size])
    big = b"\x00\x00\x00\x00" + struct.pack(">iII4f3f3f3fbB", *values) + bytes(232 - size)
    assert decode_state(big).rpy == STATE.rpy and decode_state(big).mode == STATE.mode


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[:-1], lambda d: d + bytes(8), lambda d: b"", lambda d: b"\x00\x03" + d[2:],
     lambda d: d[:16] + b"\xff\xff\xff\xff" + d[20:]],
)  # fmt: skip
def test_damaged_states_are_refused(damage):
    with pytest.raises(StateError):
        decode_state(damage(encode_state(STATE)))


def test_postures_and_velocity_of_the_state():
    assert decode_state(encode_state(STATE)).posture is Posture.MOVING
    low = replace(STATE, mode=0, body_height=0.08)
    assert decode_state(encode_state(low)).posture is Posture.LYING
    turned = replace(STATE, rpy=(0.0, 0.0, 1.5707963), velocity=(0.0, 1.0, 0.0))
    assert decode_state(encode_state(turned), 0.0, "odom").velocity == pytest.approx((1.0, 0.0, 0.0), abs=1e-6)


def answer(standin, api, parameter="{}", service=SPORT, now=0.0):
    standin.receive(service, ServiceRequest(7, api, parameter), now)
    ((name, response),) = standin.answers(now)
    assert (name, response.identity, response.api_id) == (service, 7, api)
    return response.code


def test_the_standins_codes():
    standin = Go2Standin(Simulator(World.from_seed(0)))
    assert answer(standin, 9999) == Code.NOT_IMPLEMENTED
    assert answer(standin, API_VERSION) == Code.OK
    assert answer(standin, SportApi.MOVE, move_parameter(0.1, 0, 0)) == Code.NOT_READY
    assert answer(standin, SportApi.STAND_UP, now=1.0) == Code.OK
    assert answer(standin, SportApi.BALANCE_STAND, now=1.5) == Code.NOT_READY  # still rising
    assert answer(standin, SportApi.BALANCE_STAND, now=2.5) == Code.OK
    for text in ("[]", "{", '{"x": 1}', '{"x": 1, "y": 0, "z": 1e999}', '{"x": true, "y": 0, "z": 0}'):
        assert answer(standin, SportApi.MOVE, text, now=3.0) == Code.BAD_PARAMETER
    assert answer(standin, SportApi.MOVE, move_parameter(0.1, 0, 0), now=3.0) == Code.OK
    assert answer(standin, SportApi.DAMP, now=3.0) == Code.OK
    assert answer(standin, SportApi.MOVE, move_parameter(0.1, 0, 0), now=3.0) == Code.NOT_READY
    assert answer(standin, AvoidApi.MOVE, "{}", OBSTACLES_AVOID, 3.0) == Code.BAD_PARAMETER
    standin.receive(SPORT, ServiceRequest(1, SportApi.STOP_MOVE, noreply=True), 3.0)
    assert standin.answers(3.0) == []


def test_the_standins_avoidance_does_not_run_into_things():
    now = [100.0]
    simulator = Simulator(World.from_seed(0))
    standin = Go2Standin(simulator, lying=False, clock=lambda: now[0])
    for api, text in ((AvoidApi.SWITCH_SET, '{"enable": true}'),
                      (AvoidApi.USE_REMOTE_COMMAND, '{"is_remote_commands_from_api": true}')):  # fmt: skip
        assert answer(standin, api, text, OBSTACLES_AVOID, now[0]) == Code.OK
    text = avoid_move_parameter(0.5, 0.0, 0.0)
    for _ in range(600):
        assert answer(standin, AvoidApi.MOVE, text, OBSTACLES_AVOID, now[0]) == Code.OK
        standin.advance()
        now[0] += 0.02
    assert simulator.collisions == 0
    assert simulator.pose[:2] != simulator.world.start[:2]


def test_the_simulated_driver_keeps_a_command_for_its_hold_only():
    driver = SimulatedDriver(Simulator(World.from_seed(0)), hold_s=0.5)
    driver.move(0.0, 0.0, 1.0)
    began = driver.state().received
    driver.advance(began + 0.4)
    assert driver.state().posture is Posture.MOVING and driver.state().yaw_rate == 1.0
    driver.advance(began + 2.0)
    assert driver.state().yaw_rate == 0.0 and driver.fault() is None
    assert abs(driver.state().rpy[2] - driver.simulator.world.start[2]) < 0.6
    driver.damp()
    with pytest.raises(DriverError, match="not standing"):
        driver.move(0.1, 0.0, 0.0)
