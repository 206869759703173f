# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: writing, reading, replaying and reporting them."""
