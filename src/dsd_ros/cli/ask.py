"""`dsd ask`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dsd_ros.cli.flags import add_settings, settings_from
from dsd_ros.cli.shared import EXIT_DONE, STDOUT, add_json, add_model, model_path, write_json
from dsd_ros.cli.terminal import is_terminal
from dsd_ros.paths import SHIPPED, documents_directory

if TYPE_CHECKING:
    from dsd_ros.dragon.answers import Answer
    from dsd_ros.wire.channel import Channel

SUMMARY = "one question, answered from the robot's documents and the cloud's, which never meet"
READER = "reader"
_PLACE = (
    "a folder of text files (.md, .txt), one that 'dsd documents' made, own: what 'dsd documents' keeps for this user, "
    "shipped: dsd's examples, or '': none (default: shipped)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_lab.dragon.methods import DRAGON, METHODS
    from dsd_ros.dragon.settings import AggregationSettings

    parser.epilog = (
        "Each side reads its own documents alone, and only drafts of the answer travel. The cloud is in this process "
        "when no verifier is named. Example: dsd ask 'which chair do I like?'"
    )
    parser.add_argument("question", metavar="QUESTION", help="in plain English")
    parser.add_argument("--robot-documents", metavar="PLACE", default=SHIPPED, help=f"private documents: {_PLACE}")
    parser.add_argument(
        "--cloud-documents", metavar="PLACE", default=SHIPPED,
        help=f"general documents, where no verifier is named: {_PLACE}",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=METHODS, default=DRAGON,
        help="how: by both sides together, by either side's documents alone, or by one of the methods that the DRAGON "
        "paper compares itself with; drcg-text and drcg-kv let the cloud's documents travel (default: %(default)s)",
    )  # fmt: skip
    add_settings(parser, AggregationSettings)
    add_model(parser, "--model", "robot's text")
    add_model(parser, "--cloud-model", "cloud's text")
    parser.add_argument(
        "--verifier", metavar="URL", default="",
        help="ws://host:port or wss://host:port of a verifier that has documents",
    )  # fmt: skip
    parser.add_argument("--token-file", metavar="FILE", default="", help="bearer token for the verifier")
    parser.add_argument("--ca-file", metavar="FILE", default="", help="certificate to trust for wss://")
    add_json(parser, "the answer and its figures")
    parser.set_defaults(run=_ask)


def _ask(args: argparse.Namespace) -> int:
    told = _Told(streams=args.json != STDOUT and is_terminal(sys.stdout))
    answer = _answer(args, told)
    told.end(answer.text)
    print(summary(answer), file=sys.stderr)
    write_json(args.json, as_json(args.question, answer))
    return EXIT_DONE


def _answer(args: argparse.Namespace, on_token: Callable[[str, list[int]], object]) -> Answer:
    from dsd_lab.dragon.baselines import open_session
    from dsd_lab.dragon.methods import OF_AN_ORDINARY_CLOUD
    from dsd_ros.dragon.documents.places import measured_in, open_documents
    from dsd_ros.dragon.measuring import kept_delay
    from dsd_ros.dragon.settings import AggregationSettings
    from dsd_ros.vlm.loading import ModelSettings, load_model

    if args.verifier and args.method not in OF_AN_ORDINARY_CLOUD:
        raise ValueError(
            f"--method {args.method} is for comparisons, with the cloud in this process; leave out --verifier"
        )
    settings = settings_from(args, AggregationSettings)
    model = load_model(ModelSettings(model_path(args.model, READER)))
    with ExitStack() as stack:
        channel = stack.enter_context(_cloud(args, model))
        folder = documents_directory(args.robot_documents, "robot")
        store = stack.enter_context(open_documents(folder))
        session = open_session(
            args.method, channel, model, store, settings, relevance=store.relevance,
            delay=kept_delay(model, settings.documents, measured_in(folder)),
        )  # fmt: skip
        stack.callback(session.close)
        return session.answer(args.question, on_token)


@contextmanager
def _cloud(args: argparse.Namespace, model: Any) -> Iterator[Channel]:
    """The channel to the verifier named, or to a cloud's half in this process."""
    if args.verifier:
        from dsd_ros.wire.channel import read_token
        from dsd_ros.wire.websocket import WebsocketChannel

        token = read_token(args.token_file) if args.token_file else None
        with WebsocketChannel(args.verifier, token=token, ca_file=args.ca_file or None) as channel:
            yield channel
        return
    from dsd_lab.dragon.baseline_service import BaselineService
    from dsd_lab.dragon.methods import OF_AN_ORDINARY_CLOUD
    from dsd_ros.dragon.documents.places import open_documents
    from dsd_ros.dragon.server import AggregationService
    from dsd_ros.vlm.loading import ModelSettings, load_model
    from dsd_ros.wire.channel import LocalChannel

    folder = documents_directory(args.cloud_documents, "cloud")
    if model_path(args.cloud_model, READER) != model_path(args.model, READER):
        model = load_model(ModelSettings(model_path(args.cloud_model, READER)))
    with ExitStack() as stack:
        store = stack.enter_context(open_documents(folder))
        service: AggregationService | BaselineService
        if args.method in OF_AN_ORDINARY_CLOUD:
            service = AggregationService(model, store, relevance=store.relevance)
        else:
            service = BaselineService(model, store)
        stack.enter_context(service)
        yield stack.enter_context(LocalChannel(service))


class _Told:
    """Prints an answer, on a terminal as it grows."""

    def __init__(self, streams: bool) -> None:
        self._streams = streams
        self._printed = ""

    def __call__(self, text: str, _: list[int]) -> None:
        # A character of several tokens is not whole before the last of them.
        if self._streams and text.startswith(self._printed) and not text.endswith("\ufffd"):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def end(self, text: str) -> None:
        if text.startswith(self._printed):
            print(text[len(self._printed) :], flush=True)
        else:
            print(f"\n{text}", flush=True)


def summary(answer: Answer) -> str:
    """An answer's figures on one line."""
    figures, share = answer.statistics, answer.statistics.accepted
    held = f"drafts that held: {share['device']:.0%} and {share['cloud']:.0%}; " if figures.steps else ""
    line = (
        f"{len(answer.tokens)} tokens in {figures.seconds:.2f} s, the first after {figures.first_token_seconds:.2f} s; "
        f"{figures.device_documents} of the robot's documents and {figures.cloud_documents} of the cloud's; "
        f"{held}{figures.bytes_up / 1000:.1f} kB up, {figures.bytes_down / 1000:.1f} kB down"
    )
    if figures.attempts > 1:
        line += f"; asked {figures.attempts} times"
    if not answer.whole:
        line += f"; from token {figures.alone_from} on by the robot's documents alone: the link was lost"
    return line


def as_json(question: str, answer: Answer) -> dict[str, Any]:
    """Text, tokens and figures."""
    figures = answer.statistics
    return {
        "question": question,
        "text": answer.text,
        "tokens": answer.tokens,
        "finished": answer.finished,
        "whole": answer.whole,
        "seconds": figures.seconds,
        "first_token_seconds": figures.first_token_seconds,
        "token_seconds": list(figures.token_seconds),
        "device_documents": figures.device_documents,
        "cloud_documents": figures.cloud_documents,
        "device_accepted": figures.accepted["device"],
        "cloud_accepted": figures.accepted["cloud"],
        "aggregators": list(figures.aggregators),
        "switches": figures.switches,
        "reveals": figures.reveals,
        "rejections": figures.rejections,
        "preemptions": figures.preemptions,
        "attempts": figures.attempts,
        "bytes_up": figures.bytes_up,
        "bytes_down": figures.bytes_down,
    }
