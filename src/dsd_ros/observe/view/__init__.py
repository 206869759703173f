# SPDX-License-Identifier: Apache-2.0
"""Pictures, lanes and the live page, drawn from what the robot says. Knows nothing of ROS or of models."""
