"""The live web view: gathers what the topics say and serves it to browsers. It publishes nothing but its health."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import webbrowser
from dataclasses import dataclass, field

from rclpy.node import Node
from visualization_msgs.msg import Marker, MarkerArray

from dsd_ros.nodes import health, qos
from dsd_ros.nodes.images import ImageError, to_bgr
from dsd_ros.nodes.live import Live
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.polled import Paced, Polled, spare_the_machine, take
from dsd_ros.nodes.running import main as run_main
from dsd_ros.views.overlay import PAUSE_S, OverlayPainter
from dsd_ros.views.timeline import draw_board
from dsd_ros.views.web import Thing, WebServer, WebView, is_local

_BOARD_S, _MAP_S, _PATH_S, _FIGURES_S = 0.4, 0.2, 1.0, 0.5  # least time between two of a kind
_WIDTH = 336  # of the robot's view, pixels: a phone's, and the simulated camera's
_MOVED_M, _TURNED_RAD = 0.005, 0.01


@dataclass(frozen=True)
class ViewSettings:
    """Parameters of the web view's node."""

    bind: str = field(
        default="127.0.0.1",
        metadata={"help": "address to listen on; 0.0.0.0 lets the whole network look on"},
    )
    web_port: int = field(
        default=9090,
        metadata={"help": "port of the page; a free one if it is taken", "min": 0, "max": 65535},
    )
    data_port: int = field(
        default=9876,
        metadata={"help": "port of the data; a free one if it is taken", "min": 0, "max": 65535},
    )
    rate: float = field(
        default=15.0, metadata={"help": "pictures per second, at most", "min": 0.5, "max": 30.0}
    )
    memory_mb: int = field(
        default=128,
        metadata={"help": "what the server keeps for browsers that come later, MiB", "min": 16, "max": 4096},
    )  # fmt: skip
    open_browser: bool = field(
        default=False, metadata={"help": "open the page in this machine's browser"}
    )


class ViewNode(Node):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("view_node")
        self.failure: str | None = None
        settings = declare(self, ViewSettings)
        refuse_unknown(self)
        self._server = WebServer(
            settings.bind, settings.web_port, settings.data_port, settings.memory_mb
        )
        try:
            self._view = WebView(self._server.data_url)
        except Exception:
            self._server.close()
            raise
        self._live = Live(self)
        self._ears = Polled(self)
        self._world = self._ears.subscribe(MarkerArray, "ground_truth/markers", qos.LATCHED)
        self._painter = OverlayPainter(_WIDTH, bgr=True, pause=PAUSE_S)
        self._due = dict.fromkeys(("board", "map", "path", "figures"), 0.0)
        self._seen: dict[str, object] = {}
        self._health = health.Health(self)
        page = self._server.page()
        self._health.report(health.OK, f"web view at {page}", {"page": page})
        if not is_local(settings.bind):
            name = self._server.page(socket.gethostname())
            self.get_logger().warning(f"anybody on the network can look on, at {name}")
        if settings.open_browser and has_desktop():
            webbrowser.open(page)
        self._period = 1.0 / settings.rate
        self._pace = Paced(self, self._tick)
        self._pace.start()

    def close(self) -> None:
        self._pace.close()
        self._ears.close()
        self._live.close()
        self._view.close()  # in front of its server
        self._server.close()

    def _tick(self) -> float:
        """Send what is new; s until the next time."""
        if not self._server.alive():
            self.failure = "The web view's server has ended."
            return 1.0
        live, view = self._live, self._view
        live.poll()
        view.tick()
        picture = live.picture()
        if picture is not None:
            try:
                view.picture(self._painter.frame(to_bgr(picture), live.overlay, panel=False))
            except ImageError as error:
                self._health.report(health.WARN, str(error))
        for markers in take(self._world):
            view.world(things_of(markers))
        self._send_changes(time.monotonic())
        return self._period

    def _send_changes(self, now: float) -> None:
        """What has changed, each at its own pace."""
        live, view = self._live, self._view
        if self._changed("board", live.rounds, now, _BOARD_S):
            view.board(draw_board(live.overlay.reply))
        if self._changed("figures", (live.replies, live.figures.steps), now, _FIGURES_S):
            view.figures(live.figures, self._seen.get("reply") != live.replies)
            self._seen["reply"] = live.replies
        if live.pose is not None and self._moved() and self._changed("map", live.pose, now, _MAP_S):
            view.robot(live.pose)
        if self._changed("path", live.walk.changes, now, _PATH_S):
            view.path(list(live.walk.poses))
        if live.steps and self._seen.get("step") != (live.runs, len(live.steps)):
            self._seen["step"] = (live.runs, len(live.steps))
            view.intention(live.steps[-1])

    def _moved(self) -> bool:
        before, now = self._seen.get("map"), self._live.pose
        if not isinstance(before, tuple) or now is None:
            return True
        turned = abs(math.remainder(now[2] - before[2], 2 * math.pi))
        return math.dist(now[:2], before[:2]) > _MOVED_M or turned > _TURNED_RAD

    def _changed(self, what: str, value: object, now: float, pause: float) -> bool:
        """Whether it is time to send something again, and something new."""
        if now < self._due[what] or (what in self._seen and self._seen[what] == value):
            return False
        self._due[what], self._seen[what] = now + pause, value
        return True


def has_desktop() -> bool:
    """Whether there is a place for a window; a browser for terminals would take over this one."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def things_of(message: MarkerArray) -> list[Thing]:
    """Boxes and cylinders of a world's markers, as the map shows them."""
    things = []
    for marker in message.markers:
        place, size, colour = marker.pose.position, marker.scale, marker.color
        rgb = (round(255 * colour.r), round(255 * colour.g), round(255 * colour.b))
        half = (size.x / 2, size.y / 2) if marker.type == Marker.CUBE else None
        label = f"goal: {marker.text}" if marker.ns == "goal" else marker.text
        things.append(Thing(place.x, place.y, size.x / 2, rgb, label, half))
    goals = [thing for thing in things if thing.label.startswith("goal: ")]
    named = {(goal.x, goal.y) for goal in goals}
    return [
        Thing(t.x, t.y, t.radius, t.colour, "", t.half)
        if (t.x, t.y) in named and t not in goals
        else t
        for t in sorted(things, key=lambda t: t not in goals)
    ]


def main() -> None:
    spare_the_machine()  # and what the server's process takes of it
    run_main(ViewNode, events=True)
