# SPDX-License-Identifier: Apache-2.0
"""The robot's half of a decode: the session, its rounds, and what proposes tokens."""
