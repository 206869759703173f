"""`dsd-lab bench safety`: provokes every cause of a stop and times the supervisor until the last command is zero."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus

from dsd_lab.faults.safety_standin import Provocation, StandIn
from dsd_lab.report import BenchError, check_range, header, table, use_own_ros_domain
from dsd_msgs.msg import NavAction
from dsd_ros.navigation.safety import Cause, Fallback
from dsd_ros.ros.bringup import Start
from dsd_ros.ros.processes import ProcessGroup
from dsd_ros.ros.running import ask_for_realtime, end_realtime
from dsd_ros.ros.standalone import SpinningNode

# What a supervisor under test watches.
PARAMETERS = {
    "require.deadman": "true",
    "require.obstacle": "range",
    "require.heartbeats": "draft_node",
    "require.link": "draft_node",
}
# What differs where a provocation needs it.
SETTINGS = {"": {}, "depth": {"require.obstacle": "depth"}, "draft_only": {"fallback": "draft_only"}}
LIMIT_S = 0.5  # from cause to zero


def _mute(topic: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    return Provocation(name, cause, lambda s: s.muted.add(topic), lambda s: s.muted.clear(), setting)


def _freeze(topic: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    return Provocation(name, cause, lambda s: s.frozen.add(topic), lambda s: s.frozen.clear(), setting)


def _set(name: str, cause: Cause, setting: str = "", **values: Any) -> Provocation:
    """Set attributes of the stand-in, and restore them."""
    before: dict[str, Any] = {}

    def provoke(standin: StandIn) -> None:
        before.update({key: getattr(standin, key) for key in values})
        vars(standin).update(values)

    return Provocation(name, cause, provoke, lambda s: vars(s).update(before), setting)


def _announce(name: str, cause: Cause, setting: str = "", times: int = 1, **changes: Any) -> Provocation:
    def provoke(standin: StandIn) -> None:
        for _ in range(times):
            standin.announce(**changes)

    return Provocation(name, cause, provoke, lambda s: None, setting)


def _report(node: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    warn, ok = DiagnosticStatus.WARN, DiagnosticStatus.OK
    return Provocation(name, cause, lambda s: s.report(node, warn), lambda s: s.report(node, ok), setting)


def _emergency(name: str, provoke: Callable[[StandIn], Any]) -> Provocation:
    return Provocation(name, Cause.EMERGENCY_STOP, provoke, lambda s: s.call(s.reset_client))


PROVOCATIONS = (
    _emergency("emergency stop, topic", StandIn.press_emergency_stop),
    _emergency("emergency stop, service", lambda s: s.call(s.stop_client)),
    _set("deadman released", Cause.DEADMAN, held=False),
    _mute("deadman", "deadman silent", Cause.DEADMAN),
    _set("tilt", Cause.TILT, lean=0.7),
    _set("operator takes over, at zero", Cause.OPERATOR, joystick=(0.0, 0.0)),
    _mute("odometry", "odometry silent", Cause.ODOMETRY_STALE),
    _freeze("odometry", "odometry frozen", Cause.ODOMETRY_STALE),
    _mute("imu", "imu silent", Cause.STATE_STALE),
    _mute("camera", "camera silent", Cause.CAMERA_STALE),
    _freeze("camera", "camera frozen", Cause.CAMERA_STALE),
    _set("obstacle ahead", Cause.OBSTACLE, distance=0.1),
    _mute("range", "range sensor silent", Cause.OBSTACLE_SENSOR_STALE),
    _set("battery low", Cause.LOW_BATTERY, charge=0.05),
    _mute("heartbeat", "heartbeat missed", Cause.NODE_SILENT),
    _report("draft_node", "link lost", Cause.LINK_LOST),
    _report("go2_node", "robot reports a fault", Cause.ROBOT_FAULT),
    _announce("action not verified", Cause.UNVERIFIED_ACTION, verified=False),
    _announce("action unknown", Cause.UNPARSABLE_ACTION, amount=33),
    _announce("reply too old", Cause.STALE_REPLY, age=7.0),
    _announce("motion after stop", Cause.MOTION_REFUSED, kind=NavAction.STOP, amount=0),
    _set("turning instead of driving", Cause.MOTION_REFUSED, speed=(0.0, 1.2)),
    _set("too fast", Cause.MOTION_REFUSED, speed=(0.8, 0.0)),
    _mute("command", "navigation silent", Cause.COMMAND_STALE),
    _set("obstacle in the depth image", Cause.OBSTACLE, "depth", distance=0.1),
    _set("depth camera covered", Cause.OBSTACLE_SENSOR_STALE, "depth", distance=None),
    _mute("depth", "depth camera silent", Cause.OBSTACLE_SENSOR_STALE, "depth"),
    _freeze("depth", "depth camera frozen", Cause.OBSTACLE_SENSOR_STALE, "depth"),
    _announce(
        "one unverified action too many", Cause.UNVERIFIED_ACTION, "draft_only",
        Fallback().unverified_replies + 1, verified=False,
    ),
    _announce(
        "a way back that is not allowed", Cause.UNVERIFIED_ACTION, "draft_only", verified=False, retracing=True
    ),
    _report("draft_node", "link lost, fallback draft_only", Cause.LINK_LOST, "draft_only"),
)  # fmt: skip


def measure_safety(
    trials: int,
    causes: Sequence[str] | None = None,
    progress: Callable[[str, Sequence[float]], None] | None = None,
    load: int = 0,
    realtime: bool = True,
) -> dict[str, Any]:
    """Start a supervisor and provoke every cause ``trials`` times: seconds from cause to zero, for each provocation.

    ``causes``: names of those to provoke; None: all. ``load``: busy loops beside it. ``realtime``: whether it asks for
    real-time scheduling. Call it from the main thread. SafetyBenchError, ValueErrors.
    """
    check_range("trials", trials, 1, 10_000)
    check_range("load", load, 0, 64)
    known = {provocation.cause.name for provocation in PROVOCATIONS}
    for name in causes or ():
        if name not in known:
            raise BenchError(f"unknown cause {name!r}; choose from {', '.join(sorted(known))}")
    wanted = [p for p in PROVOCATIONS if causes is None or p.cause.name in causes]
    use_own_ros_domain()
    rows = []
    with _standin() as standin, _busy(load):
        for setting, differing in SETTINGS.items():
            group_of = [p for p in wanted if p.setting == setting]
            if not group_of:
                continue
            parameters = PARAMETERS | differing | {"realtime": str(realtime).lower()}
            with ProcessGroup(lambda name, line: None) as group:
                standin.state = None
                group.start_planned(Start("supervisor_node", parameters))
                for provocation in group_of:
                    times = [standin.trial(provocation) for _ in range(trials)]
                    if progress is not None:
                        progress(provocation.name, times)
                    rows.append(
                        {
                            "provocation": provocation.name,
                            "cause": provocation.cause.name,
                            "trials": len(times),
                            "median_s": round(statistics.median(times), 4),
                            "worst_s": round(max(times), 4),
                        }
                    )
    worst = max(row["worst_s"] for row in rows)
    return {**header("safety"), "load": load, "realtime": realtime, "worst_s": worst, "rows": rows}


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    rows = [["provocation", "cause", "median s", "worst s"]]
    for row in report["rows"]:
        rows.append([row["provocation"], row["cause"], f"{row['median_s']:.3f}", f"{row['worst_s']:.3f}"])
    verdict = f"worst of all: {report['worst_s']:.3f} s; at most {LIMIT_S} s is wanted"
    return "\n".join([*table(rows, left=2), verdict, report["machine"]])


@contextmanager
def _standin() -> Iterator[StandIn]:
    """A stand-in on a node of its own, spinning in a thread."""
    ros = SpinningNode("safety_bench")
    standin = StandIn(ros.node)
    ros.start()
    # This is the clock: its delay would count as the supervisor's.
    ask_for_realtime(inherited=False)
    try:
        yield standin
    finally:
        end_realtime()
        ros.close()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Processes that do nothing but use a core each."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", _BUSY], start_new_session=True))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# It ends by itself when the bench is gone.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
