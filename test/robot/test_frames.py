# SPDX-License-Identifier: Apache-2.0
"""A robot's description as a tree of frames: the shipped one, and what others may and may not be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsd_ros.robot.frames import CAMERA_LINK, OPTICAL, Description, FrameSettings, Placed

SENSORS = '<link name="imu_link"/><link name="front_camera_optical_frame"/>' + "".join(
    f'<joint name="{name}_joint" type="fixed"><parent link="base_link"/><child link="{name}"/></joint>'
    for name in ("imu_link", "front_camera_optical_frame")
)


def described(tmp_path, inside: str, **frames: str) -> Description:
    file = tmp_path / "robot.urdf"
    file.write_text(f'<robot name="r">{inside}</robot>')
    return Description(FrameSettings(description=str(file), **frames))


def joint(parent: str, child: str, kind: str = "fixed", origin: str = "") -> str:
    return f'<joint name="{child}_j" type="{kind}"><parent link="{parent}"/><child link="{child}"/>{origin}</joint>'


def test_the_shipped_description_gives_the_chain_of_frames():
    fixed = Description(FrameSettings()).fixed()
    assert {each.child: each.parent for each in fixed} == {
        "imu_link": "base_link", CAMERA_LINK: "base_link", "front_camera_optical_frame": CAMERA_LINK,
    }  # fmt: skip
    assert Description(FrameSettings(footprint_frame="")).fixed() == fixed
    optical = next(each for each in fixed if each.child == "front_camera_optical_frame")
    assert optical.rpy == pytest.approx(OPTICAL) and optical.xyz == (0.0, 0.0, 0.0)


def test_a_description_of_ones_own_keeps_its_names(tmp_path):
    """Its base joint may be fixed: odometry says where the base is, whatever the file has."""
    inside = '<link name="base_footprint"/><link name="base_link"/>' + joint("base_footprint", "base_link") + SENSORS
    assert {each.child for each in described(tmp_path, inside).fixed()} == {"imu_link", "front_camera_optical_frame"}
    alone = described(tmp_path, '<link name="base_link"/>' + SENSORS)  # a footprint need not be in it
    assert len(alone.fixed()) == 2
    inside = '<link name="trunk"/><link name="imu"/><link name="eye"/>' + joint("trunk", "imu") + joint("trunk", "eye")
    own = described(tmp_path, inside, base_frame="trunk", imu_frame="imu", camera_frame="eye")
    assert own.fixed() == [Placed("trunk", name, (0.0, 0.0, 0.0)) for name in ("imu", "eye")]


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("<link", r"is not valid XML"),
        ('<link name="base"/>', r"has no link 'base_link'; name one of its links \(base\) by base_frame"),
        (
            '<link name="base_link"/><link name="base_footprint"/>' + joint("base_link", "base_footprint") + SENSORS,
            r"has base_footprint below another link.*: set footprint_frame to an empty text",
        ),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, inside, sentence):
    with pytest.raises(ValueError, match=rf"^The robot's description .*robot\.urdf {sentence}"):
        described(tmp_path, inside).fixed()


def test_what_cannot_be_published_is_refused(tmp_path):
    base = '<link name="base_link"/><link name="hip"/>' + SENSORS
    with pytest.raises(ValueError, match=r"a joint that moves, 'hip_j'.* robot_state_publisher"):
        described(tmp_path, base + joint("base_link", "hip", "revolute")).fixed()
    with pytest.raises(ValueError, match=r"has '1 2' as xyz of 'hip_j'; give three numbers"):
        described(tmp_path, base + joint("base_link", "hip", origin='<origin xyz="1 2"/>')).fixed()
    with pytest.raises(ValueError, match=r"cannot be read"):
        Description(FrameSettings(description=str(tmp_path)))


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ({"odom_frame": "/odom"}, "leading slash"),
        ({"frame_prefix": " go2"}, "blanks"),
        ({"camera_frame": ""}, "must have a name"),
        ({"footprint_frame": "base_link"}, "must differ"),
    ],
)
def test_names_that_tf2_refuses_are_refused(frames, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(FrameSettings(), **frames)


def test_the_optical_frame_looks_along_the_links_x():
    """REP 103: z ahead, x right, y down."""
    roll, _, yaw = OPTICAL
    # Of Rz(yaw) Rx(roll), the images of z and x.
    z = (math.sin(yaw) * math.sin(roll), -math.cos(yaw) * math.sin(roll), math.cos(roll))
    x = (math.cos(yaw), math.sin(yaw), 0.0)
    assert z == pytest.approx((1.0, 0.0, 0.0), abs=1e-12) and x == pytest.approx((0.0, -1.0, 0.0), abs=1e-12)
