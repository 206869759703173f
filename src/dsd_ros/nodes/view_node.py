# SPDX-License-Identifier: Apache-2.0
"""The live page: collects what is on the topics and serves it to browsers. It publishes only its health.

With ``visual`` this process also hosts the visualization node, and receives and draws for both.
"""

from __future__ import annotations

import math
import socket
import time

import cv2
import numpy as np
from rcl_interfaces.msg import Log
from visualization_msgs.msg import MarkerArray

from dsd_ros.addresses import is_loopback
from dsd_ros.nodes.visual_node import VisualNode
from dsd_ros.observe.ros.sight import Sight
from dsd_ros.observe.view.events import log_event, pose_event, reply_event, world_event
from dsd_ros.observe.view.web import PageFeed, ViewError, WebServer, open_browser
from dsd_ros.ros import health, qos
from dsd_ros.ros.images import ImageMessageError
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.polled import PacedThread, Polled, RateTimer, lower_priority, take
from dsd_ros.ros.running import RunnableNode, run_main
from dsd_ros.ros.settings import ViewNodeSettings

_REPLY_S, _MAP_S = 0.25, 0.2  # least time between two updates of a reply under way, and of the robot's pose
_UNSEEN_S = 1.0  # the same while no browser has the page open
_UNSEEN_RATE = 2.0  # most pictures per second in that time
_EARS_S = 0.5  # between two looks at the log and the world
_MEMORY_MB = 32  # for what browsers that come later are shown of the past
_WIDTH = 480  # most of the robot's view, pixels
_MOVED_M, _TURNED_RAD = 0.005, 0.01


class ViewNode(RunnableNode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("view_node")
        settings = declare(self, ViewNodeSettings, adopt=self._adopt)
        self.visual = VisualNode(self) if settings.visual else None
        self.guests = [] if self.visual is None else [self.visual]
        self._health = health.Health(self)
        self._feed = PageFeed(_MEMORY_MB)
        self._server: WebServer | None = None
        try:
            self._server = WebServer(self._feed, settings.bind, settings.web_port)
        except ViewError as error:
            if self.visual is None:
                raise
            self._health.report(health.ERROR, str(error))
        else:
            self._show_address(self._server, settings)
        self._sight = Sight(self, settings.image_transport)
        self._inputs = Polled(self)
        self._world = self._inputs.subscribe(MarkerArray, "ground_truth/markers", qos.LATCHED)
        self._log = self._inputs.subscribe(Log, "/rosout", qos.LOG)
        self._listened = self._replied = self._mapped = 0.0  # when each was last
        self._rounds, self._shown_pose = 0, (math.inf, math.inf, 0.0)  # shown last
        self._number = 0  # of the picture shown last
        self._adopt(settings)
        self._pace = PacedThread(self, self._tick)
        self._pace.start()

    def _adopt(self, settings: ViewNodeSettings) -> None:
        self._rate = settings.rate
        self._beat, self._seldom = RateTimer(settings.rate), RateTimer(min(settings.rate, _UNSEEN_RATE))

    def close(self) -> None:
        self._pace.close()
        self._inputs.close()
        self._sight.close()
        if self._server is not None:
            self._server.close()

    def _show_address(self, server: WebServer, settings: ViewNodeSettings) -> None:
        page = server.page()
        self._health.report(health.OK, f"live page at {page}", {"page": page})
        if not is_loopback(settings.bind):
            self.get_logger().warning(f"anyone on the network can watch at {server.page(socket.gethostname())}")
        if settings.open_browser:
            open_browser(page)

    def _tick(self) -> float:
        """Show what is new; returns the time until the next call, s."""
        now = time.monotonic()
        served = self._server is not None
        due = served and (self._beat if self._feed.watched else self._seldom).due(now)
        if self.visual is not None:
            self.visual.look_around(now)
        try:
            self._sight.look(due or (self.visual is not None and self.visual.pictures_wanted), soon=served)
        except ImageMessageError as error:
            self._health.report(health.WARN, str(error))
        if self.visual is not None and self.visual.wanted:
            self.visual.show(self._sight, now)  # first: its picture is the larger one
        if served:
            if due and self._sight.number != self._number:
                self._number = self._sight.number
                self._feed.picture(_narrowed(self._sight.picture))
            self._send_changes(now)
        return 1.0 / max(self._rate, self.visual.rate if self.visual is not None else 0.0)

    def _send_changes(self, now: float) -> None:
        """Add what has happened to the feed, states that change often at a rate of their own."""
        live, feed = self._sight.live, self._feed
        if live.heard:
            feed.heard(live.heard)
        while live.news:
            kind, value = live.news.popleft()
            feed.add(kind, reply_event(value[1], value[0]) if kind == "reply" else value)
        pause = 0.0 if feed.watched else _UNSEEN_S
        if live.rounds != self._rounds and now - self._replied >= max(_REPLY_S, pause):
            self._rounds, self._replied = live.rounds, now
            if not live.overlay.reply.done:
                feed.add("reply", reply_event(live.overlay.reply, live.begun))
        if live.pose is not None and now - self._mapped >= max(_MAP_S, pause) and self._moved(live.pose):
            self._shown_pose, self._mapped = live.pose, now
            feed.add("pose", pose_event(live.pose))
        if now - self._listened >= _EARS_S:
            self._listened = now
            for markers in take(self._world):
                feed.add("world", world_event(markers.markers), fixed=True)
            for line in take(self._log):
                feed.add("log", log_event(line))

    def _moved(self, pose: tuple[float, float, float]) -> bool:
        x, y, yaw = self._shown_pose
        turned = abs(math.remainder(pose[2] - yaw, 2 * math.pi))
        return math.hypot(pose[0] - x, pose[1] - y) > _MOVED_M or turned > _TURNED_RAD


def _narrowed(picture: np.ndarray) -> np.ndarray:
    """The picture at most _WIDTH wide."""
    height, width = picture.shape[:2]
    if width <= _WIDTH:
        return picture
    return cv2.resize(picture, (_WIDTH, round(height * _WIDTH / width)), interpolation=cv2.INTER_AREA)


def main() -> None:
    lower_priority()
    run_main(ViewNode, events=True, wake_s=0.3)
