# SPDX-License-Identifier: Apache-2.0
"""What Python 3.10, which ROS 2 Humble has, lacks of the standard library."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    from enum import StrEnum  # novm
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enumeration whose members are texts."""

        __str__ = str.__str__


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """For type checkers alone."""
        return lambda decorated: decorated


__all__ = ["StrEnum", "dataclass_transform"]
