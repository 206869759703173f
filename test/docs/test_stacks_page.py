# SPDX-License-Identifier: Apache-2.0
"""docs/topics.md and its examples: what is for our nodes is right, what is for others fits it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import yaml
from every import every
from graph import MANAGED
from pages import DOCS, ROOT, blocks
from test_topics_page import rows

from dsd_msgs.action import Navigate
from dsd_ros.ros.settings import NODES, parameter

PAGE = DOCS / "topics.md"
EXAMPLES = ROOT / "examples"


def parameter_files() -> list[dict[str, Any]]:
    texts = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    texts += [path.read_text() for path in (EXAMPLES / "nav2.yaml", ROOT / "config" / "nav2.yaml")]
    return [yaml.safe_load(text) for text in texts]


def section(node: str, key: str) -> Iterator[Any]:
    """The values of a parameter wherever the page and the examples set it."""
    for file in parameter_files():
        if node in file and key in (values := file[node]["ros__parameters"]):
            yield values[key]


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@every(parameter_files())
def test_parameter_files_are_ros_2s_and_our_nodes_know_theirs(file: dict[str, Any]) -> None:
    for name, content in file.items():
        assert content.keys() == {"ros__parameters"}
        node = name.removeprefix("/**/")
        assert (node in NODES) == name.startswith("/**/")
        for key, value in flat(content["ros__parameters"]) if node in NODES else ():
            assert parameter(node, key).allows(value), f"{name}: {key}"


def test_nav2s_velocities_go_to_the_supervisor_in_navigations_place() -> None:
    command = [
        topic
        for topic, (kind, source, drain, *_) in rows("topic").items()
        if kind.startswith("`geometry_msgs/Twist") and source == "`navigation`" and drain == "`supervisor`"
    ]
    assert set(section("collision_monitor", "cmd_vel_out_topic")) == set(command) and command != ["cmd_vel_nav"]
    assert any("collision_monitor" in each.get("commands", "") for each in section("/**/supervisor_node", "require"))


def test_spins_stay_within_the_supervisors_limit() -> None:
    for fastest in section("behavior_server", "max_rotational_vel"):
        assert fastest < parameter("supervisor_node", "limit.turn_rate").default


def test_the_lifecycle_manager_leads_lifecycle_nodes_without_bonds() -> None:
    (names,) = section("lifecycle_manager_dsd", "node_names")
    assert {name.removesuffix("_node") for name in names} <= set(MANAGED)
    assert list(section("lifecycle_manager_dsd", "bond_timeout")) == [0.0]


def test_the_behaviour_trees_ports_are_navigates_fields() -> None:
    root = ElementTree.parse(EXAMPLES / "bt" / "navigate.xml").getroot()
    assert root.get("BTCPP_format") == "4" and root.find(f"BehaviorTree[@ID='{root.get('main_tree_to_execute')}']")
    models = {model.get("ID"): model for model in root.iterfind("TreeNodesModel/Action")}
    ours = models["DsdNavigate"]
    inputs = {port.get("name") for port in ours.iterfind("input_port")}
    outputs = {port.get("name") for port in ours.iterfind("output_port")}
    assert inputs - {"server_name", "server_timeout"} == set(Navigate.Goal.get_fields_and_field_types())
    assert outputs <= set(Navigate.Result.get_fields_and_field_types())
    for node in root.iter():
        if node.tag in models:
            assert node.attrib.keys() <= {port.get("name") for port in models[node.tag]}
            assert node.get("server_name") in ("dsd/navigate", "navigate_to_pose")
