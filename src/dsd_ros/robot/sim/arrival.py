"""Whether a simulated robot stands where an instruction sends it, by ground truth."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import COLOURS, KINDS, REACH, named_goal


@dataclass(frozen=True)
class Arrival:
    """``distance`` in metres to the target's surface, -1 when it is not known which thing is meant."""

    arrived: bool
    distance: float
    message: str


def check_arrival(simulator: Simulator, instruction: str) -> Arrival:
    """As :meth:`Simulator.reached` has it, for the instruction's thing: it must be the world's target.

    Where the world has two of the target's name, the instruction must say which; where it has one, "the left one"
    is that one. Nowhere is the arrival at what is not there.
    """
    world = simulator.world
    try:
        goal = named_goal(instruction)
    except ValueError:
        colours, kinds = ", ".join(COLOURS), ", ".join(KINDS)
        return Arrival(
            False, -1.0,
            f"The instruction names no target: name a colour ({colours}) and a kind ({kinds}).",
        )  # fmt: skip
    if world.target_index is None:
        return Arrival(False, -1.0, f"The instruction names the {goal.name}, but no {world.missing} is here to go to.")
    target = world.target
    if goal.thing != target.name or (world.which and goal.which != world.which):
        return Arrival(
            False, -1.0,
            f"The instruction names the {goal.name}, but this world's target is the {world.goal}.",
        )  # fmt: skip
    distance = simulator.distance_to_target()
    where = f"The robot is {distance:.2f} m from the {world.goal}"
    if distance > REACH:
        return Arrival(False, distance, f"{where}; it must be within {REACH} m.")
    if simulator.collisions:
        return Arrival(False, distance, f"{where}, but it has run into something on the way.")
    if not simulator.reached():
        return Arrival(False, distance, f"{where}, but it still moves.")
    return Arrival(True, distance, f"{where} and stands still.")
