"""What `dsd-lab evaluate pair` is asked for, without torch, so that the command line tells of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PairSettings:
    """Models, scenes and runs of an evaluation; `pair.measure` checks them."""

    situations: str = field(
        default="",
        metadata={
            "help": "of plain, search, hidden, two, absent, by commas (default: all these) and demo, the demo's rooms"
        },
    )
    scenes: int = field(default=200, metadata={"help": "scenes of each situation"})
    seeds: int = field(default=40, metadata={"help": "runs of each situation"})
    max_steps: int = field(default=25, metadata={"help": "actions of a run at most"})
    split: str = field(
        default="test", metadata={"help": "training, validation or test, whose rooms, looks and words differ"}
    )
    history: int = field(default=0, metadata={"help": "earlier pictures in the prompts of a run at most"})
    words: str = field(
        default="",
        metadata={"help": "JSON file of instructions by intent (find, left, right, nearer, farther) to ask in, too"},
    )
    target: str = field(default="", metadata={"help": "directory or hub id of the target (default: the shipped one)"})
    draft: str = field(default="", metadata={"help": "directory or hub id of the draft (default: the shipped one)"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N, for both"})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16"})
    one_by_one: bool = field(
        default=False,
        metadata={"help": "ask as on the robot, one picture after the other, which models of other shapes always are"},
    )
