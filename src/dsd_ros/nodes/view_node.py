# SPDX-License-Identifier: Apache-2.0
"""The live web view: collects what is on the topics and serves it to browsers. It publishes only its health.

With ``visual`` this process also hosts the visualization node, and receives and draws for both. A failure of one does
not end the other.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
import webbrowser

from visualization_msgs.msg import Marker, MarkerArray

from dsd_ros.nodes.visual_node import VisualNode
from dsd_ros.observe.ros.sight import Sight
from dsd_ros.observe.view.timeline import draw_board
from dsd_ros.observe.view.web import MapObject, ViewError, WebServer, WebView, is_local
from dsd_ros.ros import health, qos
from dsd_ros.ros.images import ImageMessageError
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.polled import PacedThread, Polled, RateTimer, lower_priority, take
from dsd_ros.ros.running import RunnableNode, run_main
from dsd_ros.ros.settings import ViewNodeSettings

_BOARD_S, _MAP_S, _PATH_S, _FIGURES_S = 0.5, 0.2, 1.0, 0.5  # least time between two updates of each
_UNSEEN_S = 1.0  # the same while no browser has the page open
_UNSEEN_RATE = 2.0  # most pictures per second in that time
_SERVER_S = 2.0  # between checks of the server and of its viewers
_WIDTH = 336  # of the robot's view, pixels: fits a phone, and is the simulated camera's
_MOVED_M, _TURNED_RAD = 0.005, 0.01


class ViewNode(RunnableNode):
    """See the module."""

    topics_come_later = True

    def __init__(self) -> None:
        super().__init__("view_node")
        settings = declare(self, ViewNodeSettings, adopt=self._adopt)
        self.visual = VisualNode(self) if settings.visual else None
        self.guests = [] if self.visual is None else [self.visual]
        self._health = health.Health(self)
        self._web: _Web | None = None
        try:
            self._web = _Web(settings)
        except ViewError as error:
            if self.visual is None:
                raise
            self._health.report(health.ERROR, str(error))
        else:
            self._show_address(settings)
        self._sight = Sight(self, settings.image_transport)
        self._ears = Polled(self)
        self._world = self._ears.subscribe(MarkerArray, "ground_truth/markers", qos.LATCHED)
        self._due = dict.fromkeys(("board", "map", "path", "figures"), 0.0)
        self._seen: dict[str, object] = {}
        self._number = 0  # of the picture shown last
        self._adopt(settings)
        self._checked = float("-inf")  # when the server was checked last
        self._watched = True
        self._pace = PacedThread(self, self._tick)
        self._pace.start()

    def _adopt(self, settings: ViewNodeSettings) -> None:
        self._rate = settings.rate
        self._beat, self._seldom = RateTimer(settings.rate), RateTimer(min(settings.rate, _UNSEEN_RATE))

    def close(self) -> None:
        self._pace.close()
        self._ears.close()
        self._sight.close()
        if self._web is not None:
            self._web.close()

    def _show_address(self, settings: ViewNodeSettings) -> None:
        assert self._web is not None
        page = self._web.server.page()
        self._health.report(health.OK, f"web view at {page}", {"page": page})
        if not is_local(settings.bind):
            name = self._web.server.page(socket.gethostname())
            self.get_logger().warning(f"anyone on the network can watch at {name}")
        if settings.open_browser and has_desktop():
            webbrowser.open(page)

    def _tick(self) -> float:
        """Show what is new; returns the time until the next call, s."""
        now = time.monotonic()
        if self._web is not None and now - self._checked >= _SERVER_S:
            self._checked = now
            self._check_server(self._web)
        beat = self._beat if self._watched else self._seldom
        due = self._web is not None and beat.due(now)
        if self.visual is not None:
            self.visual.look_around(now)
        try:
            self._sight.look(due or (self.visual is not None and self.visual.pictures_wanted))
        except ImageMessageError as error:
            self._health.report(health.WARN, str(error))
        if self.visual is not None and self.visual.wanted:
            self.visual.show(self._sight, now)  # first: its picture is the larger one
        if self._web is not None:
            self._send(self._web, due, now)
        return 1.0 / max(self._rate, self.visual.rate if self.visual is not None else 0.0)

    def _check_server(self, web: _Web) -> None:
        """Check that the server is alive, and whether anyone has the page open."""
        if not web.server.alive():
            self._drop_server(web)
            return
        self._watched = web.server.watched()
        for markers in take(self._world):
            web.view.world(things_of(markers))

    def _send(self, web: _Web, due: bool, now: float) -> None:
        """Send what is new to the server; a picture only when one is ``due``."""
        try:
            if due and self._sight.number != self._number:
                self._number = self._sight.number
                web.view.picture(self._sight.frame(_WIDTH, panel=False))
            self._send_changes(web.view, now)
        except RuntimeError:  # from rerun
            if web.server.alive():
                raise
            self._drop_server(web)

    def _drop_server(self, web: _Web) -> None:
        """Give up the server, which has ended; a hosted visual node goes on without it."""
        sentence = "The web view's server has ended."
        if self.visual is None:
            self.failure = sentence
        else:
            self._health.report(health.ERROR, sentence)
        self._web = None
        with contextlib.suppress(RuntimeError):  # nothing receives the rest any more
            web.close()

    def _send_changes(self, view: WebView, now: float) -> None:
        """Send what has changed, each kind at its own rate."""
        live = self._sight.live
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
        before, now = self._seen.get("map"), self._sight.live.pose
        if not isinstance(before, tuple) or now is None:
            return True
        turned = abs(math.remainder(now[2] - before[2], 2 * math.pi))
        return math.dist(now[:2], before[:2]) > _MOVED_M or turned > _TURNED_RAD

    def _changed(self, what: str, value: object, now: float, pause: float) -> bool:
        """Whether ``value`` is new and due to be sent; if so, the next one is due after ``pause`` (s)."""
        if now < self._due[what] or (what in self._seen and self._seen[what] == value):
            return False
        pause = pause if self._watched else max(pause, _UNSEEN_S)
        self._due[what], self._seen[what] = now + pause, value
        return True


class _Web:
    """The server and the connection to it."""

    def __init__(self, settings: ViewNodeSettings) -> None:
        self.server = WebServer(settings.bind, settings.web_port, settings.data_port, settings.memory_mb)
        try:
            self.view = WebView(self.server.data_url)
        except Exception:
            self.server.close()
            raise

    def close(self) -> None:
        try:
            self.view.close()  # before its server
        finally:
            self.server.close()


def has_desktop() -> bool:
    """Whether a browser can open a window; a text browser would take over this terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def things_of(message: MarkerArray) -> list[MapObject]:
    """The boxes and cylinders of a world's markers, as the map shows them."""
    things = []
    for marker in message.markers:
        place, size, colour = marker.pose.position, marker.scale, marker.color
        rgb = (round(255 * colour.r), round(255 * colour.g), round(255 * colour.b))
        half = (size.x / 2, size.y / 2) if marker.type == Marker.CUBE else None
        label = f"goal: {marker.text}" if marker.ns == "goal" else marker.text
        things.append(MapObject(place.x, place.y, size.x / 2, rgb, label, half))
    goals = [thing for thing in things if thing.label.startswith("goal: ")]
    named = {(goal.x, goal.y) for goal in goals}
    return [
        MapObject(t.x, t.y, t.radius, t.colour, "", t.half) if (t.x, t.y) in named and t not in goals else t
        for t in sorted(things, key=lambda t: t not in goals)
    ]


def main() -> None:
    lower_priority()  # this process and the server's
    run_main(ViewNode, events=True, wake_s=0.3)
