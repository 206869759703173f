# SPDX-License-Identifier: Apache-2.0
"""Robots that are none: the simulated one with faults on demand, and a stand-in for the Go2."""
