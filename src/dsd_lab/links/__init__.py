"""Emulated links: a proxy with delay, loss and a data rate between robot and verifier."""
