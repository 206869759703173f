# SPDX-License-Identifier: Apache-2.0
"""`dsd serve`."""

from __future__ import annotations

from contextlib import closing

from dsd_ros.cli.arguments import arguments, part
from dsd_ros.cli.shared import EXIT_DONE, PairFlags, VerifierFlags, interruption
from dsd_ros.cli.terminal import working
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.settings import PATIENT_LINK, ServeSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.startup import quick_import


@arguments
class ServeArguments:
    serving: ServeSettings = part(ServeSettings, "Serving")
    decoding: DecodeSettings = part(DecodeSettings, "Decoding, where a request says nothing else")
    pair: PairFlags = part(PairFlags, "Models")
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    log: LogSettings = part(LogSettings, "Log")


def command(args: ServeArguments = ServeArguments()) -> int:
    """OpenAI's API for other programs on the robot: this robot drafts, the verifier's target replies.

    Prints one line with the address, and serves until SIGINT or SIGTERM. Decodes in this process when no verifier is
    named. Example: dsd serve --verifier wss://cloud:8765 --token-file token
    """
    with working("loading PyTorch") as say:
        quick_import("torch")
        from dsd_ros.edge.serving import ApiServer, ChatSession

        say("loading the draft model")
        draft, vocabulary = args.pair.load_draft(), args.pair.load_vocabulary()
    with (
        logging_to_stderr(args.log),
        args.pair.links(args.link) as connect,
        closing(connect()) as channel,
        ApiServer(ChatSession(channel, draft, args.decoding, PATIENT_LINK, vocabulary), args.serving) as server,
        interruption() as interrupted,
    ):
        print(f"OpenAI's API at {server.url}", flush=True)
        interrupted.wait()
    return EXIT_DONE
