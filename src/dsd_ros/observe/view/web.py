# SPDX-License-Identifier: Apache-2.0
"""Serve the web view: rerun's browser viewer and its data, from a separate process.

Viewers only watch; nothing they do reaches the robot. The server's memory is bounded; it drops the oldest data first.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import cv2
import numpy as np

from dsd_ros.observe.view.figures import Figures
from dsd_ros.observe.view.state import Pose, ShownStep, motion_of

if TYPE_CHECKING:
    from typing_extensions import Self

MISSING = "The web view needs rerun-sdk and psutil, which are not installed: pip install -r requirements/view.txt."
_START_S = 20.0
_FLUSH_S = 0.2  # data logged within this time is sent together; pictures do not wait
_PR_SET_PDEATHSIG = 1
_QUALITY = 75  # of JPEG


class ViewError(RuntimeError):
    """The web view cannot be served; one sentence."""


def available() -> bool:
    """Whether the web view's packages are installed."""
    return all(importlib.util.find_spec(name) for name in ("rerun", "psutil"))


class WebServer:
    """Serves the viewer's page and its data on two ports (0: any free one), as a context manager.

    :param bind: address to listen on; a loopback address keeps the view on this machine.
    :raises ViewError: when rerun is missing or does not start.
    """

    def __init__(self, bind: str, web_port: int, data_port: int, memory_mb: int) -> None:
        rerun = program()
        self.bind = bind
        self.web_port, self.data_port = _free_ports(bind, web_port, data_port)
        command = [rerun, "--serve-web", "--bind", bind]
        command += ["--web-viewer-port", str(self.web_port), "--port", str(self.data_port)]
        command += ["--server-memory-limit", f"{memory_mb}MiB"]
        if not is_local(bind):
            # The browser reaches this machine under a name that the server does not know.
            command += ["--cors-allow-origin", f"http://*:{self.web_port}"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RERUN_ANALYTICS": "0"},
            start_new_session=True,  # Ctrl-C must not reach it before us
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  # it makes one system call
        )
        try:
            self._await_ports()
        except ViewError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def data_url(self) -> str:
        """The data's address on this machine."""
        return f"rerun+http://{_host(self.bind)}:{self.data_port}/proxy"

    def page(self, host: str = "") -> str:
        """The address to open in a browser; ``host``: this machine's name as seen by the browser."""
        name = host or _host(self.bind)
        data = quote(f"rerun+http://{name}:{self.data_port}/proxy", safe="")
        return f"http://{name}:{self.web_port}/?url={data}"

    def alive(self) -> bool:
        return self._process.poll() is None

    def watched(self) -> bool:
        """Whether anyone has the page open: the data port has connections besides the sender's."""
        import psutil

        with contextlib.suppress(psutil.Error):  # it has just ended
            found = psutil.Process(self.pid).net_connections("tcp")
            open_ = [c for c in found if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == self.data_port]
            return len(open_) > 1
        return True

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_ports(self) -> None:
        deadline = time.monotonic() + _START_S
        for port in (self.web_port, self.data_port):
            while True:
                if not self.alive():
                    raise ViewError("The web view's server ended as it started; see `rerun --serve-web`.")
                try:
                    socket.create_connection((_host(self.bind), port), timeout=1.0).close()
                    break
                except OSError:
                    pass
                if time.monotonic() > deadline:
                    raise ViewError(f"The web view's server did not start within {_START_S:.0f} s.")
                time.sleep(0.05)


@dataclass(frozen=True)
class MapObject:
    """An object on the map: a circle, or with ``half`` (half sizes) a box, in metres."""

    x: float
    y: float
    radius: float
    colour: tuple[int, int, int]
    label: str = ""
    half: tuple[float, float] | None = None


