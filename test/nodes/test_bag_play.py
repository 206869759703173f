"""A shipped bag, played as `ros2 bag play --clock` does, drives the real nodes to the recorded replies, and RViz."""

from __future__ import annotations

from pathlib import Path

from bag_player import BagPlayer
from builtin_interfaces.msg import Time
from sensor_msgs.msg import Image

from dsd_msgs.srv import Decode
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.replay import history_of
from dsd_ros.observe.bag.run import read_run
from dsd_ros.ros import qos

BAGS = Path(__file__).parents[1] / "bags"
EARLY_S = 0.15  # a reply is asked for so much before its picture is due


def stamp(at: int) -> Time:
    return Time(sec=at // 10**9, nanosec=at % 10**9)


def test_a_played_bag_gives_the_recorded_replies(rig):
    run = read_run(open_bag(BAGS / "straight"))
    player = BagPlayer(rig.node, BAGS / "straight")
    rig.start("verifier_node", use_sim_time=True)
    rig.start("draft_node", use_sim_time=True)
    rig.start("visual_node", use_sim_time=True)
    drawn: list[Image] = []
    rig.node.create_subscription(Image, "visual/image", drawn.append, qos.NEWEST_STATE)
    rig.until_active()
    rig.until_known_to("decode")
    client = rig.node.create_client(Decode, "decode")
    rig.until(client.service_is_ready)
    player.rate = 20.0
    player.start()
    try:
        for step in run.steps:
            due = step.stamp - int(EARLY_S * 1e9)
            rig.until(lambda due=due: player.now >= due - int(2e9), what="the bag near a step")
            player.rate = 1.0
            rig.until(lambda due=due: player.now >= due, what="the bag at a step")
            request = Decode.Request(instruction=step.instruction, not_before=stamp(step.stamp), timeout=60.0)
            history = history_of(run, step)
            request.history_stamps = [stamp(at) for at, _ in history]
            request.history_actions = [action for _, action in history]
            future = client.call_async(request)
            rig.until(lambda due=due: player.now >= due + int(0.5e9), what="the picture of a step")
            player.held = True  # a reply may take longer here than it did there
            rig.until(future.done, what=f"the reply of step {step.number}")
            player.held = False
            answer = future.result()
            assert answer.success, answer.message
            assert answer.observation_stamp == stamp(step.stamp)
            assert (answer.text, answer.stats.tokens) == (step.text, len(step.tokens))
    finally:
        player.close()
    rig.until(lambda: drawn, what="an overlaid picture")
    assert not any("Traceback" in line for line in rig.lines)
