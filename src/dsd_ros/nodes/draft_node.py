"""The robot's half of a decode as a lifecycle node: draft model, camera, session with the verifier.

configure loads the draft model, activate opens the session, deactivate closes it, cleanup frees the model. With
``autostart`` the node takes itself there, and keeps trying while no verifier answers. A session that breaks later
is resumed, or opened anew, by the next decode, or in the background before there is one.
"""

from __future__ import annotations

from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.nodes.decode_service import DecodeService
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.ros.log_lines import NodeLog
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.parameters import declare, refuse_unknown
from dsd_ros.ros.running import main as run_main
from dsd_ros.ros.settings import DraftNodeSettings
from dsd_ros.vlm.loading import load_model


class DraftNode(ManagedNode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("draft_node", heartbeat=True)
        self._settings = settings = declare(self, DraftNodeSettings)
        refuse_unknown(self)
        self._log_lines = NodeLog(self)
        self._channel = DdsChannel(self)
        self._decoding = DecodeService(self, self._health, settings, settings.decode)
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        settings = self._settings
        model = load_model(settings.model)
        vocabulary = Vocabulary.load(settings.target_tokenizer) if settings.target_tokenizer else None
        self._decoding.give(EdgeSession(self._channel, model, settings.decode, settings.link, vocabulary))
        self.get_logger().info(f"draft model {model.name} loaded")

    def begin(self) -> None:
        self._decoding.open()

    def interrupt(self) -> None:
        self._decoding.interrupt()

    def end(self) -> None:
        self._decoding.end()

    def unload(self) -> None:
        self._decoding.give(None)  # and the model with it

    def give_back(self) -> None:
        self._decoding.close()
        self._channel.close()
        self._log_lines.close()


def main() -> None:
    run_main(DraftNode, threads=6)
