# SPDX-License-Identifier: Apache-2.0
"""`dsd advise`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.cli.arguments import (
    arguments,
    engine_option,
    flag,
    json_option,
    model_option,
    model_path,
    part,
    tokenizer_option,
)
from dsd_ros.cli.decode import check_goal
from dsd_ros.cli.shared import EXIT_DONE, VerifierFlags, write_json
from dsd_ros.cli.terminal import working
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.logs import LogSettings, logging_to_stderr
from dsd_ros.paths import share_directory
from dsd_ros.ros.settings import ReplyGrammar
from dsd_ros.shown import counted
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import PROMPT_HELP, ModelSettings

if TYPE_CHECKING:
    from dsd_ros.cli.advice import Advice, Question
    from dsd_ros.wire.channel import Channel

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
    draft: str = model_option("draft")
    draft_engine: str = engine_option()
    target: str = model_option("target")
    target_tokenizer: str = tokenizer_option()
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
        report = _report(_advice(args, say))
    print(_text(report, bool(args.link.verifier)))
    write_json(args.json, report)
    return EXIT_DONE


def _advice(args: AdviseArguments, say: Callable[[str], None]) -> Advice:
    from dsd_ros.cli.advice import measure
    from dsd_ros.cloud.engine import VerifierEngine
    from dsd_ros.edge.engine import load_draft
    from dsd_ros.edge.vocabulary import Vocabulary
    from dsd_ros.pictures import read_picture
    from dsd_ros.vlm.loading import load_model
    from dsd_ros.vlm.prompts import check_instruction
    from dsd_ros.wire.channel import LocalChannel

    instruction, form = check_instruction(args.instruction), args.words.form(args.decoding.max_tokens)
    images = args.image
    say("loading the models")
    draft = load_draft(ModelSettings(model_path(args.draft, "draft"), prompt=args.prompt), args.draft_engine)
    if not images and draft.reads_pictures:
        images = [share_directory() / _SCENE]
        if not images[0].is_file():  # as in a container
            raise ValueError("no picture is named, and none was installed; give --image")
    if not args.draft and (args.link.verifier or not args.target):
        check_goal(instruction)
    questions: list[Question] = [(read_picture(path), instruction) for path in images] or [(None, instruction)]
    vocabulary = Vocabulary.load(args.target_tokenizer) if args.target_tokenizer else None
    with ExitStack() as stack:
        connect: Callable[[], Channel] = args.link.channel
        if not args.link.verifier:
            target = load_model(ModelSettings(model_path(args.target, "target"), prompt=args.prompt))
            connect = partial(LocalChannel, stack.enter_context(VerifierEngine(target)))
        say("decoding")
        return measure(connect, draft, args.decoding, questions, args.replies, args.robots, vocabulary, form)


def _report(advice: Advice) -> dict[str, Any]:
    """All figures, times in seconds."""
    from dsd_ros.cli.advice import pays_from

    said = [agrees for reply in advice.replies for agrees in reply]
    return {
        **vars(advice.machines),
        "agreement": sum(said) / len(said),
        "gain": advice.gain,
        "gains": advice.gains,
        "pays_from_s": pays_from(advice.machines, advice.replies),
        "robots": advice.robots,
        "at_once": {str(count): seconds for count, seconds in advice.at_once.items()},
        "refused": advice.refused,
    }


def _text(found: dict[str, Any], apart: bool) -> str:
    """The figures in plain sentences."""
    pays, robots, times = found["pays_from_s"], found["robots"], found["at_once"]
    least = "at least " if str(robots) == list(times)[-1] != "1" else ""
    lines = [
        f"Measured: a target token takes {1e3 * found['target_s']:.1f} ms, a drafted one {1e3 * found['draft_s']:.1f} "
        f"ms, the link {1e3 * found['one_way_s']:.1f} ms one way; they agree on {found['agreement']:.0%} of tokens.",
        f"Mode stream is {found['gain']:.2f} times as fast as the target alone, {min(found['gains']):.2f} to "
        f"{max(found['gains']):.2f} by reply.",
        "No target would gain 5 % by this draft over this link."
        if pays is None
        else f"With this draft and link stream gains 5 % where a target token takes {1e3 * pays:.1f} ms, or more.",
        f"The verifier serves {least}{counted(robots, 'robot')} at the same time as soon as one, give or take 5 %: "
        f"without drafts {', '.join(f'{seconds:.2f} s a reply by {count}' for count, seconds in times.items())}.",
        found["refused"],
        "" if apart else "Draft and target shared this process, so that each held the other up.",
    ]
    return "\n".join(filter(None, lines))
