# SPDX-License-Identifier: Apache-2.0
"""The ROS 2 nodes, one file per executable."""
