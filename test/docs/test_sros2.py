# SPDX-License-Identifier: Apache-2.0
"""deploy/sros2/policy.xml allows each node just what it creates."""

from __future__ import annotations

from collections import defaultdict
from xml.etree import ElementTree

import pytest
import rclpy
from graph import MANAGED, all_ends
from pages import ROOT
from rclpy.lifecycle import LifecycleNode

from dsd_ros.ros.record_topics import PICTURES, TOPICS, WHERE_THERE

WAYS = {"publish": "publishes", "subscribe": "listens", "reply": "serves", "request": "calls"}
# Not made by ``make_all``: what record_node finds when it runs, and what a setting adds.
FURTHER = {
    ("record_node", "listens"): {PICTURES, *TOPICS, *WHERE_THERE},
    ("record_node", "publishes"): {"/diagnostics"},
    ("view_node", "publishes"): {"/diagnostics"},
    ("view_node", "listens"): {"/rosout", "ground_truth/markers"},
    ("navigation_node", "publishes"): {"emergency_stop"},  # executor: nav2
    ("supervisor_node", "listens"): {"camera/camera_info"},  # require.camera: info
}
NOT_DEPLOYED = {"simulator_node"}
Allowed = dict[tuple[str, str], set[str]]


def policy() -> tuple[Allowed, dict[str, str]]:
    """(node, way) -> names; and the enclave of each node."""
    root = ElementTree.parse(ROOT / "deploy/sros2/policy.xml").getroot()
    assert (root.tag, root.get("version")) == ("policy", "0.2.0")
    found: Allowed = {}
    enclaves: dict[str, str] = {}
    for enclave in root.iterfind("enclaves/enclave"):
        for profile in enclave.iterfind("profiles/profile"):
            node = profile.get("node")
            assert profile.get("ns") == "/" and node not in enclaves
            enclaves[node] = enclave.get("path")
            for group in profile:
                ((way, rule),) = group.items()
                names = [one.text.replace("~", node) for one in group]
                assert rule == "ALLOW" and names == [
                    one.text.replace("~", node) for one in group.iterfind(group.tag[:-1])
                ]
                assert len(set(names)) == len(names) and (node, way) not in found
                found[node, way] = set(names)
    return found, enclaves


@pytest.fixture
def common(ros_domain: int) -> dict[bool, dict[str, set[str]]]:
    """What every node has by itself; True: every lifecycle node."""
    rclpy.init(args=[])
    try:
        found = {}
        for managed in (False, True):
            node = (LifecycleNode if managed else rclpy.create_node)("any_node")
            services = node.get_service_names_and_types_by_node("any_node", "/")
            topics = node.get_publisher_names_and_types_by_node("any_node", "/")
            found[managed] = {
                "serves": {name.removeprefix("/any_node/") for name, _ in services},
                "publishes": {name.removeprefix("/any_node/") for name, _ in topics},
            }
            node.destroy_node()
        return found
    finally:
        rclpy.shutdown()


def test_the_policy_allows_each_node_what_it_creates(common, ros_domain):
    made: dict[tuple[str, str], set[str]] = defaultdict(set)
    for end in all_ends():
        made[end.node, end.way].add(end.name)
    for place, names in FURTHER.items():
        made[place] |= names
    allowed, enclaves = policy()
    assert {node for node, _ in made} - NOT_DEPLOYED == enclaves.keys() - {"operator"}
    assert {path for node, path in enclaves.items() if node != "operator"} == {"/dsd/robot", "/dsd/verifier"}
    for node in enclaves.keys() - {"operator"}:
        own = common[node.removesuffix("_node") in MANAGED]
        wanted = {
            "publish": made[node, "publishes"] | _placed(node, own["publishes"]),
            "subscribe": made[node, "listens"] | {"/clock"},  # use_sim_time
            "reply": made[node, "serves"] | _placed(node, own["serves"]),
            "request": made[node, "calls"],
        }
        for way, names in wanted.items():
            assert allowed.get((node, way), set()) == names, (node, way)
    assert {node: names for (node, way), names in allowed.items() if way == "execute"} == {
        "navigation_node": {"dsd/navigate"}
    }
    assert allowed["navigation_node", "call"] == {"drive_on_heading", "navigate_to_pose", "spin"}  # executor: nav2


def test_the_operator_may_not_command_the_robot_past_the_supervisor():
    allowed, enclaves = policy()
    assert enclaves["operator"] == "/dsd/operator"
    assert allowed["operator", "publish"] & {"cmd_vel", "cmd_vel_dsd", "dsd/nav_action", "odom", "dsd/outcome"} == set()
    assert {node for (node, way), names in allowed.items() if way == "publish" and "cmd_vel" in names} == {
        "supervisor_node"
    }
    assert allowed["operator", "call"] == {"dsd/navigate"}
    heard = {name for (_, way), names in allowed.items() if way in ("publish", "reply") for name in names}
    assert allowed["operator", "request"] <= heard and allowed["operator", "subscribe"] - {"/clock"} <= heard


def _placed(node: str, names: set[str]) -> set[str]:
    """Names of a node of its own as the policy writes them; absolute ones stay."""
    return {name if name.startswith("/") else f"{node}/{name}" for name in names}
