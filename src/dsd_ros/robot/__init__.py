"""Robots: the simulated Go2 and its world."""
