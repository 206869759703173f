# SPDX-License-Identifier: Apache-2.0
"""A test's own ROS node, spinning in a thread, beside the nodes under test: in its process, or in their own."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import Log, SetParametersResult
from rcl_interfaces.srv import ListParameters, SetParameters
from rclpy.action import ActionClient
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.exceptions import InvalidHandle
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import NodeNameNonExistentError
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image
from std_msgs.msg import String

from dsd_msgs.action import Navigate
from dsd_msgs.srv import Decode
from dsd_ros.bringup.processes import Child, ProcessGroup
from dsd_ros.bringup.systems import REMAPPINGS, Start
from dsd_ros.ros import qos
from dsd_ros.ros.images import from_rgb
from dsd_ros.ros.managed import LifecycleWatch
from dsd_ros.ros.running import RCLError, ThreadedExecutor, executor_of
from dsd_ros.ros.stamps import pose_of, seconds, to_duration, velocity_of

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 180.0  # for a process to get ready on a busy machine
_ASK_AGAIN_S, _RARELY_S = 0.1, 3.0  # before a question is put again: at first, and twice as long each time up to this
Remappings = tuple[tuple[str, str], ...]
_ROBOTS = ("simulator_node", "go2_standin_node")  # the laboratory's, which take faults


class HostedNode:
    """A node in the test's own process, as its ``main`` would run it, with a DDS participant and threads of its own.

    It starts in a tenth of the time of a process, in which Python, rclpy and torch would be loaded again.
    """

    def __init__(self, module: str, arguments: list[str]) -> None:
        context = rclpy.Context()
        rclpy.init(args=arguments, context=context, signal_handler_options=SignalHandlerOptions.NO)
        program = importlib.import_module(module)
        with (
            mock.patch.object(program, "run_main") as run,
            mock.patch.object(program, "lower_priority", create=True),  # it would be this process's
            mock.patch.object(rclpy.utilities, "g_default_context", context),  # for whoever names none
        ):
            program.main()
            try:
                self.node = run.call_args.args[0]()
            except BaseException:
                rclpy.shutdown(context=context)
                raise
            self._executor = executor_of(run.call_args.kwargs.get("threads", 1))
        self._executor.add_node(self.node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As at the process's end; may be called twice."""
        if self._stop.is_set():
            return
        self.node.close()
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._executor.shutdown(timeout_sec=1.0)
        context = self.node.context
        self.node.destroy_node()
        rclpy.shutdown(context=context)

    def _spin(self) -> None:
        while not self._stop.is_set():
            with suppress(InvalidHandle, RCLError):  # as run_node
                self._executor.spin_once(timeout_sec=0.1)


