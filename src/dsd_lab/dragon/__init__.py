# SPDX-License-Identifier: Apache-2.0
"""DRAGON measured: its bench, and the methods that it is compared with (``baselines``), by name."""

from __future__ import annotations

DRAGON = "dragon"
IN_STEP = "drdg-tw"
METHODS = (DRAGON, "device", "cloud", "crcg", "crcg-cloud", "drcg-text", "drcg-kv", IN_STEP, "drdg-sw")
OF_AN_ORDINARY_CLOUD = (DRAGON, IN_STEP)  # the others' cloud is a ``BaselineService``, or none
