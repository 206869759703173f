# SPDX-License-Identifier: Apache-2.0
"""The systems as plain tables: their launch arguments, the processes that they start, and what each argument sets.

`dsd demo` and the process runner start a system from here. The files under launch/ take the arguments and parameters
from here, and name the nodes themselves; a test holds both to the same nodes, parameters and remappings.
Imports nothing of ROS, so that the command line can read it anywhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.paths import config_directory, user_path
from dsd_ros.ros.settings import NODES, ManagedSettings, parameter, specs
from dsd_ros.shown import meant

SYSTEMS = {  # name, also of its launch file -> what it is
    "demo": "The whole system on one machine: a simulated Go2 in its world, the robot's nodes and a verifier",
    "robot": "The robot's nodes: driver, safety supervisor, navigation, draft, and the bridge to a remote verifier",
    "verifier": "The verifier as a ROS node, for a robot in the same DDS domain and namespace",
}
DEMO_SEED = 24  # of a world where the shipped target does not depend on how exactly a turn ends
DEMO_INSTRUCTION = "find the silver bottle"
# Topics that are absolute by convention; in a robot's namespace they are the robot's own, as in Nav2.
PER_ROBOT = ("/tf", "/tf_static", "/clock")
REMAPPINGS = tuple((topic, topic[1:]) for topic in PER_ROBOT)
# Other people's stacks on the robot, and what is remapped beside each. config/stacks/NAME.yaml has the parameters.
STACKS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    # The supervisor takes twist_mux's place before the driver, and hears what the joystick's node publishes. The
    # stack's own imu has a type of its own.
    "go2_ros2_sdk": (("cmd_vel", "cmd_vel_out"), ("cmd_vel_joy", "cmd_vel"), ("imu", "imu/data")),
    "unitree_ros2": (),
}
# Nav2's own nodes publish cmd_vel, as Jazzy's docking_server does, so the supervisor's has another name.
BESIDE_NAV2 = (("cmd_vel", "cmd_vel_out"),)
END_S = 1.6  # from SIGINT until a process is killed
RECORDER_END_S = 10.0  # it has a bag to close
RESPAWN_DELAY_S = 1.0  # before a process that has crashed is started again
SWITCH = ("false", "true", "False", "True")  # Nav2's pages write True
PROOF = {"token_file": "token_file", "allow_unauthenticated": "allow_unauthenticated"}
WORLD = {"seed": "seed", "instruction": "instruction"}
# Node -> its parameter -> the launch argument that sets it, unless the argument is empty.
SETS: dict[str, dict[str, str]] = {
    "go2_node": {name: name for name in ("frame_prefix", "description")},
    "supervisor_node": {"limit.speed": "speed", "fallback": "fallback", "grammar": "grammar"},
    "navigation_node": {
        "motion.speed": "speed",
        "executor": "executor",
        "grammar": "grammar",
        "memory.when": "memory",
        "run.fallback": "fallback",
        "run.arrival_check": "arrival_check",
    },
    "draft_node": {
        **PROOF,
        "transport": "transport",
        "decode.mode": "mode",
        "decode.temperature": "temperature",
        "grammar": "grammar",
        "constrain": "constrain",
        "history_frames": "history",
        "draft_engine": "draft_engine",
        "target_tokenizer": "target_tokenizer",
        "model.path": "draft_model",
        "model.prompt": "prompt",
        "model.quantization": "quantization",
        "model.device": "device",
    },
    "serve_node": {
        **PROOF,
        "draft_engine": "draft_engine",
        "target_tokenizer": "target_tokenizer",
        "model.path": "draft_model",
        "model.quantization": "quantization",
        "model.device": "device",
    },
    "memory_node": {**PROOF, "documents": "memory_documents", "model.path": "text_model"},
    "bridge_node": {"url": "verifier", "token_file": "token_file", "ca_file": "ca_file"},
    "record_node": {"directory": "record"},
    "visual_node": {},
    "view_node": {"bind": "view_bind", "open_browser": "view_open"},
    "simulator_node": {**WORLD, "frame_prefix": "frame_prefix"},
    "verifier_node": {
        **PROOF,
        "model.path": "target_model",
        "model.device": "device",
        "model.dtype": "dtype",
        "model.prompt": "prompt",
        "documents": "cloud_documents",
        "text_model": "text_model",
        "tokens_file": "tokens_file",
    },
}


@dataclass(frozen=True)
class Argument:
    """A launch argument of a system, and an option of the process runner."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """A process to start: a node of this package, or another program where ``command`` is not empty.

    ``respawn``: it is started again when it crashes. ``optional``: its end ends nothing; the end of any other process
    ends all. ``end_s``: it is killed when it has not ended this long after SIGINT.
    """

    name: str  # of the node and its executable, or of the program
    parameters: dict[str, Any] = field(default_factory=dict)  # over the files; a text is read as their type
    namespace: str = ""
    files: tuple[Path, ...] = ()  # parameter files over the node's own, which is under config/
    remappings: tuple[tuple[str, str], ...] = REMAPPINGS
    log_level: str = ""  # empty: rcl's own
    command: tuple[str, ...] = ()
    respawn: bool = False
    optional: bool = False
    end_s: float = END_S

    @property
    def available(self) -> bool:
        """Whether the program is installed here; a node always is."""
        return not self.command or shutil.which(self.command[0]) is not None

    @property
    def parameter_files(self) -> tuple[Path, ...]:
        """Of a node, each over those before it."""
        return (config_directory() / f"{self.name.removesuffix('_node')}.yaml", *self.files)

    @property
    def full_name(self) -> str:
        """Of the node, with its namespace."""
        return f"/{self.namespace.strip('/')}/{self.name}".replace("//", "/")

    @property
    def typed_parameters(self) -> dict[str, Any]:
        """The parameters with texts read as the types that the node declares."""
        known = {spec.name: spec for spec in specs(NODES[self.name])}
        return {
            name: known[name].read(value) if name in known and isinstance(value, str) else value
            for name, value in self.parameters.items()
        }


def _of(node: str, name: str, argument: str, default: str = "") -> Argument:
    """The argument that sets a node's parameter. Empty leaves the parameter to the parameter files."""
    spec = parameter(node, name)
    choices = SWITCH if spec.kind is bool else spec.choices
    return Argument(argument, default, spec.help, ("", *choices) if choices and not default else choices)


