"""Whether another node is active, asked until it is."""

from __future__ import annotations

import time
from typing import Any

from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from rclpy.node import Node

_PATIENCE_S = 2.0  # for an answer


class LifecycleWatch:
    """Asks a lifecycle node for its state each time the last answer was another than active.

    A node that has found this client's question before it found the client drops its answer (DDS tells the two sides
    of each other independently), and while a killed node is not missed yet, its successor may not hear the question.
    So an answer that does not come is asked for again.
    """

    def __init__(self, node: Node, name: str) -> None:
        """:param node: spinning elsewhere. :param name: of the node to be watched, in its namespace."""
        self._node = node
        self._client = node.create_client(GetState, f"{name}/get_state")
        self._call: Any = None
        self._asked = 0.0
        self._active = False

    def active(self) -> bool:
        """Whether the node has been active; asks on, without waiting."""
        if self._active:
            return True
        if self._call is not None and self._call.done():
            answer, self._call = self._call.result(), None
            self._active = answer is not None and answer.current_state.id == State.PRIMARY_STATE_ACTIVE
        elif self._call is not None and time.monotonic() - self._asked > _PATIENCE_S:
            self._client.remove_pending_request(self._call)
            self._call = None
        elif self._call is None and self._client.service_is_ready():
            self._call, self._asked = self._client.call_async(GetState.Request()), time.monotonic()
        return self._active

    def close(self) -> None:
        """Ask no more."""
        self._node.destroy_client(self._client)
