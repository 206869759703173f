# SPDX-License-Identifier: Apache-2.0
"""The robot's settings of its link to the verifier. Loads nothing of the wire: launch files read it, in a Python that
may have none of the packages that the nodes need.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.addresses import check_host, is_loopback
from dsd_ros.limits import ENCODINGS, MAX_SIDE
from dsd_ros.options import check_options, option

ENGINE_HELP = (
    "server that drafts in this process' place: http://host:port of llama-server, or http://host:port/v1 of an OpenAI "
    "API; the draft's folder is then read for its tokenizer and prompts alone; empty: none"
)


@dataclass(frozen=True)
class LinkSettings:
    """How long the robot's half waits for link and verifier; ValueError for a value out of range."""

    response_timeout_s: float = option(
        2.0, "a round is sent again after this much silence, s", 0.05, 600.0, allowed="0.05 to 600 seconds"
    )
    attempts: int = option(4, "times a round is sent, or the link dialled, before giving up", 1, 100)
    image_size: int = option(
        0, "longest side of pictures on the link, pixels; 0: as the target shrinks them", 0, MAX_SIDE
    )
    image_encoding: str = option(
        "png", "encoding of pictures on the link; what a lossy one leaves, both models see", choices=ENCODINGS
    )

    def __post_init__(self) -> None:
        check_options(self)


# For a person at a prompt, where a large model may take seconds for a round; the defaults suit a moving robot.
PATIENT_LINK = LinkSettings(response_timeout_s=5.0, attempts=5)


@dataclass(frozen=True)
class ServeSettings:
    """Where other programs find OpenAI's API; ValueError for an address of other machines without a token."""

    host: str = option("127.0.0.1", "address to listen on", check=check_host)
    port: int = option(8000, "port to listen on; 0: any free port", 0, 65535, allowed="0 (any free port) to 65535")
    api_token_file: str = option(
        "",
        "file with the token that clients give as their API key; needed where other machines reach this; empty: none",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not (self.api_token_file or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} lets other machines use this robot's model, and api_token_file is not set: name a "
                "file with a token (openssl rand -hex 32 > FILE)"
            )

    def token(self) -> str | None:
        """The token, None without one; ValueError for a file that holds none."""
        from dsd_ros.wire.channel import read_token

        return read_token(self.api_token_file) if self.api_token_file else None
