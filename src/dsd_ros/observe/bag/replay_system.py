# SPDX-License-Identifier: Apache-2.0
"""Start the draft node and the verifier of a replay as processes, over either transport.

They run in their own namespace and with discovery limited to this machine, so that no robot nearby hears them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsd_ros.bringup.processes import ProcessGroup, use_own_ros_domain
from dsd_ros.bringup.systems import Start
from dsd_ros.environment import check_environment
from dsd_ros.ros.settings import NODES, specs

if TYPE_CHECKING:
    from typing_extensions import Self

READY_LIMIT_S = 180.0
_ADDRESS = re.compile(r"wss?://[\w.\-\[\]:]+:\d+")
# Recorded parameters that describe the recording machine or its link.
_MACHINE_PARAMETERS = ("autostart", "image_transport", "token_file", "transport", "use_sim_time", "link.", "engine.")


class ReplayFailed(RuntimeError):
    """A node of the replay did not start or ended; one sentence."""


@dataclass(frozen=True)
class ReplayPlan:
    """How to start the nodes: flat parameters that override those of the nodes' files."""

    transport: str
    draft: dict[str, Any] = field(default_factory=dict)
    verifier: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayRequest:
    """One recorded step, to be decoded again."""

    stamp: int  # of the picture, ns
    picture: bytes  # a PNG or JPEG file
    format: str  # of a CompressedImage
    instruction: str
    history: tuple[tuple[int, str], ...] = ()  # (stamp in ns, action) of the previous steps, oldest first


@dataclass(frozen=True)
class ReplayReply:
    """The replayed reply. ``tokens`` is None when a message was missed; ``message`` says why there is no reply."""

    text: str = ""
    tokens: list[int] | None = None
    count: int = 0  # of its tokens
    rounds: int = 0
    seconds: float = 0.0
    stamp: int = 0  # of its picture, ns
    message: str = ""


def reusable_parameters(recorded: dict[str, Any], node: str) -> dict[str, Any]:
    """The recorded parameters of a node that still exist and do not depend on the machine."""
    kinds = {spec.name: spec.kind for spec in specs(NODES[node]) if not spec.name.startswith(_MACHINE_PARAMETERS)}
    return {name: value for name, value in recorded.items() if name in kinds and isinstance(value, kinds[name])}


class ReplaySystem:
    """The running nodes and the client that queries them, as a context manager.

    Create it in a thread that outlives it: the processes end with that thread.
    """

    def __init__(self, plan: ReplayPlan, printer: Callable[[str, str], None], interrupted: Callable[[], bool]) -> None:
        self._plan = plan
        self._interrupted = interrupted
        self._lines: list[str] = []

        def keep(name: str, line: str) -> None:
            self._lines = [*self._lines[-19:], f"[{name}] {line}"]
            printer(name, line)

        self._group = ProcessGroup(keep)
        self.client: Any = None  # the ReplayClient, after ``__enter__``

    def __enter__(self) -> Self:
        use_own_ros_domain()
        os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
        check_environment()
        namespace = f"replay_{os.getpid()}"
        try:
            self._start(namespace)
            # Imported late, so that the nodes start while this process loads ROS.
            from dsd_ros.observe.ros.replay_client import ReplayClient

            verifies = "verifier_node" if self._plan.transport == "dds" else "bridge_node"
            self.client = ReplayClient(namespace, ("draft_node", verifies))
            self.wait(self.client.ready, "The nodes did not become ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.client is not None:
            self.client.close()
        self._group.close()

    def check(self) -> None:
        """Raise KeyboardInterrupt when interrupted, ReplayFailed when a node has ended."""
        if self._interrupted():
            raise KeyboardInterrupt
        child = self._group.ended()
        if child is not None:
            tail = "\n".join(self._lines)
            raise ReplayFailed(f"{child.name} ended with exit code {child.process.returncode}; its last lines:\n{tail}")

    def wait(self, done: Callable[[], bool], sentence: str) -> None:
        """Poll until ``done()``; raises ReplayFailed after READY_LIMIT_S."""
        deadline = time.monotonic() + READY_LIMIT_S
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise ReplayFailed(f"{sentence} within {READY_LIMIT_S:.0f} s.")
            time.sleep(0.02)

    def _start(self, namespace: str) -> None:
        plan = self._plan
        draft = {
            "transport": plan.transport,
            "image_timeout_s": 20.0,
            "link.response_timeout_s": 10.0,
            "use_sim_time": True,
        }
        self._group.start_planned(Start("draft_node", plan.draft | draft, namespace))
        if plan.transport == "dds":
            self._group.start_planned(Start("verifier_node", plan.verifier, namespace))
            return
        addresses: list[str] = []
        options = {"--model": "model.path", "--device": "model.device", "--dtype": "model.dtype"}
        command = [sys.executable, "-m", "dsd_ros.cli", "verifier", "--port", "0"]
        for option, name in options.items():
            if plan.verifier.get(name):
                command += [option, str(plan.verifier[name])]
        self._group.start("verifier", command, on_line=lambda line: addresses.extend(_ADDRESS.findall(line)))
        self.wait(lambda: bool(addresses), "The verifier named no address")
        self._group.start_planned(Start("bridge_node", {"url": addresses[0]}, namespace))
