"""A lifecycle node as this project has them: hooks that raise, and a way to be active without being told.

A subclass says what happens by overriding the hooks, which raise on failure instead of returning codes:

    load        unconfigured -> inactive    read files, load models; nothing moves, nobody is answered
    begin       inactive -> active          open sessions, start to answer
    end         active -> inactive          robot at rest first, then no more answers; always leaves the node inactive
    unload      inactive -> unconfigured    give memory back
    give_back   before the process ends     what the constructor made

``shutdown`` is allowed in each of these states and does what is left of ``end`` and ``unload``. No two transitions
overlap, whoever asked for them; a transition that the state does not have is refused with an answer, where rclpy
gives none. With the parameter ``autostart`` the node takes itself to active and tries again while ``begin`` fails;
a transition made over the lifecycle services ends that: from then on whoever asked for it is in charge.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node

from dsd_ros.ros import health
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.running import EXIT_BAD_START, EXIT_GAVE_UP, RCLError
from dsd_ros.ros.settings import ManagedSettings
from dsd_ros.wire.channel import Backoff, LinkError

_EXPECTED = (ValueError, OSError, RuntimeError, LinkError)  # what a hook may raise without a defect
_CLOSE_PATIENCE_S = 0.4  # for a transition under way when the process ends
SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)
_GONE = SimpleNamespace(current_state=(State.PRIMARY_STATE_FINALIZED, "finalized"))


class ManagedNode(LifecycleNode):
    """See the module. A subclass declares its parameters, and calls :meth:`autostart` last in its constructor.

    Spin it with two threads or more: a transition occupies one while it lasts.

    :param heartbeat: also say the node's name on ``heartbeat``, in every state: the process is alive.
    :param options: rclpy's, e.g. ``context``.
    """

    def __init__(self, name: str, hardware: str = "", heartbeat: bool = False, **options: Any) -> None:
        Node.__init__(self, name, **options)
        # rclpy's own constructor has no group for these; in the default one a long transition would
        # keep even get_state from being answered.
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        self.failure: str | None = None  # a sentence once the node has given up; ends the process
        self.exit_code = EXIT_GAVE_UP
        self.reason = f"The {name} is not configured."  # why it is not active
        self._managed = declare(self, ManagedSettings)
        self._transition = threading.RLock()
        self._closing = threading.Event()
        self._active = False
        self._by_hand = False
        self._health = health.Health(self, hardware, heartbeat)
        self._rcl_change_state = self._service_change_state.callback
        self._service_change_state.callback = self._on_change_state

    # -- hooks ---------------------------------------------------------------------------------

    def load(self) -> None:
        """unconfigured -> inactive. Raises ValueError, OSError or RuntimeError with a sentence."""

    def begin(self) -> None:
        """inactive -> active. Raises those, or LinkError, and then leaves nothing behind."""

    def end(self) -> None:
        """active -> inactive, the robot at rest first. ``active`` is already False."""

    def unload(self) -> None:
        """inactive -> unconfigured. Must bear being called after a :meth:`load` that failed."""

    def interrupt(self) -> None:
        """Somebody waits for a transition: whatever a hook or a callback waits for may be given up. Any thread."""

    def give_back(self) -> None:
        """The process ends: give back what the constructor made. The executor still spins."""

    # -- for subclasses ------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Between a :meth:`begin` that worked and the :meth:`end` behind it."""
        return self._active

    @property
    def closing(self) -> bool:
        """The process is ending: under a second is left."""
        return self._closing.is_set()

    @property
    def state(self) -> str:
        """unconfigured, inactive, active or finalized, or the name of the transition under way."""
        return str(self._state_machine.current_state[1])

    def autostart(self) -> None:
        """Take the node to active in a thread, where its parameter says so."""
        if self._managed.autostart:
            threading.Thread(target=self._start, name="autostart", daemon=True).start()

    def give_up(self, sentence: str, exit_code: int = EXIT_GAVE_UP) -> None:
        """End the process with this sentence. May be called from any thread."""
        self.exit_code = exit_code
        self.failure = sentence

    def close(self) -> None:
        """What run_node calls when the process ends."""
        self._closing.set()
        self.interrupt()
        if self._transition.acquire(timeout=_CLOSE_PATIENCE_S):
            try:
                self._end()
            finally:
                self._transition.release()
        self.give_back()

    def destroy_node(self) -> None:
        """rclpy's, and what it leaves: its state machine keeps the participant, whose shared memory outlives us."""
        super().destroy_node()
        self._state_machine = _GONE

    # -- transitions ---------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        sentence = self._attempt(self.load)
        if sentence is not None:
            self._attempt(self.unload)
            return self._not_done(sentence, health.ERROR)
        self.reason = f"The {self.get_name()} is not active."
        if self._by_hand or not self._managed.autostart:
            self._health.report(health.WARN, "inactive")
        return SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        sentence = self._attempt(self.begin)
        if sentence is not None:
            return self._not_done(sentence, health.WARN)
        self._active = True
        return SUCCESS

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        done = self._end()
        self._stand(f"The {self.get_name()} is not active.", "inactive")
        return SUCCESS if done else ERROR  # from which on_error leads to unconfigured

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
        """The service's callback: as rclpy's, one at a time, and with an answer also to what is refused."""
        self.interrupt()
        with self._transition:
            before, self._by_hand = self._by_hand, True
            try:
                return self._rcl_change_state(request, response)
            except RCLError:  # raised before anything has happened
                self._by_hand = before
                asked = request.transition.label or request.transition.id
                self.get_logger().warning(f"{asked}: no transition of the state {self.state}")
                response.success = False
                return response

    def _start(self) -> None:
        """Takes the node to active, as often as it needs."""
        backoff = Backoff(0.2, 2.0)
        while not self._closing.is_set():
            with self._transition:
                if self._by_hand or self._closing.is_set():
                    return
                if self.state == "unconfigured" and self.trigger_configure() != SUCCESS:
                    self.give_up(self.reason, EXIT_BAD_START)
                    return
                if self.trigger_activate() == SUCCESS or self.failure is not None:
                    return
            self._closing.wait(backoff.next_delay())

    def _attempt(self, hook: Any) -> str | None:
        """Call a hook; None, or a sentence for what it raised."""
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

    def _not_done(self, sentence: str, level: bytes) -> TransitionCallbackReturn:
        self.reason = sentence
        self._health.report(level, sentence)
        return FAILURE

    def _stand(self, reason: str, message: str) -> None:
        self.reason = reason
        self._health.report(health.WARN, message)

    def _end(self) -> bool:
        """:meth:`end`, where the node is active; False when it raised."""
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
    """Give back what a dropped model held, also to the GPU's driver."""
    torch = sys.modules.get("torch")
    if torch is None:
        return  # then there was no model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
