# SPDX-License-Identifier: Apache-2.0
"""`dsd serve`."""

from __future__ import annotations

from dsd_ros.cli.arguments import arguments, engine_option, flag, model_option, model_path, part, tokenizer_option
from dsd_ros.cli.shared import EXIT_DONE, VerifierFlags, interruption
from dsd_ros.cli.terminal import working
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.settings import PATIENT_LINK, ServeSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import ModelSettings


@arguments
class ServeArguments:
    serving: ServeSettings = part(ServeSettings, "Serving")
    decoding: DecodeSettings = part(DecodeSettings, "Decoding, where a request says nothing else")
    draft: str = model_option("draft")
    device: str = flag(default=ModelSettings.device, text="of the draft: cpu, cuda or cuda:N")
    draft_engine: str = engine_option()
    target: str = model_option("target")
    target_tokenizer: str = tokenizer_option()
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    log: LogSettings = part(LogSettings, "Log")


def command(args: ServeArguments = ServeArguments()) -> int:
    """OpenAI's API for other programs on the robot: this robot drafts, the verifier's target replies.

    Prints one line with the address, and serves until SIGINT or SIGTERM. Decodes in this process when no verifier is
    named. Example: dsd serve --verifier wss://cloud:8765 --token-file token
    """
    with working("loading PyTorch") as say:
        quick_import("torch")
        from dsd_ros.cloud.engine import in_process_channel
        from dsd_ros.edge.engine import load_draft
        from dsd_ros.edge.serving import ApiServer, ChatSession
        from dsd_ros.edge.vocabulary import Vocabulary

        say("loading the draft model")
        draft = load_draft(ModelSettings(model_path(args.draft, "draft"), device=args.device), args.draft_engine)
        vocabulary = Vocabulary.load(args.target_tokenizer) if args.target_tokenizer else None
    with (
        logging_to_stderr(args.log),
        args.link.channel() if args.link.verifier else in_process_channel(model_path(args.target, "target")) as channel,
        ApiServer(ChatSession(channel, draft, args.decoding, PATIENT_LINK, vocabulary), args.serving) as server,
        interruption() as interrupted,
    ):
        print(f"OpenAI's API at {server.url}", flush=True)
        interrupted.wait()
    return EXIT_DONE
