"""Recorded runs: writing, reading, replaying and reporting them."""
