# SPDX-License-Identifier: Apache-2.0
"""The base of this project's lifecycle nodes: hooks that raise, and autostart; and a watch on other nodes' states.

A subclass overrides the hooks :meth:`~ManagedNode.load`, ``begin``, ``end``, ``unload`` and ``give_back``, which raise
on failure instead of returning codes. ``shutdown`` is allowed in every state and does what remains of ``end`` and
``unload``. Transitions never overlap. One that the current state does not allow is refused with a response, where rclpy
sends none. With the parameter ``autostart`` the node activates itself and retries while ``begin`` fails; the first
transition requested over the lifecycle services ends that, and the requester is in charge from then on.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node

from dsd_ros.navigation.safety.causes import STARTING
from dsd_ros.ros import health
from dsd_ros.ros.parameters import NodeParameters
from dsd_ros.ros.running import EXIT_BAD_START, EXIT_GAVE_UP, RCLError, RunnableNode
from dsd_ros.ros.settings import ManagedSettings
from dsd_ros.wire.channel import Backoff, LinkError

_EXPECTED = (ValueError, OSError, RuntimeError, LinkError)  # what a hook may raise in normal operation
_CLOSE_PATIENCE_S = 0.4  # for a transition in progress at shutdown
SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)
_START_S = 60.0  # what an autostart waits for within this time, such as a verifier, is information
_GONE = SimpleNamespace(current_state=(State.PRIMARY_STATE_FINALIZED, "finalized"))


NodeSettings = TypeVar("NodeSettings", bound=ManagedSettings)


class ManagedNode(LifecycleNode, RunnableNode, Generic[NodeSettings]):
    """A subclass calls :meth:`autostart` last in its constructor.

    Spin it with two threads or more: a transition occupies one.

    :param schema: of the node's parameters.
    :param heartbeat: publish the node's name on ``dsd/heartbeat`` in every state, to show that the process is alive.
    :param options: rclpy's, e.g. ``context``.
    """

    def __init__(
        self, name: str, schema: type[NodeSettings], hardware: str = "", heartbeat: bool = False, **options: Any
    ) -> None:
        Node.__init__(self, name, **options)
        # rclpy's constructor takes no group for these services; in the default one a long transition would block
        # even get_state.
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        self.reason = f"The {name} is not configured."  # why it is not active
        self._declared = NodeParameters(self, schema, adopt=self._adopt)
        self._settings = self._declared.settings
        self._transition = threading.RLock()
        self._closing = threading.Event()
        self._active = False
        self._by_hand = False
        self._starter: threading.Thread | None = None
        self._calm_until = time.monotonic() + _START_S
        self._health = health.Health(self, hardware, heartbeat)
        self._rcl_change_state = self._service_change_state.callback
        self._service_change_state.callback = self._on_change_state

    # -- hooks ---------------------------------------------------------------------------------

    def load(self) -> None:
        """unconfigured -> inactive: read files, load models. Raises ValueError, OSError or RuntimeError."""

    def begin(self) -> None:
        """inactive -> active: open sessions, answer. Raises the same or LinkError, and then cleans up after itself."""

    def end(self) -> None:
        """active -> inactive, always, the robot at rest first. ``active`` is already False."""

    def unload(self) -> None:
        """inactive -> unconfigured: free memory. Also called after a failed :meth:`load`."""

    def change(self, settings: NodeSettings) -> None:
        """Live parameters change, in any state; ``_settings`` are still the old ones. Raises ValueError to refuse."""

    def interrupt(self) -> None:
        """A transition was requested: hooks and callbacks should stop waiting. Called from any thread."""

    def give_back(self) -> None:
        """The process ends: release what the constructor created. The executor still spins."""

    # -- for subclasses ------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Between a successful :meth:`begin` and the next :meth:`end`."""
        return self._active

    @property
    def closing(self) -> bool:
        """The process ends in less than a second."""
        return self._closing.is_set()

    @property
    def state(self) -> str:
        """unconfigured, inactive, active, finalized, or the name of the transition in progress."""
        return str(self._state_machine.current_state[1])

    def autostart(self) -> None:
        """Activate the node from a thread if the parameter ``autostart`` is set."""
        if self._settings.autostart:
            self._starter = threading.Thread(target=self._start, name="autostart", daemon=True)
            self._starter.start()

    def give_up(self, sentence: str, exit_code: int = EXIT_GAVE_UP) -> None:
        """End the process with this sentence. Thread-safe."""
        self.exit_code = exit_code
        self.failure = sentence

    def close(self) -> None:
        """Called by run_node when the process ends."""
        self._closing.set()
        self.interrupt()
        if self._transition.acquire(timeout=_CLOSE_PATIENCE_S):
            try:
                self._end()
            finally:
                self._transition.release()
        self.give_back()

    def destroy_node(self) -> None:
        """Also drop rclpy's state machine, which would keep the participant and its shared memory alive.

        Waits for a transition of the autostart that :meth:`close` has interrupted; a process has ``close_s`` for that.
        """
        if self._starter is not None:
            self._starter.join()
        super().destroy_node()
        self._state_machine = _GONE

    # -- transitions ---------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._settings = self._declared.configure()
        sentence = self._attempt(self.load)
        if sentence is not None:
            self._attempt(self.unload)
            return self._not_done(sentence, health.ERROR)
        self.reason = f"The {self.get_name()} is not active."
        if self._by_hand or not self._settings.autostart:
            self._health.report(health.WARN, "inactive")
        return SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        sentence = self._attempt(self.begin)
        if sentence is not None:
            starting = not self._by_hand and time.monotonic() < self._calm_until
            return self._not_done(sentence, health.WARN, starting)
        self._active = True
        return SUCCESS

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        done = self._end()
        self._stand(f"The {self.get_name()} is not active.", "inactive")
        return SUCCESS if done else ERROR  # on_error then leads to unconfigured

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._unloaded()

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._end()
        self._unloaded()
        self._stand(f"The {self.get_name()} is shut down.", "shut down")
        return SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._active = False
        self._unloaded()
        self._health.report(health.ERROR, "back to unconfigured after an error")
        return SUCCESS

    def _on_change_state(self, request: Any, response: Any) -> Any:
        """rclpy's service callback, one call at a time, with a response to refused transitions."""
        self.interrupt()
        with self._transition:
            before, self._by_hand = self._by_hand, True
            try:
                return self._rcl_change_state(request, response)
            except RCLError:  # raised before the transition began
                self._by_hand = before
                asked = request.transition.label or request.transition.id
                self.get_logger().warning(f"{asked}: no transition of the state {self.state}")
                response.success = False
                return response

    def _start(self) -> None:
        """Activate the node, retrying until it works."""
        backoff = Backoff(0.2, 2.0)
        while not self._closing.is_set():
            with self._transition:
                if self._by_hand or self._closing.is_set():
                    return
                if self.state == "unconfigured" and self.trigger_configure() != SUCCESS:
                    self.give_up(self.reason, EXIT_BAD_START)
                    return
                if self._closing.is_set() or self.trigger_activate() == SUCCESS or self.failure is not None:
                    return
            self._closing.wait(backoff.next_delay())

    def _adopt(self, settings: NodeSettings) -> None:
        self.change(settings)
        self._settings = settings

    def _attempt(self, hook: Any) -> str | None:
        """Call a hook; returns None, or a sentence for what it raised."""
        try:
            hook()
        except _EXPECTED as error:
            return str(error) or repr(error)
        except Exception as error:  # rclpy would swallow it
            sentence = f"The {self.get_name()} failed in {hook.__name__}: {error!r}"
            self.get_logger().error(sentence)
            if not self._by_hand:
                self.give_up(sentence)
            return sentence
        return None

    def _not_done(self, sentence: str, level: bytes, starting: bool = False) -> TransitionCallbackReturn:
        self.reason = sentence
        self._health.report(level, f"{STARTING}: {sentence}" if starting else sentence, calm=starting)
        return FAILURE

    def _stand(self, reason: str, message: str) -> None:
        self.reason = reason
        self._health.report(health.WARN, message)

    def _end(self) -> bool:
        """Call :meth:`end` if the node is active; returns False when it raised."""
        if not self._active:
            return True
        self._active = False
        sentence = self._attempt(self.end)
        if sentence is not None:
            self._health.report(health.ERROR, sentence)
        return sentence is None

    def _unloaded(self) -> TransitionCallbackReturn:
        sentence = self._attempt(self.unload)
        free_memory()
        self._stand(f"The {self.get_name()} is not configured.", "unconfigured")
        return SUCCESS if sentence is None else ERROR


