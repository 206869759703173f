# SPDX-License-Identifier: Apache-2.0
"""`dsd advise`."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, model_path, part, tokenizer_option
from dsd_ros.cli.decode import check_goal
from dsd_ros.cli.shared import EXIT_DONE, EXIT_LINK, CommandError, VerifierFlags, write_json
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

_SCENE = "docs/images/view.png"
_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)  # targets that the table has, as parts of the present one's time


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
    target: str = model_option("target")
    target_tokenizer: str = tokenizer_option()
    prompt: str = flag(default="", text=PROMPT_HELP, metavar="NAME_OR_FILE")
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    log: LogSettings = part(LogSettings, "Log")
    json: Path | None = json_option()


def command(args: AdviseArguments = AdviseArguments()) -> int:
    """What mode stream gains here, for which targets it would, and how many robots the verifier serves.

    Decodes some replies over the configured link with the configured models, then some by several robots at once: run
    it on the robot, while the verifier serves nobody else. Starts one on this machine when none is named.
    """
    for name, most in (("replies", 100), ("robots", 64)):
        if not 1 <= getattr(args, name) <= most:
            raise ValueError(f"{name} is {getattr(args, name)}; use 1 to {most}")
    if args.decoding.mode != "stream":
        raise ValueError(f"advice is about mode stream beside ar; leave out --mode {args.decoding.mode}")
    with working("loading PyTorch") as say, logging_to_stderr(args.log):
        quick_import("torch")
        advice = _advice(args, say)
        report = as_json(advice)
    print(_text(report, bool(args.link.verifier)))
    write_json(args.json, report)
    return EXIT_DONE


def _advice(args: AdviseArguments, say: Callable[[str], None]) -> Advice:
    from dsd_ros.cli.advice import measure
    from dsd_ros.edge.vocabulary import Vocabulary
    from dsd_ros.pictures import read_picture
    from dsd_ros.vlm.loading import load_model
    from dsd_ros.vlm.prompts import check_instruction

    instruction, form = check_instruction(args.instruction), args.words.form(args.decoding.max_tokens)
    images = [read_picture(path) for path in args.image]
    say("loading the draft model")
    threads = 0 if args.link.verifier else _half()
    draft = load_model(ModelSettings(model_path(args.draft, "draft"), prompt=args.prompt, threads=threads))
    if not images and draft.reads_pictures:
        scene = share_directory() / _SCENE
        if not scene.is_file():  # as in a container
            raise ValueError("no picture is named, and none was installed; give --image")
        images = [read_picture(scene)]
    if not args.draft and (args.link.verifier or not args.target):
        check_goal(instruction)
    vocabulary = Vocabulary.load(args.target_tokenizer) if args.target_tokenizer else None
    say("dialling the verifier" if args.link.verifier else "loading the target model")
    with _verifier(args) as address:
        link = dataclasses.replace(args.link, verifier=address)
        questions: list[Question] = [(image, instruction) for image in images] or [(None, instruction)]
        return measure(
            link.channel, draft, args.decoding, questions, args.replies, args.robots, say,
            vocabulary=vocabulary, form=form,
        )  # fmt: skip


@contextmanager
def _verifier(args: AdviseArguments) -> Iterator[str]:
    """The address of the verifier that is named, or of one in a process of its own, with half of the processors."""
    if args.link.verifier:
        yield args.link.verifier
        return
    command = [sys.executable, "-m", "dsd_ros.cli", "verifier", "--port", "0", "--prompt", args.prompt]
    command += ["--model", model_path(args.target, "target")]
    environment = os.environ | {"OMP_NUM_THREADS": str(_half())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as verifier:
        try:
            found = re.search(r"wss?://\S+", verifier.stdout.readline() if verifier.stdout else "")
            if found is None:
                raise CommandError("the verifier of this machine did not start; its own words stand above", EXIT_LINK)
            yield found[0]
        finally:
            verifier.terminate()


def _half() -> int:
    from dsd_ros.edge.ahead import processors

    return max(1, processors() // 2)


def as_json(advice: Advice) -> dict[str, Any]:
    """All figures; times in milliseconds, but for replies in seconds."""
    from dsd_ros.cli.advice import computed_gain, pays_from

    on, replies = advice.machines, advice.replies
    pays = pays_from(on, replies)
    targets = [on.target_s * times for times in _TIMES]
    times = {name.removesuffix("_s") + "_ms": 1e3 * value for name, value in vars(on).items() if name != "growth"}
    beside = {count: advice.beside(count) for count in advice.at_once}
    return {
        **times,
        "pass_growth": on.growth,
        "agreement": advice.agreement,
        "draft_share": advice.draft_share,
        "alone_s": advice.alone_s,
        "stream_s": advice.stream_s,
        "gain": advice.gain,
        "gains": advice.gains,
        "computed_gain": computed_gain(on, replies),
        "pays_from_ms": None if pays is None else 1e3 * pays,
        "targets": [{"target_ms": 1e3 * s, "gain": computed_gain(on.with_target(s), replies)} for s in targets],
        "robots": advice.robots,
        "refused": advice.refused,
        "at_once": [{"robots": n, "alone_s": alone, "stream_s": stream} for n, (alone, stream) in beside.items()],
    }


def _text(found: dict[str, Any], apart: bool) -> str:
    """The figures in plain sentences, and a table of targets and one of robots."""
    lines = [
        f"Measured: a target token takes {found['target_ms']:.1f} ms, a drafted one {found['draft_ms']:.1f} ms, the "
        f"link {found['one_way_ms']:.1f} ms one way; both agree on {found['agreement']:.0%} of the tokens.",
        f"Mode stream is {found['gain']:.2f} times as fast as the target alone ({min(found['gains']):.2f} to "
        f"{max(found['gains']):.2f} by reply): {found['stream_s']:.2f} instead of {found['alone_s']:.2f} s a reply, "
        f"{found['draft_share']:.0%} of the tokens from drafts.",
    ]
    if not apart:
        lines.append("Both ran on this machine, with half of its processors each; --verifier measures another.")
    if abs(found["computed_gain"] / found["gain"] - 1.0) > 0.15:
        lines.append(f"Computed it would be {found['computed_gain']:.2f} times, so take what follows with care.")
    pays, most = found["pays_from_ms"], found["at_once"][-1]["robots"]
    lines.append(
        "No target would gain 5 % by this draft over this link."
        if pays is None
        else f"With this draft and link stream gains 5 % or more where a target token takes {pays:.1f} ms or longer."
    )
    least = "at least " if found["robots"] == most > 1 else ""
    lines.append(
        f"The verifier serves {least}{counted(found['robots'], 'robot')} at the same time, each as fast as the target "
        "alone serves one, give or take 5 %."
    )
    lines += [found["refused"]] if found["refused"] else []
    lines += ["", "ms a target token   times as fast"]
    lines += [f"{row['target_ms']:17.1f} {row['gain']:15.2f}" for row in found["targets"]]
    lines += ["", "robots at once   s a reply, alone   s a reply, stream"]
    lines += [f"{row['robots']:14} {row['alone_s']:18.2f} {row['stream_s']:19.2f}" for row in found["at_once"]]
    return "\n".join(lines)