class Rig:
    """Use as a context manager, with ROS_DOMAIN_ID set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lines: list[str] = []
        self._hosted: list[HostedNode] = []
        self._names: set[str] = set()  # of the hosted nodes
        self._log: Any = None  # the subscription to what hosted nodes say, once there are any
        self._at_end: list[Callable[[], None]] = []
        self._faults: Any = None  # the publisher, once needed
        self.group = ProcessGroup(lambda name, line: self.lines.append(f"[{name}] {line}"))

    def __enter__(self) -> Self:
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self.node = rclpy.create_node("test_rig")
        self._calls = ReentrantCallbackGroup()  # a test's service that takes long holds up no call
        self._executor = ThreadedExecutor(4)
        self._executor.add_node(self.node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        for hosted in self._hosted:
            hosted.close()
        for close in self._at_end:
            close()
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._executor.shutdown(timeout_sec=1.0)
        self.node.destroy_node()
        rclpy.shutdown()

    def at_end(self, close: Callable[[], None]) -> None:
        """Call ``close`` when the rig is taken down, after the processes."""
        self._at_end.append(close)

    def _spin(self) -> None:
        while not self._stop.is_set():
            with suppress(InvalidHandle):  # another thread destroyed what was about to be waited for
                self._executor.spin_once(timeout_sec=0.1)

    def start(self, executable: str, remappings: Remappings = REMAPPINGS, **parameters: Any) -> Child:
        """Start a node as a process, with its shipped parameter file; ``__`` in a name stands for a dot."""
        program = [sys.executable, "-m", "dsd_lab.robot", executable]
        if executable == "go2_standin_node":
            given = [w for name, value in parameters.items() for w in ("-p", f"{name}:={json.dumps(value)}")]
            return self.group.start(executable, [*program, "--ros-args", *given])
        planned = _planned(executable, parameters, remappings)
        return self.group.start_planned(planned, program=program if executable in _ROBOTS else ())

    def host(self, executable: str, remappings: Remappings = REMAPPINGS, **parameters: Any) -> HostedNode:
        """As :meth:`start`, in this process: for tests that neither signal nor kill the node."""
        if self._log is None:
            self._log = self.node.create_subscription(Log, "/rosout", self._on_log, qos.LOG)
        if executable == "supervisor_node":
            parameters |= {"realtime": False}  # it would be this process's
        package = "dsd_lab.robot" if executable in _ROBOTS else "dsd_ros.nodes"
        arguments = self.group.node_arguments(_planned(executable, parameters, remappings))
        self._names.add(executable)
        self._hosted.append(HostedNode(f"{package}.{executable}", arguments))
        return self._hosted[-1]

    def _on_log(self, message: Log) -> None:
        """Keep a hosted node's line as a process would print it."""
        if message.name in self._names:
            level = {30: "WARN", 40: "ERROR"}.get(message.level, "INFO")  # Log.WARN is bytes in Humble
            self.lines.append(f"[{message.name}] [{level}] {message.msg}")

    def until(self, done: Callable[[], Any], timeout: float = PATIENCE_S, what: str = "") -> Any:
        """Poll until ``done()`` is true and return its value; fails with what the processes printed."""
        deadline = time.monotonic() + timeout
        while not (value := done()):
            if time.monotonic() > deadline:
                tail = "\n".join(self.lines[-30:])
                raise AssertionError(f"not within {timeout} s: {what or done}\n{tail}")
            time.sleep(0.01)
        return value

    def call(self, kind: type, name: str, request: Any, timeout: float = PATIENCE_S) -> Any:
        """Call a service and return its answer."""
        client = self.node.create_client(kind, name, callback_group=self._calls)
        try:
            self.until(client.service_is_ready, what=f"service {name}")
            self.until_known_to(name)
            future = client.call_async(request)
            self.until(future.done, timeout, f"answer of {name}")
            return future.result()
        finally:
            self.node.destroy_client(client)

    def ask(self, kind: type, name: str, request: Any) -> Any:
        """As :meth:`call`, for what changes nothing: asked again until it is answered.

        An answer is lost where the node has not found the client yet, a question where a killed node is not missed
        yet and its successor has not been found.
        """
        client = self.node.create_client(kind, name, callback_group=self._calls)
        futures: list[Any] = []
        due, pause = time.monotonic(), _ASK_AGAIN_S

        def answered() -> Any:
            nonlocal due, pause
            if time.monotonic() >= due and client.service_is_ready():
                due, pause = time.monotonic() + pause, min(_RARELY_S, 2.0 * pause)
                futures.append(client.call_async(request))
            return next((future for future in futures if future.done()), None)

        try:
            return self.until(answered, what=f"answer of {name}").result()
        finally:
            self.node.destroy_client(client)

    def until_known_to(self, service: str) -> None:
        """Wait until the node that offers ``service`` has found every client that this process has made so far.

        It drops the answers to others, and one of a call that changes something cannot be had by asking again. So a
        client made later is answered first: DDS tells of clients in the order in which they were made, and the node
        has found the earlier ones, too, then.
        """
        full = self.node.resolve_service_name(service)

        def server() -> str:
            for name, namespace in self.node.get_node_names_and_namespaces():
                with suppress(NodeNameNonExistentError):  # it has gone meanwhile
                    offers = self.node.get_service_names_and_types_by_node(name, namespace)
                    if full in (offered for offered, _ in offers):
                        return f"{namespace.rstrip('/')}/{name}"
            return ""

        self._until_found_by(self.until(server, what=f"a node that offers {service}"))

    def until_linked(self, node: str, *ends: Any) -> None:
        """Wait until ``node`` and these publishers and subscriptions of the test have found each other.

        A publisher that has found a subscription may still be unknown to it, and what it publishes is then dropped.
        So what is published only once is published after this.
        """

        def matched(end: Any) -> int:
            return end.get_subscription_count() if hasattr(end, "publish") else end.get_publisher_count()

        self.until(lambda: all(map(matched, ends)), what=f"the topics of {node}")
        self._until_found_by(node)

    def _until_found_by(self, node: str) -> None:
        """Wait until ``node`` has found all that this process has made so far: see :meth:`until_known_to`."""
        self.ask(ListParameters, f"{node}/list_parameters", ListParameters.Request())

    def set_parameter(self, node: str, name: str, value: Any) -> SetParametersResult:
        """As `ros2 param set`."""
        request = SetParameters.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
        (result,) = self.call(SetParameters, f"{node}/set_parameters", request).results
        return result

    def refused(self, node: str, name: str, value: Any) -> str:
        """Why a node refuses to set a parameter."""
        result = self.set_parameter(node, name, value)
        assert not result.successful, result
        return str(result.reason)

    def fault(self, text: str) -> None:
        """Inject a fault into the simulated robot, or end it: "camera freeze", "robot ok"."""
        if self._faults is None:
            self._faults = self.node.create_publisher(String, "simulator/fault", qos.STATE)

        def answered() -> int:
            return sum("faults: " in line or "is no fault" in line for line in self.lines)

        def robot() -> str:
            listeners = self.node.get_subscriptions_info_by_topic(self._faults.topic_name)
            return next((each.node_name for each in listeners if each.node_name in _ROBOTS), "")

        self.until_linked(self.until(robot, what="a robot that takes faults"), self._faults)
        said = answered()
        self._faults.publish(String(data=text))
        self.until(lambda: answered() > said, what=f"the fault '{text}'")

    def state(self, node: str) -> int:
        """The id of a lifecycle node's state, asked for until it is answered."""
        answer = self.ask(GetState, f"{node}/get_state", GetState.Request())
        return answer.current_state.id

    def change(self, node: str, *transitions: int) -> bool:
        """Lead a lifecycle node through transitions; False when one is refused.

        None can be asked for twice, and a node started again after a kill may not hear what is asked before it is
        found.
        """
        client = self.node.create_client(ChangeState, f"{node}/change_state", callback_group=self._calls)
        try:
            self.until_known_to(f"{node}/change_state")
            for transition in transitions:
                request = ChangeState.Request(transition=Transition(id=transition))
                future = client.call_async(request)
                self.until(future.done, what=f"transition {transition} of {node}")
                if not future.result().success:
                    return False
            return True
        finally:
            self.node.destroy_client(client)

    def until_active(self, name: str = "draft_node") -> None:
        """Wait until a lifecycle node is active."""
        watch = LifecycleWatch(self.node, name)
        try:
            self.until(watch.active, what=f"{name} active")
        finally:
            watch.close()


