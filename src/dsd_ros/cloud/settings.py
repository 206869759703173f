"""Settings of the verifier, the schema of `dsd verifier`'s flags and the verifier node's parameters."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from dsd_ros.decoding.bounds import check_bounds


class VerifierSettingsError(ValueError):
    """A verifier setting out of place; one sentence."""


LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerError(OSError):
    """A server cannot listen; one sentence with the remedy."""


def listen_error(error: Exception, what: str, port: int, host: str, zero: str = "any free one") -> ServerError:
    """Why ``what`` ("port") cannot be listened on; ``zero`` is what 0 means there."""
    where = f"{what} {port} on {host}"
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return ServerError(f"{where} is in use; choose another, or 0 for {zero}")
    if number == errno.EACCES:
        return ServerError(f"{where} may not be used by this user; choose one above 1023")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ServerError(f"{where} cannot be listened on: {reason}")


@dataclass(frozen=True)
class EngineSettings:
    """What the engine holds, whatever carries its messages."""

    max_sessions: int = field(default=64, metadata={"help": "sessions held at once", "min": 1, "max": 100_000})
    session_expiry_s: float = field(
        default=120.0,
        metadata={
            "help": "seconds until an unused session is dropped",
            "min": 0.1,
            "max": 86_400.0,
            "range": "0.1 to 86400 seconds",
        },
    )
    exit_share: float = field(
        default=0.25,
        metadata={
            "help": "share of a CPU's pass that early exits may take; 0: no exits",
            "min": 0.0,
            "max": 1.0,
            "range": "0 (no exits) to 1",
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, VerifierSettingsError)


@dataclass(frozen=True)
class MetricsSettings:
    """Where an operator's Prometheus finds the verifier's metrics."""

    metrics_port: int = field(
        default=0,
        metadata={
            "help": "port of the Prometheus metrics; 0: none",
            "min": 0,
            "max": 65535,
            "range": "0 (no metrics) to 65535",
        },
    )
    metrics_host: str = field(default="127.0.0.1", metadata={"help": "address of the Prometheus metrics"})

    def __post_init__(self) -> None:
        if not self.metrics_host:
            raise VerifierSettingsError("metrics_host is empty; use 127.0.0.1, or 0.0.0.0 for every interface")
        check_bounds(self, VerifierSettingsError)


@dataclass(frozen=True)
class DocumentSettings:
    """What questions are answered from, and by which model (``rag.service``)."""

    documents: str = field(
        default="",
        metadata={
            "help": "general documents that questions are answered from: a folder of text files (.md, .txt), one made "
            "by 'dsd documents', or shipped: dsd's examples; empty: no questions are answered"
        },
    )
    text_model: str = field(
        default="",
        metadata={"help": "directory or hub id of the text model that answers questions; empty: the shipped reader"},
    )


@dataclass(frozen=True)
class VerifierSettings(MetricsSettings, EngineSettings):
    """An engine served over a websocket."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(
        default=8765,
        metadata={
            "help": "port to listen on; 0: any free one",
            "min": 0,
            "max": 65535,
            "range": "0 (any free one) to 65535",
        },
    )
    token_file: str = field(
        default="", metadata={"help": "file with the bearer token that robots must show; empty: none"}
    )
    certificate: str = field(default="", metadata={"help": "TLS certificate chain, PEM; empty: no TLS"})
    key: str = field(default="", metadata={"help": "TLS private key, PEM"})

    def __post_init__(self) -> None:
        MetricsSettings.__post_init__(self)  # and with it every bound
        if not self.host:
            raise VerifierSettingsError("host is empty; use 127.0.0.1, or 0.0.0.0 for every interface")
        if bool(self.certificate) != bool(self.key):
            raise VerifierSettingsError("TLS needs both a certificate and a key; give both or neither")
        if self.metrics_port and self.metrics_port == self.port:
            raise VerifierSettingsError(f"metrics_port and port are both {self.port}; give the metrics another")
