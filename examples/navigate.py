#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send an instruction to a running robot, print what it does, and exit with 0 when it has arrived.

    python examples/navigate.py "find the silver bottle"

Ctrl-C cancels: the robot stops, and the program ends when the result says so. Remaps and namespaces as in every node:
``--ros-args -r __ns:=/go2_1``.
"""

import sys

import rclpy
from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from dsd_msgs.action import Navigate
from dsd_msgs.msg import NavAction


def main() -> int:
    words = remove_ros_args(sys.argv)[1:]
    if len(words) != 1:
        print('usage: navigate.py "INSTRUCTION" [--ros-args ...]', file=sys.stderr)
        return 2
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C raises KeyboardInterrupt here
    node = rclpy.create_node("navigate_example")
    client = ActionClient(node, Navigate, "dsd/navigate")
    try:
        return navigate(node, client, words[0])
    finally:
        client.destroy()
        node.destroy_node()
        rclpy.shutdown()


def navigate(node, client, instruction: str) -> int:
    if not client.wait_for_server(timeout_sec=10.0):
        print("No node offers the action 'dsd/navigate': start the robot's nodes.", file=sys.stderr)
        return 1
    shown = 0

    def on_feedback(message) -> None:
        nonlocal shown
        now = message.feedback
        if now.step != shown:
            shown = now.step
            moves = {NavAction.STOP: "stop", NavAction.FORWARD: f"{now.distance:.2f} m ahead"}
            print(f"{now.step}. {moves.get(now.kind) or f'turn by {now.angle:.2f} rad'}", flush=True)

    handle = wait(node, client.send_goal_async(Navigate.Goal(instruction=instruction), on_feedback))
    result = handle.get_result_async()
    while not result.done():
        try:
            wait(node, result)
        except KeyboardInterrupt:
            handle.cancel_goal_async()
    answer = result.result()
    print(answer.result.message)
    return 0 if answer.status == GoalStatus.STATUS_SUCCEEDED else 1


def wait(node, future):
    rclpy.spin_until_future_complete(node, future)
    return future.result()


if __name__ == "__main__":
    sys.exit(main())
