"""The `dsd` command: a thin view of the rooms below it.

A command's arguments are built only when it is called, so that `dsd doctor` runs where nothing else does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsd_ros import __version__
from dsd_ros.flags import add_settings, settings_from
from dsd_ros.paths import models_directory

EXIT_DONE = 0
EXIT_GOAL_MISSED = 1
EXIT_BAD_INPUT = 2
EXIT_LINK = 3
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `dsd` command and return its exit code, listed in ``dsd --help``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(argv).parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "0" if args.online else "1")
    try:
        code: int = args.run(args)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        expected = _exit_code(error)
        if args.debug or expected is None:
            raise
        print(f"dsd: {error}", file=sys.stderr)
        return expected


def run() -> NoReturn:
    """The installed command: ``main``, then the end of the process.

    Leaving the interpreter would unload torch for a second, which a Ctrl-C should not wait for.
    """
    try:
        code = main()
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that was foreseen; None for a defect, which deserves its traceback."""
    from dsd_ros.wire.channel import LinkError

    if isinstance(error, LinkError):
        return EXIT_LINK
    if isinstance(error, (ValueError, OSError, ModuleNotFoundError)):
        return EXIT_BAD_INPUT
    return None


# ---------------------------------------------------------------------------------------------- parser


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for ``argv``: every command with its help, and the arguments of those named in it."""
    parser = argparse.ArgumentParser(
        prog="dsd",
        description="Distributed speculative decoding for on-robot VLM control.",
        epilog="Exit codes: 0 done, 1 goal not reached, 2 bad input, 3 link or verifier failed, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"dsd_ros {__version__}")
    parser.add_argument("--debug", action="store_true", help="show an error's traceback")
    parser.add_argument(
        "--online", action="store_true", help="allow downloading a model named by its hub id"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, populate) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv:
            populate(command)
    return parser


def _add_model(parser: argparse.ArgumentParser, flag: str, role: str) -> None:
    parser.add_argument(
        flag,
        metavar="MODEL",
        default="",
        help=f"directory or hub id of the {role} model (default: the shipped one)",
    )


def _model_path(given: str, role: str) -> str:
    return given or str(models_directory() / role)


def _write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------------------- commands


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.nodes.bringup import TRANSPORTS

    parser.epilog = "Exit 0 only when the robot came within 0.6 m of the target and stopped, without a collision."
    parser.add_argument(
        "--instruction", default="find the silver bottle", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--mode", default="dsd", help="decoding mode, dsd or ar (default: %(default)s)"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="dds", help="(default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the simulated world (default: 0)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: 0)")
    parser.add_argument("--headless", action="store_true", help="open no window; plain output")
    parser.add_argument("--json", metavar="FILE", help="write the run as JSON")
    _add_model(parser, "--draft", "draft")
    _add_model(parser, "--target", "target")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    from dsd_ros.nodes.demo import DemoSettings, run_demo

    return run_demo(
        DemoSettings(
            instruction=args.instruction,
            mode=args.mode,
            transport=args.transport,
            seed=args.seed,
            temperature=args.temperature,
            draft_model=args.draft,
            target_model=args.target,
            headless=args.headless,
            json_path=args.json,
        )
    )


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.decoding.settings import DecodeSettings

    parser.epilog = "Decodes in this process when no verifier is named."
    parser.add_argument(
        "--image", type=Path, required=True, metavar="FILE", help="picture to look at"
    )
    parser.add_argument("--instruction", required=True, help="what the robot is told")
    add_settings(parser, DecodeSettings)
    _add_model(parser, "--draft", "draft")
    _add_model(parser, "--target", "target")
    parser.add_argument(
        "--verifier", metavar="URL", default="", help="ws://host:port or wss://host:port"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", default="", help="bearer token for the verifier"
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", default="", help="certificate to trust for wss://"
    )
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    parser.set_defaults(run=_decode)


def _decode(args: argparse.Namespace) -> int:
    from dsd_ros.decoding.settings import DecodeSettings
    from dsd_ros.edge.session import EdgeSession
    from dsd_ros.vlm.images import read_image
    from dsd_ros.vlm.loading import ModelSettings, load_model
    from dsd_ros.vlm.prompts import check_instruction

    settings = settings_from(args, DecodeSettings)
    instruction = check_instruction(args.instruction)
    image = read_image(args.image)
    draft = load_model(ModelSettings(_model_path(args.draft, "draft")))
    with _verifier_channel(args) as channel, EdgeSession(channel, draft, settings) as session:
        reply = session.decode(image, instruction)
    if args.json:
        print(json.dumps(_reply_as_json(reply)))
        return EXIT_DONE
    print(reply.text)
    print(
        f"{reply.mode}: {len(reply.tokens)} tokens in {reply.rounds} rounds (tau {reply.tau:.2f}), "
        f"{reply.seconds:.3f} s, {reply.bytes_up} bytes up, {reply.bytes_down} down",
        file=sys.stderr,
    )
    return EXIT_DONE


def _verifier_channel(args: argparse.Namespace) -> Any:
    """The channel to the verifier named, or to one in this process."""
    if not args.verifier:
        from dsd_ros.cloud.local import in_process_channel

        return in_process_channel(_model_path(args.target, "target"))
    from dsd_ros.wire.credentials import read_token
    from dsd_ros.wire.websocket_client import WebsocketChannel

    token = read_token(args.token_file) if args.token_file else None
    return WebsocketChannel(args.verifier, token=token, ca_file=args.ca_file or None)


def _reply_as_json(reply: Any) -> dict[str, Any]:
    from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply

    try:
        action = format_action(parse_reply(reply.text).action)
    except UnparsableReply:
        action = None
    names = [
        "tokens",
        "text",
        "mode",
        "rounds",
        "accepted",
        "tau",
        "bytes_up",
        "bytes_down",
        "seconds",
    ]
    return {"action": action} | {name: getattr(reply, name) for name in names}


def _verifier_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.cloud.settings import VerifierSettings

    parser.epilog = (
        "Prints one line with the address it listens on, then serves until SIGINT or SIGTERM."
    )
    add_settings(parser, VerifierSettings)
    _add_model(parser, "--model", "target")
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", help="float32, bfloat16 or float16 (default: %(default)s)"
    )
    parser.set_defaults(run=_verifier)


def _verifier(args: argparse.Namespace) -> int:
    from dsd_ros.cloud.engine import VerifierEngine
    from dsd_ros.cloud.server import run_verifier
    from dsd_ros.cloud.settings import VerifierSettings
    from dsd_ros.vlm.loading import ModelSettings, load_model

    settings = settings_from(args, VerifierSettings)
    model = ModelSettings(_model_path(args.model, "target"), device=args.device, dtype=args.dtype)
    run_verifier(VerifierEngine(load_model(model), settings), settings)
    return EXIT_DONE


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.doctor import Role

    parser.epilog = "Exit 0 when nothing that the role needs is missing, else 1."
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.LAPTOP.value,
        help="laptop: the whole demo; robot: draft and nodes; cloud: the verifier (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from dsd_ros import doctor

    findings = doctor.examine(doctor.Role(args.role))
    print(json.dumps(doctor.as_json(findings)) if args.json else doctor.render(findings))
    return EXIT_DONE if doctor.healthy(findings) else EXIT_GOAL_MISSED


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="BENCH")
    overhead = benches.add_parser(
        "overhead",
        help="time per round not spent in models or on the link",
        description="Decode replies over each transport on loopback, the verifier in a process of its own; "
        "print the median and 95th percentile of what a round costs beyond both models' time.",
    )
    overhead.add_argument(
        "--transports",
        default="local,websocket,dds",
        help="comma-separated: local, websocket, dds (default: %(default)s)",
    )
    overhead.add_argument(
        "--replies", type=int, default=30, help="per transport (default: %(default)s)"
    )
    _add_model(overhead, "--draft", "draft")
    _add_model(overhead, "--target", "target")
    overhead.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    overhead.set_defaults(run=_bench_overhead)


def _bench_overhead(args: argparse.Namespace) -> int:
    from dsd_ros.evaluation.overhead import measure_overhead, render

    report = measure_overhead(
        transports=args.transports.split(","),
        replies=args.replies,
        draft=_model_path(args.draft, "draft"),
        target=_model_path(args.target, "target"),
    )
    print(render(report))
    _write_json(args.json, report)
    return EXIT_DONE


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    trainings = parser.add_subparsers(required=True, metavar="WHAT")
    pair = trainings.add_parser(
        "pair",
        help="the shipped target and draft, from nothing",
        description="Train both shipped models on scenes of the simulator; interrupted, the same command "
        "goes on where it stopped.",
    )
    from dsd_ros.training.pair import TrainSettings

    add_settings(pair, TrainSettings)
    pair.set_defaults(run=_train_pair)


def _train_pair(args: argparse.Namespace) -> int:
    from dsd_ros.training.pair import TrainSettings, train_pair

    train_pair(settings_from(args, TrainSettings))
    return EXIT_DONE


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations = parser.add_subparsers(required=True, metavar="WHAT")
    pair = evaluations.add_parser(
        "pair",
        help="accuracy, acceptance and closed-loop success of a pair",
        description="Measure a target and a draft on held-out scenes and in simulated runs from unseen seeds.",
    )
    pair.add_argument("--scenes", type=int, default=1000, help="(default: %(default)s)")
    pair.add_argument("--seeds", type=int, default=50, help="runs (default: %(default)s)")
    _add_model(pair, "--draft", "draft")
    _add_model(pair, "--target", "target")
    pair.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    pair.set_defaults(run=_evaluate_pair)


def _evaluate_pair(args: argparse.Namespace) -> int:
    from dsd_ros.evaluation.pair import evaluate_pair

    target, draft = _model_path(args.target, "target"), _model_path(args.draft, "draft")
    figures = evaluate_pair(Path(target), Path(draft), scenes=args.scenes, seeds=args.seeds)
    for name in ("target", "draft"):
        row = figures[name]
        print(
            f"{name:6}  actions right {row['actions_right']:.1%}  closed loop {row['closed_loop']:.0%}  "
            f"collided {row['collided']:.0%}  steps {row['steps']:.1f}"
        )
    print(f"acceptance {figures['acceptance']:.3f}, tau {figures['tokens_per_round']:.2f}")
    _write_json(args.json, figures)
    return EXIT_DONE


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": (
        "the simulated Go2 finds the object named in an instruction, every node a process",
        _demo_arguments,
    ),
    "decode": ("one reply to one picture, without ROS", _decode_arguments),
    "verifier": ("serve the target model to robots over a websocket", _verifier_arguments),
    "doctor": ("what is installed here, what is missing, and the remedy", _doctor_arguments),
    "bench": ("measure the system on this machine", _bench_arguments),
    "train": ("train the shipped models", _train_arguments),
    "evaluate": ("measure models on held-out scenes and in simulated runs", _evaluate_arguments),
}

if __name__ == "__main__":
    run()
