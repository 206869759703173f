"""Faults injected into the running system, and what the robot did."""
