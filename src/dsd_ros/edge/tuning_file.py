# SPDX-License-Identifier: Apache-2.0
"""The file that keeps what mode ``auto`` measured, so that the next session begins with it.

One entry for each link and sampling settings, with the fingerprints of both models. A file that cannot be used costs a
line in the log and nothing else: choices never change a reply.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.tuner import Tuner
from dsd_ros.paths import OWN, cache_directory, user_path

_log = logging.getLogger(__name__)

_VERSION = 1
_ENTRIES = 8  # the oldest are dropped
_MOST_BYTES = 1 << 20
_PAUSE_S = 10.0  # at least, between two writes


class TuningFile:
    """One session's entry in the file. No method raises for a file that is missing, damaged or not writable."""

    def __init__(self, named: str, link: str) -> None:
        """``named``: a path, or "own", in the user's cache directory; empty: nothing is kept. ``link``: which one."""
        self._path = cache_directory() / "tuning.json" if named == OWN else user_path(named) if named else None
        self._link = link
        self._entry: tuple[str, list[str]] | None = None  # its key, and the fingerprints of both models
        self._written = 0.0  # time.monotonic()
        self._complained = {"reading": False, "writing": False}

    def recall(self, tuner: Tuner, settings: DecodeSettings, draft: str, target: str) -> None:
        """Give ``tuner`` what was measured with these settings and models; once for each target."""
        if self._path is None or (self._entry is not None and self._entry[1] == [draft, target]):
            return
        parts = (
            settings.proven_by.value, settings.shape, settings.draft_length,
            float(settings.temperature), settings.top_k, float(settings.top_p),
            *((settings.draft_image_cut, settings.draft_image_tokens) if settings.draft_image_tokens else ()),
        )  # fmt: skip
        self._entry = key, models = " ".join(map(str, (self._link, *parts))), [draft, target]
        self._written = time.monotonic()
        entry = self._read().get(key)
        if entry is None:
            return
        try:
            if entry["models"] != models:
                _log.info("mode auto measures anew: %s was measured with other models", self._link)
            else:
                tuner.restore(entry["tuner"])
                _log.info("mode auto begins with what it measured before over %s: %s", self._link, tuner.explain())
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            self._give_up(f"the entry for {self._link} is damaged ({type(error).__name__})")

    def keep(self, tuner: Tuner, now: bool = False) -> None:
        """Write down what ``tuner`` knows, unless that was done lately; ``now``: in any case."""
        if self._path is None or self._entry is None or not (now or time.monotonic() - self._written > _PAUSE_S):
            return
        self._written = time.monotonic()
        key, models = self._entry
        entries = {name: entry for name, entry in self._read().items() if name != key}  # others may have written, too
        kept = [*entries.items(), (key, {"models": models, "tuner": tuner.state()})][-_ENTRIES:]
        text = json.dumps({"version": _VERSION, "entries": dict(kept)}, separators=(",", ":"), allow_nan=False)
        part = self._path.with_name(f"{self._path.name}.{id(self)}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            if not self._complained["writing"]:
                _log.warning("what mode auto measured is not kept: %s; name another --tuning-file", error)
            self._complained["writing"] = True

    def _read(self) -> dict[str, Any]:
        """The entries by key, oldest first."""
        assert self._path is not None
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                return self._give_up("it is too large")
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            return self._give_up(f"it cannot be read ({type(error).__name__})")
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            return self._give_up("it is of another version")
        entries = content.get("entries")
        return entries if isinstance(entries, dict) else self._give_up("it is damaged")

    def _give_up(self, why: str) -> dict[str, Any]:
        if not self._complained["reading"]:
            _log.info("mode auto measures anew, without %s: %s", self._path, why)
        self._complained["reading"] = True
        return {}
