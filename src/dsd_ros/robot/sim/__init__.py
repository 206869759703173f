"""The simulated Go2 and its world."""
