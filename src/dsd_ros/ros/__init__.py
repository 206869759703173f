# SPDX-License-Identifier: Apache-2.0
"""What the nodes share: parameters, lifecycle, QoS, images, the DDS channel, bring-up and processes."""
