"""The robot's half of a decode as a lifecycle node: draft model, camera, session with the verifier.

configure loads the draft model, activate opens the session, deactivate closes it, cleanup frees the model. With
``autostart`` the node takes itself there, and keeps trying while no verifier answers. A session that breaks later
is resumed, or opened anew, by the next decode, or in the background before there is one.
"""

from __future__ import annotations

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.nodes.decode_service import DecodeService, DraftNodeSettings
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.ros.log_lines import NodeLog
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.models import declare_model
from dsd_ros.ros.parameters import declare, refuse_unknown
from dsd_ros.ros.running import main as run_main
from dsd_ros.vlm.loading import load_model


class DraftNode(ManagedNode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("draft_node", heartbeat=True)
        settings = declare(self, DraftNodeSettings)
        self._model_settings = declare_model(self, "draft")
        self._decode_settings = declare(self, DecodeSettings, "decode.")
        self._link_settings = declare(self, LinkSettings, "link.")
        refuse_unknown(self)
        self._log_lines = NodeLog(self)
        self._target_tokenizer = settings.target_tokenizer
        self._channel = DdsChannel(self)
        self._decoding = DecodeService(self, self._health, settings, self._decode_settings)
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        model = load_model(self._model_settings)
        tokenizer = self._target_tokenizer
        vocabulary = Vocabulary.load(tokenizer) if tokenizer else None
        self._decoding.give(EdgeSession(self._channel, model, self._decode_settings, self._link_settings, vocabulary))
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
