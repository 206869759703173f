# SPDX-License-Identifier: Apache-2.0
"""`dsd demo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsd_ros.bringup.systems import DEMO_INSTRUCTION, DEMO_SEED
from dsd_ros.cli.arguments import (
    arguments,
    engine_option,
    flag,
    json_option,
    model_option,
    part,
    tokenizer_option,
    word,
)
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.ros.settings import TRANSPORTS


@dataclass(frozen=True)
class Errand:
    """An instruction that robot and cloud can only resolve together; ``target``, which no node knows, is its answer.

    ``seed``: of a room with two things that look alike, of which the answer says which is meant.
    """

    instruction: str
    target: str
    seed: int


@dataclass(frozen=True)
class Scenario:
    """Errands, and the arguments of the demo system for them."""

    help: str
    errands: tuple[Errand, ...]
    arguments: Mapping[str, str]

    def errand(self, instruction: str | None) -> Errand:
        """The errand of an instruction; the first one for any other."""
        said = " ".join((instruction or "").lower().split()).rstrip(".!")
        return next((one for one in self.errands if one.instruction.lower() == said), self.errands[0])


SCENARIOS = {
    "owner": Scenario(
        "the robot's documents say which thing its owner means, and the cloud's what colour that thing is",
        (
            Errand("bring me to the chair I like", "find the red chair", 97),  # beside a blue chair
            Errand("go where my guest's box is", "find the blue box", 39),  # beside a white box
        ),
        {"memory": "auto", "memory_documents": "shipped", "cloud_documents": "shipped"},
    )
}


@dataclass(frozen=True)
class DemoSettings:
    """One demo run."""

    instruction: str | None = flag(
        None, f"what the robot is to find, in plain English (default: {DEMO_INSTRUCTION}, or the scenario's)"
    )
    scenario: str = flag(
        "", "; ".join(f"{name}: {each.help}" for name, each in SCENARIOS.items()), choices=tuple(SCENARIOS)
    )
    mode: str = flag(DecodeSettings.mode, "decoding mode", choices=tuple(PRESETS))
    transport: str = flag(
        TRANSPORTS[0],
        "how robot and verifier talk: ROS topics, or a websocket as over the Internet",
        choices=TRANSPORTS,
    )
    seed: int | None = flag(None, f"number of the simulated room (default: {DEMO_SEED}, or the scenario's)")
    temperature: float = flag(DecodeSettings.temperature, "sampling temperature; 0: always the likeliest token")
    headless: bool = flag(False, "open no window; plain output")
    verbose: bool = flag(False, "show what the nodes log, which a file has in any case")
    record: str = flag("", "record the run into a bag, as record:=DIR does", metavar="DIR")
    draft: str = model_option("draft")
    draft_engine: str = engine_option()
    target: str = model_option("target")
    target_tokenizer: str = tokenizer_option()

    def with_scenario(self) -> DemoSettings:
        """Fill in the scenario's instruction and seed where none is given; ValueError for an unknown scenario."""
        if self.scenario and self.scenario not in SCENARIOS:
            raise ValueError(f"'{self.scenario}' is not a scenario; choose from {', '.join(SCENARIOS)}.")
        chosen = SCENARIOS[self.scenario].errand(self.instruction) if self.scenario else None
        instruction, seed = (chosen.instruction, chosen.seed) if chosen else (DEMO_INSTRUCTION, DEMO_SEED)
        return replace(
            self,
            instruction=instruction if self.instruction is None else self.instruction,
            seed=seed if self.seed is None else self.seed,
        )

    @property
    def goal(self) -> str:
        """The instruction that names the world's target."""
        if self.scenario:
            return SCENARIOS[self.scenario].errand(self.instruction).target
        return self.instruction or DEMO_INSTRUCTION


@arguments
class DemoArguments:
    arguments: list[str] = word(
        default=[], text="more arguments of demo.launch.py, e.g. fallback:=return history:=2", metavar="ARGUMENT:=VALUE"
    )
    settings: DemoSettings = part(DemoSettings)
    json: Path | None = json_option("the run")


def command(args: DemoArguments = DemoArguments()) -> int:
    """The simulated Go2 finds the object named in an instruction, every node a process.

    Exits with 0 only when the robot came within 0.6 m of the target and stopped, without a collision.
    """
    from dsd_ros.cli.demo_run import run_demo

    wrong = [text for text in args.arguments if ":=" not in text]
    if wrong:
        raise ValueError(f"'{wrong[0]}' is not ARGUMENT:=VALUE, e.g. fallback:=return")
    if args.json is not None and ":=" in args.json.name:
        raise ValueError(f"'{args.json}' is not a FILE for --json; put --json last, or - after it")
    return run_demo(args.settings, dict(text.split(":=", 1) for text in args.arguments), args.json)
