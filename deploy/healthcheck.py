"""Asks a verifier on this machine for anything: exit code 0 when it speaks HTTP, as a container's HEALTHCHECK wants it.

    python healthcheck.py [PORT]

Whether the token is right is no matter of health: a refusal is an answer, too.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import sys

PATIENCE_S = 3.0


def answers(port: int) -> bool:
    """Whether somebody answers on the port, with TLS or without."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # it is ourselves
    for connection in (
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S),
        http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=anybody),
    ):
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse()
            return True
    return False


if __name__ == "__main__":
    sys.exit(0 if answers(int(sys.argv[1]) if len(sys.argv) > 1 else 8765) else 1)
