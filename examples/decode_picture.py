#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One reply to one picture, without ROS: the draft model here, the target behind a verifier.

    dsd verifier --model models/target --port 8765                   # in the cloud, or another terminal
    python examples/decode_picture.py ws://localhost:8765 view.png "find the silver bottle"

Tokens are printed as the verifier confirms them. The exit code is 3 when the link or the verifier fails.
"""

import sys
from pathlib import Path

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.pictures import read_picture
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LinkError
from dsd_ros.wire.websocket import WebsocketChannel

DRAFT = Path(__file__).resolve().parents[1] / "models" / "draft"


def main() -> int:
    if len(sys.argv) != 4:
        print('usage: decode_picture.py URL PICTURE "INSTRUCTION"', file=sys.stderr)
        return 2
    url, picture, instruction = sys.argv[1:]
    draft = load_model(ModelSettings(str(DRAFT)))
    shown = ""

    def show(text: str, *_) -> None:
        nonlocal shown
        print(text[len(shown) :], end="", flush=True)
        shown = text

    try:
        with WebsocketChannel(url) as channel, EdgeSession(channel, draft, DecodeSettings()) as session:
            reply = session.decode(read_picture(Path(picture)), instruction, on_progress=show)
    except LinkError as error:
        print(error, file=sys.stderr)
        return 3
    print(f"\n{len(reply.tokens)} tokens in {reply.rounds} rounds, {reply.seconds:.2f} s, {reply.bytes_up} bytes up")
    try:
        print(f"the robot would do: {format_action(parse_reply(reply.text).action)}")
    except UnparsableReply as error:
        print(f"the robot would stay where it is: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
