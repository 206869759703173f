# SPDX-License-Identifier: Apache-2.0
"""What an announcement of a kind and an amount (cm, degrees) holds: an action, or why it is none of the grammar."""

from __future__ import annotations

from dsd_ros.navigation.run.actions import Action, ActionKind


def announced(kind: ActionKind | None, amount: int) -> Action | str:
    if kind is None:
        return "An action of that kind is unknown."
    try:
        return Action(kind, amount)
    except ValueError as error:
        return str(error)
