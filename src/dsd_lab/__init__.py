# SPDX-License-Identifier: Apache-2.0
"""The laboratory of dsd_ros: trains the shipped models, measures, reproduces the papers, breaks things on purpose."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[no-redef]


def read_data(name: str) -> dict[str, Any]:
    """A data file of this package, such as "worlds/looks.toml"."""
    return tomllib.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
