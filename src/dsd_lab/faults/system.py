"""The system under test of `dsd-lab bench faults`: the demo's processes, the link, and what is done to them."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import TextIO

from dsd_lab.faults.plan import Fault, Kind
from dsd_lab.faults.watch import Watcher
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.links.proxy import Conditions, LinkProxy, Way
from dsd_ros.cli.demo_run import address_in
from dsd_ros.ros.bringup import plan
from dsd_ros.ros.processes import ProcessGroup
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Outcome, SessionClose

_MARK = "DSD_FAULTS_BENCH"  # in the environment of every process, to find what is left over
LOSS, JITTER_S = 0.05, 0.3

Undo = Callable[[], None]


class FaultBenchError(RuntimeError):
    """The bench cannot go on; one sentence."""


class SystemUnderTest:
    """The demo's processes over one transport, each by its name. Use it from the main thread."""

    def __init__(self, transport: str, overrides: dict[str, str], seed: int, log: TextIO | None = None) -> None:
        """``log``: takes what the processes print."""
        self.transport = transport
        self.lines: deque[str] = deque(maxlen=400)
        self.proxy: LinkProxy | None = None
        self._overrides = overrides | {"transport": transport, "verifier_port": "0"}
        self._seed, self._log = seed, log
        self._group: ProcessGroup | None = None
        self._mark = {_MARK: uuid.uuid4().hex}

    def start(self) -> None:
        """Start every process; the link's proxy first."""
        assert self._group is None
        self._group = group = ProcessGroup(self._hear)
        if self.transport == "websocket":
            self.proxy = LinkProxy(("127.0.0.1", 9), seed=self._seed)  # its target is not known yet
            self._overrides["verifier"] = self.proxy.url
        for start in plan("demo", self._overrides):
            group.start_planned(start, self._mark, self._look if start.name == "verifier" else None)

    def _look(self, line: str) -> None:
        """Find the verifier's address in what it prints; after a restart it is another one."""
        found = address_in(line)
        if found is not None and self.proxy is not None:
            self.proxy.target = (str(found.hostname), found.port or 0)

    def _hear(self, name: str, line: str) -> None:
        self.lines.append(f"[{name}] {line}")
        if self._log is not None:
            self._log.write(f"{time.monotonic():.3f} [{name}] {line}\n")

    def process(self, name: str) -> int:
        """The pid of the process that has this name now."""
        return self._children.child(name).pid

    def tend(self) -> str:
        """Restart what may be restarted; the name of an ended process without which nothing may go on."""
        child = self._children.ended()
        return "" if child is None else child.name

    @property
    def _children(self) -> ProcessGroup:
        assert self._group is not None, "it has not been started"
        return self._group

    def close(self) -> list[str]:
        """End everything; the command lines of processes that are left over."""
        if self._group is not None:
            for child in self._group.children:  # a stopped process does not receive other signals
                child.signal(signal.SIGCONT)
            self._group.close()
            self._group = None
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
        return _left_over(self._mark[_MARK])

    # -- faults --------------------------------------------------------------------------------

    def provoke(self, fault: Fault, watcher: Watcher, source: random.Random) -> Undo:
        """Provoke a fault; the returned function undoes it, where the system does not do so itself."""
        kind, target = fault.kind, fault.target
        if kind is Kind.KILL:
            self._children.child(target).signal(signal.SIGKILL)
        elif kind is Kind.RESTART:
            self._children.restart(target)
        elif kind is Kind.PAUSE:
            child = self._children.child(target)
            child.signal(signal.SIGSTOP)
            return lambda: child.signal(signal.SIGCONT)
        elif kind in (Kind.FREEZE, Kind.REPEAT):
            watcher.tell_simulator(f"camera {'freeze' if kind is Kind.FREEZE else 'repeat'}")
            return lambda: watcher.tell_simulator("camera ok")
        elif self.proxy is None:
            watcher.talk_nonsense("up" if kind is Kind.GARBAGE_UP else "down", source)
        else:
            return self._harm(self.proxy, kind, source)
        return lambda: None

    def _harm(self, proxy: LinkProxy, kind: Kind, source: random.Random) -> Undo:
        match kind:
            case Kind.CUT:
                proxy.cut()
                return proxy.restore
            case Kind.SILENCE:
                proxy.silence()
                return proxy.restore
            case Kind.LOSS | Kind.JITTER:
                lossy = kind is Kind.LOSS
                proxy.set(Conditions(loss=LOSS) if lossy else Conditions(LinkProfile(jitter_s=JITTER_S)))
                return lambda: proxy.set(Conditions())
            case _:
                way = Way.UP if kind in (Kind.GARBAGE_UP, Kind.NOISE_UP) else Way.DOWN
                as_frame = kind in (Kind.GARBAGE_UP, Kind.GARBAGE_DOWN)
                proxy.inject(way, nonsense(way, source) if as_frame else source.randbytes(100), as_frame)
                return lambda: None


def nonsense(way: Way, source: random.Random) -> bytes:
    """A frame that no correct peer sends: noise, or a message of this protocol about things that do not exist."""
    if source.random() < 0.5:
        return source.randbytes(source.randrange(1, 2000))
    session = source.getrandbits(31) | 1
    if way is Way.UP:
        return encode(SessionClose(session))
    return encode(Outcome(session, source.getrandbits(31), source.getrandbits(31), 8, 1, 7, 0.5, True, 0))


def _left_over(mark: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                ours = f"{_MARK}={mark}".encode() in file.read()
            if ours:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    found.append(file.read().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return [line for line in found if line]  # a zombie has none
