# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md: every table and figure of the four papers, beside formulas and measurements; a module per paper."""
