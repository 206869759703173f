"""The papers' formulas and proofs, computed and drawn beside what is measured."""
