"""The verifier on DDS topics: the same engine that `dsd verifier` serves over a websocket.

configure loads the target model, activate answers, deactivate lets the round under way be answered and then leaves
the topics, cleanup frees the model and its GPU memory. Sessions do not outlive deactivate: robots open new ones.
"""

from __future__ import annotations

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.nodes import health
from dsd_ros.nodes.dds_channel import VerifierTopics
from dsd_ros.nodes.managed import ManagedNode
from dsd_ros.nodes.models import declare_model
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import Message

_PEER = "dds"  # topics do not tell who wrote; sessions do
_TURN_PATIENCE_S = 5.0  # for the round under way, when answering ends


class _Service:
    """One activation: topics and engine. The model runs in the engine's thread, not in the executor's."""

    def __init__(
        self, node: VerifierNode, model: VisionLanguageModel, settings: EngineSettings
    ) -> None:
        self.topics = VerifierTopics(node, self._on_message)
        self.engine = VerifierEngine(model, settings)
        self.topics.start()

    def close(self, timeout: float) -> bool:
        """Answer what is under way, nothing further; False when that takes longer than ``timeout`` seconds."""
        ended = self.engine.close(timeout)
        self.topics.close()
        return ended

    def _on_message(self, message: Message) -> None:
        self.engine.submit(message, self.topics.publish, _PEER)


class VerifierNode(ManagedNode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("verifier_node")
        self._model_settings = declare_model(self, "target")
        self._engine_settings = declare(self, EngineSettings, "engine.")
        refuse_unknown(self)
        self._model: VisionLanguageModel | None = None
        self._service: _Service | None = None
        self.create_timer(1.0, self._count)
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        self._model = load_model(self._model_settings)

    def begin(self) -> None:
        assert self._model is not None, "load comes first"
        self._service = _Service(self, self._model, self._engine_settings)
        name = self._model.name
        self._health.report(health.OK, f"target model {name} loaded, verifying on DDS topics")

    def end(self) -> None:
        service, self._service = self._service, None
        if service is not None and not service.close(_TURN_PATIENCE_S):
            self.get_logger().warning(
                "the round under way goes on until its end; the model is freed behind it"
            )

    def unload(self) -> None:
        self._model = None

    def _count(self) -> None:
        service = self._service
        if service is None or not self.active:
            return
        self._health.report(
            health.OK,
            "verifying",
            {
                "bytes received": service.topics.bytes_up,
                "bytes sent": service.topics.bytes_down,
                "sessions": service.engine.sessions,
            },
        )


def main() -> None:
    run_main(VerifierNode, threads=3)
