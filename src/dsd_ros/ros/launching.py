"""What the files under launch/ share: arguments and parameters made from the nodes' settings, and restarts.

Nothing of `launch` is imported before a function needs it: the files are also read without it (see launch_standin).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from dsd_ros.addresses import check_host, check_verifier_address
from dsd_ros.environment import check_domain
from dsd_ros.paths import config_directory
from dsd_ros.ros.bringup import REMAPPINGS
from dsd_ros.ros.processes import FIRST_PAUSE_S, Restarts
from dsd_ros.ros.settings import parameter

_NAMESPACE = re.compile(r"(/?[A-Za-z][A-Za-z0-9_]*)(/[A-Za-z][A-Za-z0-9_]*)*")
_ADDRESSES = {"verifier": check_verifier_address, "view_bind": check_host}  # launch arguments that are addresses


def setting(node: str, name: str, default: str | None = None) -> dict[str, Any]:
    """Default, description and choices of a launch argument that sets a node's parameter.

    :param default: of this system, where it is not the parameter's own.
    """
    spec = parameter(node, name)
    own = str(spec.default).lower() if spec.kind is bool else str(spec.default)
    options: dict[str, Any] = {"default_value": own if default is None else default, "description": spec.help}
    choices = ("false", "true") if spec.kind is bool else spec.choices
    return options | ({"choices": list(choices)} if choices else {})


def switch(description: str) -> dict[str, Any]:
    """Default, description and choices of a launch argument that turns something on."""
    return {"default_value": "false", "description": description, "choices": ["false", "true"]}


def node(executable: str, given: Mapping[str, Any] | None = None, guest: str = "", **options: Any) -> Any:
    """A node of this package in the robot's namespace, with its parameter file and what launch arguments set over it.

    :param given: parameter -> name of the launch argument that sets it, or a substitution.
    :param guest: a node that may run in the same process; it reads its own file.
    :param options: of launch_ros' Node, e.g. ``condition`` and ``on_exit``.
    """
    from launch.substitutions import LaunchConfiguration
    from launch_ros.actions import Node
    from launch_ros.parameter_descriptions import ParameterValue

    files: list[Any] = [str(config_directory() / f"{name[:-5]}.yaml") for name in (executable, guest) if name]
    values = {}
    for name, value in (given or {}).items():
        kind = parameter(executable, name).kind
        values[name] = ParameterValue(LaunchConfiguration(value) if isinstance(value, str) else value, value_type=kind)
    return Node(
        package="dsd_ros",
        executable=executable,
        namespace=LaunchConfiguration("namespace"),
        parameters=[*files, values] if values else files,
        remappings=REMAPPINGS,
        output="screen",
        emulate_tty=True,
        **options,
    )


def namespace_and_domain() -> list[Any]:
    """The arguments ``namespace`` and ``domain``, and what they do to all processes."""
    from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
    from launch.conditions import IfCondition
    from launch.substitutions import LaunchConfiguration, NotEqualsSubstitution

    domain = LaunchConfiguration("domain")
    return [
        DeclareLaunchArgument(
            "namespace", default_value="", description="namespace of the robot, for several in one domain, e.g. go2_1"
        ),
        DeclareLaunchArgument("domain", default_value="", description="ROS domain; empty: that of ROS_DOMAIN_ID"),
        OpaqueFunction(function=_check),
        SetEnvironmentVariable("ROS_DOMAIN_ID", domain, condition=IfCondition(NotEqualsSubstitution(domain, ""))),
    ]


def _check(context: Any) -> None:
    given = context.launch_configurations
    namespace, domain = given["namespace"], given["domain"]
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"'{namespace}' is no namespace; use letters, digits and _, as in go2_1.")
    check_domain(domain)
    for name, check in _ADDRESSES.items():
        if name in given:
            check(given[name])


def restarted() -> dict[str, Any]:
    """Options of a process that is restarted after a crash; one crash too many, or an end without one, ends all.

    The bounds are those of the process runner; launch knows one pause between restarts, not a growing one.
    """
    restarts = Restarts()

    def on_exit(event: Any, context: Any) -> Any:
        if context.is_shutdown or restarts.after(event.returncode, time.monotonic()) is not None:
            return None
        from launch.actions import Shutdown

        return Shutdown(reason=f"{event.process_name} {restarts.sentence(event.returncode)}; ending the others")

    # A shutdown has to overtake launch's own restart during this pause.
    return {"respawn": True, "respawn_delay": 2 * FIRST_PAUSE_S, "on_exit": on_exit}