def _switch(name: str, about: str, default: str = "false") -> Argument:
    return Argument(name, default, about, SWITCH)


def _common() -> list[Argument]:
    """The arguments of every system, with Nav2's names and meanings."""
    return [
        Argument("namespace", "", "namespace of the robot, for several in one domain, e.g. go2_1"),
        Argument("params_file", "", "parameter file (YAML) for all nodes, over those under config/"),
        Argument("use_sim_time", "", "take the time from /clock", ("", *SWITCH)),
        Argument("autostart", "", "configure and activate the lifecycle nodes", ("", *SWITCH)),
        _switch("use_respawn", "restart nodes that crash, where a robot at rest allows", "true"),
        Argument("log_level", "info", "least severe log lines shown", ("debug", "info", "warn", "error", "fatal")),
    ]


def _robot_arguments() -> list[Argument]:
    driver = "go2: drive a Unitree Go2; none: other nodes drive the robot, as with stack:=go2_ros2_sdk"
    stack = "the stack that runs on the robot: its topics, and what the supervisor can require of it"
    rviz = str(config_directory() / "dsd.rviz")
    return [
        *_common(),
        Argument("driver", "go2", driver, ("go2", "none")),
        Argument("stack", "none", stack, tuple(STACKS)),
        _of("go2_node", "frame_prefix", "frame_prefix"),
        _of("go2_node", "description", "description"),
        _of("draft_node", "transport", "transport", "websocket"),
        _of("draft_node", "decode.mode", "mode"),
        _of("draft_node", "decode.temperature", "temperature"),
        _of("navigation_node", "motion.speed", "speed"),
        _of("navigation_node", "executor", "executor"),
        _of("navigation_node", "run.fallback", "fallback"),
        _of("navigation_node", "grammar", "grammar"),
        _of("draft_node", "constrain", "constrain"),
        _of("navigation_node", "run.arrival_check", "arrival_check"),
        _of("draft_node", "history_frames", "history"),
        _of("navigation_node", "memory.when", "memory", "never"),
        _of("memory_node", "documents", "memory_documents"),
        _of("verifier_node", "text_model", "text_model"),
        Argument("record", "", "folder to create for a bag; empty: no bag"),
        _switch("serve", "serve OpenAI's API to other programs on the robot"),
        _switch("visual", "publish what RViz shows"),
        _switch("rviz", "open RViz here, and publish what it shows"),
        Argument("rviz_config", rviz, "RViz' configuration file"),
        _switch("view", "serve the live page"),
        _of("view_node", "bind", "view_bind"),
        _of("view_node", "open_browser", "view_open"),
        _of("draft_node", "model.path", "draft_model"),
        _of("draft_node", "draft_engine", "draft_engine"),
        _of("draft_node", "target_tokenizer", "target_tokenizer"),
        _of("draft_node", "model.prompt", "prompt"),
        _of("draft_node", "model.quantization", "quantization"),
        _of("draft_node", "model.device", "device"),
        _of("bridge_node", "url", "verifier"),
        _of("draft_node", "token_file", "token_file"),
        _of("draft_node", "allow_unauthenticated", "allow_unauthenticated"),
        _of("bridge_node", "ca_file", "ca_file"),
    ]


