# SPDX-License-Identifier: Apache-2.0
"""The simulated Go2 and its world."""
