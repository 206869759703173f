"""`dsd record`."""

from __future__ import annotations

import argparse

SUMMARY = "record a running system into a bag that can be inspected and replayed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.observe.bag.writer import STORAGES

    parser.epilog = "Ends with Ctrl-C. Pictures are kept as PNG: JPEG would lose what an exact replay takes."
    parser.add_argument("directory", metavar="DIR", help="folder to make; it must not be there yet")
    parser.add_argument(
        "--storage", choices=tuple(STORAGES), default="mcap", help="file format of the bag (default: %(default)s)"
    )
    parser.add_argument(
        "--camera-hz",
        type=float,
        default=0.0,
        metavar="HZ",
        help="pictures kept per second, beside those that replies are about; 0: all of them (default: 0)",
    )
    parser.add_argument(
        "--topic", action="append", default=[], metavar="NAME", help="record this topic, too; may be repeated"
    )
    parser.add_argument(
        "--namespace", default="", metavar="NAME", help="ROS namespace of the robot, e.g. go2_1 (default: none)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="end after so long (default: with Ctrl-C)"
    )
    parser.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    import os
    import signal
    import threading

    from dsd_ros.nodes.record_node import RecordNode
    from dsd_ros.ros.bringup import PER_ROBOT
    from dsd_ros.ros.running import run_node

    given = {
        "directory": args.directory,
        "storage": args.storage,
        "camera_hz": args.camera_hz,
        "topics": ",".join(args.topic),
    }
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
