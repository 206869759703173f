"""`dsd decode`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dsd_ros.cli.flags import add_settings, settings_from
from dsd_ros.cli.shared import EXIT_DONE, add_model, add_target_tokenizer, model_path
from dsd_ros.logs import LogSettings, logging_to_stderr

SUMMARY = "one reply to one picture or text, without ROS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.decoding.settings import DecodeSettings

    parser.epilog = "Decodes in this process when no verifier is named."
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="picture to look at; none with models that read text alone"
    )
    parser.add_argument(
        "--history-image", type=Path, action="append", default=[], metavar="FILE",
        help="picture of an earlier step, oldest first; once for each of up to 8",
    )  # fmt: skip
    parser.add_argument(
        "--history-action", action="append", default=[], metavar="ACTION",
        help="what was done behind it, e.g. 'forward 50 cm'; once for each --history-image",
    )  # fmt: skip
    parser.add_argument("--instruction", required=True, help="what the robot is told")
    add_settings(parser, DecodeSettings)
    add_model(parser, "--draft", "draft")
    add_model(parser, "--target", "target")
    add_target_tokenizer(parser)
    parser.add_argument("--verifier", metavar="URL", default="", help="ws://host:port or wss://host:port")
    parser.add_argument("--token-file", metavar="FILE", default="", help="bearer token for the verifier")
    parser.add_argument("--ca-file", metavar="FILE", default="", help="certificate to trust for wss://")
    add_settings(parser, LogSettings)
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    parser.set_defaults(run=_decode)


def _decode(args: argparse.Namespace) -> int:
    from dsd_ros.decoding.settings import DecodeSettings
    from dsd_ros.edge.client import PATIENT_LINK
    from dsd_ros.edge.session import EdgeSession
    from dsd_ros.edge.vocabulary import Vocabulary
    from dsd_ros.vlm.backbones import read_image
    from dsd_ros.vlm.loading import ModelSettings, load_model
    from dsd_ros.vlm.prompts import check_instruction

    settings = settings_from(args, DecodeSettings)
    instruction = check_instruction(args.instruction)
    image = None if args.image is None else read_image(args.image)
    if len(args.history_image) != len(args.history_action):
        raise ValueError(
            f"{len(args.history_image)} pictures of earlier steps are named and {len(args.history_action)} "
            "actions; give one --history-action for each --history-image"
        )
    earlier = [read_image(path) for path in args.history_image]
    history = list(zip(earlier, args.history_action, strict=True))
    draft = load_model(ModelSettings(model_path(args.draft, "draft")))
    if image is None and draft.reads_pictures:
        raise ValueError("no picture is named; give --image, or models that read text alone")
    vocabulary = Vocabulary.load(args.target_tokenizer) if args.target_tokenizer else None
    with (
        logging_to_stderr(settings_from(args, LogSettings)),
        _verifier_channel(args) as channel,
        EdgeSession(channel, draft, settings, PATIENT_LINK, vocabulary) as session,
    ):
        reply = session.decode(image, instruction, history=history)
    if args.json:
        print(json.dumps(_reply_as_json(reply)))
        return EXIT_DONE
    print(reply.text)
    print(reply.summary(), file=sys.stderr)
    return EXIT_DONE


def _verifier_channel(args: argparse.Namespace) -> Any:
    """The channel to the verifier named, or to one in this process."""
    if not args.verifier:
        from dsd_ros.cloud.engine import in_process_channel

        return in_process_channel(model_path(args.target, "target"))
    from dsd_ros.wire.channel import read_token
    from dsd_ros.wire.websocket import WebsocketChannel

    token = read_token(args.token_file) if args.token_file else None
    return WebsocketChannel(args.verifier, token=token, ca_file=args.ca_file or None)


def _reply_as_json(reply: Any) -> dict[str, Any]:
    from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply

    try:
        action = format_action(parse_reply(reply.text).action)
    except UnparsableReply:
        action = None
    return {"action": action} | reply.as_json()
