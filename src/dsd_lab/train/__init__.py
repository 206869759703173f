# SPDX-License-Identifier: Apache-2.0
"""Training of the shipped model pair and of the reader."""
