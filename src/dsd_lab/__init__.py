# SPDX-License-Identifier: Apache-2.0
"""The laboratory of dsd_ros: trains the shipped models, measures, reproduces the papers, breaks things on purpose."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_data(name: str) -> dict[str, Any]:
    """A data file of this package, such as "worlds/looks.toml"."""
    return tomllib.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
