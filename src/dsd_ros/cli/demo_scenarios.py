"""What `dsd demo --scenario` shows: an instruction that is plain only with what robot and cloud know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """``instruction`` is what the robot is told; ``target`` names what it is meant to find, which nobody tells it."""

    help: str
    instruction: str
    target: str
    seed: int
    arguments: Mapping[str, str]  # of the demo system


SCENARIOS = {
    "my-chair": Scenario(
        "the robot's documents know which chair its owner likes, and the cloud's which colour that one has",
        "bring me to the chair I like",
        "find the red chair",
        7,  # among a blue, a white and a silver chair
        {"memory": "auto", "memory_documents": "my-chair", "cloud_documents": "my-chair"},
    )
}


def scenario(name: str) -> Scenario:
    """A scenario by its name; ValueError with those there are."""
    if name not in SCENARIOS:
        raise ValueError(f"'{name}' is no scenario; choose from {', '.join(SCENARIOS)}.")
    return SCENARIOS[name]
