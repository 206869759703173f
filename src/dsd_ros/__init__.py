"""Distributed speculative decoding for on-robot VLM control."""

__version__ = "0.1.0"
