# SPDX-License-Identifier: Apache-2.0
"""Ask a verifier on this machine for /healthz: exit code 0 if it answers, as a container's HEALTHCHECK expects.

    python healthcheck.py [PORT]

Any HTTP answer counts as healthy, whatever its status. /healthz needs no token.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import sys

TIMEOUT_S = 3.0


def answers(port: int) -> bool:
    """Whether a server answers HTTP on the port, with TLS or without."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the verifier is on this machine
    for connection in (
        http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S),
        http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context),
    ):
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/healthz")
            connection.getresponse()
            return True
    return False


if __name__ == "__main__":
    sys.exit(0 if answers(int(sys.argv[1]) if len(sys.argv) > 1 else 8765) else 1)
