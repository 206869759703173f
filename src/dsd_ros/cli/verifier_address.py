"""Where a verifier listens, as `dsd verifier` prints it."""

from __future__ import annotations

import re
from typing import NamedTuple

_ADDRESS = re.compile(r"(wss?)://(\[[\w.:]+\]|[\w.\-]+):(\d+)")


class VerifierAddress(NamedTuple):
    """`host` is without the brackets that a URL puts round an IPv6 address."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def address_in(line: str) -> VerifierAddress | None:
    """The address in a line of `dsd verifier`; None where there is none."""
    found = _ADDRESS.search(line)
    return found and VerifierAddress(found[1], found[2].strip("[]"), int(found[3]))
