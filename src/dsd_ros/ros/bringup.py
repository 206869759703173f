"""Which nodes with which parameter files make up a system: the one table that `ros2 launch` and `dsd` both read.

Imports nothing of ROS, so that launch files and the command line can read it anywhere.
"""

from __future__ import annotations

import re
import sys

from dsd_ros.navigation.goals import WHEN
from dsd_ros.navigation.safety import FALLBACKS
from dsd_ros.paths import config_directory
from dsd_ros.ros.bringup_parts import Argument as Argument
from dsd_ros.ros.bringup_parts import NodeEntry as NodeEntry
from dsd_ros.ros.bringup_parts import NodeStart as NodeStart
from dsd_ros.ros.bringup_parts import Program as Program
from dsd_ros.ros.bringup_parts import System as System

TRANSPORTS = ("dds", "websocket")
DEMO_SEED = 24  # of a world where the shipped target does not depend on how exactly a turn ends
ROBOTS = ("simulated", "go2-standin")
DRIVERS = ("go2", "none")
# Absolute by convention; in a robot's namespace they are the robot's own, as Nav2 has it.
PER_ROBOT = ("/tf", "/tf_static", "/clock")
_NAMESPACE = re.compile(r"(/?[A-Za-z][A-Za-z0-9_]*)(/[A-Za-z][A-Za-z0-9_]*)*")
_LARGEST_DOMAIN = 232  # beyond it, DDS runs out of ports


SIMULATOR = NodeEntry("simulator_node", "simulator.yaml", only_with=("robot", "simulated"))
GO2_STANDIN = NodeEntry("go2_standin_node", "go2_standin.yaml", only_with=("robot", "go2-standin"))
SUPERVISOR = NodeEntry("supervisor_node", "supervisor.yaml")
NAVIGATION = NodeEntry("navigation_node", "navigation.yaml", respawn=True)
DRAFT = NodeEntry("draft_node", "draft.yaml", respawn=True)
MEMORY = NodeEntry("memory_node", "memory.yaml", ("memory", "!never"), respawn=True)
VERIFIER = NodeEntry("verifier_node", "verifier.yaml", ("transport", "dds"), respawn=True)
BRIDGE = NodeEntry("bridge_node", "bridge.yaml", ("transport", "websocket"), respawn=True)

RECORD = NodeEntry("record_node", "record.yaml", ("record", "*"), optional=True)
VISUAL = NodeEntry("visual_node", "visual.yaml", ("visual", "true"), optional=True, guest_of="view_node")
VIEW = NodeEntry("view_node", "view.yaml", ("view", "true"), optional=True)

RVIZ = Program("rviz2", "rviz2", (), ("rviz", "true"), optional=True)

_NAMESPACE_ARGUMENT = Argument("namespace", "", "namespace of the robot, for several in one domain, e.g. go2_1")
_DOMAIN = Argument("domain", "", "ROS domain; empty: the environment's ROS_DOMAIN_ID", environment="ROS_DOMAIN_ID")
_RECORD = Argument("record", "", "folder to make for a bag of the run; empty: none", ("record_node.directory",))
_SWITCH = ("false", "true")
_VIEWS = (
    Argument("visual", "false", "publish what RViz shows", ("view_node.visual",), _SWITCH),
    Argument("rviz", "false", "open RViz here, and publish what it shows", choices=_SWITCH),
    Argument("view", "false", "serve the web view", choices=_SWITCH),
    Argument(
        "view_bind", "127.0.0.1", "address the web view listens on; 0.0.0.0: for the whole network",
        ("view_node.bind",),
    ),
    Argument(
        "view_open", "false", "open the web view in this machine's browser",
        ("view_node.open_browser",), _SWITCH,
    ),
)  # fmt: skip
_MODE = Argument("mode", "dsd", "decoding mode, e.g. dsd or ar", ("draft_node.decode.mode",))
_TEMPERATURE = Argument("temperature", "0.0", "sampling temperature; 0: greedy", ("draft_node.decode.temperature",))
_DRAFT_MODEL = Argument(
    "draft_model", "", "directory or hub id of the draft model; empty: the shipped one",
    ("draft_node.model.path",),
)  # fmt: skip
_TARGET_MODEL = Argument(
    "target_model", "", "directory or hub id of the target model; empty: the shipped one",
    ("verifier_node.model.path",),
)  # fmt: skip
_TARGET_TOKENIZER = Argument(
    "target_tokenizer", "", "the target's directory or tokenizer.json; empty: the draft's tokenizer",
    ("draft_node.target_tokenizer",),
)  # fmt: skip
_TRANSPORT = Argument(
    "transport", "dds", "dds: verifier node on topics; websocket: bridge to a remote verifier",
    ("draft_node.transport",), TRANSPORTS,
)  # fmt: skip
_VERIFIER_URL = Argument(
    "verifier", "ws://127.0.0.1:8765", "address of the remote verifier, ws:// or wss://",
    ("bridge_node.url",),
)  # fmt: skip
_TOKEN_FILE = Argument(
    "token_file", "", "file with the bearer token of the remote verifier", ("bridge_node.token_file",)
)
_CA_FILE = Argument(
    "ca_file", "", "certificate authority of the remote verifier; empty: the system's",
    ("bridge_node.ca_file",),
)  # fmt: skip

