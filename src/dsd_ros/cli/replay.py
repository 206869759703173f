# SPDX-License-Identifier: Apache-2.0
"""`dsd replay`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from dsd_ros.cli.arguments import arguments, flag, json_option, model_option, word
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, EXIT_LINK, CommandError, interruption, write_json
from dsd_ros.cli.terminal import Progress, paint
from dsd_ros.decoding.modes import PRESETS, unit_of
from dsd_ros.ros.settings import TRANSPORTS
from dsd_ros.shown import LINES, counted, shown


@arguments
class ReplayArguments:
    bags: list[str] = word(text="folder of a bag, or one of its files", metavar="BAG")
    namespace: str = flag(
        "", "the robot's namespace in a bag of several, e.g. go2_1; /: none (default: the first)", metavar="NAME"
    )
    mode: str = flag("", "another decoding mode, which must give the same (default: as recorded)", choices=PRESETS)
    transport: str = flag("", "how the nodes talk to the verifier (default: as recorded)", choices=TRANSPORTS)
    draft_model: str = model_option("draft")
    target_model: str = model_option("target")
    rate: float = flag(0.0, "speed as a multiple of the recorded one; 0: as fast as possible")
    timeout: float = flag(60.0, "seconds one reply may take", metavar="S")
    verbose: bool = flag(False, "pass on what the nodes print")
    json: Path | None = json_option("the comparison")


def command(args: ReplayArguments) -> int:
    """Run a bag's pictures and instructions through the real nodes, and compare every reply.

    Exits with 0 when every reply, action and token is as recorded; with 1 and a difference by step when not, or when
    something of a bag is missing or damaged.
    """
    from dsd_ros.observe.bag.reader import open_bag
    from dsd_ros.observe.bag.replay import ReplayOptions, prepare
    from dsd_ros.observe.bag.replay_system import ReplayFailed
    from dsd_ros.observe.bag.run import read_run

    if args.rate < 0.0 or not 0.5 <= args.timeout <= 3600.0:
        raise ValueError("--rate must not be negative, and --timeout 0.5 to 3600 seconds")
    options = ReplayOptions(args.mode, args.transport, args.draft_model, args.target_model)
    tasks = []
    for path in args.bags:
        bag = open_bag(path, args.namespace or None)
        run = read_run(bag)
        try:
            task = prepare(bag, run, options)
        finally:
            for note in bag.notes:
                print(f"dsd replay: {path}: {shown(note)}", file=sys.stderr)
        for note in task.notes:
            print(f"dsd replay: {path}: {shown(note)}", file=sys.stderr)
        tasks.append(task)
    began = time.monotonic()
    try:
        with interruption() as interrupted, Progress() as bar:
            results = _run(tasks, args, interrupted.is_set, bar)
    except ReplayFailed as error:
        raise CommandError(error, EXIT_LINK) from error
    compared = [comparison for _, found, _ in results for comparison in found]
    different = sum(not comparison.same for comparison in compared)
    word = paint(f"{different} of them differ", "red") if different else paint("all as recorded", "green")
    cut = [str(task.bag.path) for task in tasks if not task.bag.whole]
    if cut and not different:
        word = paint(f"all as recorded, as far as {', '.join(cut)} can be read; the rest is missing", "red")
    print(f"{len(compared)} replies replayed in {time.monotonic() - began:.1f} s: {word}")
    report = [
        {
            "bag": str(task.bag.path),
            "notes": [*task.bag.notes, *task.notes],
            "whole": task.bag.whole,
            "mode": task.mode,
            "transport": task.plan.transport,
            "target_fingerprint": fingerprint,
            "steps": [comparison.as_json() for comparison in found],
        }
        for task, found, fingerprint in results
    ]
    write_json(args.json, {"same": not different, "bags": report})
    return EXIT_GOAL_MISSED if different or cut else EXIT_DONE


def _run(tasks: list[Any], args: ReplayArguments, interrupted: Any, bar: Progress) -> list[Any]:
    """Replay bag by bag, in order of time, so that the same nodes can serve several; returns their comparisons."""
    from dsd_ros.observe.bag.replay_system import ReplaySystem

    def printer(name: str, line: str) -> None:
        if args.verbose:
            bar.say(shown(f"[{name}] {line}", keep=LINES))

    results = []
    replies = sum(len(task.asked) for task in tasks)
    left = sorted(tasks, key=lambda task: task.first)
    while left:
        together = [left.pop(0)]
        for task in list(left):
            mine = together[-1]
            suits = task.plan == mine.plan and task.shareable and mine.shareable
            if suits and task.first > mine.last:  # the clock never goes back
                together.append(task)
                left.remove(task)
        with ReplaySystem(together[0].plan, printer, interrupted) as system:
            for task in together:
                compared = _one(task, system, args, bar, replies)
                results.append((task, compared, system.client.target_fingerprint))
    order = {id(task): number for number, task in enumerate(tasks)}
    return sorted(results, key=lambda result: order[id(result[0])])


def _one(task: Any, system: Any, args: ReplayArguments, bar: Progress, replies: int) -> list[Any]:
    from dsd_ros.observe.bag.replay import compare

    plan, client = task.plan, system.client
    bar.say(f"{task.bag.path}: {len(task.asked)} replies, mode {task.mode} over {plan.transport}")
    recorded = {v.target_fingerprint for v in task.run.verifiers if v.target_fingerprint}
    checked = not recorded
    compared = []
    began = time.monotonic()
    client.run_clock(task.first, args.rate)
    for step, question in task.asked:
        if args.rate:
            due = began + (question.stamp - task.first) * 1e-9 / args.rate
            while time.monotonic() < due:
                system.check()
                time.sleep(min(0.02, max(0.0, due - time.monotonic())))
        client.run_clock(question.stamp, args.rate)
        comparison = compare(step, client.ask(question, args.timeout, system.check))
        compared.append(comparison)
        # Known once a session is open, which may be after the first reply.
        if client.target_fingerprint and not checked:
            checked = True
            if client.target_fingerprint not in recorded:
                bar.say(f"{task.bag.path}: the target model is not the one it was recorded with")
        if comparison.same:
            reply = comparison.reply
            what = f"{step.action or 'no action'}, {reply.count} tokens in {counted(reply.rounds, unit_of(task.mode))}"
            bar.say(shown(f"step {step.number:2}: {what}: as recorded"))
        else:
            bar.say(paint(shown("\n".join(comparison.lines()), keep=LINES), "red"))
        bar.step(replies, f"{task.bag.path}, step {step.number}")
    return compared
