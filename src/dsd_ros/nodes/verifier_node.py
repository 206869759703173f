"""The verifier on DDS topics: the same engine that `dsd verifier` serves over a websocket."""

from __future__ import annotations

from rclpy.node import Node

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.nodes import health
from dsd_ros.nodes.dds_channel import VerifierTopics
from dsd_ros.nodes.models import declare_model
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.vlm.loading import load_model
from dsd_ros.wire.messages import Message

_PEER = "dds"  # topics do not tell who wrote; sessions do


class VerifierNode(Node):
    """Loads the target model, then answers. The model runs in the engine's thread, not in the executor's."""

    def __init__(self) -> None:
        super().__init__("verifier_node")
        self.failure: str | None = None
        model_settings = declare_model(self, "target")
        engine_settings = declare(self, EngineSettings, "engine.")
        refuse_unknown(self)
        model = load_model(model_settings)
        self._engine = VerifierEngine(model, engine_settings)
        self._topics = VerifierTopics(self, self._on_message)
        self._health = health.Health(self, model.name)
        self._health.report(health.OK, f"target model {model.name} loaded, verifying on DDS topics")
        self.create_timer(1.0, self._count)
        self._topics.start()

    def close(self) -> None:
        self._topics.close()
        self._engine.disconnect(_PEER)
        self._engine.close()

    def _on_message(self, message: Message) -> None:
        self._engine.submit(message, self._topics.publish, _PEER)

    def _count(self) -> None:
        counted = {"bytes received": self._topics.bytes_up, "bytes sent": self._topics.bytes_down}
        self._health.report(health.OK, "verifying", counted)


def main() -> None:
    run_main(VerifierNode)