def free_memory() -> None:
    """Free the memory of a dropped model, on the GPU too."""
    torch = sys.modules.get("torch")
    if torch is None:
        return  # so no model was loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_HASTE_S, _PATIENCE_S = 0.2, 2.0  # before a request is repeated: at first, and twice as long each time up to this


class LifecycleWatch:
    """Asks a lifecycle node for its state until it is active; ``node`` is spun elsewhere.

    An unanswered request is repeated: DDS discovers the two sides independently, so a node may receive the request
    before it knows the client; and a restarted node may miss a request.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._client = node.create_client(GetState, f"{name}/get_state")
        self._call: Any = None
        self._asked, self._patience = 0.0, _HASTE_S
        self._active = False

    def active(self) -> bool:
        """Whether the node has been active; polls without blocking."""
        if self._active:
            return True
        if self._call is not None and self._call.done():
            answer, self._call = self._call.result(), None
            self._active = answer is not None and answer.current_state.id == State.PRIMARY_STATE_ACTIVE
        elif self._call is not None and time.monotonic() - self._asked > self._patience:
            self._client.remove_pending_request(self._call)
            self._call, self._patience = None, min(_PATIENCE_S, 2.0 * self._patience)
        elif self._call is None and self._client.service_is_ready():
            self._call, self._asked = self._client.call_async(GetState.Request()), time.monotonic()
        return self._active

    def close(self) -> None:
        """Stop asking."""
        self._node.destroy_client(self._client)
