# SPDX-License-Identifier: Apache-2.0
"""`dsd replay`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, word
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import Progress, paint
from dsd_ros.decoding.modes import PRESETS, unit_of
from dsd_ros.shown import LINES, counted, shown

if TYPE_CHECKING:
    from dsd_ros.observe.bag.replay import ReplayTask, StepComparison


@arguments
class ReplayArguments:
    bags: list[str] = word(text="folder of a bag, or one of its files", metavar="BAG")
    namespace: str = flag(
        "", "the robot's namespace in a bag of several, e.g. go2_1; /: none (default: the first)", metavar="NAME"
    )
    mode: str = flag("", "another decoding mode, which must give the same (default: as recorded)", choices=PRESETS)
    draft_model: str = model_option("draft")
    target_model: str = model_option("target")
    json: Path | None = json_option("the comparison")


def command(args: ReplayArguments) -> int:
    """Decode a bag's pictures and instructions again, in this process, and compare every reply.

    Exits with 0 when every reply, action and token is as recorded; with 1 and a difference by step when not, or when
    something of a bag is missing or damaged. Needs no ROS.
    """
    from dsd_ros.observe.bag.reader import open_bag
    from dsd_ros.observe.bag.replay import ReplayOptions, prepare
    from dsd_ros.observe.bag.run import read_run

    options = ReplayOptions(args.mode, args.draft_model, args.target_model)
    tasks = []
    for path in args.bags:
        bag = open_bag(path, args.namespace or None)
        try:
            tasks.append(prepare(bag, read_run(bag), options))
        finally:
            for note in (*bag.notes, *(tasks[-1].notes if tasks and tasks[-1].bag is bag else ())):
                print(f"dsd replay: {path}: {shown(note)}", file=sys.stderr)
    began = time.monotonic()
    replies = sum(len(task.steps) for task in tasks)
    with Progress() as bar:
        results = [(task, _one(task, bar, replies)) for task in tasks]
    different = sum(not comparison.same for _, found in results for comparison in found)
    word = paint(f"{different} of them differ", "red") if different else paint("all as recorded", "green")
    cut = [str(task.bag.path) for task in tasks if not task.bag.whole]
    if cut and not different:
        word = paint(f"all as recorded, as far as {', '.join(cut)} can be read; the rest is missing", "red")
    print(f"{replies} replies replayed in {time.monotonic() - began:.1f} s: {word}")
    report = [
        {
            "bag": str(task.bag.path),
            "notes": [*task.bag.notes, *task.notes],
            "whole": task.bag.whole,
            "mode": task.settings.mode,
            "steps": [comparison.as_json() for comparison in found],
        }
        for task, found in results
    ]
    write_json(args.json, {"same": not different, "bags": report})
    return EXIT_GOAL_MISSED if different or cut else EXIT_DONE


def _one(task: ReplayTask, bar: Progress, replies: int) -> list[StepComparison]:
    from dsd_ros.observe.bag.replay import replay

    bar.say(f"{task.bag.path}: {len(task.steps)} replies, mode {task.settings.mode}")
    known, compared = len(task.notes), []
    for comparison in replay(task):
        compared.append(comparison)
        step, reply = comparison.step, comparison.reply
        if comparison.same:
            what = f"{step.action or 'no action'}, {counted(len(reply.tokens), 'token')} in "
            what += counted(reply.rounds, unit_of(task.settings.mode))
            bar.say(shown(f"step {step.number:2}: {what}: as recorded"))
        else:
            bar.say(paint(shown("\n".join(comparison.lines()), keep=LINES), "red"))
        bar.step(replies, f"{task.bag.path}, step {step.number}")
    for note in task.notes[known:]:
        bar.say(f"{task.bag.path}: {note}")
    return compared
