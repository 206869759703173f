"""This package's own log lines, where they are not a node's, told by the node that runs it: on /rosout like its own."""

from __future__ import annotations

import logging

from rclpy.node import Node

from dsd_ros.logs import ROOT, fields_of


class NodeLog(logging.Handler):
    """Lines of ``logging.getLogger("dsd_ros...")``, with session, reply and round, as the node's; until closed."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._logger = node.get_logger()
        ours = logging.getLogger(ROOT)
        self._before = ours.level
        ours.setLevel(int(self._logger.get_effective_level()))
        ours.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        about = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = record.getMessage() + about
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        # rclpy wants each severity to have a call of its own.
        if record.levelno >= logging.ERROR:
            self._logger.error(line)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(line)
        elif record.levelno >= logging.INFO:
            self._logger.info(line)
        else:
            self._logger.debug(line)

    def close(self) -> None:
        ours = logging.getLogger(ROOT)
        if self in ours.handlers:
            ours.removeHandler(self)
            ours.setLevel(self._before)
        super().close()
