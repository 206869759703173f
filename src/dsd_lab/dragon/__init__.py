"""DRAGON measured: its baselines, its bench, its simulator."""
