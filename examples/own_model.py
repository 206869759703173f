#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One reply of your own models, and the action that your grammar reads in it: no ROS, no network.

    python examples/own_model.py DRAFT TARGET GRAMMAR view.png "find the silver bottle"

DRAFT and TARGET: folders of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint, or Hugging Face ids, with one tokenizer. For
a prompt of your own, put a dsd.json beside the weights of both (config/prompts has presets). GRAMMAR: dsd, navila or a
YAML file. The exit code is 3 when the reply is none of the grammar's; the robot would stay where it is.
"""

import sys
from pathlib import Path

from dsd_ros.cloud.engine import in_process_channel
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import UnparsableReply, format_action, parse_reply, read_grammar
from dsd_ros.pictures import read_picture
from dsd_ros.vlm.loading import ModelSettings, load_model


def main() -> int:
    if len(sys.argv) != 6:
        print('usage: own_model.py DRAFT TARGET GRAMMAR PICTURE "INSTRUCTION"', file=sys.stderr)
        return 2
    draft_path, target_path, named, picture, instruction = sys.argv[1:]
    try:
        grammar = read_grammar(named)
        draft = load_model(ModelSettings(draft_path))
        with in_process_channel(target_path) as channel, EdgeSession(channel, draft, DecodeSettings()) as session:
            reply = session.decode(read_picture(Path(picture)), instruction)
    except ValueError as error:  # each says in one sentence what to change
        print(error, file=sys.stderr)
        return 1
    print(reply.text)
    print(f"{len(reply.tokens)} tokens in {reply.rounds} rounds")
    try:
        action = parse_reply(reply.text, grammar).action
    except UnparsableReply as error:
        print(f"the robot would stay where it is: {error}")
        return 3
    print(f"the robot would do: {format_action(action)}, {action.metres:.2f} m and {action.radians:.2f} rad")
    return 0


if __name__ == "__main__":
    sys.exit(main())
