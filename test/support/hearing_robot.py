# SPDX-License-Identifier: Apache-2.0
"""A robot's end of the DDS topics that prints what it hears: ``python hearing_robot.py REQUEST``.

It opens a session, and prints a line "ROUND TOKEN" for each outcome.
"""

from __future__ import annotations

import contextlib
import sys

import rclpy

from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.messages import PROTOCOL_VERSION, Outcome, SessionReply, SessionRequest


def main(request: int) -> None:
    rclpy.init()
    channel = DdsChannel(rclpy.create_node(f"robot_{request}"))
    session = 0
    while True:
        if not session:  # asked again, as a session does: a verifier that has not found this robot yet does not hear it
            with contextlib.suppress(LinkClosed):
                channel.send(SessionRequest(request, PROTOCOL_VERSION, "fsd", "", 8, 0.0, 0, 1.0, 0, 64))
        with contextlib.suppress(LinkTimeout):
            message = channel.receive(60.0 if session else 1.0)
            if isinstance(message, SessionReply) and message.request == request:
                session = message.session
                print("open", flush=True)
            elif isinstance(message, Outcome) and message.session == session:
                print(message.round, message.next_token, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