_FALLBACK = Argument(
    "fallback", "stop", "when the link is lost: stop, draft_only (a few slow unverified steps: not exact) or return",
    ("navigation_node.run.fallback", "supervisor_node.fallback"), FALLBACKS,
)  # fmt: skip
_LOOK_AHEAD = Argument(
    "look_ahead", "0.0", "the next picture may be taken this long before the robot stands, s; 0: only at rest",
    ("navigation_node.run.look_ahead_s",),
)  # fmt: skip
_HISTORY = Argument(
    "history", "0", "pictures and actions of this many earlier steps are shown along, 0 to 8",
    ("draft_node.history_frames",),
)  # fmt: skip


_MEMORY = Argument(
    "memory", "never", "instructions that memory is asked about first: never, auto (those of their speaker), always",
    ("navigation_node.memory.when",), WHEN,
)  # fmt: skip
_CLOUD_DOCUMENTS = Argument(
    "cloud_documents", "", "general documents of the verifier: a folder, or shipped: dsd's examples; empty: none",
    ("verifier_node.documents",),
)  # fmt: skip


def _text_model(*targets: str) -> Argument:
    return Argument(
        "text_model", "", "directory or hub id of the text model that answers questions; empty: the shipped reader",
        targets,
    )  # fmt: skip


def _memory_documents(default: str) -> Argument:
    return Argument(
        "memory_documents", default, "the robot's own documents: a folder, own: of this user, or shipped; empty: none",
        ("memory_node.documents",),
    )  # fmt: skip


def _arrival_check(default: str) -> Argument:
    return Argument(
        "arrival_check", default, "who says that the target is reached: model, or service: check_arrival as well",
        ("navigation_node.run.arrival_check",), ("model", "service"),
    )  # fmt: skip


def _speed(default: str) -> Argument:
    return Argument(
        "speed", default, "top speed ahead, m/s",
        ("navigation_node.motion.speed", "supervisor_node.limit.speed"),
    )  # fmt: skip


DEMO = System(
    "demo",
    "the simulated Go2, the safety supervisor, navigation, draft and verifier",
    (
        SIMULATOR, GO2_STANDIN, NodeEntry("go2_node", "go2.yaml", ("robot", "go2-standin")), SUPERVISOR,
        NAVIGATION, DRAFT, MEMORY, VERIFIER, BRIDGE, RECORD, VISUAL, VIEW,
    ),
    (
        _NAMESPACE_ARGUMENT,
        _DOMAIN,
        _TRANSPORT,
        _MODE,
        _TEMPERATURE,
        Argument(
            "robot", "simulated",
            "simulated: on the robot's ROS topics; go2-standin: behind the Go2's own protocol and its driver",
            choices=ROBOTS,
        ),
        Argument(
            "seed", str(DEMO_SEED), "number of the simulated world",
            ("simulator_node.seed", "go2_standin_node.seed"),
        ),
        Argument(
            "instruction", "find the silver bottle", "names the target of the simulated world",
            ("simulator_node.instruction", "go2_standin_node.instruction"),
        ),
        _DRAFT_MODEL,
        _TARGET_MODEL,
        _TARGET_TOKENIZER,
        _FALLBACK,
        _arrival_check("service"),
        _LOOK_AHEAD,
        _HISTORY,
        _MEMORY,
        _memory_documents("shipped"),
        _CLOUD_DOCUMENTS,
        _text_model("memory_node.model.path", "verifier_node.text_model"),
        _RECORD,
        *_VIEWS,
        Argument("verifier_port", "8765", "port of the websocket verifier on this machine"),
        _VERIFIER_URL,
    ),
    (
        Program(
            "verifier",
            "verifier",
            (
                ("--port", "verifier_port"), ("--model", "target_model"), ("--documents", "cloud_documents"),
                ("--text-model", "text_model"),
            ),
            only_with=("transport", "websocket"),
            respawn=True,
        ),
        RVIZ,
    ),
)  # fmt: skip
ROBOT = System(
    "robot",
    "what runs on the robot: driver, safety supervisor, navigation, draft, and the bridge to a verifier in the cloud",
    (
        NodeEntry("go2_node", "go2.yaml", ("driver", "go2")), SUPERVISOR, NAVIGATION, DRAFT, MEMORY,
        BRIDGE, RECORD, VISUAL, VIEW,
    ),
    (
        _NAMESPACE_ARGUMENT,
        _DOMAIN,
        Argument(
            "driver", "go2", "go2: drive a Unitree Go2; none: other nodes drive the robot",
            choices=DRIVERS,
        ),
        Argument(
            "transport", "websocket", "websocket: bridge to a remote verifier; dds: one on the network",
            ("draft_node.transport",), TRANSPORTS,
        ),
        _MODE,
        _TEMPERATURE,
        _speed("0.5"),
        _FALLBACK,
        _arrival_check("model"),
        _LOOK_AHEAD,
        _HISTORY,
        _MEMORY,
        _memory_documents("own"),
        _text_model("memory_node.model.path"),
        _RECORD,
        *_VIEWS,
        _DRAFT_MODEL,
        _TARGET_TOKENIZER,
        Argument(
            "quantization", "none", "of the draft model: none, int8 (CPU) or 4bit (CUDA)",
            ("draft_node.model.quantization",), ("none", "int8", "4bit"),
        ),
        Argument("device", "cpu", "of the draft model: cpu, cuda or cuda:N", ("draft_node.model.device",)),
        _VERIFIER_URL,
        _TOKEN_FILE,
        _CA_FILE,
    ),
    (RVIZ,),
)  # fmt: skip
VERIFIER_ALONE = System(
    "verifier",
    "the verifier as a ROS node, for a robot in the same DDS domain and namespace",
    (NodeEntry("verifier_node", "verifier.yaml", respawn=True),),
    (
        _NAMESPACE_ARGUMENT,
        _DOMAIN,
        _TARGET_MODEL,
        _CLOUD_DOCUMENTS,
        _text_model("verifier_node.text_model"),
        Argument("device", "cpu", "cpu, cuda or cuda:N", ("verifier_node.model.device",)),
        Argument(
            "dtype", "float32", "precision of the weights", ("verifier_node.model.dtype",),
            ("float32", "bfloat16", "float16"),
        ),
    ),
)  # fmt: skip

