"""`dsd demo`."""

from __future__ import annotations

import argparse
import sys

from dsd_ros.cli.flags import offer
from dsd_ros.cli.shared import add_json, add_model, add_target_tokenizer

SUMMARY = "the simulated Go2 finds the object named in an instruction, every node a process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.cli.demo_scenarios import SCENARIOS
    from dsd_ros.decoding.modes import PRESETS
    from dsd_ros.ros.bringup import DEMO_SEED, ROBOTS, TRANSPORTS

    parser.epilog = "Exit 0 only when the robot came within 0.6 m of the target and stopped, without a collision."
    parser.add_argument(
        "--instruction",
        default=None,
        help="what the robot is to find, in plain English (default: find the silver bottle, or the scenario's)",
    )
    parser.add_argument(
        "--scenario",
        choices=tuple(SCENARIOS),
        default="",
        help="; ".join(f"{name}: {scenario.help}" for name, scenario in SCENARIOS.items()),
    )
    mode = parser.add_argument(
        "--mode", default="dsd", metavar="MODE", help=f"decoding mode: {', '.join(PRESETS)} (default: %(default)s)"
    )
    offer(mode, tuple(PRESETS))
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="dds",
        help="how robot and verifier talk: ROS topics, or a websocket as over the Internet (default: %(default)s)",
    )
    parser.add_argument(
        "--robot",
        choices=ROBOTS,
        default="simulated",
        help="go2-standin: drive a stand-in Go2 through the real robot's driver (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help=f"which simulated room (default: {DEMO_SEED}, or the scenario's)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="how freely replies are drawn; 0: always the likeliest (default: 0)",
    )
    parser.add_argument("--headless", action="store_true", help="open no window; plain output")
    add_json(parser, "the run")
    parser.add_argument("--record", metavar="DIR", default="", help="record the run into a bag, as record:=DIR does")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT:=VALUE",
        help="more arguments of demo.launch.py, e.g. fallback:=return look_ahead:=0.5 history:=2",
    )
    add_model(parser, "--draft", "draft")
    add_model(parser, "--target", "target")
    add_target_tokenizer(parser)
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from dsd_ros.cli.demo_run import EXIT_BAD_INPUT, DemoSettings, run_demo

    wrong = [text for text in args.arguments if ":=" not in text]
    if wrong:
        print(f"dsd demo: '{wrong[0]}' is no ARGUMENT:=VALUE, e.g. fallback:=return", file=sys.stderr)
        return EXIT_BAD_INPUT
    if args.json is not None and ":=" in args.json.name:
        raise ValueError(f"'{args.json}' is no FILE for --json; put --json last, or - behind it")
    if args.instruction is not None and not args.instruction.strip():
        raise ValueError("the instruction is empty: say what the robot should find")
    recorded = {"record": args.record} if args.record else {}
    return run_demo(
        DemoSettings(
            instruction=args.instruction or "",
            scenario=args.scenario,
            mode=args.mode,
            transport=args.transport,
            robot=args.robot,
            seed=args.seed,
            temperature=args.temperature,
            draft_model=args.draft,
            target_model=args.target,
            target_tokenizer=args.target_tokenizer,
            headless=args.headless,
            json_path=None if args.json is None else str(args.json),
            arguments=dict(text.split(":=", 1) for text in args.arguments) | recorded,
        )
    )
