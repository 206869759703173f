# SPDX-License-Identifier: Apache-2.0
"""`dsd record`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from dsd_ros.cli.arguments import arguments, flag, word
from dsd_ros.cli.shared import EXIT_BAD_INPUT, EXIT_GOAL_MISSED, CommandError
from dsd_ros.cli.terminal import is_terminal, working
from dsd_ros.shown import counted, shown


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

    Ends with Ctrl-C; exits with 1 when the bag lacks messages, e.g. because the disk was full, or no robot
    was heard. Raw pictures are kept as
    PNG, since JPEG would lose what an exact replay needs; compressed ones are kept as they come.
    """
    from dsd_ros.environment import check_environment

    check_environment()
    from dsd_ros.bringup.systems import PER_ROBOT
    from dsd_ros.nodes.record_node import RecordNode
    from dsd_ros.observe.bag.writer import BagWriter
    from dsd_ros.ros.record_topics import TOPICS, WHERE_THERE
    from dsd_ros.ros.running import run_node

    given = {"directory": args.directory, "camera_hz": args.camera_hz, "topics": ",".join(args.topic)}
    if args.seconds > 0.0:
        end = threading.Timer(args.seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        end.daemon = True
        end.start()
    name = args.namespace.strip("/")
    ros = ["--ros-args"] + ["--log-level", "warn"] * is_terminal(sys.stderr)  # a line on the terminal says the rest
    if name:
        renamed = [f"{topic}:={topic[1:]}" for topic in PER_ROBOT]
        ros += [*(word for rule in (f"__ns:=/{name}", *renamed) for word in ("-r", rule))]
    nodes: list[RecordNode] = []

    def make() -> RecordNode:
        nodes.append(RecordNode(given))
        return nodes[0]

    def said(bag: BagWriter) -> str:
        size = sum(file.stat().st_size for file in bag.folder.iterdir())
        messages = f"{counted(sum(bag.counts.values()), 'message')} on {counted(len(bag.counts), 'topic')}"
        return shown(f"{bag.folder}: {time.monotonic() - began:.0f} s, {messages}, {size / 1e6:.1f} MB")

    def show() -> None:
        while not over.wait(0.5):
            if nodes and nodes[0].bag is not None:
                say(f"recording into {said(nodes[0].bag)}")

    began, over = time.monotonic(), threading.Event()
    with working("starting the recorder") as say:
        line = threading.Thread(target=show, daemon=True)
        line.start()
        code = run_node(make, args=ros)
        over.set()
        line.join()
    if code == EXIT_BAD_INPUT or not nodes or nodes[0].bag is None:
        return code
    print(f"recorded {said(nodes[0].bag)} (dsd inspect {shown(args.directory)})", flush=True)
    if not nodes[0].bag.counts.keys() - {*TOPICS, *WHERE_THERE}:  # these are of all robots: the others have full names
        domain = os.environ.get("ROS_DOMAIN_ID", "0")
        raise CommandError(
            f"nothing was heard of a robot in namespace '/{name}' and ROS domain {domain}; name the "
            "robot's own with --namespace and ROS_DOMAIN_ID",
            EXIT_GOAL_MISSED,
        )
    return code
