# SPDX-License-Identifier: Apache-2.0
"""The parameters of every node: one dataclass per node, nested ones for its groups (``model.path``, ``decode.mode``).

Loads neither rclpy nor torch, nor anything else that `ros2 launch` may lack: launch files, the command line and the
generator of config/*.yaml read it, too.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dsd_ros.addresses import check_engine_address, check_host, check_verifier_address
from dsd_ros.cloud.settings import (
    BOTH_FILES,
    DocumentSettings,
    EngineSettings,
    MetricsSettings,
    TokensSettings,
    VerifierSettings,
)
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.dragon.settings import AggregationSettings, ServiceSettings
from dsd_ros.edge.settings import ENGINE_HELP, LinkSettings, ServeSettings
from dsd_ros.limits import MAX_HISTORY
from dsd_ros.navigation.run.actions import GRAMMAR_HELP, read_grammar
from dsd_ros.navigation.run.controller import MotionSettings
from dsd_ros.navigation.run.executor import EXECUTORS, Nav2Settings
from dsd_ros.navigation.run.goals import WHEN
from dsd_ros.navigation.run.settings import PointSettings, RunSettings
from dsd_ros.navigation.safety.causes import FALLBACK_HELP, FALLBACKS, DepthView, Requirements, SafetyLimits, Timeouts
from dsd_ros.options import check_options, option
from dsd_ros.paths import OWN, shipped_model
from dsd_ros.robot.driver import MotionLimits
from dsd_ros.robot.frames import FrameSettings, check_frame
from dsd_ros.robot.go2.driver import Go2Settings
from dsd_ros.ros.transport import stays_here
from dsd_ros.vlm.settings import ModelSettings

if TYPE_CHECKING:
    from dsd_ros.cloud.credentials import Tokens
    from dsd_ros.decoding.constraint import ReplyForm

TRANSPORTS = ("dds", "websocket")
CONSTRAIN = ("none", "grammar")


@dataclass(frozen=True)
class ManagedSettings:
    """Parameters that every lifecycle node has."""

    fixed: ClassVar[tuple[str, ...]] = ("autostart",)

    autostart: bool = option(True, "configure and activate without being asked")


def stamped_by_default() -> bool:
    """Whether this ROS distribution's velocity commands carry a stamp: as in Nav2, from Kilted on."""
    return os.environ.get("ROS_DISTRO", "") not in ("", "foxy", "galactic", "humble", "iron", "jazzy")


@dataclass(frozen=True)
class CommandSettings:
    """The type of the velocity commands that a node sends and obeys: Nav2's parameter, with Nav2's defaults."""

    enable_stamped_cmd_vel: bool = option(
        stamped_by_default(),
        "velocity commands, in and out, are geometry_msgs/TwistStamped; false: geometry_msgs/Twist",
        varies="false up to Jazzy, true from Kilted on",
    )


def reaches_other_machines() -> bool:
    """Whether the ROS environment lets nodes of this process meet those of other machines. Humble knows no range."""
    if os.environ.get("ROS_LOCALHOST_ONLY") == "1":
        return False
    within = () if os.environ.get("ROS_DISTRO") == "humble" else ("LOCALHOST", "OFF")
    alone = os.environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "").upper() in within or stays_here(os.environ)
    return not alone or bool(os.environ.get("ROS_STATIC_PEERS"))


