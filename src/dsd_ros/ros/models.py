"""Model parameters of a node: those of ModelSettings, an empty path meaning the shipped model."""

from __future__ import annotations

from typing import Any

from rclpy.node import Node

from dsd_ros.paths import models_directory
from dsd_ros.ros.parameters import declare
from dsd_ros.vlm.loading import ModelSettings

DEFAULTS = {"path": "", "threads": 1}


def declare_model(node: Node, role: str) -> ModelSettings:
    """Declare ``model.*``; ``role`` ("draft" or "target") names the shipped model."""

    def complete(values: dict[str, Any]) -> None:
        values["path"] = values["path"] or str(models_directory() / role)

    return declare(node, ModelSettings, "model.", DEFAULTS, complete)
