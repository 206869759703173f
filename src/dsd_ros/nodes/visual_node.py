# SPDX-License-Identifier: Apache-2.0
"""What RViz shows beside the driver's topics: the picture with its overlay, paths and markers.

The node subscribes and draws only while its topics have subscribers, which it checks every half second. Earlier events
are not shown: the path begins when the first subscriber comes. With view_node's parameter ``visual``, the node is a
guest in that node's process, which receives and draws for both.
"""

from __future__ import annotations

import time

from nav_msgs.msg import Path
from rclpy.node import Node
from sensor_msgs.msg import Image
from std_msgs.msg import Header
from visualization_msgs.msg import MarkerArray

from dsd_ros.observe.ros import visual_messages as shapes
from dsd_ros.observe.ros.live import Live
from dsd_ros.observe.ros.sight import Sight
from dsd_ros.ros import health, qos
from dsd_ros.ros.images import ImageMessageError
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.polled import PacedThread, RateTimer, lower_priority
from dsd_ros.ros.running import RunnableNode, named, run_main
from dsd_ros.ros.settings import VisualNodeSettings

_LOOK_S = 0.5  # between checks for subscribers
_PRESENT_S = 0.5  # between publications of markers that fade
_STEPS_EVERY = 8  # publications between repetitions of the steps, for late subscribers
_IDLE_S = 3.0  # after this long without subscribers the node unsubscribes


class VisualNode(RunnableNode):
    """See the module.

    :param host: the node whose process hosts this one; it calls :meth:`look_around` and :meth:`show`.
    """

    def __init__(self, host: Node | None = None) -> None:
        super().__init__("visual_node", **(named("visual_node", host) if host is not None else {}))
        self._settings = settings = declare(self, VisualNodeSettings, host, self._adopt)
        self._image = self.create_publisher(Image, "dsd/visual/image", qos.NEWEST_STATE)
        self._walked = self.create_publisher(Path, "dsd/visual/path_walked", qos.LATCHED)
        self._intended = self.create_publisher(Path, "dsd/visual/path_intended", qos.LATCHED)
        self._markers = self.create_publisher(MarkerArray, "dsd/visual/markers", qos.STATE)
        self.rate = settings.rate
        self._beat = RateTimer(settings.rate)
        self._sight: Sight | None = None  # None with a host, or without subscribers
        self._looked = self._present = self._wanted = float("-inf")
        self.wanted = False  # whether any topic has subscribers
        self.pictures_wanted = False
        self._number = 0  # of the picture shown last
        self._shown = (-1, -1, -1)  # poses, steps and run that paths and markers were published for
        self._rounds = 0  # of publications
        self._health = health.Health(self)
        self._health.report(health.OK, "no subscribers")
        self._pace: PacedThread | None = None
        if host is None:
            self._pace = PacedThread(self, self._work)
            self._pace.start()

    def _adopt(self, settings: VisualNodeSettings) -> None:
        self._settings, self.rate, self._beat = settings, settings.rate, RateTimer(settings.rate)

    def close(self) -> None:
        if self._pace is not None:
            self._pace.close()
        if self._sight is not None:
            self._sight.close()

    def _work(self) -> float:
        """Draw if there are subscribers; returns the time until the next call, s."""
        now = time.monotonic()
        self.look_around(now)
        if not self.wanted:
            if self._sight is not None:
                self._sight.close()
                self._sight = None
            return _LOOK_S
        if self._sight is None:
            self._sight = Sight(self, self._settings.image_transport)
        try:
            self._sight.look(self.pictures_wanted)
        except ImageMessageError as error:
            self._health.report(health.WARN, str(error))
        self.show(self._sight, now)
        return 1.0 / self.rate

    def look_around(self, now: float) -> None:
        """Check every half second for subscribers."""
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        publishers = (self._image, self._walked, self._intended, self._markers)
        self.pictures_wanted = self._image.get_subscription_count() > 0
        if self.pictures_wanted or any(p.get_subscription_count() for p in publishers):
            self._wanted = now
            if not self.wanted:
                self.wanted = True
                self._shown = (-1, -1, -1)
                self._health.report(health.OK, "has subscribers")
        elif self.wanted and now - self._wanted > _IDLE_S:
            self.wanted = False
            self._health.report(health.OK, "no subscribers")

    def show(self, sight: Sight, now: float) -> None:
        """Publish what is new."""
        if self.pictures_wanted and sight.number != self._number and self._beat.due(now):
            self._number = sight.number
            # Like `publish`, which accepts only bytes and would copy the picture.
            with self._image.handle:
                self._image.handle.publish_raw(sight.message(self._settings.overlay_width))
        if now - self._present >= _PRESENT_S:
            self._present = now
            self._publish_motion(sight.live)

    def _publish_motion(self, live: Live) -> None:
        """Publish paths and lasting markers when they have changed, and fading markers each time."""
        header = Header(stamp=self.get_clock().now().to_msg(), frame_id=live.frame)
        step = live.steps[-1] if live.steps else None
        markers = []
        shown = (live.walk.changes, step.number if step else 0, live.runs)
        changed = shown != self._shown
        if changed:
            if shown[2] != self._shown[2]:
                markers.append(shapes.fresh_start(header))
            if shown[0] != self._shown[0]:
                self._walked.publish(shapes.path_message(live.walk.poses, header))
            if shown[1:] != self._shown[1:]:
                self._intended.publish(shapes.intended_path(step, header))
            self._shown = shown
        if self._markers.get_subscription_count() == 0:
            return
        self._rounds += 1
        if changed or self._rounds % _STEPS_EVERY == 0:
            markers += shapes.step_markers(live.steps, header)
        if live.pose is not None:
            markers += shapes.present_markers(live.overlay, step, live.pose, header)
        if markers:
            self._markers.publish(MarkerArray(markers=markers))


def main() -> None:
    lower_priority()
    run_main(VisualNode, events=True, wake_s=0.3)
