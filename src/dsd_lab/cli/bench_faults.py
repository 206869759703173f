"""`dsd-lab bench faults`."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from pathlib import Path
from typing import Any

from dsd_ros.cli.arguments import arguments, file_option, flag, json_option, model_option, model_path
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, EXIT_INTERRUPTED, EXIT_LINK, CommandError, write_json
from dsd_ros.cli.terminal import Progress, is_terminal


@arguments
class BenchFaultsArguments:
    count: int = flag(100, "how many faults")
    seed: int = flag(0, "which plan of faults to follow")
    transport: str = flag(
        "both", "how robot and verifier talk; both: half of the faults each", choices=("both", "websocket", "dds")
    )
    mode: str = flag("dsd", "decoding mode")
    draft: str = model_option("draft")
    target: str = model_option("target")
    log: Path | None = file_option("write what the processes print to FILE")
    json: Path | None = json_option("everything")


def command(args: BenchFaultsArguments = BenchFaultsArguments()) -> int:
    """Random faults over long demo runs, and whether the robot stayed safe and exact.

    Runs the demo, goal after goal, while processes are killed and frozen, the link is cut, lossy or late, the camera
    freezes and garbage is sent. An observer judges: every action is the target's own word about its picture, no motion
    later than half a second after what must stop the robot, every run ends in success or a named stop. Exits with 1
    if any of that did not hold.
    """
    from dsd_lab.faults.plan import FaultSettings, render
    from dsd_lab.faults.run import measure_faults
    from dsd_lab.faults.system import FaultBenchError
    from dsd_ros.decoding.modes import mode

    mode(args.mode)
    settings = FaultSettings(
        count=args.count,
        seed=args.seed,
        transport=args.transport,
        mode=args.mode,
        draft=model_path(args.draft, "draft"),
        target=model_path(args.target, "target"),
    )
    settings.shares()
    for number in (signal.SIGINT, signal.SIGTERM):  # a job of a shell ignores the first
        signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(Progress())
            log = stack.enter_context(open(args.log, "w", buffering=1)) if args.log else None
            report = measure_faults(settings, functools.partial(_progress, bar), log)
    except FaultBenchError as error:
        raise CommandError(error, EXIT_LINK) from error
    print(render(report))
    write_json(args.json, report)
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_GOAL_MISSED if report["problems"] else EXIT_DONE


def _progress(bar: Progress, number: int, count: int, trial: Any) -> None:
    line = f"{number:3}/{count} {trial.transport:9} {trial.fault:28} {trial.run}"
    if trial.recovered_s is not None:
        line += f", acted again after {trial.recovered_s:.1f} s"
    bar.to(number / count, line)
    if trial.problems or not is_terminal(sys.stderr):  # a log keeps every trial
        bar.say("\n    ".join([line, *trial.problems]), sys.stderr)