def _demo_arguments() -> list[Argument]:
    own = [
        _of("simulator_node", "seed", "seed", str(DEMO_SEED)),
        _of("simulator_node", "instruction", "instruction", DEMO_INSTRUCTION),
        _of("draft_node", "transport", "transport", "dds"),
        _of("navigation_node", "run.arrival_check", "arrival_check", "service"),
        _of("memory_node", "documents", "memory_documents", "shipped"),
        # Nobody is hurt by a simulated robot that a stranger drives; a robot's own default is false.
        _of("draft_node", "allow_unauthenticated", "allow_unauthenticated", "true"),
        _of("verifier_node", "model.path", "target_model"),
        _of("verifier_node", "documents", "cloud_documents"),
        Argument("verifier_port", str(VerifierSettings.port), "port of dsd verifier"),
    ]
    names = {each.name for each in own} | {"driver"}  # the simulator is its own
    return [*own, *(each for each in _robot_arguments() if each.name not in names)]


def _verifier_arguments() -> list[Argument]:
    return [*_common(), *(_of("verifier_node", name, argument) for name, argument in SETS["verifier_node"].items())]


def arguments_of(system: str) -> list[Argument]:
    """The launch arguments of a system; ValueError for an unknown one."""
    if system not in SYSTEMS:
        raise ValueError(f"There is no system '{system}'; known are {', '.join(SYSTEMS)}.")
    return {"demo": _demo_arguments, "robot": _robot_arguments, "verifier": _verifier_arguments}[system]()


