# SPDX-License-Identifier: Apache-2.0
"""Faults that can be injected into a simulated robot: "camera freeze", "robot die", "all ok"."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

OK = "ok"


class FaultBoard:
    """The present fault of each part. Thread-safe.

    :param faults: part -> its possible faults.
    """

    def __init__(self, faults: Mapping[str, Sequence[str]]) -> None:
        self._faults = {part: tuple(names) for part, names in faults.items()}
        self._now = dict.fromkeys(self._faults, OK)
        self._lock = threading.Lock()

    def set(self, text: str) -> str:
        """Set "PART FAULT"; "PART ok" ends a part's fault, "all ok" every fault. Returns a complaint, or ""."""
        part, _, fault = text.strip().partition(" ")
        fault = fault.strip()
        if (part, fault) == ("all", OK):
            changed = dict.fromkeys(self._faults, OK)
        elif part in self._faults and fault in (OK, *self._faults[part]):
            changed = {part: fault}
        else:
            return f"'{text[:60]}' is no fault; say {self.choices}."
        with self._lock:
            self._now |= changed
        return ""

    def of(self, part: str) -> str:
        """The fault of a part; "ok" when it has none."""
        with self._lock:
            return self._now[part]

    @property
    def choices(self) -> str:
        each = (f"{part} {'|'.join((*names, OK))}" for part, names in self._faults.items())
        return f"{', '.join(each)} or all {OK}"

    def __str__(self) -> str:
        """The present faults; empty when there are none."""
        with self._lock:
            return ", ".join(f"{part} {fault}" for part, fault in self._now.items() if fault != OK)
