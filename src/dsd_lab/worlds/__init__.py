# SPDX-License-Identifier: Apache-2.0
"""Worlds to learn and to test in: situations, what can be seen of them, and the expert that walks through them."""
