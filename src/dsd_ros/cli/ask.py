# SPDX-License-Identifier: Apache-2.0
"""`dsd ask`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.cli.arguments import STDOUT, arguments, flag, json_option, model_option, model_path, part, word
from dsd_ros.cli.shared import EXIT_DONE, VerifierFlags, write_json
from dsd_ros.cli.terminal import is_terminal, working
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.paths import SHIPPED, documents_directory, reader_note
from dsd_ros.shown import LINES, shown
from dsd_ros.startup import quick_import
from dsd_ros.vlm.settings import ModelSettings

if TYPE_CHECKING:
    from dsd_ros.dragon.answers import Answer

READER = "reader"
_PLACE = (
    "a folder of text files (.md, .txt), a store made by 'dsd documents', own: this user's store, shipped: dsd's "
    "examples, or '': none"
)
_FIGURES = (
    "seconds", "first_token_seconds", "device_documents", "cloud_documents", "switches", "reveals", "rejections",
    "preemptions", "attempts", "bytes_up", "bytes_down",
)  # fmt: skip


@arguments
class AskArguments:
    question: str = word(text="the question, in plain English")
    robot_documents: str = flag(SHIPPED, f"private documents: {_PLACE}", metavar="PLACE")
    cloud_documents: str = flag(SHIPPED, f"general documents, when no verifier is named: {_PLACE}", metavar="PLACE")
    aggregation: AggregationSettings = part(AggregationSettings, "Answers")
    model: str = model_option("robot's text")
    cloud_model: str = model_option("cloud's text")
    link: VerifierFlags = part(VerifierFlags, "Verifier")
    json: Path | None = json_option("the answer and its figures")


def command(args: AskArguments) -> int:
    """One question, answered from the robot's documents and the cloud's, which never meet.

    Each side reads only its own documents, and only drafts of the answer travel. The verifier must have documents;
    without --verifier this process is the cloud as well. Example: dsd ask 'which chair do I like?'
    """
    if not args.question.strip():
        raise ValueError("the question is empty; ask one: dsd ask 'which chair do I like?'")
    with working("loading PyTorch"):
        quick_import("torch")
        from dsd_ros.dragon.client import DragonClient
        from dsd_ros.dragon.server import DragonServer

    return answer_by(args, DragonClient, DragonServer)


def answer_by(args: AskArguments, session: Callable[..., Any], service: Callable[..., Any]) -> int:
    """Answer with a ``session`` on the robot's side and, without a named verifier, a ``service`` on the cloud's."""
    streams, printed = args.json != STDOUT and is_terminal(sys.stdout), ""
    with ExitStack() as line:
        say = line.enter_context(working("loading the model"))

        def on_token(text: str, _: list[int]) -> None:
            nonlocal printed
            line.close()
            # A character of several tokens is incomplete until the last one.
            if streams and text.startswith(printed) and not text.endswith("\ufffd"):
                print(shown(text[len(printed) :], keep=LINES), end="", flush=True)
                printed = text

        answer = _answer(args, session, service, on_token, say)
    rest = answer.text[len(printed) :] if answer.text.startswith(printed) else f"\n{answer.text}"
    print(shown(rest, keep=LINES), flush=True)
    for told in [*source_lines(answer), summary(answer)]:
        print(told, file=sys.stderr)
    write_json(args.json, as_json(args.question, answer))
    return EXIT_DONE


def _answer(
    args: AskArguments,
    session: Any,
    service: Any,
    on_token: Callable[[str, list[int]], object],
    say: Callable[[str], None],
) -> Answer:
    from dsd_ros.dragon.documents.store import open_documents
    from dsd_ros.vlm.loading import load_model

    model = load_model(ModelSettings(model_path(args.model, READER)))
    if not args.model and (note := reader_note()):
        print(note, file=sys.stderr)
    with ExitStack() as stack:
        say("reading the documents")
        channel = stack.enter_context(args.link.channel() if args.link.verifier else _cloud(args, model, service))
        store = stack.enter_context(open_documents(documents_directory(args.robot_documents, "robot")))
        asking = session(channel, model, store, args.aggregation)
        stack.callback(asking.close)
        say("asking")
        answer: Answer = asking.answer(args.question, on_token)
        return answer


@contextmanager
def _cloud(args: AskArguments, model: Any, service: Any) -> Iterator[Any]:
    """A channel to a cloud in this process."""
    from dsd_ros.dragon.documents.store import open_documents
    from dsd_ros.vlm.loading import load_model
    from dsd_ros.wire.channel import LocalChannel

    if model_path(args.cloud_model, READER) != model_path(args.model, READER):
        model = load_model(ModelSettings(model_path(args.cloud_model, READER)))
    with ExitStack() as stack:
        store = stack.enter_context(open_documents(documents_directory(args.cloud_documents, "cloud")))
        cloud = stack.enter_context(service(model, store))
        yield stack.enter_context(LocalChannel(cloud))


def source_lines(answer: Answer) -> list[str]:
    """A line for each sentence whose document is known: the document's name, and whose it is."""
    owners = {"device": "the robot", "cloud": "the cloud"}
    return [shown(f"  {each.sentence}  <- {each.document} of {owners[each.side]}") for each in answer.sources]


def summary(answer: Answer) -> str:
    """An answer's figures on one line."""
    figures, share = answer.statistics, answer.statistics.accepted
    held = f"accepted drafts: {share['device']:.0%} and {share['cloud']:.0%}; " if figures.steps else ""
    line = (
        f"{len(answer.tokens)} tokens in {figures.seconds:.2f} s, the first after {figures.first_token_seconds:.2f} s; "
        f"{figures.device_documents} of the robot's documents and {figures.cloud_documents} of the cloud's; "
        f"{held}{figures.bytes_up / 1000:.1f} kB up, {figures.bytes_down / 1000:.1f} kB down"
    )
    if figures.attempts > 1:
        line += f"; {figures.attempts} attempts"
    if not answer.whole:
        line += f"; from token {figures.alone_from} on by the robot's documents alone: the link was lost"
    return line


def as_json(question: str, answer: Answer) -> dict[str, Any]:
    """Text, tokens, sources and figures."""
    figures = answer.statistics
    result = {"question": question} | {
        name: getattr(answer, name) for name in ("text", "tokens", "finished", "whole", "known")
    }
    result["sources"] = [each._asdict() for each in answer.sources]
    result |= {name: getattr(figures, name) for name in _FIGURES}
    accepted = {f"{side}_accepted": figures.accepted[side] for side in ("device", "cloud")}
    listed = {"token_seconds": list(figures.token_seconds), "aggregators": list(figures.aggregators)}
    return result | accepted | listed
