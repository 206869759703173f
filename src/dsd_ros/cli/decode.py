# SPDX-License-Identifier: Apache-2.0
"""`dsd decode`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, part
from dsd_ros.cli.shared import EXIT_DONE, PairFlags, VerifierFlags, write_json
from dsd_ros.cli.terminal import colours, console, token_legend, token_text, working
from dsd_ros.decoding.modes import streams, unit_of
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.navigation.run.actions import action_in, read_grammar
from dsd_ros.ros.settings import ReplyGrammar
from dsd_ros.shown import LINES, counted, shown
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import PROMPT_HELP

if TYPE_CHECKING:
    import numpy as np

    from dsd_ros.edge.results import DecodedReply


@arguments
class DecodeArguments:
    instruction: str = flag(text="what to tell the robot")
    image: Path | None = file_option("picture to look at; none with models that read text alone")
    history_image: list[Path] = flag([], "picture of an earlier step, oldest first; up to 8 times", metavar="FILE")
    history_action: list[str] = flag(
        [], "what the robot did after it, e.g. 'forward 50 cm'; once for each --history-image", metavar="ACTION"
    )
    decoding: DecodeSettings = part(DecodeSettings, "Decoding")
    words: ReplyGrammar = part(ReplyGrammar, "Form of the reply")
    pair: PairFlags = part(PairFlags, "Models")
    prompt: str = flag("", PROMPT_HELP, metavar="NAME_OR_FILE")
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    log: LogSettings = part(LogSettings, "Log")
    stats: bool = flag(False, "also the figures in the papers' symbols: tau, T_q, T_c, gamma T_p, c, ...")
    json: Path | None = json_option("the reply")


def command(args: DecodeArguments) -> int:
    """One reply to one picture or text, without ROS.

    Decodes in this process when no verifier is named. On a terminal the reply's tokens are in colour.
    """
    seen = _pictures(args)
    with working("loading PyTorch") as say:
        quick_import("torch")
        reply, text = _decode(args, *seen, say)
    if colours():
        # Imported late: models that read text alone need no view.
        from dsd_ros.observe.view.state import Round

        rounds = [
            Round(
                drafted=record.drafted,
                depth=record.depth,
                accepted=record.accepted,
                gained=tuple(text([token]) for token in record.gained),
                rejected=tuple(text([token]) for token in record.rejected),
            )
            for record in reply.records
        ]
        console().print(token_text(rounds, reply.mode))
        console(sys.stderr).print(token_legend(reply.mode))
    else:
        print(shown(reply.text, keep=LINES))
    if args.json is None:
        print(_figures(reply), file=sys.stderr)
    if args.stats:
        print(shown(reply.summary()), file=sys.stderr)
    write_json(args.json, _as_json(reply, args.words.grammar))
    return EXIT_DONE


def _pictures(args: DecodeArguments) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """The picture and those of earlier steps; checks what can be checked before anything large is loaded."""
    from dsd_ros.pictures import read_picture
    from dsd_ros.vlm.prompts import check_instruction

    check_instruction(args.instruction)
    if len(args.history_image) != len(args.history_action):
        raise ValueError(
            f"{len(args.history_image)} pictures and {len(args.history_action)} actions of earlier steps are named; "
            "give one --history-action for each --history-image"
        )
    return None if args.image is None else read_picture(args.image), [read_picture(path) for path in args.history_image]


def _decode(
    args: DecodeArguments, image: np.ndarray | None, earlier: list[np.ndarray], say: Callable[[str], None]
) -> tuple[DecodedReply, Callable[[list[int]], str]]:
    """The reply, and what turns its tokens into text."""
    from dsd_ros.edge.session import EdgeSession
    from dsd_ros.edge.settings import PATIENT_LINK
    from dsd_ros.vlm.prompts import check_instruction

    instruction, form = check_instruction(args.instruction), args.words.form(args.decoding.max_tokens)
    history = list(zip(earlier, args.history_action, strict=True))
    say("loading the draft model")
    draft, vocabulary = args.pair.load_draft(args.prompt), args.pair.load_vocabulary()
    if image is None and draft.reads_pictures:
        raise ValueError("no picture is named; give --image, or models that read text alone")
    check_goal(instruction, args.pair, args.link)
    say("dialling the verifier" if args.link.verifier else "loading the target model")
    with (
        logging_to_stderr(args.log),
        args.pair.links(args.link, args.prompt) as connect,
        closing(connect()) as channel,
        EdgeSession(channel, draft, args.decoding, PATIENT_LINK, vocabulary, form) as session,
    ):
        say("decoding")
        return session.decode(image, instruction, history=history), session.text


def check_goal(instruction: str, pair: PairFlags, link: VerifierFlags) -> None:
    """ValueError for an instruction that names nothing the shipped pair was trained on: its reply would be made up."""
    from dsd_ros.robot.sim.world import COLOURS, KINDS, named_goal

    if pair.draft or (pair.target and not link.verifier):
        return
    try:
        named_goal(instruction)
    except ValueError:
        raise ValueError(
            f"the shipped pair knows nothing that '{shown(instruction)}' names: name a colour ({', '.join(COLOURS)}) "
            f"followed by a kind ({', '.join(KINDS)}), or give --draft and --target of models that know more"
        ) from None


def _figures(reply: DecodedReply) -> str:
    """A reply's figures in plain words."""
    of = "of the target" if streams(reply.mode) else "with the verifier"
    drafts = f", {100 * reply.draft_share:.0f} % from drafts" if reply.draft_length else ""
    sooner = f", about {reply.sooner:.1f} times as fast as the target alone (estimate)" if reply.sooner else ""
    return (
        f"{counted(len(reply.tokens), 'token')} in {counted(reply.rounds, unit_of(reply.mode))} {of}{drafts}, "
        f"{reply.seconds:.2f} s{sooner}, {reply.bytes_up / 1000:.1f} kB up, {reply.bytes_down / 1000:.1f} kB down"
    )


def _as_json(reply: DecodedReply, grammar: str) -> dict[str, Any]:
    figures: dict[str, Any] = {"action": action_in(reply.text, read_grammar(grammar)) or None} | reply.as_json()
    return figures