def _planned(executable: str, parameters: dict[str, Any], remappings: Remappings) -> Start:
    texts = {k.replace("__", "."): v if isinstance(v, bool) else str(v) for k, v in parameters.items()}
    return Start(executable, texts, remappings=remappings)


class CameraRig:
    """Publishes pictures as a robot's camera does. ``prefix``: of the robot's names, e.g. "go2_1/"."""

    def __init__(self, rig: Rig, prefix: str = "") -> None:
        self._rig, self._prefix = rig, prefix
        topic = f"{prefix}camera/image_raw"
        self._publisher = rig.node.create_publisher(Image, topic, qos.CAMERA)

    def show(self, picture: np.ndarray) -> Image:
        """Publish once, stamped now."""
        message = from_rgb(picture)
        message.header.stamp = self._rig.node.get_clock().now().to_msg()
        message.header.frame_id = "front_camera_optical_frame"
        self._publisher.publish(message)
        return message

    def ask(
        self, picture: np.ndarray, instruction: str, timeout: float = 30.0, patience: float = 10.0, **fields: Any
    ) -> Any:
        """Have a reply decoded about this very picture; AssertionError ``patience`` seconds after the time-out.

        ``fields``: what else the request says.
        """
        first = self.show(picture).header.stamp
        fields = {"instruction": instruction, "not_before": first, "timeout": to_duration(timeout)} | fields
        with repeating(lambda: self.show(picture)):
            request = Decode.Request(**fields)
            return self._rig.call(Decode, f"{self._prefix}dsd/decode", request, timeout + patience)


