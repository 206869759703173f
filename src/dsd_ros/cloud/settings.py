# SPDX-License-Identifier: Apache-2.0
"""Settings of the verifier, the schema of `dsd verifier`'s flags and the verifier node's parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dsd_ros.addresses import check_host, is_loopback
from dsd_ros.options import check_options, option


class VerifierSettingsError(ValueError):
    """A verifier setting out of range; one sentence."""


BOTH_FILES = "token_file and tokens_file are both set; give the one that all robots share, or the one that names them"


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine, the same for all transports."""

    max_sessions: int = option(64, "sessions held at once", 1, 100_000)
    session_expiry_s: float = option(
        120.0, "an unused session is dropped after this long, s", 0.1, 86_400.0, allowed="0.1 to 86400 seconds"
    )
    max_batch: int = option(32, "robots whose rounds are verified in one pass, at most", 1, 4096)
    max_batch_tokens: int = option(2048, "tokens of one pass at most, those of prompts included", 1, 1 << 20)
    exit_share: float = option(
        0.25, "fraction of a CPU's pass that early exits may take; 0: no exits", 0.0, 1.0, allowed="0 (no exits) to 1"
    )

    def __post_init__(self) -> None:
        check_options(self, VerifierSettingsError)


BACKENDS = ("local", "vllm")


@dataclass(frozen=True)
class BackendSettings:
    """What runs the target."""

    backend: str = option(
        BACKENDS[0],
        "what runs the target: local, this process; vllm, vLLM's engine in this environment",
        choices=BACKENDS,
    )
    engine_timeout_s: float = option(
        60.0,
        "a vLLM that gives no answer for this long is lost, and the verifier exits, s (backend vllm)",
        0.1,
        3600.0,
        allowed="0.1 to 3600 seconds",
    )
    drafts: bool = option(True, "vLLM verifies what robots draft; off: it runs as it is (backend vllm)")
    tensor_parallel: int = option(1, "GPUs that share a copy of the model (backend vllm)", 1, 1024)
    data_parallel: int = option(1, "copies of the model (backend vllm)", 1, 1024)
    engine_args: str = option(
        "", 'further arguments of vLLM\'s engine, a JSON object such as {"gpu_memory_utilization": 0.8} (backend vllm)'
    )

    def __post_init__(self) -> None:
        check_options(self, VerifierSettingsError)
        for name in ("engine_args", "drafts", "tensor_parallel", "data_parallel"):
            if self.backend != "vllm" and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise VerifierSettingsError(f"{name} is for backend vllm, and the backend is {self.backend}")
        try:
            given = json.loads(self.engine_args or "{}")
        except ValueError as error:
            raise VerifierSettingsError(f"engine_args is no JSON: {error}") from error
        if not isinstance(given, dict):
            raise VerifierSettingsError(
                'engine_args is JSON but no object; write {"NAME": VALUE}, names as of vLLM\'s engine arguments'
            )


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
class TokensSettings:
    """Robots that have a name and a token of their own."""

    tokens_file: str = option(
        "", "instead of token_file: YAML file with a line 'NAME: TOKEN' for each robot, and its limits; empty: none"
    )
    sessions_per_robot: int = option(
        8, "sessions of one robot of tokens_file, and half its connections, unless the file says more", 1, 100_000
    )


@dataclass(frozen=True)
class VerifierSettings(MetricsSettings, EngineSettings, TokensSettings):
    """An engine served over a websocket."""

    host: str = option("127.0.0.1", "address to listen on", check=check_host)
    port: int = option(8765, "port to listen on; 0: any free port", 0, 65535, allowed="0 (any free port) to 65535")
    token_file: str = option("", "file with the token that robots must present; empty: none")
    allow_unauthenticated: bool = option(False, "do without tokens where other machines reach this")
    certificate: str = option("", "TLS certificate chain, PEM; empty: no TLS")
    key: str = option("", "TLS private key, PEM")
    drain_s: float = option(
        5.0,
        "after SIGTERM, how long robots may finish their replies before they are sent elsewhere, s; 0: stop at once",
        0.0,
        3600.0,
        allowed="0 (stop at once) to 3600 seconds",
    )

    def __post_init__(self) -> None:
        MetricsSettings.__post_init__(self)  # and with it every bound
        if not self.host:
            raise VerifierSettingsError("host is empty; use 127.0.0.1, or 0.0.0.0 for every interface")
        if self.token_file and self.tokens_file:
            raise VerifierSettingsError(BOTH_FILES)
        if not is_loopback(self.host) and not (self.token_file or self.tokens_file or self.allow_unauthenticated):
            raise VerifierSettingsError(
                f"host {self.host} lets other machines reach this verifier, and token_file is not set: give robots and "
                "verifier a file with the same token (openssl rand -hex 32 > FILE), or allow_unauthenticated"
            )
        if bool(self.certificate) != bool(self.key):
            raise VerifierSettingsError("TLS needs both a certificate and a key; give both or neither")
        if self.metrics_port and self.metrics_port == self.port:
            raise VerifierSettingsError(f"metrics_port and port are both {self.port}; give the metrics another")
