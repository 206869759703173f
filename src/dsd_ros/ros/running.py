"""Runs one node as a process: signals, clean end within a second, exit codes, one sentence per
failure.

Exit codes: 0 after SIGINT or SIGTERM; 1 when the node gave up, or hung at its end in native code that kept the
interpreter (what hung is said); 2 when it could not start (parameters, models).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import rclpy
from rclpy.exceptions import InvalidParameterValueException
from rclpy.executors import Executor, SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from dsd_ros.ros.threaded_executor import ThreadedExecutor

RCLError = rclpy_implementation.RCLError

EXIT_OK = 0
EXIT_GAVE_UP = 1
EXIT_BAD_START = 2

_END_LIMIT_S = 0.9  # a callback that hangs must not keep the process past this
_HELD_S = 0.4  # later than that: no Python runs, native code keeps the interpreter


class StartError(RuntimeError):
    """A node that cannot start; one sentence with the remedy."""


class RunnableNode(Protocol):
    """What :func:`run_node` needs beside rclpy's Node."""

    failure: str | None  # a sentence once the node has given up; ends the process

    def close(self) -> None:
        """Stop threads, leave the robot at rest, give devices and sockets back."""
        ...


class _Interrupted(BaseException):
    """SIGINT or SIGTERM while the node was still being built."""


def run_node(
    make: Callable[[], Node],
    args: Sequence[str] | None = None,
    threads: int = 1,
    events: bool = False,
    wake_s: float = 0.1,
) -> int:
    """Build a node, spin it until a signal or its own failure, close it. Returns the exit code.

    :param threads: above 1, callbacks in different groups run side by side.
    :param events: one thread, woken by events instead of by asking every entity, where rclpy has that: a third
        of the processor time, so that a busy machine delays the node less.
    :param wake_s: longest time from a signal or a failure to the node's end, s; to look for them costs time, too.
    """
    stop = threading.Event()
    starting = True

    def on_signal(*_: object) -> None:
        stop.set()
        if starting:
            raise _Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    node: Node | None = None
    try:
        # rclpy's own handlers would invalidate the context before a last command can be published.
        rclpy.init(args=None if args is None else list(args), signal_handler_options=SignalHandlerOptions.NO)
        node = make()
        starting = False
    except _Interrupted:
        return _leave(None, EXIT_OK)
    except (ValueError, RuntimeError, OSError, InvalidParameterValueException) as error:
        print(f"{_program()}: {error}", file=sys.stderr, flush=True)
        return _leave(None, EXIT_BAD_START)
    executor = _executor(threads, events)
    for each in (node, *getattr(node, "guests", ())):
        executor.add_node(each)
    while not stop.is_set() and node.failure is None:  # type: ignore[attr-defined]
        try:
            executor.spin_once(timeout_sec=wake_s)
        except RCLError as error:  # e.g. a lifecycle transition that the node's state does not allow
            node.get_logger().error(f"refused by ROS: {error}")
    code = EXIT_OK
    if node.failure is not None:  # type: ignore[attr-defined]
        node.get_logger().error(node.failure)  # type: ignore[attr-defined]
        code = getattr(node, "exit_code", EXIT_GAVE_UP)
    spare = _force_end_later(code)
    _close(node, executor)
    executor.shutdown(timeout_sec=0.1)
    code = _leave(node, code)
    spare()
    return code


def _executor(threads: int, events: bool) -> Executor:
    if events:
        try:
            from rclpy.experimental import EventsExecutor
        except ImportError:  # before Jazzy
            return SingleThreadedExecutor()
        return EventsExecutor()
    return SingleThreadedExecutor() if threads == 1 else ThreadedExecutor(threads)


def main(make: Callable[[], Node], threads: int = 1, events: bool = False, wake_s: float = 0.1) -> None:
    """Entry point of a node's executable: never returns."""
    code = run_node(make, threads=threads, events=events, wake_s=wake_s)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the middleware and of the models are daemons in all but name; waiting for them can
    # hang.
    os._exit(code)


def _close(node: Node, executor: Executor) -> None:
    """Close the node while it still spins, so that a last result and a last command get out."""
    closer = threading.Thread(target=node.close, name="closer", daemon=True)  # type: ignore[attr-defined]
    closer.start()
    while closer.is_alive():
        executor.spin_once(timeout_sec=0.02)
    for _ in range(5):
        executor.spin_once(timeout_sec=0.01)


def _leave(node: Node | None, code: int) -> int:
    if node is not None:
        for each in (*getattr(node, "guests", ()), node):
            each.destroy_node()
    if rclpy.ok():
        rclpy.shutdown()
    return code


def _force_end_later(code: int) -> Callable[[], None]:
    """End the process in a while, whatever hangs; also what holds the interpreter, and then say what it was.

    Returns what calls that off.
    """
    faulthandler.dump_traceback_later(_END_LIMIT_S + _HELD_S, exit=True, file=sys.__stderr__)
    timer = threading.Timer(_END_LIMIT_S, lambda: os._exit(code))
    timer.daemon = True
    timer.start()

    def spare() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return spare


def _program() -> str:
    return os.path.splitext(os.path.basename(sys.argv[0]))[0]