@dataclass(frozen=True)
class SharedToken:
    """The secret by which robot and verifier recognise each other (wire.authentication)."""

    token_file: str = option(
        "",
        "file with the token that robot and verifier share: with it, nothing that another process sends counts; needed "
        "where the DDS domain reaches other machines; empty: none",
    )
    allow_unauthenticated: bool = option(
        False, "do without token_file where others reach this: any of them can then answer for the verifier"
    )

    def token(self) -> str | None:
        """The token, None without one; ValueError for a file that holds none, or where there must be one."""
        from dsd_ros.wire.channel import read_token

        if self.token_file:
            return read_token(self.token_file)
        self.check_alone()
        return None

    def check_alone(self) -> None:
        """ValueError where there must be a token."""
        if reaches_other_machines() and not self.allow_unauthenticated:
            raise ValueError(
                "token_file is not set, and this DDS domain reaches other machines, any of which could answer for the "
                "verifier: give robot and verifier a file with the same token (openssl rand -hex 32 > FILE), stay on "
                "this machine with ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST (Humble: ROS_LOCALHOST_ONLY=1), or set "
                "allow_unauthenticated"
            )


@dataclass(frozen=True)
class NodeModelSettings(ModelSettings):
    """A node's model: the shipped one unless a path is given, on one thread, since nodes share the robot's cores."""

    role: ClassVar[str]  # folder of the shipped model

    path: str = option("", "model directory or Hugging Face id; empty: the shipped model")
    threads: int = option(1, "CPU threads of this process's models; 0: torch's choice", 0)

    def __post_init__(self) -> None:
        if not self.path:
            object.__setattr__(self, "path", str(shipped_model(self.role)))
        super().__post_init__()


class DraftModelSettings(NodeModelSettings):
    role = "draft"


class TargetModelSettings(NodeModelSettings):
    role = "target"


class ReaderModelSettings(NodeModelSettings):
    role = "reader"


@dataclass(frozen=True)
class CameraSettings:
    """The topic of the camera's pictures."""

    image_transport: str = option(
        "auto",
        "raw: camera/image_raw; compressed: camera/image_raw/compressed, JPEG or PNG; auto: the one that has a "
        "publisher, raw where both have",
        choices=("auto", "raw", "compressed"),
    )


