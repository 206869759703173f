# SPDX-License-Identifier: Apache-2.0
"""The parts of observation that use ROS messages."""
