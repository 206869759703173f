# SPDX-License-Identifier: Apache-2.0
"""The package runs on ROS 2 Humble: it imports what Humble's rclpy and launch have, and does without the rest."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from dsd_ros.ros import running
from dsd_ros.ros.running import RunnableNode

ROOT = Path(__file__).resolve().parents[2]
# What is imported of rclpy 3.3.15, launch 1.0 and launch_ros 0.19, the branches `humble` of their repositories: each of
# these names was looked up there. Look a new one up as well, and do without one that is missing.
OF_HUMBLE = {
    "launch": "LaunchContext LaunchDescription",
    "launch.actions": "DeclareLaunchArgument ExecuteProcess GroupAction IncludeLaunchDescription OpaqueFunction "
    "SetEnvironmentVariable Shutdown",
    "launch.launch_description_sources": "PythonLaunchDescriptionSource",
    "launch_ros.actions": "Node",
    "launch_ros.parameter_descriptions": "ParameterValue",
    "rclpy": "",
    "rclpy.action": "ActionClient ActionServer CancelResponse GoalResponse",
    "rclpy.action.server": "ServerGoalHandle",
    "rclpy.callback_groups": "CallbackGroup MutuallyExclusiveCallbackGroup ReentrantCallbackGroup",
    "rclpy.clock": "Clock ClockType ROSClock",
    "rclpy.context": "Context",
    "rclpy.duration": "Duration",
    "rclpy.exceptions": "InvalidHandle InvalidParameterTypeException InvalidParameterValueException "
    "ParameterException ParameterUninitializedException",
    "rclpy.executors": "Executor ExternalShutdownException ShutdownException SingleThreadedExecutor TimeoutException",
    "rclpy.impl.implementation_singleton": "rclpy_implementation",
    "rclpy.lifecycle": "LifecycleNode LifecycleState TransitionCallbackReturn",
    "rclpy.lifecycle.node": "LifecycleNodeMixin",
    "rclpy.node": "Node",
    "rclpy.parameter": "Parameter parameter_value_to_python",
    "rclpy.publisher": "Publisher",
    "rclpy.qos": "DurabilityPolicy HistoryPolicy QoSPolicyKind QoSProfile ReliabilityPolicy",
    "rclpy.qos_overriding_options": "QoSOverridingOptions",
    "rclpy.serialization": "deserialize_message serialize_message",
    "rclpy.signals": "SignalHandlerOptions",
    "rclpy.task": "Future Task",
    "rclpy.time": "Time",
    "rclpy.timer": "Timer",
    "rclpy.topic_endpoint_info": "TopicEndpointInfo",
    "rclpy.utilities": "get_rmw_implementation_identifier remove_ros_args",
}
LATER = {("rclpy.experimental", "EventsExecutor")}  # with a stand-in


def imported() -> set[tuple[str, str]]:
    """(module, name) of every import of rclpy, launch and launch_ros, those within functions too."""
    found = set()
    for folder in ("src/dsd_ros", "launch", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    found |= {(node.module or "", name.name) for name in node.names}
                elif isinstance(node, ast.Import):
                    found |= {(name.name, "") for name in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] in ("rclpy", "launch", "launch_ros")}


def test_nothing_is_imported_that_humble_lacks() -> None:
    known = {(module, name) for module, names in OF_HUMBLE.items() for name in (names.split() or [""])}
    found = imported()
    assert len(found) > 50 and found >= LATER
    assert found - LATER <= known, f"look these up in Humble's sources: {found - LATER - known}"


def test_no_message_or_service_type_is_younger_than_humble() -> None:
    """Humble's rosidl reads these files: primitive types, arrays, bounds, constants and defaults."""
    line = r"(\w+/)?\w+(<=\d+)?(\[(<=)?\d*\])?"
    files = [path for kind in ("msg", "srv", "action") for path in (ROOT / "src" / "dsd_msgs" / kind).iterdir()]
    assert len(files) > 20
    for path in files:
        for text in path.read_text().splitlines():
            text = text.split("#")[0].strip()
            assert not text or text == "---" or re.fullmatch(rf"{line}\s+\w+(\s*=\s*\S+|\s+\S+)?", text), (path, text)


class Counting(RunnableNode):
    """Ends after some turns of a timer."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.turns = 0
        self.create_timer(0.01, self.count)

    def count(self) -> None:
        self.turns += 1
        if self.turns == 5:
            self.failure = f"counted in a {type(self.executor).__name__}"


def test_a_node_runs_where_there_is_no_events_executor(ros_domain) -> None:
    program = f"""
import sys
sys.modules["rclpy.experimental"] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_humble import Counting, running
sys.exit(running.run_node(Counting, events=True))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == running.EXIT_GAVE_UP and "counted in a SingleThreadedExecutor" in run.stderr, run.stderr


def test_what_a_callback_destroys_before_its_turn_does_not_end_a_node(ros_domain, tmp_path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import rclpy.executors
from rclpy.exceptions import InvalidHandle
from test_humble import Counting, running

once = rclpy.executors.SingleThreadedExecutor.spin_once
turns = []
def spin_once(self, timeout_sec=None):
    turns.append(timeout_sec)
    if len(turns) == 2:
        raise InvalidHandle("cannot use Destroyable because destruction was requested")
    once(self, timeout_sec)
rclpy.executors.SingleThreadedExecutor.spin_once = spin_once
sys.exit(running.run_node(Counting))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == running.EXIT_GAVE_UP and "counted" in run.stderr, run.stderr
