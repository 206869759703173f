# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas and proofs, computed and drawn beside what is measured."""
