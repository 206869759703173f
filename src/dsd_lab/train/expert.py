"""The simulator's expert: from what is truly there to the reply a perfect model would give."""

from __future__ import annotations

from dsd_lab.worlds.guide import AHEAD, LITTLE, MUCH, View, decide, split_goal

__all__ = ["View", "reply"]


def reply(view: View, goal: str, searched: bool = False) -> str:
    """The expert's reply (reasoning, then one action) for a goal called "colour kind", "left colour kind" or so.

    One picture decides. Where the goal is not in view the robot turns for it; with `searched` (it was in none
    of the pictures of a full round) it says that there is none, and stops.
    """
    decision = decide(view, goal, searched)
    index = decision.index
    if index is None:
        if searched:
            return f"No {goal} anywhere here, so I stop. Action: {decision.action}"
        other = _other(view, None, goal)
        seen = f"only {other}" if other else "nothing but the room"
        return f"No {goal} in view, {seen}, so I look around. Action: {decision.action}"
    where = f"The {goal} is {_side(view.bearing(index))}, {_metres(view.gap(index))} away"
    other = _other(view, index, goal)
    scene = f"{other}, " if other else "nothing else is near it, "
    around = ""
    if decision.side:
        around = f"{decision.obstacle} is in the way, so I go round its {decision.side}"
    if decision.verb == "stop":
        plan = "and I have arrived"
    elif decision.obstacle and not decision.side:
        plan = f"{decision.obstacle} blocks me"
    elif decision.verb == "forward":
        way = "open" if decision.free > 2.0 else "clear" if decision.free > 1.2 else "short"
        plan = around or f"the way is {way}"
    else:
        plan = around or f"I {decision.verb}"
    return f"{where}; {scene}{plan}. Action: {decision.action}"


def _side(bearing: float) -> str:
    size = abs(bearing)
    if size <= AHEAD:
        return "straight ahead"
    side = "left" if bearing > 0 else "right"
    if size <= LITTLE:
        return f"a little {side}"
    return f"on the {side}" if size <= MUCH else f"far {side}"


def _metres(gap: float) -> str:
    """Rounded as finely as a camera can tell: 0.1 m near by, then 0.2 m, then 0.5 m."""
    step = 0.1 if gap < 1.0 else 0.2 if gap < 2.0 else 0.5
    return f"{max(round(gap / step), 0) * step:.1f} m"


def _other(view: View, goal: int | None, name: str) -> str:
    """A clause on the thing that could be mistaken for the goal, else the most prominent one."""
    kind = split_goal(name)[1].split()[1]
    others = [i for i in view.pixels if i != goal]
    if not others:
        return ""

    def rank(i: int) -> tuple[bool, int]:
        return view.world.things[i].kind == kind, view.pixels[i]

    index = max(others, key=rank)
    thing = view.world.things[index]
    angle = view.camera_bearing(index)
    side = "left" if angle > 0.2 else "right" if angle < -0.2 else "middle"
    if goal is None:
        return f"a {thing.name} in the {side}" if side == "middle" else f"a {thing.name} on the {side}"
    apart = angle - view.camera_bearing(goal)
    beside = "left of" if apart > 0.12 else "right of" if apart < -0.12 else "in line with"
    depth = view.gap(index) - view.gap(goal)
    order = "behind" if depth > 0.35 else "before" if depth < -0.35 else "level"
    link = "not the" if thing.kind == kind else "with the"
    return f"{link} {thing.name} {beside} it and {order}"
