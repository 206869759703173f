"""`dsd doctor`."""

from __future__ import annotations

from pathlib import Path

from dsd_ros.cli import doctor_checks
from dsd_ros.cli.arguments import arguments, flag, json_option
from dsd_ros.cli.shared import EXIT_DONE, EXIT_GOAL_MISSED, write_json
from dsd_ros.cli.terminal import paint


@arguments
class DoctorArguments:
    role: doctor_checks.Role = flag(
        doctor_checks.Role.LAPTOP, "laptop: the whole demo; robot: draft and nodes; cloud: the verifier"
    )
    json: Path | None = json_option("the findings")


def command(args: DoctorArguments = DoctorArguments()) -> int:
    """What is installed here, what is missing, and the remedy.

    Exits with 0 when nothing that the role needs is missing, else with 1.
    """
    findings = doctor_checks.examine(args.role)
    print(_coloured(doctor_checks.render(findings)))
    write_json(args.json, doctor_checks.as_json(findings))
    return EXIT_DONE if doctor_checks.healthy(findings) else EXIT_GOAL_MISSED


def _coloured(text: str) -> str:
    colours = {"ok": "green", "MISSING": "red", "optional": "yellow"}
    lines = []
    for line in text.splitlines():
        mark = line.partition(" ")[0]
        lines.append(paint(mark, colours[mark]) + line[len(mark) :] if mark in colours else line)
    return "\n".join(lines)
