"""Faults that a simulated robot can be told to have: "camera freeze", "robot die", "all ok"."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

OK = "ok"


class FaultBoard:
    """Which part has which fault now. Thread-safe.

    :param faults: part -> the faults that it can have.
    """

    def __init__(self, faults: Mapping[str, Sequence[str]]) -> None:
        self._faults = {part: tuple(names) for part, names in faults.items()}
        self._now = dict.fromkeys(self._faults, OK)
        self._lock = threading.Lock()

    def say(self, text: str) -> str:
        """Take "PART FAULT" in; "ok" ends a part's fault, and "all ok" every one. Why not, in a sentence, or ""."""
        part, _, fault = text.strip().partition(" ")
        fault = fault.strip()
        if (part, fault) == ("all", OK):
            with self._lock:
                self._now = dict.fromkeys(self._faults, OK)
            return ""
        if part not in self._faults or fault not in (OK, *self._faults[part]):
            return f"'{text[:60]}' is no fault; say {self.choices}."
        with self._lock:
            self._now[part] = fault
        return ""

    def of(self, part: str) -> str:
        """The fault of a part, "ok" when it has none."""
        with self._lock:
            return self._now[part]

    @property
    def choices(self) -> str:
        each = (f"{part} {'|'.join((*names, OK))}" for part, names in self._faults.items())
        return f"{', '.join(each)} or all {OK}"

    def __str__(self) -> str:
        """What is wrong, for people; empty when nothing is."""
        with self._lock:
            return ", ".join(f"{part} {fault}" for part, fault in self._now.items() if fault != OK)
