# SPDX-License-Identifier: Apache-2.0
"""Parameters that change while nodes run, over their own services as `ros2 param` calls them."""

from __future__ import annotations

from ros_rig import CameraRig, picture
from rosgraph_msgs.msg import Clock

from dsd_ros.nodes.supervisor_node import SupervisorNode
from dsd_ros.ros import qos


def test_the_next_reply_has_the_new_mode(rig, tiny_pair):
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.host("draft_node", model__path=tiny_pair[1], decode__max_tokens=12)
    camera, image = CameraRig(rig), picture(3)
    rig.until_active()
    before = camera.ask(image, "find the silver bottle")
    assert before.success and before.stats.mode == "stream"
    assert "choose from stream, ar, dsd" in rig.refused("draft_node", "decode.mode", "dds")
    for mode in ("ar", "fsd"):
        assert rig.set_parameter("draft_node", "decode.mode", mode).successful
        answer = camera.ask(image, "find the silver bottle")
        assert (answer.success, answer.stats.mode, answer.text) == (True, mode, before.text), answer.message
    assert rig.set_parameter("draft_node", "decode.max_tokens", 4).successful
    assert camera.ask(image, "find the silver bottle").stats.tokens == 4


def test_the_clock_may_be_chosen_while_the_node_runs(rig):
    node = SupervisorNode()
    clock = rig.node.create_publisher(Clock, "/clock", qos.CLOCK)
    rig._executor.add_node(node)
    try:
        assert rig.set_parameter("supervisor_node", "use_sim_time", True).successful

        message = Clock()
        message.clock.sec = 77

        def simulated() -> bool:
            clock.publish(message)
            return bool(node.get_clock().now().nanoseconds == 77 * 10**9)

        rig.until(simulated, what="simulated time")
        assert rig.set_parameter("supervisor_node", "use_sim_time", False).successful
        assert node.get_clock().now().nanoseconds > 10**18
    finally:
        rig._executor.remove_node(node)
        node.close()
        node.destroy_node()
