"""The launch descriptions, where launch is installed: it is no wheel, so this runs on ROS 2 installations alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("launch_ros")

from launch.actions import EmitEvent, OpaqueFunction  # noqa: E402

from dsd_ros.ros.bringup import SYSTEMS, plan  # noqa: E402
from dsd_ros.ros.launching import _at_the_end, describe  # noqa: E402
from launch import LaunchContext  # noqa: E402

RUNNING = SimpleNamespace(is_shutdown=False)


@pytest.mark.parametrize("system", list(SYSTEMS.values()), ids=list(SYSTEMS))
def test_a_description_starts_what_the_plan_says(system):
    description = describe(system.name)
    context = LaunchContext()
    context.launch_configurations.update(system.defaults() | {"namespace": "go2_1"})
    start = next(item for item in description.entities if isinstance(item, OpaqueFunction))
    started = start.execute(context)
    assert len(started) >= len(plan(system.name))
    assert len(description.entities) == len(system.arguments) + 1


def test_crashes_are_forgiven_as_often_as_by_the_process_runner():
    options = _at_the_end("draft_node", respawn=True)
    assert options["respawn"] and options["respawn_delay"] > 0.0
    ends = [options["on_exit"](SimpleNamespace(returncode=-9), RUNNING) for _ in range(6)]
    assert ends[:5] == [None] * 5 and any(isinstance(item, EmitEvent) for item in ends[5])
    for code in (0, 2):
        fresh = _at_the_end("draft_node", respawn=True)["on_exit"]
        assert fresh(SimpleNamespace(returncode=code), RUNNING)
    fatal = _at_the_end("supervisor_node", respawn=False)
    assert "respawn" not in fatal and fatal["on_exit"](SimpleNamespace(returncode=-9), RUNNING)
    told = _at_the_end("record_node", respawn=False, optional=True)["on_exit"](SimpleNamespace(returncode=1), RUNNING)
    assert not any(isinstance(item, EmitEvent) for item in told)
