"""`dsd doctor`: what is installed here, what is missing for which role, and the remedy for each."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Role(StrEnum):
    """The machine to examine."""

    LAPTOP = "laptop"  # the demo: every part on one machine
    ROBOT = "robot"  # draft model, ROS 2 nodes, robot driver
    CLOUD = "cloud"  # the verifier alone, no ROS


ALL_ROLES = frozenset(Role)
WITH_ROS = frozenset({Role.LAPTOP, Role.ROBOT})


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``required`` is false for what only some set-ups need."""

    name: str
    ok: bool
    required: bool
    detail: str
    remedy: str = ""


def examine(role: Role) -> list[Finding]:
    """Run every check for ``role``. Changes nothing on the machine."""
    return [check(role) for roles, check in _CHECKS if role in roles]


def healthy(findings: list[Finding]) -> bool:
    return all(finding.ok for finding in findings if finding.required)


def render(findings: list[Finding]) -> str:
    """One line per finding: mark, name and what was found; the remedy on a second line if needed."""
    lines = []
    for finding in findings:
        mark = "ok     " if finding.ok else ("MISSING" if finding.required else "optional")
        lines.append(f"{mark:8} {finding.name:22} {finding.detail}")
        if not finding.ok and finding.remedy:
            lines.append(f"{'':8} {'':22} -> {finding.remedy}")
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> list[dict]:
    return [asdict(finding) for finding in findings]


def _distribution(module: str, distribution: str, remedy: str, required: bool = True) -> Callable[[Role], Finding]:
    def check(_: Role) -> Finding:
        if importlib.util.find_spec(module) is None:
            return Finding(module, False, required, "not installed", remedy)
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "installed (no version metadata)"
        return Finding(module, True, required, version)

    return check


def _python(_: Role) -> Finding:
    found = sys.version_info
    text = f"{found.major}.{found.minor}.{found.micro}"
    return Finding("python", found >= (3, 10), True, text, "install Python 3.10 or newer")


def _torch(_: Role) -> Finding:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Finding("torch", False, True, str(error), "pip install -r requirements/cloud.txt")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU only"
    return Finding("torch", True, True, f"{torch.__version__}, {device}")


def _four_bit(_: Role) -> Finding:
    present = [name for name in ("bitsandbytes", "torchao") if importlib.util.find_spec(name)]
    return Finding(
        "4-bit quantization",
        bool(present),
        False,
        ", ".join(present) or "neither bitsandbytes nor torchao",
        "pip install bitsandbytes (CUDA only; int8 works on every CPU without it)",
    )


def _rclpy(_: Role) -> Finding:
    try:
        importlib.import_module("rclpy")
        rmw = importlib.import_module("rclpy.utilities").get_rmw_implementation_identifier()
    except Exception as error:  # a broken ROS raises anything from ImportError to its own errors
        remedy = "source your ROS 2 installation, or run `make setup` for the wheels"
        return Finding("rclpy", False, True, f"{error}", remedy)
    distro = os.environ.get("ROS_DISTRO", "from wheels")
    return Finding("rclpy", True, True, f"{distro}, {rmw}")


def _messages(_: Role) -> Finding:
    try:
        importlib.import_module("dsd_msgs.msg")
        importlib.import_module("dsd_msgs.action")
    except Exception as error:
        remedy = "run `make setup`, or `colcon build --base-paths . src/dsd_msgs` and source it"
        return Finding("dsd_msgs", False, True, f"{error}", remedy)
    return Finding("dsd_msgs", True, True, "built")


def _go2_messages(_: Role) -> Finding:
    places = []
    for name in ("unitree_api", "unitree_go"):
        try:
            places.append(os.path.dirname(str(importlib.import_module(f"{name}.msg").__file__)))
        except Exception as error:
            remedy = (
                "source a workspace with unitree_ros2, or run `make setup`, or "
                "`colcon build --base-paths src/unitree_api src/unitree_go` and source it"
            )
            return Finding("Go2 messages", False, False, f"{error}", remedy)
    return Finding("Go2 messages", True, False, ", ".join(places))


def _discovery(_: Role) -> Finding:
    domain = os.environ.get("ROS_DOMAIN_ID", "0")
    reach = os.environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "SUBNET")
    valid = domain.isdigit() and int(domain) <= 101
    detail = f"ROS_DOMAIN_ID={domain}, discovery range {reach}"
    return Finding("DDS discovery", valid, True, detail, "set ROS_DOMAIN_ID to a number 0..101")


