# SPDX-License-Identifier: Apache-2.0
"""What the shipped pair and the readers can do: the evaluations and their pages."""
