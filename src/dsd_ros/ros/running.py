# SPDX-License-Identifier: Apache-2.0
"""Run one node as a process: executor, signals, logging, priority, and a clean shutdown within a second.

Exit codes: 0 after SIGINT or SIGTERM; 1 when the node gave up, or did not close in time (its traceback is printed where
native code holds the interpreter); 2 when it could not start (parameters, models). A failure is one sentence.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rclpy
from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.context import Context
from rclpy.exceptions import InvalidHandle, InvalidParameterTypeException, ParameterException
from rclpy.executors import (
    Executor,
    ExternalShutdownException,
    ShutdownException,
    SingleThreadedExecutor,
    TimeoutException,
)
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Task
from rclpy.timer import Timer

from dsd_ros.environment import EXIT_BAD_START as EXIT_BAD_START  # with the other codes
from dsd_ros.logs import ROOT, fields_of
from dsd_ros.ros.topic_node import TopicNode
from dsd_ros.ros.transport import use_udp
from dsd_ros.shown import LINES, shown

RCLError = rclpy_implementation.RCLError

EXIT_OK = 0
EXIT_GAVE_UP = 1

NOT_CLOSED = "it could not close"  # printed where the process ends before it has given back what it holds
_HELD_S = 0.4  # extra time before a hang in native code is reported


def steady_timer(
    node: Node, period: float, callback: Callable[[], object], group: CallbackGroup | None = None
) -> Timer:
    """A timer on the steady clock (s): a simulator that dies takes /clock with it, and the timer must outlive it."""
    return node.create_timer(period, callback, group, clock=Clock(clock_type=ClockType.STEADY_TIME))


def companion(owner: Node, suffix: str) -> Node:
    """A second node, ``_<owner>_<suffix>``, for topics that must not wait for the first one's executor.

    It is in the owner's context and namespace, without services, clock or log of its own. The underscore hides it from
    ``ros2 node list``; ``--all`` shows it.
    """
    name = f"_{owner.get_name()}_{suffix}"
    quiet = [Parameter("start_type_description_service", value=False), Parameter("use_sim_time", value=False)]
    options = named(name, owner) | {"enable_rosout": False, "start_parameter_services": False}
    return TopicNode(name, **options, parameter_overrides=quiet)


def named(name: str, beside: Node) -> dict[str, Any]:
    """Arguments of a Node that is to have this name in the process and namespace of another."""
    # A remapped name is meant for the other node alone; its other remappings hold here too.
    arguments = ["--ros-args", "-r", f"__node:={name}"]
    return {"context": beside.context, "namespace": beside.get_namespace(), "cli_args": arguments}


class StartError(RuntimeError):
    """The node cannot start; one sentence with the remedy."""


class RunnableNode(TopicNode):
    """A node that :func:`run_node` runs."""

    failure: str | None = None  # set to a sentence to end the process; close() may still set it
    exit_code = EXIT_GAVE_UP  # after a failure
    close_s = 0.9  # within which `close` ends; a hanging callback must not delay the exit beyond it
    guests: Sequence[Node] = ()  # other nodes of this process

    def close(self) -> None:
        """Stop threads, bring the robot to rest, release devices and sockets."""


class _Interrupted(BaseException):
    """SIGINT or SIGTERM while the node was being constructed."""


def run_node(
    make: Callable[[], RunnableNode],
    args: Sequence[str] | None = None,
    threads: int = 1,
    events: bool = False,
    wake_s: float = 0.1,
) -> int:
    """Construct a node, spin it until a signal or its own failure, close it. Returns the exit code.

    The node has ``failure``, None or a sentence that ends the process, and ``close()``, which stops its threads,
    brings the robot to rest and releases devices and sockets.

    :param threads: above 1, callbacks of different groups run in parallel.
    :param events: use rclpy's single-threaded EventsExecutor where available: a third of the processor time, so a
        busy machine delays the node less.
    :param wake_s: maximum delay before a signal or failure is noticed, s; shorter costs processor time.
    """
    stop = threading.Event()
    starting = True

    def on_signal(*_: object) -> None:
        stop.set()
        if starting:
            raise _Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    node: RunnableNode | None = None
    try:
        use_udp(os.environ)
        # rclpy's own handlers would invalidate the context before a last command can be published.
        rclpy.init(args=None if args is None else list(args), signal_handler_options=SignalHandlerOptions.NO)
        node = make()
        starting = False
    except _Interrupted:
        return _leave(None, EXIT_OK)
    except InvalidParameterTypeException as error:  # of a parameter that ROS itself declares, such as use_sim_time
        return _cannot_start(f"{error}; correct it in the parameter file (true and false without quotes)")
    except (ValueError, RuntimeError, OSError, ParameterException) as error:
        return _cannot_start(str(error))
    executor = executor_of(threads, events)
    for each in (node, *node.guests):
        executor.add_node(each)
    while not stop.is_set() and node.failure is None:
        try:
            executor.spin_once(timeout_sec=wake_s)
        except InvalidHandle:  # Humble's, for what a callback destroyed just before its turn
            continue
        except RCLError as error:  # e.g. a lifecycle transition that the node's state does not allow
            node.get_logger().error(f"refused by ROS: {error}", throttle_duration_sec=1.0)
    code = _reported(node)
    cancel = _force_end_later(node.close_s)
    _close(node, executor)
    code = code or _reported(node)  # what only closing brought to light
    executor.shutdown(timeout_sec=0.1)
    code = _leave(node, code)
    cancel()
    return code


def _reported(node: RunnableNode) -> int:
    """Log the node's failure, if there is one; returns the exit code."""
    if node.failure is None:
        return EXIT_OK
    node.get_logger().error(node.failure)
    return node.exit_code


