# SPDX-License-Identifier: Apache-2.0
"""What ROS 2 Humble lacks of the later distributions' rclpy and launch, as far as this package uses it.

| later | on Humble |
| --- | --- |
| ``rclpy.clock_type`` | ``ClockType`` is in ``rclpy.clock``, of every distribution |
| ``rclpy.experimental.EventsExecutor`` | ``run_node`` takes the single-threaded executor |
| executors that skip what a callback has destroyed | ``run_node`` goes on after the ``InvalidHandle`` they raise |
| ``start_type_description_service`` | nodes have no such service; the override for companions has no effect |
| three substitutions of launch | this module has them by the same names, looked up at each import |

The last because launch_standin reads the launch files with stand-ins, in a process that may have the real launch, too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    EqualsSubstitution: Any
    IfElseSubstitution: Any
    NotEqualsSubstitution: Any


def _truth(value: bool) -> str:
    return str(value).lower()


_PERFORM: dict[str, Callable[..., str]] = {
    "EqualsSubstitution": lambda left, right: _truth(left == right),
    "NotEqualsSubstitution": lambda left, right: _truth(left != right),
    "IfElseSubstitution": lambda condition, one, other: one if condition.lower() in ("true", "1") else other,
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The substitution of that name: launch's own, or one made here."""
        if name not in _PERFORM:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("launch.substitutions"), name, None) or _made(name)


def _made(name: str) -> Any:
    """A substitution that launch lacks; each of its arguments is a text or a substitution."""
    from launch.utilities import normalize_to_list_of_substitutions, perform_substitutions

    from launch import Substitution

    class Made(Substitution):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__()
            self.given = [normalize_to_list_of_substitutions(each) for each in given]

        def perform(self, context: Any) -> str:
            return _PERFORM[name](*(perform_substitutions(context, each) for each in self.given))

    Made.__name__ = Made.__qualname__ = name
    return Made
