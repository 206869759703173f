"""The robot as a run sees it: where it is and was, the motion under way, and since when it stands."""

from __future__ import annotations

from dsd_ros.navigation.actions import Action
from dsd_ros.navigation.controller import MotionController, MotionSettings, MotionStatus, Pose, Velocity, predict
from dsd_ros.navigation.lookahead import Track
from dsd_ros.navigation.records import Moment
from dsd_ros.navigation.retrace import Path

_MAX_PREDICTION_S = 0.3  # beyond: a stalled sender, or another machine's clock
_STAMP_ROUNDING_S = 1e-3  # stamps go through float64 seconds and back


class Walk:
    """Pure. ``stood``: when the robot was first measured standing after the last motion."""

    def __init__(self) -> None:
        self.pose = Pose(0.0, 0.0, 0.0)
        self.path = Path()
        self.track = Track()
        self.motion: MotionController | None = None
        self.stood: Moment | None = None
        self._distance = 0.0

    @property
    def distance(self) -> float:
        """Metres of path since the start, the motion under way included."""
        return self._distance + (self.motion.travelled if self.motion else 0.0)

    def on_pose(self, pose: Pose, measured: Velocity, moment: Moment, stamp: float | None, outward: bool) -> float:
        """Note a pose that was true at ``stamp`` (None: now); returns the stamp it is taken to have.

        :param outward: it belongs to the path; False on the way back.
        """
        at = moment.stamp
        if stamp is not None and 0.0 <= at - stamp < _MAX_PREDICTION_S:
            at = stamp
        self.track.add(at, pose)
        self.pose = predict(pose, measured, moment.stamp - at)
        if outward:
            self.path.add(self.pose)
        return at

    def begin(
        self, action: Action, settings: MotionSettings, moment: Moment, origin: Pose | None = None
    ) -> MotionController:
        """Begin a motion; ``origin`` as of :class:`MotionController`."""
        self.stood = None
        self.motion = MotionController(action, settings, self.pose, moment.stamp, origin)
        return self.motion

    def update(self, motion: MotionController, measured: Velocity, at: float, moment: Moment) -> Velocity:
        """The motion's command for the newest pose, which was true at ``at``."""
        command = motion.update(self.pose, measured, moment.stamp)
        if motion.standing:
            self.stood = self.stood or Moment(moment.steady, at)
        elif motion.finished:  # it never stood quite still, and does not get any stiller
            self.stood = moment
        else:
            self.stood = None
        return command

    def finish(self) -> bool:
        """The motion is over; returns whether it was blocked."""
        stuck = self.motion is not None and self.motion.status is MotionStatus.STUCK
        self.drop()
        return stuck

    def drop(self) -> None:
        """No motion is under way any more."""
        self._distance = self.distance
        self.motion = None

    def stood_at(self, stamp: float) -> bool:
        """Whether the robot stood at ``stamp``, where it stands now."""
        return self.stood is not None and stamp >= self.stood.stamp - _STAMP_ROUNDING_S