def values_of(system: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The arguments' values: the defaults, overridden.

    :raises ValueError: for an unknown system or argument, or a value that is not among the choices.
    """
    known = {argument.name: argument for argument in arguments_of(system)}
    values = {name: argument.default for name, argument in known.items()}
    for name, value in (overrides or {}).items():
        if name not in known:
            near = meant(name, known) or f"it has {', '.join(known)}."
            raise ValueError(f"The system '{system}' has no argument '{name}'; {near}")
        choices = known[name].choices
        if choices and value not in choices:
            near = meant(value, choices)
            among = f"choose from {', '.join(filter(None, choices))}" + (f"; {near}" if near else ".")
            raise ValueError(f"'{value}' is no {name}; {among}")
        values[name] = value
    return values


def given(node: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a node that the arguments with these values set, of the parameters' types."""
    sets = SETS[node] | ({"autostart": "autostart"} if issubclass(NODES[node], ManagedSettings) else {})
    found = {name: parameter(node, name).read(text) for name, argument in sets.items() if (text := values[argument])}
    return found | ({"use_sim_time": _on(clock)} if (clock := values["use_sim_time"]) else {})


def files(values: Mapping[str, str]) -> tuple[Path, ...]:
    """The parameter files over the nodes' own that arguments with these values name: Nav2's, the stack's, the user's.

    :raises ValueError: when ``params_file`` is no file.
    """
    found = [config_directory() / "nav2.yaml"] if values.get("executor") == "nav2" else []
    if (stack := values.get("stack", "none")) != "none":
        found.append(config_directory() / "stacks" / f"{stack}.yaml")
    if file := values["params_file"]:
        if not user_path(file).is_file():
            raise ValueError(f"params_file:={file} is no file; give the path of a ROS 2 parameter file (YAML).")
        found.append(user_path(file))
    return tuple(found)


def remappings(values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of every node."""
    beside = STACKS[values.get("stack", "none")]
    if values.get("executor") == "nav2" and not beside:
        beside = BESIDE_NAV2
    return beside + REMAPPINGS


def _on(text: str) -> bool:
    return text.lower() == "true"


def _node(name: str, values: Mapping[str, str], respawn: bool = False, optional: bool = False) -> Start:
    return Start(
        name, given(name, values), values["namespace"], files(values), remappings(values), values["log_level"],
        respawn=respawn and _on(values["use_respawn"]), optional=optional,
    )  # fmt: skip


def _robot(values: Mapping[str, str]) -> list[Start]:
    view, rviz = _on(values["view"]), _on(values["rviz"])
    wanted = [
        values["driver"] == "go2" and values["stack"] != "go2_ros2_sdk" and _node("go2_node", values),
        _node("supervisor_node", values),
        _node("navigation_node", values, respawn=True),
        _node("draft_node", values, respawn=True),
        _on(values["serve"]) and _node("serve_node", values, respawn=True),
        values["memory"] != "never" and _node("memory_node", values, respawn=True),
        values["transport"] == "websocket" and _node("bridge_node", values, respawn=True),
        values["record"] != "" and replace(_node("record_node", values, optional=True), end_s=RECORDER_END_S),
        (rviz or _on(values["visual"])) and _node("visual_node", values, optional=True),
        view and _node("view_node", values, optional=True),
        rviz and _rviz(values),
    ]
    return [start for start in wanted if isinstance(start, Start)]


def _demo(values: Mapping[str, str]) -> list[Start]:
    on_topics = values["transport"] == "dds"
    verifier = _node("verifier_node", for_verifier(values), respawn=True) if on_topics else _program(values)
    return [_node("simulator_node", values), *_robot({**values, "driver": "none"}), verifier]


def for_verifier(values: Mapping[str, str]) -> dict[str, str]:
    """The demo's arguments that are the verifier's: what the draft runs on is the draft's alone."""
    return {**values, "device": "", "dtype": "", "tokens_file": ""}


def verifier_command(values: Mapping[str, str]) -> list[str]:
    """`dsd verifier` with what the demo's arguments say."""
    # The program says itself which Python it needs: `ros2 launch` runs in the system's, which may lack what it imports.
    program = shutil.which("dsd", path=f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', '')}") or "dsd"
    options = {
        "--port": "verifier_port", "--model": "target_model", "--prompt": "prompt", "--documents": "cloud_documents",
        "--text-model": "text_model", "--token-file": "token_file",
    }  # fmt: skip
    return [program, "verifier", *(word for option, name in options.items() for word in (option, values[name]))]


def _program(values: Mapping[str, str]) -> Start:
    return Start("verifier", command=tuple(verifier_command(values)), respawn=_on(values["use_respawn"]))


def _rviz(values: Mapping[str, str]) -> Start:
    clock = ("-p", f"use_sim_time:={str(_on(values['use_sim_time'])).lower()}")
    words = ["rviz2", "-d", values["rviz_config"], "--ros-args", *_placed(values["namespace"], REMAPPINGS), *clock]
    return Start("rviz2", command=tuple(words), optional=True)


def _verifier(values: Mapping[str, str]) -> list[Start]:
    return [_node("verifier_node", values, respawn=True)]


def plan(system: str, overrides: Mapping[str, str] | None = None) -> list[Start]:
    """The processes of a system to start, in order; ValueError as :func:`values_of`, and for a missing params_file."""
    values = values_of(system, overrides)
    return {"demo": _demo, "robot": _robot, "verifier": _verifier}[system](values)


def ros_arguments(start: Start) -> list[str]:
    """The name, namespace, remappings and log level of a node, as `ros2 launch` passes them."""
    level = ["--log-level", start.log_level] if start.log_level else []
    return [*level, "-r", f"__node:={start.name}", *_placed(start.namespace, start.remappings)]


def _placed(namespace: str, remapped: tuple[tuple[str, str], ...]) -> list[str]:
    place = namespace.strip("/")
    words = ["-r", f"__ns:=/{place}"] if place else []
    return [*words, *(word for one, other in remapped for word in ("-r", f"{one}:={other}"))]
