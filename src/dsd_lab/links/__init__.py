# SPDX-License-Identifier: Apache-2.0
"""Emulated links: a proxy with delay, loss and a data rate between robot and verifier."""
