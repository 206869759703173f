# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from types import SimpleNamespace

from dsd_ros.ros.running import NodeLog


class Logger:
    """Records what a node's logger gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        for level in ("debug", "info", "warning", "error"):
            setattr(self, level, lambda line, level=level: self.lines.append((level, line)))

    def get_effective_level(self) -> int:
        return logging.INFO


def test_lines_of_the_package_become_the_nodes():
    logger, log = Logger(), logging.getLogger("dsd_ros.edge.client")
    handlers = list(logging.getLogger("dsd_ros").handlers)
    lines = NodeLog(SimpleNamespace(get_logger=lambda: logger))
    try:
        log.info("session %s", "opened", extra={"session": 7, "ticket": b"secret"})
        log.debug("not at this level")
        log.error("failed", extra={"reply": 1, "seconds": 0.31820899999999996})
        log.warning("said %s at %s", "\x1b[2J", "ws://u:hunter2@h:1")
        logging.getLogger("elsewhere").warning("another package's")
    finally:
        lines.close()
        lines.close()
    log.error("after the end")
    assert logger.lines == [
        ("info", "session opened session=7"),
        ("error", "failed reply=1 seconds=0.318"),
        ("warning", "said \\x1b[2J at ws://***@h:1"),
    ]
    assert logging.getLogger("dsd_ros").handlers == handlers
