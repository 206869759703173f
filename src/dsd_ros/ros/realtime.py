"""Real-time scheduling for the process that stops the robot, so that busy models cannot delay it."""

from __future__ import annotations

import os

_LEAST = 1  # any real-time priority comes before every ordinary process


def ask_for_realtime(inherited: bool = True) -> bool:
    """Give every thread of this process real-time scheduling.

    :param inherited: threads and processes that are started later have it, too.

    False where the system does not have it or does not allow it: that takes CAP_SYS_NICE, or a limit such as
    systemd's LimitRTPRIO=1.
    """
    if not hasattr(os, "SCHED_RR"):
        return False
    return _schedule(os.SCHED_RR if inherited else os.SCHED_RR | os.SCHED_RESET_ON_FORK, _LEAST)


def end_realtime() -> None:
    """Back to ordinary scheduling."""
    if hasattr(os, "SCHED_OTHER"):
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> bool:
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
    except OSError:
        return False
    return True
