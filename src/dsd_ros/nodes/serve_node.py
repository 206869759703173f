# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API on the robot as a lifecycle node: what `dsd serve` does, over DDS topics.

configure loads the draft model, activate listens, deactivate ends every reply under way, cleanup frees the model. The
session with the verifier opens with the first request.
"""

from __future__ import annotations

from dsd_ros.edge.engine import load_draft
from dsd_ros.edge.serving import ApiServer, ChatSession
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.ros import health
from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.running import NodeLog, run_main
from dsd_ros.ros.settings import ServeNodeSettings
from dsd_ros.wire.authentication import AuthenticatedChannel


class ServeNode(ManagedNode[ServeNodeSettings]):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("serve_node", ServeNodeSettings)
        self._log_lines = NodeLog(self)
        self._channel = DdsChannel(self)
        self._session: ChatSession | None = None
        self._server: ApiServer | None = None
        self.autostart()

    def load(self) -> None:
        settings = self._settings
        channel = AuthenticatedChannel(self._channel, settings.token) if settings.token() else self._channel
        vocabulary = Vocabulary.load(settings.target_tokenizer) if settings.target_tokenizer else None
        draft = load_draft(settings.model, settings.draft_engine)
        self._session = ChatSession(channel, draft, settings.decode, settings.link, vocabulary)

    def begin(self) -> None:
        assert self._session is not None, "load comes first"
        self._server = ApiServer(self._session, self._settings.serve)
        self._health.report(health.OK, f"OpenAI's API at {self._server.url}")

    def end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def unload(self) -> None:
        self._session = None

    def give_back(self) -> None:
        self._channel.close()
        self._log_lines.close()


def main() -> None:
    run_main(ServeNode, threads=2)
