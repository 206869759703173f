# SPDX-License-Identifier: Apache-2.0
"""`dsd inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, word
from dsd_ros.cli.shared import EXIT_BAD_INPUT, EXIT_DONE, EXIT_GOAL_MISSED, CommandError, interruption, write_json
from dsd_ros.shown import LINES, shown

if TYPE_CHECKING:
    from dsd_ros.observe.bag.run import Run

_PORT = 9090


@arguments
class InspectArguments:
    bag: str = word(text="folder of a bag, or one of its files")
    namespace: str = flag(
        "", "the robot's namespace in a bag of several, e.g. go2_1; /: none (default: the first)", metavar="NAME"
    )
    rounds: bool = flag(False, "print every round as well")
    json: Path | None = json_option("all of it")
    html: Path | None = file_option("write a report with pictures, in one file")
    view: bool = flag(False, "show the run in the live page, in this machine's browser, until Ctrl-C")


def command(args: InspectArguments) -> int:
    """What happened in a recorded run: figures and tables; even if the bag's end is missing.

    Needs no ROS: the bag contains its message definitions. Exits with 1 when a part of the bag is missing or damaged.
    """
    from dsd_ros.observe.bag.reader import open_bag
    from dsd_ros.observe.bag.report import as_json, round_lines, step_lines, summary_lines
    from dsd_ros.observe.bag.run import read_run

    bag = open_bag(args.bag, args.namespace or None)
    run = read_run(bag)
    lines = [*summary_lines(run), "", *step_lines(run)]
    if args.rounds:
        lines += ["", *round_lines(run)]
    print(shown("\n".join(lines), keep=LINES))
    write_json(args.json, as_json(run))
    if args.html is not None:
        from dsd_ros.observe.bag.html_report import page

        args.html.write_text(page(run), encoding="utf-8")
    if args.view:
        _show(run)
    return EXIT_DONE if bag.whole else EXIT_GOAL_MISSED


def _show(run: Run) -> None:
    """Serve the live page with a recorded run until an interruption."""
    from dsd_ros.observe.bag.shown_run import feed_of
    from dsd_ros.observe.view.web import ViewError, WebServer, open_browser

    with interruption() as interrupted:
        try:
            with WebServer(feed_of(run), "127.0.0.1", _PORT) as server:
                print(f"\nthe run is at {server.page()}; Ctrl-C ends", flush=True)
                open_browser(server.page())
                interrupted.wait()
        except ViewError as error:
            raise CommandError(error, EXIT_BAD_INPUT) from error
