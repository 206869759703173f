#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send an instruction to a running robot, print what it does, and exit with 0 when it has arrived.

    python examples/navigate.py "find the silver bottle"

Ctrl-C cancels: the robot stops, and the program ends when the result says so; a second one ends it at once. Remaps and
namespaces as in every node: ``--ros-args -r __ns:=/go2_1``.
"""

import signal
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
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C is handled here
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
    shown, interrupted = 0, False

    def interrupt(*_) -> None:  # only notes it: an exception out of a callback could be lost, and the goal with it
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_feedback(message) -> None:
        nonlocal shown
        now = message.feedback
        if now.step != shown:
            shown = now.step
            moves = {NavAction.STOP: "stop", NavAction.FORWARD: f"{now.distance:.2f} m ahead"}
            print(f"{now.step}. {moves.get(now.kind) or f'turn by {now.angle:.2f} rad'}", flush=True)

    signal.signal(signal.SIGINT, interrupt)
    goal = client.send_goal_async(Navigate.Goal(instruction=instruction), on_feedback)
    rclpy.spin_until_future_complete(node, goal)
    handle, cancelled = goal.result(), None
    result = handle.get_result_async()
    while not result.done():
        if interrupted and cancelled is None:  # also when Ctrl-C came before the goal was accepted
            cancelled = handle.cancel_goal_async()
        rclpy.spin_until_future_complete(node, result, timeout_sec=0.1)
    answer = result.result()
    print(answer.result.message)
    return 0 if answer.status == GoalStatus.STATUS_SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
