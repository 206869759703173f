# SPDX-License-Identifier: Apache-2.0
"""A test that fails must not leave its ROS context to the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_context_is_left() -> Iterator[None]:
    yield
    import rclpy

    if rclpy.ok():
        rclpy.shutdown()
