"""`dsd-lab bench safety`."""

from __future__ import annotations

from pathlib import Path

from dsd_ros.cli.arguments import arguments, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, CommandError, write_json
from dsd_ros.cli.terminal import Progress


@arguments
class BenchSafetyArguments:
    trials: int = flag(10, "how often to provoke each cause")
    causes: str = flag("all", "causes of SafetyState.msg, e.g. CAMERA_STALE,TILT", metavar="CAUSE,...")
    load: int = flag(0, "busy loops beside it, at ordinary priority")
    no_realtime: bool = flag(False, "run the supervisor without real-time scheduling")
    json: Path | None = json_option()


def command(args: BenchSafetyArguments = BenchSafetyArguments()) -> int:
    """Time from each cause of a stop to zero velocity.

    Starts the safety supervisor, drives it over DDS as robot, navigation and operator do, provokes every cause and
    times how long cmd_vel goes on commanding motion. Exits with 1 if that is ever more than half a second.
    """
    from dsd_lab.faults.safety_bench import LIMIT_S, PROVOCATIONS, measure_safety, render
    from dsd_lab.faults.safety_standin import SafetyBenchError

    causes = None if args.causes == "all" else args.causes.split(",")
    count = sum(causes is None or p.cause.name in causes for p in PROVOCATIONS)
    try:
        with Progress() as bar:
            report = measure_safety(
                args.trials,
                causes,
                lambda name, times: bar.step(count, f"{name}: worst {max(times):.3f} s"),
                args.load,
                realtime=not args.no_realtime,
            )
    except SafetyBenchError as error:
        raise CommandError(error, EXIT_GOAL_MISSED) from error
    print(render(report))
    write_json(args.json, report)
    return EXIT_DONE if report["worst_s"] <= LIMIT_S else EXIT_GOAL_MISSED