def _cv_bridge(_: Role) -> Finding:
    found = importlib.util.find_spec("cv_bridge") is not None
    detail = "installed" if found else "not installed: the built-in equivalent conversion is used"
    return Finding("cv_bridge", found, False, detail, "apt install ros-$ROS_DISTRO-cv-bridge")


def _ros2_launch(_: Role) -> Finding:
    found = shutil.which("ros2") is not None
    detail = shutil.which("ros2") or "not installed: `dsd demo` starts the same processes itself"
    remedy = "apt install ros-$ROS_DISTRO-ros-base, then source it"
    return Finding("ros2 launch", found, False, detail, remedy)


def _rendering(_: Role) -> Finding:
    # In a process of its own: a failing GL library may abort the interpreter.
    program = (
        "from dsd_ros.robot.sim.world import World\n"
        "from dsd_ros.robot.sim.simulator import Simulator\n"
        "import os\n"
        "simulator = Simulator(World.from_seed(0))\n"
        "image = simulator.render()\n"
        "simulator.close()\n"
        "print(os.environ.get('MUJOCO_GL', 'default'), image.shape)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return Finding("offscreen rendering", False, True, "no image within 60 s", _RENDER_REMEDY)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["the renderer ended without an error message"])[-1]
        return Finding("offscreen rendering", False, True, last, _RENDER_REMEDY)
    return Finding("offscreen rendering", True, True, done.stdout.strip())


_RENDER_REMEDY = "install Mesa's software renderer: apt install libosmesa6 (or libegl1)"


def _models(role: Role) -> Finding:
    from dsd_ros.paths import models_directory

    wanted = {Role.CLOUD: ("target",), Role.ROBOT: ("draft",)}.get(role, ("target", "draft"))
    root = models_directory()
    absent = [name for name in wanted if not (root / name / "config.json").is_file()]
    remedy = "check the models out, name other directories by --model, or run `dsd-lab train pair`"
    detail = f"no {' and no '.join(absent)} under {root}" if absent else ", ".join(wanted)
    return Finding("shipped models", not absent, True, detail, remedy)


def _unitree_sdk(_: Role) -> Finding:
    if importlib.util.find_spec("unitree_sdk2py") is None:
        remedy = "pip install dsd_ros[go2] (not needed for the simulated robot)"
        return Finding("unitree_sdk2py", False, False, "not installed", remedy)
    try:
        cyclone = importlib.metadata.version("cyclonedds")
    except importlib.metadata.PackageNotFoundError:
        cyclone = "unknown"
    if cyclone.startswith("0.10"):
        return Finding("unitree_sdk2py", True, False, f"cyclonedds {cyclone}")
    detail = f"cyclonedds {cyclone}: crashes the 0.10 peers that a Go2 runs"
    remedy = "build cyclonedds 0.10.2, and keep this machine off the robot's network until then"
    return Finding("unitree_sdk2py", False, False, detail, remedy)


_CLOUD_REMEDY = "pip install -r requirements/cloud.txt"
_CHECKS: list[tuple[frozenset[Role], Callable[[Role], Finding]]] = [
    (ALL_ROLES, _python),
    (ALL_ROLES, _torch),
    (ALL_ROLES, _distribution("transformers", "transformers", _CLOUD_REMEDY)),
    (ALL_ROLES, _distribution("safetensors", "safetensors", _CLOUD_REMEDY)),
    (ALL_ROLES, _distribution("msgspec", "msgspec", _CLOUD_REMEDY)),
    (ALL_ROLES, _distribution("websockets", "websockets", _CLOUD_REMEDY)),
    (ALL_ROLES, _models),
    (
        ALL_ROLES,
        _distribution(
            "qwen_vl_utils",
            "qwen-vl-utils",
            "pip install dsd_ros[real-models] (its resizing rule is built in)",
            required=False,
        ),
    ),
    (ALL_ROLES, _four_bit),
    (WITH_ROS, _rclpy),
    (WITH_ROS, _messages),
    (WITH_ROS, _go2_messages),
    (WITH_ROS, _discovery),
    (WITH_ROS, _distribution("cv2", "opencv-python-headless", "pip install -r requirements/robot.txt")),
    (WITH_ROS, _cv_bridge),
    (WITH_ROS, _ros2_launch),
    (frozenset({Role.LAPTOP}), _distribution("mujoco", "mujoco", "pip install -r requirements/sim.txt")),
    (frozenset({Role.LAPTOP}), _rendering),
    (frozenset({Role.ROBOT}), _unitree_sdk),
]
