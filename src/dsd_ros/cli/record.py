# SPDX-License-Identifier: Apache-2.0
"""`dsd record`."""

from __future__ import annotations

import os
import signal
import threading

from dsd_ros.cli.arguments import arguments, flag, word


@arguments
class RecordArguments:
    directory: str = word(text="folder to make; it must not exist yet")
    camera_hz: float = flag(
        0.0, "pictures to keep per second, besides those that replies are about; 0: all of them", metavar="HZ"
    )
    topic: list[str] = flag([], "record this topic as well; may be repeated", metavar="NAME")
    namespace: str = flag("", "ROS namespace of the robot, e.g. go2_1 (default: none)", metavar="NAME")
    seconds: float = flag(0.0, "how long to record; 0: until Ctrl-C", metavar="S")


def command(args: RecordArguments) -> int:
    """Record a running system into a bag that can be inspected and replayed.

    Ends with Ctrl-C; exits with 1 when the bag lacks messages, e.g. because the disk was full. Raw pictures are kept as
    PNG, since JPEG would lose what an exact replay needs; compressed ones are kept as they come.
    """
    from dsd_ros.environment import check_environment

    check_environment()
    from dsd_ros.bringup.systems import PER_ROBOT
    from dsd_ros.nodes.record_node import RecordNode
    from dsd_ros.ros.running import run_node

    given = {"directory": args.directory, "camera_hz": args.camera_hz, "topics": ",".join(args.topic)}
    if args.seconds > 0.0:
        end = threading.Timer(args.seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        end.daemon = True
        end.start()
    name = args.namespace.strip("/")
    ros = []
    if name:
        renamed = [f"{topic}:={topic[1:]}" for topic in PER_ROBOT]
        ros = ["--ros-args", *(word for rule in (f"__ns:=/{name}", *renamed) for word in ("-r", rule))]
    return run_node(lambda: RecordNode(given), args=ros)