SYSTEMS = {system.name: system for system in (DEMO, ROBOT, VERIFIER_ALONE)}


def plan(name: str, overrides: dict[str, str] | None = None) -> list[NodeStart]:
    """The nodes of a system to start, with the parameters that the arguments set.

    :raises ValueError: for an unknown system or argument, or a value that is not among the choices.
    """
    if name not in SYSTEMS:
        raise ValueError(f"There is no system '{name}'; known are {', '.join(SYSTEMS)}.")
    system = SYSTEMS[name]
    values = values_of(system, overrides)
    environment = environment_of(system, values)
    wanted = [entry for entry in system.nodes if entry.wanted(values)]
    hosts = {entry.executable for entry in wanted}
    return [
        NodeStart(
            entry,
            parameters_of(system, entry, values),
            values["namespace"],
            environment,
            tuple(guest for guest in wanted if guest.guest_of == entry.executable),
        )
        for entry in wanted
        if entry.guest_of not in hosts
    ]


def program_command(program: Program, values: dict[str, str]) -> list[str]:
    """The command line of a program; options whose argument is empty are left out."""
    if program is RVIZ:
        return _rviz_command(values["namespace"].strip("/"))
    command = [sys.executable, "-m", "dsd_ros.cli"]
    command.append(program.command)
    for option, argument in program.options:
        if values[argument]:
            command += [option, values[argument]]
    return command


def _rviz_command(namespace: str) -> list[str]:
    """RViz comes with an installed ROS 2; its topics are relative, so that they follow the robot's namespace."""
    command = ["rviz2", "-d", str(config_directory() / "dsd.rviz")]
    if namespace:
        command += ["--ros-args", "-r", f"__ns:=/{namespace}"]
        for topic in PER_ROBOT:
            command += ["-r", f"{topic}:={topic[1:]}"]
    return command


def values_of(system: System, overrides: dict[str, str] | None = None) -> dict[str, str]:
    """The arguments' values: the defaults, and the overrides over them; ValueError as :func:`plan`."""
    values = system.defaults()
    for key, value in (overrides or {}).items():
        if key not in values:
            raise ValueError(f"The system '{system.name}' has no argument '{key}'; it has {', '.join(values)}.")
        values[key] = value
    for argument in system.arguments:
        if argument.choices and values[argument.name] not in argument.choices:
            raise ValueError(
                f"'{values[argument.name]}' is no {argument.name}; choose from {', '.join(argument.choices)}."
            )
    if values.get("rviz") == "true":
        values["visual"] = "true"
    if values["namespace"] and not _NAMESPACE.fullmatch(values["namespace"]):
        raise ValueError(f"'{values['namespace']}' is no namespace; use letters, digits and _, as in go2_1.")
    domain = values["domain"]
    if domain and not (domain.isdecimal() and int(domain) <= _LARGEST_DOMAIN):
        raise ValueError(f"'{domain}' is no ROS domain; use a number from 0 to {_LARGEST_DOMAIN}.")
    return values


def environment_of(system: System, values: dict[str, str]) -> dict[str, str]:
    """The environment variables that a system's arguments set."""
    return {
        argument.environment: values[argument.name]
        for argument in system.arguments
        if argument.environment and values[argument.name]
    }


def parameters_of(system: System, entry: NodeEntry, values: dict[str, str]) -> dict[str, str]:
    """The parameters of one node that a system's arguments set, as name -> text."""
    result = {}
    for argument in system.arguments:
        for target in argument.targets:
            node, _, parameter = target.partition(".")
            if node == entry.executable:
                result[parameter] = values[argument.name]
    return result
