# SPDX-License-Identifier: Apache-2.0
"""Distributed speculative decoding for on-robot VLM control."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

__version__: str  # read from package.xml, the one place that states it

if not TYPE_CHECKING:

    def __getattr__(name):
        if name != "__version__":
            raise AttributeError(name)
        from dsd_ros.paths import share_directory

        manifest = (share_directory() / "package.xml").read_text(encoding="utf-8")
        return re.search(r"<version>([^<]+)</version>", manifest)[1]
