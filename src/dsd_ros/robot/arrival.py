"""Whether a simulated robot stands where an instruction sends it, by ground truth."""

from __future__ import annotations

from dataclasses import dataclass

from .simulator import Simulator
from .world import COLOURS, KINDS, REACH, named_thing


@dataclass(frozen=True)
class Arrival:
    """``distance`` in metres to the target's surface, -1 when it is not known which thing is meant."""

    arrived: bool
    distance: float
    message: str


def check_arrival(simulator: Simulator, instruction: str) -> Arrival:
    """As :meth:`Simulator.reached` has it, for the instruction's thing: it must be the world's target."""
    target = simulator.world.target
    try:
        kind, colour = named_thing(instruction)
    except ValueError:
        colours, kinds = ", ".join(COLOURS), ", ".join(KINDS)
        return Arrival(
            False, -1.0,
            f"The instruction names no target: name a colour ({colours}) and a kind ({kinds}).",
        )  # fmt: skip
    if (kind, colour) != (target.kind, target.colour):
        return Arrival(
            False, -1.0,
            f"The instruction names the {colour} {kind}, but this world's target is the {target.name}.",
        )  # fmt: skip
    distance = simulator.distance_to_target()
    where = f"The robot is {distance:.2f} m from the {target.name}"
    if distance > REACH:
        return Arrival(False, distance, f"{where}; it must be within {REACH} m.")
    if simulator.collisions:
        return Arrival(False, distance, f"{where}, but it has run into something on the way.")
    if not simulator.reached():
        return Arrival(False, distance, f"{where}, but it still moves.")
    return Arrival(True, distance, f"{where} and stands still.")