def _cannot_start(sentence: str) -> int:
    print(f"{_program()}: {shown(' '.join(sentence.split()))}", file=sys.stderr, flush=True)
    return _leave(None, EXIT_BAD_START)


def executor_of(threads: int, events: bool = False) -> Executor:
    """What spins a node; see :func:`run_node`."""
    if events:
        try:
            from rclpy.experimental import EventsExecutor
        except ImportError:  # Humble
            return SingleThreadedExecutor()
        return EventsExecutor()
    return SingleThreadedExecutor() if threads == 1 else ThreadedExecutor(threads)


def run_main(make: Callable[[], RunnableNode], threads: int = 1, events: bool = False, wake_s: float = 0.1) -> None:
    """Entry point of a node's executable; never returns."""
    code = run_node(make, threads=threads, events=events, wake_s=wake_s)
    sys.stdout.flush()
    sys.stderr.flush()
    # Waiting for the threads of the middleware and the models can hang.
    os._exit(code)


def _close(node: RunnableNode, executor: Executor) -> None:
    """Close the node while it still spins, so that its last result and command are sent."""
    closer = threading.Thread(target=node.close, name="closer", daemon=True)
    closer.start()
    while closer.is_alive():
        executor.spin_once(timeout_sec=0.02)
    for _ in range(5):
        executor.spin_once(timeout_sec=0.01)


def _leave(node: RunnableNode | None, code: int) -> int:
    if node is not None:
        for each in (*node.guests, node):
            each.destroy_node()
    if rclpy.ok():
        rclpy.shutdown()
    return code


def _force_end_later(limit: float) -> Callable[[], None]:
    """Let the process fail after ``limit`` s whatever hangs; print a traceback if native code holds the interpreter.

    Returns a function that cancels this.
    """

    def force() -> None:
        print(f"{_program()}: {NOT_CLOSED} within {limit} s; ended as it is", file=sys.stderr, flush=True)
        os._exit(EXIT_GAVE_UP)

    faulthandler.dump_traceback_later(limit + _HELD_S, exit=True, file=sys.__stderr__ or 2)
    timer = threading.Timer(limit, force)
    timer.daemon = True
    timer.start()

    def cancel() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return cancel


def _program() -> str:
    return Path(sys.argv[0]).stem


class ThreadedExecutor(Executor):
    """Runs callbacks of different groups in parallel, in at most ``threads`` threads, each submitted once.

    rclpy's MultiThreadedExecutor submits a callback again and again until a thread has begun it
    (https://github.com/ros2/rclpy/issues/1452, fixed after https://github.com/ros2/rclpy/pull/1547): its main loop uses
    a whole core and holds the GIL. A node that received 100 messages a second fell half a second behind.
    An exception in a callback is raised by a later :meth:`spin_once`, as in rclpy's executors.
    """

    def __init__(self, threads: int, context: Context | None = None) -> None:
        super().__init__(context=context)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="callback")
        self._submitted: dict[Task, tuple[Future[None], threading.Event]] = {}

    def spin_once(self, timeout_sec: float | None = None) -> None:
        """Submit the next callback, and wait until a thread has begun it."""
        self._settle()
        try:
            task, _, _ = self.wait_for_ready_callbacks(timeout_sec=timeout_sec)
        except (TimeoutException, ShutdownException, ExternalShutdownException):
            return
        if task not in self._submitted:
            begun = threading.Event()
            self._submitted[task] = self._pool.submit(_run, task, begun), begun
        self._submitted[task][1].wait(timeout_sec)

    def _settle(self) -> None:
        for task, (run, _) in list(self._submitted.items()):
            if run.done():
                del self._submitted[task]
                if task.done():
                    task.result()  # raises what the callback raised

    def shutdown(self, timeout_sec: float | None = None) -> bool:
        """Start no more callbacks. Returns False when running ones do not end within the timeout (s)."""
        ended = super().shutdown(timeout_sec)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return ended


def _run(task: Task, begun: threading.Event) -> None:
    begun.set()
    task()


class NodeLog(logging.Handler):
    """Forwards the package's log lines, with their fields, to the node's logger and so to /rosout; until closed."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._logger = node.get_logger()
        package = logging.getLogger(ROOT)
        self._before = package.level
        package.setLevel(int(self._logger.get_effective_level()))
        package.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        about = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = shown(record.getMessage() + about)
        if record.exc_info:
            line += "\n" + shown(logging.Formatter().formatException(record.exc_info), keep=LINES)
        # rclpy requires a separate call site per severity.
        if record.levelno >= logging.ERROR:
            self._logger.error(line)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(line)
        elif record.levelno >= logging.INFO:
            self._logger.info(line)
        else:
            self._logger.debug(line)

    def close(self) -> None:
        package = logging.getLogger(ROOT)
        if self in package.handlers:
            package.removeHandler(self)
            package.setLevel(self._before)
        super().close()


_PRIORITY = 1  # the lowest real-time priority already precedes every ordinary process


def ask_for_realtime(inherited: bool = True) -> bool:
    """Give all threads of this process real-time scheduling, so that busy models cannot delay the safety supervisor.

    :param inherited: later threads and child processes get it, too.

    Returns False where it is unavailable or not permitted; it takes CAP_SYS_NICE or e.g. systemd's LimitRTPRIO=1.
    """
    if not hasattr(os, "SCHED_RR"):
        return False
    return _schedule(os.SCHED_RR if inherited else os.SCHED_RR | os.SCHED_RESET_ON_FORK, _PRIORITY)


def end_realtime() -> None:
    """Return to ordinary scheduling."""
    if hasattr(os, "SCHED_OTHER"):
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> bool:
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
    except OSError:
        return False
    return True
