"""The bearer token that a robot shows to a verifier."""

from __future__ import annotations

import hmac
from pathlib import Path

MAX_TOKEN_CHARS = 4096


def read_token(path: str | Path) -> str:
    """The token in a file, without surrounding white space; ValueError, one sentence, when there is none."""
    try:
        token = Path(path).expanduser().read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"the token file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        token = ""
    if not token or len(token) > MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ValueError(
            f"the token file {path} holds no token; write one line of printable ASCII without spaces, "
            "for example from `openssl rand -hex 32`"
        )
    return token


def bearer(token: str) -> str:
    """The value of the Authorization header."""
    return f"Bearer {token}"


def shows_token(header: str | None, token: str) -> bool:
    """Whether an Authorization header shows the token, compared in constant time."""
    return hmac.compare_digest((header or "").encode(), bearer(token).encode())
