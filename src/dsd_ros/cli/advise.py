# SPDX-License-Identifier: Apache-2.0
"""`dsd advise`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsd_ros.cli.arguments import arguments, flag, json_option, part
from dsd_ros.cli.decode import check_goal
from dsd_ros.cli.shared import EXIT_DONE, PairFlags, VerifierFlags, write_json
from dsd_ros.cli.terminal import working
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.paths import share_directory
from dsd_ros.ros.settings import ReplyGrammar
from dsd_ros.shown import counted
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import PROMPT_HELP

if TYPE_CHECKING:
    from dsd_ros.cli.advice import Advice, Question

_SCENE = "docs/images/view.png"


@arguments
class AdviseArguments:
    instruction: str = flag(default="find the silver bottle", text="what to tell the robot")
    image: list[Path] = flag(
        default=[], text="a picture to look at (default: the shipped one); several take turns", metavar="FILE"
    )
    replies: int = flag(default=5, text="replies to decode by the target alone and in mode stream, by turns")
    robots: int = flag(default=8, text="robots that decode at the same time, at most")
    decoding: DecodeSettings = part(DecodeSettings, "Decoding")
    words: ReplyGrammar = part(ReplyGrammar, "Form of the reply")
    pair: PairFlags = part(PairFlags, "Models")
    prompt: str = flag(default="", text=PROMPT_HELP, metavar="NAME_OR_FILE")
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    log: LogSettings = part(LogSettings, "Log")
    json: Path | None = json_option()


def command(args: AdviseArguments = AdviseArguments()) -> int:
    """What mode stream gains here, for which targets it would, and how many robots the verifier serves.

    Decodes some replies over the configured link with the configured models, then some by several robots at once: run
    it on the robot, while the verifier serves nobody else. Decodes in this process when no verifier is named.
    """
    for name, most in (("replies", 100), ("robots", 64)):
        if not 1 <= getattr(args, name) <= most:
            raise ValueError(f"{name} is {getattr(args, name)}; use 1 to {most}")
    if args.decoding.mode != "stream":
        raise ValueError(f"advice is about mode stream beside ar; leave out --mode {args.decoding.mode}")
    with working("loading PyTorch") as say, logging_to_stderr(args.log):
        quick_import("torch")
        advice = _advice(args, say)
    print(_text(advice, bool(args.link.verifier)))
    write_json(args.json, advice.as_json())
    return EXIT_DONE


def _advice(args: AdviseArguments, say: Callable[[str], None]) -> Advice:
    from dsd_ros.cli.advice import measure
    from dsd_ros.pictures import read_picture
    from dsd_ros.vlm.prompts import check_instruction

    instruction, form = check_instruction(args.instruction), args.words.form(args.decoding.max_tokens)
    check_goal(instruction, args.pair, args.link)
    say("loading the models")
    draft, vocabulary = args.pair.load_draft(args.prompt), args.pair.load_vocabulary()
    images = args.image or ([share_directory() / _SCENE] if draft.reads_pictures else [])
    if not args.image and images and not images[0].is_file():  # as in a container
        raise ValueError("no picture is named, and none was installed; give --image")
    questions: list[Question] = [(read_picture(path), instruction) for path in images] or [(None, instruction)]
    with args.pair.links(args.link, args.prompt) as connect:
        say("decoding")
        return measure(connect, draft, args.decoding, questions, args.replies, args.robots, vocabulary, form)


def _text(advice: Advice, apart: bool) -> str:
    """The figures in plain sentences."""
    on, pays, times = advice.machines, advice.pays_from_s, advice.at_once
    least = "at least " if advice.robots == max(times) > 1 else ""
    lines = [
        f"Measured: a target token takes {1e3 * on.target_s:.1f} ms, a drafted one {1e3 * on.draft_s:.1f} ms, the link "
        f"{1e3 * on.one_way_s:.1f} ms one way; they agree on {advice.agreement:.0%} of tokens.",
        f"Mode stream is {advice.gain:.2f} times as fast as the target alone, {min(advice.gains):.2f} to "
        f"{max(advice.gains):.2f} by reply.",
        "No target would gain 5 % by this draft over this link."
        if pays is None
        else f"With this draft and link stream gains 5 % where a target token takes {1e3 * pays:.1f} ms, or more.",
        f"The verifier serves {least}{counted(advice.robots, 'robot')} at the same time as soon as one, give or take "
        f"5 %: without drafts {', '.join(f'{seconds:.2f} s a reply by {count}' for count, seconds in times.items())}.",
        advice.refused,
        "" if apart else "Draft and target shared this process, so that each held the other up.",
    ]
    return "\n".join(filter(None, lines))
