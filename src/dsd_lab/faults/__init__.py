# SPDX-License-Identifier: Apache-2.0
"""Faults injected into the running system, and what the robot did."""
