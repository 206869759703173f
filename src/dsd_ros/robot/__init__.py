# SPDX-License-Identifier: Apache-2.0
"""Robots: one driver interface, the real Go2 and the simulated one."""
