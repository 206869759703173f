"""Training of the shipped model pair and of the reader."""
