"""`dsd doctor`."""

from __future__ import annotations

import argparse
import json

from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED
from dsd_ros.cli.terminal import paint

SUMMARY = "what is installed here, what is missing, and the remedy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dsd_ros.cli.doctor_checks import Role

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
    from dsd_ros.cli import doctor_checks

    findings = doctor_checks.examine(doctor_checks.Role(args.role))
    print(json.dumps(doctor_checks.as_json(findings)) if args.json else _coloured(doctor_checks.render(findings)))
    return EXIT_DONE if doctor_checks.healthy(findings) else EXIT_GOAL_MISSED


def _coloured(text: str) -> str:
    colours = {"ok": "green", "MISSING": "red", "optional": "yellow"}
    lines = []
    for line in text.splitlines():
        mark = line.partition(" ")[0]
        lines.append(paint(mark, colours[mark]) + line[len(mark) :] if mark in colours else line)
    return "\n".join(lines)
