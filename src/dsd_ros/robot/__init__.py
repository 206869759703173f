"""Robots: one driver interface, the real Go2 and the simulated one."""
