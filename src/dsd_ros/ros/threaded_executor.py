"""Runs callbacks in threads, each handed over once.

rclpy's own MultiThreadedExecutor hands a callback to its threads again and again until one of them has begun it, and
asks every entity anew each time (https://github.com/ros2/rclpy/issues/1452, mended in releases behind
https://github.com/ros2/rclpy/pull/1547): its main loop takes a whole core then and, holding the interpreter's lock,
keeps the threads from what it waits for. A node that hears 100 messages a second fell half a second behind.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from rclpy.context import Context
from rclpy.executors import Executor, ExternalShutdownException, ShutdownException, TimeoutException
from rclpy.task import Task

__all__ = ["ThreadedExecutor"]


class ThreadedExecutor(Executor):
    """Callbacks in different groups run side by side, in ``threads`` threads at most.

    An exception in a callback is raised by a later :meth:`spin_once`, as rclpy's executors do.
    """

    def __init__(self, threads: int, context: Context | None = None) -> None:
        super().__init__(context=context)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="callback")
        self._handed: dict[Task, tuple[Future[None], threading.Event]] = {}

    def spin_once(self, timeout_sec: float | None = None) -> None:
        """Hand over the next callback, and wait until a thread has begun it."""
        self._settle()
        try:
            task, _, _ = self.wait_for_ready_callbacks(timeout_sec=timeout_sec)
        except (TimeoutException, ShutdownException, ExternalShutdownException):
            return
        if task not in self._handed:
            begun = threading.Event()
            self._handed[task] = self._pool.submit(_run, task, begun), begun
        self._handed[task][1].wait(timeout_sec)

    def _settle(self) -> None:
        for task, (run, _) in list(self._handed.items()):
            if run.done():
                del self._handed[task]
                if task.done():
                    task.result()  # raises what the callback raised

    def shutdown(self, timeout_sec: float | None = None) -> bool:
        """Begin no more callbacks. Returns False when those that run have not ended in time (s)."""
        ended = super().shutdown(timeout_sec)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return ended


def _run(task: Task, begun: threading.Event) -> None:
    begun.set()
    task()
