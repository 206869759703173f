"""Scenes, expert answers and training of the shipped model pair."""
