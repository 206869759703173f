"""What can end a decode early; each message is one sentence. The session stays usable."""

from __future__ import annotations

from dsd_ros.wire.channel import LinkError


class VerifierRefused(LinkError):
    """The verifier answered that it will not serve this; ``code`` is a RefusalCode or "session"."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


class SessionLost(Exception):
    """The verifier has forgotten the session (inside this room only: the reply goes on in another)."""


class TargetChanged(Exception):
    """Another target answers, before anything is verified (inside this room only: the reply begins anew)."""
