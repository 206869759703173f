"""The protocol's version, without what its messages import."""

PROTOCOL_VERSION = 6
