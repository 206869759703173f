# SPDX-License-Identifier: Apache-2.0
"""Settings of the verifier, the schema of `dsd verifier`'s flags and the verifier node's parameters."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dsd_ros.addresses import check_host
from dsd_ros.options import check_options, option


class VerifierSettingsError(ValueError):
    """A verifier setting out of range; one sentence."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# What becomes of each MB (2^20 bytes) of ``EngineSettings.memory_mb``.
PICTURE_BYTES_OF_A_MB, WAITING_BYTES_OF_A_MB, RECEIVING_BYTES_OF_A_MB = 512 << 10, 256 << 10, 256 << 10


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine, the same for all transports."""

    max_sessions: int = option(64, "sessions held at once", 1, 100_000)
    session_expiry_s: float = option(
        120.0, "an unused session is dropped after this long, s", 0.1, 86_400.0, allowed="0.1 to 86400 seconds"
    )
    memory_mb: int = option(
        1024,
        "memory for what robots send, MB: half for the pictures kept of their histories, a quarter for messages that "
        "wait, a quarter for frames being received",
        256,
        1 << 20,
    )
    max_batch: int = option(32, "robots whose rounds are verified in one pass, at most", 1, 4096)
    max_batch_tokens: int = option(2048, "tokens of one pass over several robots' rounds, at most", 1, 1 << 20)
    exit_share: float = option(
        0.25, "fraction of a CPU's pass that early exits may take; 0: no exits", 0.0, 1.0, allowed="0 (no exits) to 1"
    )

    def __post_init__(self) -> None:
        check_options(self, VerifierSettingsError)


@dataclass(frozen=True)
class MetricsSettings:
    """Where Prometheus finds the verifier's metrics."""

    metrics_port: int = option(
        0, "port of the Prometheus metrics; 0: none", 0, 65535, allowed="0 (no metrics) to 65535"
    )
    metrics_host: str = option("127.0.0.1", "address of the Prometheus metrics", check=check_host)

    def __post_init__(self) -> None:
        if not self.metrics_host:
            raise VerifierSettingsError("metrics_host is empty; use 127.0.0.1, or 0.0.0.0 for every interface")
        check_options(self, VerifierSettingsError)


@dataclass(frozen=True)
class DocumentSettings:
    """The documents that questions are answered from, and the model that answers."""

    documents: str = option(
        "",
        "general documents that questions are answered from: a folder of text files (.md, .txt), one made by "
        "'dsd documents', or shipped: dsd's examples; empty: no questions are answered",
    )
    text_model: str = option(
        "", "text model that answers questions: directory or Hugging Face id; empty: the shipped reader"
    )


@dataclass(frozen=True)
class VerifierSettings(MetricsSettings, EngineSettings):
    """An engine served over a websocket."""

    host: str = option("127.0.0.1", "address to listen on", check=check_host)
    port: int = option(8765, "port to listen on; 0: any free port", 0, 65535, allowed="0 (any free port) to 65535")
    connections_per_address: int = option(
        64, "connections from one address; behind a proxy all robots have the proxy's", 1, 100_000
    )
    messages_per_second: int = option(4000, "messages taken from one address a second", 100, 1_000_000)
    message_mb: int = option(
        20, "largest message of a robot, MB, unless the target's vocabulary needs more; 40 is the most", 1, 40
    )
    sessions_per_connection: int = option(8, "sessions held over one connection", 1, 100_000)
    sessions_per_address: int = option(
        32, "sessions held from one address; behind a proxy all robots have the proxy's", 1, 100_000
    )
    token_file: str = option("", "file with the token that robots must present and prove; empty: none")
    allow_unauthenticated: bool = option(False, "do without token_file where other machines reach this")
    certificate: str = option("", "TLS certificate chain, PEM; empty: no TLS")
    key: str = option("", "TLS private key, PEM")

    def __post_init__(self) -> None:
        MetricsSettings.__post_init__(self)  # and with it every bound
        if not self.host:
            raise VerifierSettingsError("host is empty; use 127.0.0.1, or 0.0.0.0 for every interface")
        if not is_loopback(self.host) and not (self.token_file or self.allow_unauthenticated):
            raise VerifierSettingsError(
                f"host {self.host} lets other machines reach this verifier, and token_file is not set: give robots and "
                "verifier a file with the same token (openssl rand -hex 32 > FILE), or allow_unauthenticated"
            )
        if bool(self.certificate) != bool(self.key):
            raise VerifierSettingsError("TLS needs both a certificate and a key; give both or neither")
        if self.metrics_port and self.metrics_port == self.port:
            raise VerifierSettingsError(f"metrics_port and port are both {self.port}; give the metrics another")
