"""Benchmarks of the running system."""
