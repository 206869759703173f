# SPDX-License-Identifier: Apache-2.0
"""The verifier on DDS topics: the same engine that `dsd verifier` serves over a websocket.

configure loads the target model; activate answers robots; deactivate finishes the round in progress and then leaves
the topics; cleanup frees the model and its GPU memory. Sessions end with deactivate: robots open new ones.
With documents it also answers questions, with a text model of its own (``dragon.server``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics_server import MetricsServer
from dsd_ros.paths import documents_directory
from dsd_ros.ros import health
from dsd_ros.ros.dds_channel import VerifierTopics
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.running import NodeLog, run_main
from dsd_ros.ros.settings import VerifierNodeSettings
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import Message

if TYPE_CHECKING:
    from dsd_ros.dragon.server import Documents, WithDocuments

_PEER = "dds"  # topics do not name the sender; sessions do
_LAST_ROUND_S = 5.0  # for the round in progress, when answering ends


class _Service:
    """One activation: topics and engine. The model runs on the engine's thread, not on the executor's."""

    def __init__(
        self,
        node: VerifierNode,
        engine: VerifierEngine | WithDocuments,
        settings: VerifierNodeSettings,
        tokens: Tokens | None,
    ) -> None:
        self.engine = engine
        self.guard: Authenticator | None = None
        self._submit = engine.submit
        if tokens is not None:
            limits = settings.engine.max_sessions, settings.sessions_per_robot
            self.guard = Authenticator(engine.submit, tokens, engine.metrics, *limits)
            self._submit = self.guard.submit
        self._counted = 0, 0
        self._metrics = MetricsServer(engine.metrics.registry, settings)
        if settings.metrics_port:
            try:
                self._metrics.start()
            except OSError:
                self.engine.close()
                raise
        self.topics = VerifierTopics(node, self._on_message)
        self.topics.start()

    def count(self) -> None:
        """Add the topics' new bytes to the metrics."""
        up, down = self.topics.bytes_in, self.topics.bytes_out
        self.engine.metrics.received(up - self._counted[0])
        self.engine.metrics.sent(down - self._counted[1])
        self._counted = up, down

    def close(self, timeout: float) -> bool:
        """Finish the round in progress, then stop; False when that takes longer than ``timeout`` seconds."""
        ended = self.engine.close(timeout)
        self.topics.close()
        self._metrics.close()
        return ended

    def _on_message(self, message: Message) -> None:
        self._submit(message, self.topics.publish, _PEER)


class VerifierNode(ManagedNode[VerifierNodeSettings]):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("verifier_node", VerifierNodeSettings)
        self._log_lines = NodeLog(self)
        self._model: VisionLanguageModel | None = None
        self._documents: Documents | None = None
        self._service: _Service | None = None
        self._tokens: Tokens | None = None
        self.create_timer(1.0, self._count)
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        self._tokens = self._settings.tokens()
        folder = documents_directory(self._settings.documents, "cloud")
        if folder is not None:
            from dsd_ros.dragon.server import Documents

            self._documents = Documents.load(folder, self._settings.model, self._settings.text_model)
        self._model = load_model(self._settings.model)

    def begin(self) -> None:
        self._service = _Service(self, self._engine(), self._settings, self._tokens)
        assert self._model is not None
        answers = "; answering questions" if self._documents is not None else ""
        self._health.report(health.OK, f"target model {self._model.name} loaded, verifying on DDS topics{answers}")

    def _engine(self) -> VerifierEngine | WithDocuments:
        model = self._model
        assert model is not None, "load comes first"
        if self._documents is None:
            return VerifierEngine(model, self._settings.engine)
        return self._documents.serve(lambda: VerifierEngine(model, self._settings.engine), self._settings.answers)

    def end(self) -> None:
        service, self._service = self._service, None
        if service is not None and not service.close(_LAST_ROUND_S):
            self.get_logger().warning("the round in progress still runs; the model is freed after it")

    def unload(self) -> None:
        self._model = self._documents = None

    def give_back(self) -> None:
        self._log_lines.close()

    def _count(self) -> None:
        service = self._service
        if service is None or not self.active:
            return
        service.count()
        sessions, lost = service.engine.held_sessions()
        figures: dict[str, object] = {"bytes received": service.topics.bytes_in, "bytes sent": service.topics.bytes_out}
        figures |= {"sessions": sessions + lost, "turns waiting": service.engine.queue()[0]}
        dropped = service.guard.dropped.count if service.guard is not None else 0
        figures |= {"authenticated": "yes" if service.guard is not None else "no", "dropped messages": dropped}
        self._health.report(health.OK, "verifying", figures)


def main() -> None:
    run_main(VerifierNode, threads=3)
