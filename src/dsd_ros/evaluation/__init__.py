"""Benchmarks and evaluations of the running system."""
