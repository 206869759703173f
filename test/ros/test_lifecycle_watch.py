# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from typing import Any

import pytest
from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from rclpy.callback_groups import ReentrantCallbackGroup
from ros_rig import Rig

from dsd_ros.ros.managed import LifecycleWatch


class Asked:
    """Stands for a lifecycle node: keeps its first ``lost`` answers back, then says ``states`` in turn."""

    def __init__(self, lost: int, *states: int) -> None:
        self.questions, self.end = 0, threading.Event()
        self._lost, self._states = lost, states

    def answer(self, _: Any, response: Any) -> Any:
        self.questions += 1
        number = self.questions - self._lost - 1
        if number < 0:
            self.end.wait(60.0)
        response.current_state.id = self._states[min(max(number, 0), len(self._states) - 1)]
        return response


@pytest.mark.parametrize(("lost", "questions"), [(0, 2), (2, 4)])
def test_asks_until_a_node_is_active_and_again_for_a_lost_answer(rig: Rig, lost: int, questions: int) -> None:
    asked = Asked(lost, State.PRIMARY_STATE_INACTIVE, State.PRIMARY_STATE_ACTIVE)
    rig.node.create_service(GetState, "some_node/get_state", asked.answer, callback_group=ReentrantCallbackGroup())
    watch = LifecycleWatch(rig.node, "some_node")
    try:
        rig.until(watch.active, 30.0, "some_node active")
        assert asked.questions == questions
        assert watch.active() and asked.questions == questions  # known, so not asked again
    finally:
        asked.end.set()
        watch.close()