class WebView:
    """Sends data to a :class:`WebServer`. Times are seconds since the view began."""

    def __init__(self, data_url: str) -> None:
        import rerun as rr

        self._rr = rr
        self._recording = rr.RecordingStream(
            "dsd",
            recording_id=f"dsd-{os.getpid()}-{time.time():.0f}",
            batcher_config=rr.ChunkBatcherConfig(flush_tick=_FLUSH_S),
        )
        self._recording.connect_grpc(data_url, default_blueprint=_blueprint())
        for entity in ("view", "rounds"):  # the constant part of a picture
            self._send(entity, rr.EncodedImage.from_fields(media_type="image/jpeg"), static=True)
        self._began = time.monotonic()

    def close(self) -> None:
        self._recording.flush()
        self._recording.disconnect()

    def picture(self, image: np.ndarray, entity: str = "view") -> None:
        """Show the robot's view with its overlay: uint8 (H, W, 3), BGR. It is sent at once, not in a batch."""
        rr = self._rr
        _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        when = rr.TimeColumn("time", duration=[time.monotonic() - self._began])
        rr.send_columns(entity, [when], rr.EncodedImage.columns(blob=[data]), recording=self._recording, strict=True)

    def board(self, image: np.ndarray) -> None:
        """Show tokens and rounds of a reply: uint8 (H, W, 3), RGB."""
        self.picture(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), "rounds")

    def figures(self, figures: Figures, new_reply: bool) -> None:
        """Show the table, and with ``new_reply`` add a point to each curve."""
        rr = self._rr
        document = rr.TextDocument(figures.markdown(), media_type="text/markdown")
        self._send("figures", document)
        if new_reply:
            newest = figures.newest
            self._send("curves/tau", rr.Scalars(newest.tau))
            self._send("curves/seconds_per_reply", rr.Scalars(newest.seconds))
            self._send("curves/estimated_speedup", rr.Scalars(newest.speedup))

    def world(self, things: Sequence[MapObject]) -> None:
        """Show the objects in the room; sent once."""
        rr = self._rr
        boxes = [thing for thing in things if thing.half is not None]
        rounds = [thing for thing in things if thing.half is None]
        if boxes:
            halves = [(t.half[1], t.half[0]) for t in boxes if t.half is not None]
            shapes = rr.Boxes2D(
                centers=_on_map([(t.x, t.y) for t in boxes]), half_sizes=halves, colors=[t.colour for t in boxes]
            )
            self._send("map/room", shapes, static=True)
        if rounds:
            points = rr.Points2D(
                _on_map([(t.x, t.y) for t in rounds]),
                radii=[t.radius for t in rounds],
                colors=[t.colour for t in rounds],
                labels=[t.label for t in rounds],
                show_labels=True,
            )
            self._send("map/things", points, static=True)

    def robot(self, pose: Pose) -> None:
        """Show the robot's position and heading."""
        rr = self._rr
        x, y, yaw = pose
        ahead = _on_map([(0.4 * np.cos(yaw), 0.4 * np.sin(yaw))])
        self._send("map/robot", rr.Points2D(_on_map([(x, y)]), radii=0.15, colors=(116, 176, 255)))
        arrow = rr.Arrows2D(origins=_on_map([(x, y)]), vectors=ahead, colors=(116, 176, 255))
        self._send("map/robot/heading", arrow)

    def path(self, poses: Sequence[Pose]) -> None:
        """Show the path walked."""
        strip = _on_map([(x, y) for x, y, _ in poses])
        self._send("map/walked", self._rr.LineStrips2D([strip], colors=(240, 98, 92), radii=0.015))

    def intention(self, step: ShownStep) -> None:
        """Show where the current action leads."""
        rr = self._rr
        reach = 0.5 if step.turn else 0.0
        points = [
            (x + reach * np.cos(yaw), y + reach * np.sin(yaw))
            for x, y, yaw in motion_of(step.pose, step.ahead, step.turn)
        ]
        colour = (96, 211, 128) if step.verified else (246, 190, 82)
        strip = rr.LineStrips2D([_on_map(points)], colors=colour, radii=0.03)
        self._send("map/intended", strip)

    def _send(self, entity: str, what: Any, static: bool = False) -> None:
        if not static:
            self._recording.set_time("time", duration=time.monotonic() - self._began)
        self._recording.log(entity, what, static=static)


def is_local(bind: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _blueprint() -> Any:
    """Four views in a grid: two by two on a desktop, stacked on a phone."""
    import rerun.blueprint as rrb

    return rrb.Blueprint(
        rrb.Grid(
            rrb.Spatial2DView(origin="/view", name="Robot's view"),
            rrb.Spatial2DView(origin="/map", name="Map"),
            rrb.Spatial2DView(origin="/rounds", name="Reply and rounds"),
            rrb.Tabs(
                rrb.TextDocumentView(origin="/figures", name="Figures"),
                rrb.TimeSeriesView(origin="/curves", name="Curves"),
                active_tab=0,
            ),
        ),
        rrb.TopPanel(state="hidden"),
        rrb.BlueprintPanel(state="hidden"),
        rrb.SelectionPanel(state="hidden"),
        rrb.TimePanel(state="hidden", timeline="time", play_state="following"),
        auto_layout=False,
        auto_views=False,
    )


def _on_map(points: Sequence[tuple[float, float]]) -> np.ndarray:
    """Map x (ahead) and y (left) to up and left; the view's second axis points down."""
    xy = np.asarray(points, np.float32).reshape(-1, 2)
    return np.stack([-xy[:, 1], -xy[:, 0]], axis=1)


def program() -> str:
    """The path of rerun's program. :raises ViewError: when it is not installed."""
    spec = importlib.util.find_spec("rerun_cli") if available() else None
    for folder in (spec and spec.submodule_search_locations) or ():
        if (program := Path(folder) / "rerun").is_file():
            return str(program)
    raise ViewError(MISSING)


def _host(bind: str) -> str:
    """The host name under which this machine reaches ``bind``."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return bind
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{bind}]" if address.version == 6 else bind


def _free_ports(bind: str, *wanted: int) -> list[int]:
    """The wanted ports, each replaced by a free one if taken."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(family)) for _ in wanted]
        for listener, port in zip(listeners, wanted, strict=True):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((bind, port))
            except OSError:
                try:
                    listener.bind((bind, 0))
                except OSError as error:
                    raise ViewError(f"The web view cannot listen on {bind}: {error}.") from error
        return [int(listener.getsockname()[1]) for listener in listeners]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