class OdometryRig:
    """What the robot reports: pose and velocity with the time they arrived."""

    def __init__(self, rig: Rig) -> None:
        self.samples: list[tuple[float, float, Any, Any]] = []  # (stamp, arrival, pose, velocity)
        rig.node.create_subscription(Odometry, "odom", self._on_odometry, qos.STATE)

    def _on_odometry(self, message: Odometry) -> None:
        stamp = seconds(message.header.stamp)
        self.samples.append((stamp, time.time(), pose_of(message), velocity_of(message)))

    @property
    def pose(self) -> Any:
        return self.samples[-1][2]

    @property
    def velocity(self) -> Any:
        return self.samples[-1][3]


@contextmanager
def repeating(act: Callable[[], Any], every: float = 0.1) -> Iterator[None]:
    """Act again and again meanwhile: what is published with best effort may be lost."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(every):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def picture(seed: int, height: int = 56, width: int = 84) -> np.ndarray:
    """A random picture."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class GoalClient:
    """A Navigate client whose requests and answers are handled by one thread.

    rclpy's ActionClient loses an answer that another thread takes before the asking one has noted the request.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._node = rclpy.create_node("goal_client")
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self._client = ActionClient(self._node, Navigate, "dsd/navigate")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()
        rig.at_end(self.close)

    def ready(self) -> bool:
        return self._client.server_is_ready()

    def send(self, feedback: Callable[[Any], None] | None = None, **goal: Any) -> Any:
        """Send a goal and return its handle."""
        message = Navigate.Goal(**{"instruction": "find the silver bottle"} | goal)
        self._rig.until_known_to("dsd/navigate/_action/send_goal")
        return self._run(lambda: self._client.send_goal_async(message, feedback))()

    def result(self, handle: Any, timeout: float = 60.0) -> Callable[[], Any]:
        """Ask for a goal's result; the returned function waits for it: (status, result)."""
        wait = self._run(handle.get_result_async, timeout)

        def finish() -> Any:
            answer = wait()
            return answer.status, answer.result

        return finish

    def cancel(self, handle: Any) -> None:
        self._run(handle.cancel_goal_async)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._executor.shutdown(timeout_sec=1.0)
        self._client.destroy()  # its node does not, and the participant's shared memory would stay
        self._node.destroy_node()

    def _run(self, ask: Callable[[], Any], timeout: float = PATIENCE_S) -> Callable[[], Any]:
        """Call ``ask``, which returns a future, in the spinning thread; the function waits for its result."""
        futures: list[Any] = []
        self._executor.create_task(lambda: futures.append(ask()))
        self._rig.until(lambda: futures, what="a request being sent")

        def wait() -> Any:
            self._rig.until(futures[0].done, timeout, "an answer of the navigation node")
            return futures[0].result()

        return wait

    def _spin(self) -> None:
        while not self._stop.is_set():
            with suppress(InvalidHandle):  # another thread destroyed what was about to be waited for
                self._executor.spin_once(timeout_sec=0.1)