@dataclass(frozen=True)
class ReplyGrammar:
    """The actions of the model's replies, and whether both sides hold the replies to them."""

    grammar: str = option("dsd", GRAMMAR_HELP, check=read_grammar)
    constrain: str = option(
        CONSTRAIN[0],
        "grammar: both models may only write replies that end in an action of the grammar, and the reply is that of "
        "the target held to it; none: they write what they like, and what does not parse is not executed",
        choices=CONSTRAIN,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def form(self, max_tokens: int) -> ReplyForm | None:
        """What replies of up to ``max_tokens`` are held to, None for nothing; ValueError for what cannot be held."""
        if self.constrain == CONSTRAIN[0]:
            return None
        from dsd_ros.decoding.constraint import ReplyForm

        grammar = read_grammar(self.grammar)
        if grammar.parser:
            raise ValueError(
                f"The grammar {grammar.name} has the parser '{grammar.parser}' read other words than its own, to which "
                "no reply can be held: set constrain to none."
            )
        return ReplyForm(**grammar.written, limit=max_tokens)


@dataclass(frozen=True)
class DraftNodeSettings(ReplyGrammar, CameraSettings, SharedToken, ManagedSettings):
    """The draft model, the decoding mode and the session with the verifier."""

    live: ClassVar = (
        "image_timeout_s", "link_patience_s", "history_frames", "decode", "link", "constrain"
    )  # fmt: skip
    fixed: ClassVar = ("autostart", "image_transport", "grammar")

    transport: str = option(
        TRANSPORTS[0], "dds: verifier_node; websocket: bridge_node. The node only reports it", choices=TRANSPORTS
    )
    image_timeout_s: float = option(2.0, "longest wait for a fresh picture, s", 0.1, 30.0)
    draft_engine: str = option("", ENGINE_HELP, check=check_engine_address)
    target_tokenizer: str = option("", "tokenizer.json of a target that has another one; empty: the draft's")
    link_patience_s: float = option(
        2.0, "a decode that allows unverified replies returns the draft's after this much silence, s", 0.1, 60.0
    )
    history_frames: int = option(
        0, "earlier pictures and actions in the prompt, for models trained with them (not the shipped)", 0, MAX_HISTORY
    )
    model: DraftModelSettings = field(default_factory=DraftModelSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True)
class ServeNodeSettings(SharedToken, ManagedSettings):
    """OpenAI's API for other programs on the robot."""

    draft_engine: str = option("", ENGINE_HELP, check=check_engine_address)
    target_tokenizer: str = option("", "tokenizer.json of a target that has another one; empty: the draft's")
    serve: ServeSettings = field(default_factory=ServeSettings)
    model: DraftModelSettings = field(default_factory=DraftModelSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True)
class MemoryNodeSettings(SharedToken, ManagedSettings):
    """The robot's own documents, and questions answered from them together with the cloud."""

    live: ClassVar = ("remember", "answer")

    documents: str = option(
        OWN,
        "the robot's own documents: a folder of text files (.md, .txt), one made by 'dsd documents', own: what "
        "'dsd documents' keeps for this user, or shipped: dsd's examples; empty: none",
    )
    remember: bool = option(
        True, "add what verified replies report to these documents; text files keep it while the node runs"
    )
    model: ReaderModelSettings = field(default_factory=ReaderModelSettings)
    answer: AggregationSettings = field(default_factory=AggregationSettings)


@dataclass(frozen=True)
class VerifierNodeSettings(DocumentSettings, MetricsSettings, TokensSettings, SharedToken, ManagedSettings):
    """The target model and its engine, on DDS topics."""

    model: TargetModelSettings = field(default_factory=TargetModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    answers: ServiceSettings = field(default_factory=ServiceSettings)

    def tokens(self) -> Tokens | None:
        """The tokens of its robots, None without any; ValueError for a file without, or where there must be one."""
        from dsd_ros.cloud.credentials import Tokens

        if self.token_file and self.tokens_file:
            raise ValueError(BOTH_FILES)
        tokens = Tokens.of(self.token_file, self.tokens_file)
        if tokens is None:
            self.check_alone()
        return tokens


@dataclass(frozen=True)
class BridgeNodeSettings(ManagedSettings):
    """The websocket to a remote verifier."""

    url: str = option(
        f"ws://127.0.0.1:{VerifierSettings.port}",
        "address of the verifier, ws:// or wss://host:port",
        check=check_verifier_address,
    )
    token_file: str = option(
        "", "file with the token of the remote verifier, which the robot's nodes must prove too; empty: none"
    )
    ca_file: str = option("", "certificate authority (PEM) of the remote verifier; empty: the system's")
    longest_wait_s: float = option(5.0, "longest pause between two attempts to dial, s", 0.1, 60.0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class GoalMemorySettings:
    """Which goals memory is asked about."""

    when: str = option(
        "never", "goals to ask memory about: never, auto (those that refer to their speaker) or always", choices=WHEN
    )
    timeout_s: float = option(30.0, "longest wait for memory's answer, s", 0.5, 600.0)


@dataclass(frozen=True)
class NavigationNodeSettings(CommandSettings, ManagedSettings):
    """The Navigate action, the motion controller and the watchdog."""

    live: ClassVar = ("run", "motion", "memory", "point")
    fixed: ClassVar = ("autostart", "executor", "nav2", "enable_stamped_cmd_vel", "grammar")

    executor: str = option(
        EXECUTORS[0],
        "who carries out an action; own: this node, by velocity commands; nav2: Nav2, as goals",
        choices=EXECUTORS,
    )
    grammar: str = option("dsd", GRAMMAR_HELP, check=read_grammar)
    nav2: Nav2Settings = field(default_factory=Nav2Settings)
    run: RunSettings = field(default_factory=RunSettings)
    motion: MotionSettings = field(default_factory=MotionSettings)
    memory: GoalMemorySettings = field(default_factory=GoalMemorySettings)
    point: PointSettings = field(default_factory=PointSettings)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class SupervisorNodeSettings(CommandSettings, CameraSettings):
    """The causes that stop the robot, and after how long."""

    live: ClassVar = ("fallback", "stop_speed", "timeout", "limit", "depth")

    grammar: str = option("dsd", GRAMMAR_HELP, check=read_grammar)
    fallback: str = option("stop", FALLBACK_HELP, choices=FALLBACKS)
    realtime: bool = option(True, "ask for real-time scheduling, where that is allowed: models must not delay a stop")
    stop_speed: float = option(
        0.0, "speed ahead of a stop, m/s; 0.001 for a driver that ignores zeros and rounds this to zero", 0.0, 0.004
    )
    timeout: Timeouts = field(default_factory=Timeouts)
    limit: SafetyLimits = field(default_factory=SafetyLimits)
    require: Requirements = field(default_factory=Requirements)
    depth: DepthView = field(default_factory=DepthView)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Go2NodeSettings(CommandSettings, FrameSettings, ManagedSettings):
    """The driver of a Unitree Go2."""

    fixed: ClassVar = ("autostart", "enable_stamped_cmd_vel")
    live: ClassVar = ("camera_rate", "camera_delay_s", "camera_fov", "limits", "drive.velocity_frame")

    link: str = option(
        "ros", "ros: plain ROS 2 messages; sdk: the vendor's SDK in a process of its own", choices=("ros", "sdk")
    )
    stand_up: bool = option(True, "have the robot stand up when the node starts")
    camera_rate: float = option(10.0, "rate at which pictures are requested from the robot, Hz", 0.5, 30.0)
    camera_delay_s: float = option(0.1, "age of a picture when it is requested, s; subtracted from its stamp", 0.0, 2.0)
    sdk_python: str = option("", "Python of the environment with unitree_sdk2py; empty: this one")
    sdk_interface: str = option("", "network interface to the robot; empty: the SDK chooses")
    camera_fov: float = option(0.0, "the camera's vertical field of view, rad; 0: unknown", 0.0, 2.97)
    drive: Go2Settings = field(default_factory=Go2Settings)
    remote: bool = option(True, "the Go2's own remote control is an operator's joystick (cmd_vel_joy)")
    limits: MotionLimits = field(default_factory=MotionLimits)


@dataclass(frozen=True)
class WorldSettings:
    """Which simulated world."""

    seed: int = option(0, "number of the simulated world", 0, 2**31 - 1)
    instruction: str = option("", "names the world's target, e.g. 'find the silver bottle'; empty: the world's own")


@dataclass(frozen=True)
class SimulatorNodeSettings(CommandSettings, FrameSettings, WorldSettings):
    """The simulated Go2 and its world."""

    rate: float = option(1.0, "simulated seconds per second; other than 1 needs use_sim_time everywhere", 0.1, 20.0)
    map_frame: str = option(
        "",
        "publish that this frame and odom_frame coincide, e.g. map; empty: do not, as a SLAM does",
        check=check_frame,
    )


@dataclass(frozen=True)
class RecordNodeSettings(CameraSettings):
    """A bag of the run."""

    live: ClassVar = ("camera_hz", "queue_mb")

    directory: str = option("", "folder to create for the bag; it must not exist")
    camera_hz: float = option(0.0, "pictures kept per second, besides those that replies are about; 0: all", 0.0, 1e3)
    topics: str = option("", "further topics of any type, separated by commas")
    queue_mb: int = option(64, "room for messages waiting to be written, MB; others are dropped and counted", 1, 4096)


@dataclass(frozen=True)
class VisualNodeSettings(CameraSettings):
    """What RViz shows. The node does nothing without subscribers."""

    live: ClassVar = ("rate", "overlay_width")

    rate: float = option(15.0, "highest rate of overlaid pictures, Hz", 0.5, 60.0)
    overlay_width: int = option(336, "width of the overlaid picture, pixels; wider ones cost more", 240, 1920)


@dataclass(frozen=True)
class ViewNodeSettings(CameraSettings):
    """The live page: read-only, and for this machine alone unless bind says otherwise."""

    live: ClassVar = ("rate",)

    bind: str = option(
        "127.0.0.1", "address the live page listens on; 0.0.0.0: for the whole network", check=check_host
    )
    web_port: int = option(9090, "port of the page; a free one if it is taken", 0, 65535)
    rate: float = option(10.0, "highest rate of pictures, Hz", 0.5, 30.0)
    open_browser: bool = option(False, "open the live page in this machine's browser")
    visual: bool = option(False, "also run visual_node in this process, which costs less than a process of its own")

    def __post_init__(self) -> None:
        check_options(self)


NODES: dict[str, type] = {
    "draft_node": DraftNodeSettings,
    "serve_node": ServeNodeSettings,
    "memory_node": MemoryNodeSettings,
    "verifier_node": VerifierNodeSettings,
    "bridge_node": BridgeNodeSettings,
    "navigation_node": NavigationNodeSettings,
    "supervisor_node": SupervisorNodeSettings,
    "go2_node": Go2NodeSettings,
    "simulator_node": SimulatorNodeSettings,
    "record_node": RecordNodeSettings,
    "visual_node": VisualNodeSettings,
    "view_node": ViewNodeSettings,
}


# When a parameter's change takes effect: at once; at the next configure; or never, as it is read when the node starts.
LIVE, CONFIGURE, START = "live", "configure", "start"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as a node declares it. ``change``: LIVE, CONFIGURE or START."""

    name: str
    kind: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    change: str = START
    varies: str = ""

    def read(self, text: str) -> Any:
        """A text as this parameter's type; what cannot be read stays text, for the node to refuse by name."""
        if self.kind is bool:
            return text.lower() in ("1", "true", "yes", "on")
        try:
            return self.kind(text)
        except ValueError:
            return text

    def allows(self, value: Any) -> bool:
        """Whether a value has this parameter's type and range."""
        kind: Any = self.kind
        if type(value) is not kind or (self.choices and value not in self.choices):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def allowed(self) -> str:
        """What this parameter takes, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.kind]
        low, high = ("" if end is None else f" {word} {end:g}" for word, end in (("from", self.low), ("to", self.high)))
        return kind + low + high


def specs(schema: type, prefix: str = "", node: type | None = None) -> Iterator[ParameterSpec]:
    """The parameters of a settings dataclass, those of nested dataclasses after ``NAME.``.

    The class variable ``live`` of a node's settings names the parameters, or whole groups, that change at once. The
    others of a lifecycle node change at the next configure, except for those in ``fixed``.

    :param node: the node's settings, where ``schema`` is nested in them.
    """
    node = node or schema
    hints = typing.get_type_hints(schema)
    for item in fields(schema):
        kind = hints[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from specs(kind, f"{prefix}{item.name}.", node)
        elif kind in (bool, int, float, str):
            known = item.metadata
            yield ParameterSpec(
                prefix + item.name, kind, item.default, known["help"], known.get("min"), known.get("max"),
                known.get("choices", ()), _change(node, prefix + item.name), known.get("varies", ""),
            )  # fmt: skip
        else:
            raise TypeError(f"The setting '{item.name}' of type {kind} cannot become a parameter.")


def _change(node: type, name: str) -> str:
    def among(groups: Iterable[str]) -> bool:
        return any(f"{name}.".startswith(f"{group}.") for group in groups)

    if among(getattr(node, "live", ())):
        return LIVE
    return CONFIGURE if issubclass(node, ManagedSettings) and not among(node.fixed) else START


def parameter(node: str, name: str) -> ParameterSpec:
    """A node's parameter by its full name, e.g. "decode.mode"; KeyError where there is none."""
    for spec in specs(NODES[node]):
        if spec.name == name:
            return spec
    raise KeyError(f"{node} has no parameter '{name}'")
