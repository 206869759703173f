# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench engine`: robots on vLLM beside vLLM's own client, in one run.

Two engines with the target stand in one process of vLLM's environment: one that verifies drafts, and one as it is
(`--no-drafts`). Each is asked by its own client and by robots over websockets, in shuffled order. Robots and cloud have
a core each where there are two.
"""

from __future__ import annotations

import base64
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from dsd_lab.bench.harness import Bench, PairFlags, Report, Told
from dsd_lab.bench.real import two_cores
from dsd_lab.bench.scenes import PATIENT_LINK, Scene, held_out_scenes, text_scenes
from dsd_lab.report import CODE, SOURCE, BenchError, check_range, header
from dsd_ros.cli.arguments import arguments, flag
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafters import LEAD, Worth
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.stream import StreamDecoder
from dsd_ros.paths import share_directory
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.websocket import WebsocketChannel

_CODE = (*CODE, "dsd_lab/bench/engine.py", "dsd_lab/bench/engine_cloud.py")
_MAX_CLIENTS = 64
_SPIN_S = 1.5  # vLLM's workers spin for a second after a step, which would slow the other engine down


class Way(NamedTuple):
    """Who asks which engine, and what robots draft: "" (vLLM's own client), none, pair, perfect or useless."""

    label: str
    engine: str
    draft: str


STOCK = Way("vLLM's own client", "stock", "")
WAYS = (
    STOCK,
    Way("robots, --no-drafts", "stock", "none"),
    Way("vLLM's own client, verifying", "drafts", ""),
    Way("robots without drafts", "drafts", "none"),
    Way("robots, the pair's draft", "drafts", "pair"),
    Way("robots, a perfect draft", "drafts", "perfect"),
    Way("robots, a useless draft", "drafts", "useless"),
)


@arguments
class Flags(PairFlags):
    clients: str = flag("1,4,16", "how many robots, or clients of vLLM's own, at once", metavar="N,...")
    replies: int = flag(6, "pictures, or instructions, that each of them asks about")
    repeats: int = flag(5, "how often each way is measured")
    max_tokens: int = flag(64, "longest reply")
    engine_python: str = flag("", "Python of vLLM's environment (default: that of make vllm-venv)", metavar="FILE")
    engine_args: str = flag("", "as of dsd verifier", metavar="JSON")


class Cloud:
    """The process with both engines."""

    def __init__(self, flags: Flags) -> None:
        python = flags.engine_python or str(share_directory() / ".venv-vllm" / "bin" / "python")
        if not Path(python).is_file():
            raise BenchError(f"there is no {python}; make vllm-venv makes it, or give --engine-python")
        self._command = [python, "-m", "dsd_lab.bench.engine_cloud", flags.models[1].path, flags.engine_args]
        self._process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}

    @contextmanager
    def running(self) -> Iterator[str]:
        """While it serves; BenchError when it cannot."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(self._command, text=True, env=environment, **pipes) as self._process:
            self.addresses = self._heard()
            yield ""
            assert self._process.stdin is not None
            self._process.stdin.close()

    def ask(self, way: Way, clients: int, asked: list[Any], max_tokens: int) -> dict[str, Any]:
        """What vLLM's own client gets from an engine."""
        assert self._process is not None and self._process.stdin is not None
        request = {"engine": way.engine, "clients": clients, "asked": asked, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the engines have ended; what they printed says why")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def _busy() -> Iterator[None]:
    """Keep this core busy whenever no robot needs it.

    Else it would be idle in some ways and taken by what else runs on the machine in others, and where both cores share
    a cache or a processor, the engine would be measured at different speeds.
    """
    code = "import os; parent = os.getppid(); os.nice(19)\nwhile os.getppid() == parent: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


class Reciter:
    """A drafter that knows its replies, or has them wrong at every position, and takes no time."""

    device, error = None, ""

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self._replies = replies
        self._reply: Sequence[int] = ()
        self._verified, self.far_enough = 0, False

    def begin(self, request: ReplyRequest, ends: frozenset[int]) -> None:
        """See ``Drafter``. The replies come in order, again and again."""
        self._reply = self._replies[(request.number - 1) % len(self._replies)]
        self._verified, self.far_enough = 0, False

    def follow(self, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self.far_enough &= len(tokens) == self._verified
        self._verified = len(tokens)

    def next(self) -> list[int]:
        """See ``Drafter``. All but the last, which is the target's own."""
        self.far_enough = True
        return list(self._reply[self._verified : -1][:LEAD])

    def close(self) -> None:
        """There is no memory to give back."""


class ReciterSession(EdgeSession):
    """A robot with a ``Reciter``."""

    def __init__(self, *args: Any, reciter: Reciter) -> None:
        self._reciter = reciter
        super().__init__(*args)

    def _make_decoder(self, worth: Worth) -> StreamDecoder:
        return StreamDecoder(self._link, self._pictures, self._reciter, self.settings, worth)


class Robots:
    """``clients`` robots that ask one engine, each in a session that stays open."""

    def __init__(self, stack: ExitStack, url: str, way: Way, clients: int, given: Any) -> None:
        """``given``: the draft model, the longest reply, the scenes, and what the target says to them."""
        model, max_tokens, self._scenes, said = given
        settings = DecodeSettings(mode="ar" if way.draft == "none" else "stream", max_tokens=max_tokens)
        self._sessions = []
        for _ in range(clients):
            channel = stack.enter_context(WebsocketChannel(url))
            arguments = channel, model, settings, PATIENT_LINK
            if way.draft in ("none", "pair"):
                session = EdgeSession(*arguments)
            else:
                wrong = way.draft == "useless"
                known = [[(token + wrong) % model.vocab_size for token in tokens] for tokens in said]
                session = ReciterSession(*arguments, reciter=Reciter(known))
            self._sessions.append(stack.enter_context(session))
            session.open()

    def ask(self) -> dict[str, Any]:
        """As ``Cloud.ask``, with the steps that the replies took."""
        first: list[float] = []
        steps: list[int] = []

        def drive(session: EdgeSession) -> list[list[int]]:
            replies = []
            for scene in self._scenes:
                began, seen = time.perf_counter(), []

                def heard(*_: object) -> None:
                    seen.append(time.perf_counter() - began)  # noqa: B023  # called before the next one begins

                replies.append(session.decode(scene.image, scene.instruction, on_progress=heard).tokens)
                first.append(seen[0])
                steps.append(len(seen))
            return replies

        began = time.perf_counter()
        with ThreadPoolExecutor(len(self._sessions)) as pool:
            tokens = list(pool.map(drive, self._sessions))
        return {"tokens": tokens, "first": first, "seconds": time.perf_counter() - began, "steps": steps}


def measure(flags: Flags, told: Told) -> Report:
    """Ask in every way, each number of clients at once; a row per combination. BenchError, ModelError."""
    counts = _numbers(flags.clients)
    check_range("replies", flags.replies, 1, 100)
    check_range("repeats", flags.repeats, 1, 1000)
    robot = load_model(flags.models[0])
    scenes = held_out_scenes(flags.replies) if robot.reads_pictures else text_scenes(flags.replies)
    asked = [_packed(scene) for scene in scenes]
    cloud = Cloud(flags)
    found: dict[tuple[int, Way], list[dict[str, Any]]] = {(count, way): [] for count in counts for way in WAYS}
    with two_cores(cloud.running()) as (_, cores), _busy() if cores else nullcontext(), ExitStack() as stack:
        said = cloud.ask(STOCK, 1, asked, flags.max_tokens)["tokens"][0]
        robots: dict[tuple[int, Way], Robots] = {}

        def ask(way: Way, count: int) -> dict[str, Any]:
            if not way.draft:
                return cloud.ask(way, count, asked, flags.max_tokens)
            if (count, way) not in robots:
                given = robot, flags.max_tokens, scenes, said
                robots[count, way] = Robots(stack, cloud.addresses[way.engine], way, count, given)
            return robots[count, way].ask()

        for number in range(-1, flags.repeats):  # the first is not counted
            for count, ways in _shuffled(counts, number):
                time.sleep(_SPIN_S)
                cloud.ask(ways[0]._replace(draft=""), 1, asked[:1], flags.max_tokens)  # wakes it
                for way in ways:
                    one = ask(way, count)
                    found[count, way].append(one)
                    told((number + 1) / (flags.repeats + 1), f"{count} x {way.label}: {_speed(one):.0f} tokens/s")
    rows = [_row(count, way, {key: several[1:] for key, several in found.items()}) for count, way in found]
    return {
        **header("engine", _CODE, draft=robot, target=flags.models[1].path),
        "replies": flags.replies,
        "repeats": flags.repeats,
        "max_tokens": flags.max_tokens,
        "cores": cores,
        "tokens": [len(tokens) for tokens in said],
        "exact": all(tokens == said for several in found.values() for one in several for tokens in one["tokens"]),
        "rows": rows,
    }


def _shuffled(counts: Sequence[int], seed: int) -> list[tuple[int, list[Way]]]:
    """(count, ways of one engine) in random order."""
    order = random.Random(seed)
    blocks = [(count, [way for way in WAYS if way.engine == name]) for count in counts for name in ("stock", "drafts")]
    order.shuffle(blocks)
    for _, ways in blocks:
        order.shuffle(ways)
    return blocks


def _numbers(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if not counts:
        raise BenchError(f"--clients is {text!r}; use whole numbers separated by commas, for example 1,4,16")
    for count in counts:
        check_range("clients", count, 1, _MAX_CLIENTS)
    return counts


def _packed(scene: Scene) -> list[Any]:
    if scene.image is None:
        return [None, 0, 0, scene.instruction]
    png = base64.b64encode(encode_picture(scene.image)).decode()
    return [png, *scene.image.shape[:2], scene.instruction]


def _speed(one: dict[str, Any]) -> float:
    """Tokens a second of all clients together."""
    return sum(len(tokens) for replies in one["tokens"] for tokens in replies) / float(one["seconds"])


def _row(count: int, way: Way, found: dict[tuple[int, Way], list[dict[str, Any]]]) -> dict[str, Any]:
    mine, stock = found[count, way], found[count, STOCK]
    return {
        "clients": count,
        "who": way.label,
        "tokens_per_second": statistics.median(map(_speed, mine)),
        "times_stock": statistics.median(_speed(a) / _speed(b) for a, b in zip(mine, stock, strict=True)),
        "first_ms": 1e3 * statistics.median(seconds for one in mine for seconds in one["first"]),
        "steps": statistics.fmean(steps for one in mine for steps in one["steps"]) if way.draft else None,
    }


BENCH = Bench(
    measure,
    lambda report: (
        ("clients", "clients", "d"), ("who", "who", ""), ("tokens/s", "tokens_per_second", ".0f"),
        ("times stock", "times_stock", ".2f"), ("first token, ms", "first_ms", ".1f"),
        ("steps a reply", "steps", ".1f"),
    ),
    lambda report: ["every reply is vLLM's own" if report["exact"] else "REPLIES DIFFER"],
    holds="exact", left=2,
)  # fmt: skip


def command(flags: Flags = Flags()) -> int:
    """Robots on vLLM, beside vLLM's own client.

    Asks two engines of this machine, one that verifies drafts and one as it is, by vLLM's own client and by robots that
    draft nothing, with the pair's draft, a perfect and a useless one. Prints tokens a second of all together, beside
    those of vLLM's own client of the engine as it is, and the time to the first token. Exits with 1 if a reply differs.
    """
    return BENCH.run(flags)
