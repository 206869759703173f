# SPDX-License-Identifier: Apache-2.0
"""Settings of `dsd-lab evaluate pair`, without torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PairSettings:
    """Models, scenes and runs of an evaluation; `evaluate.evaluate_pair` checks them."""

    situations: str = field(
        default="",
        metadata={"help": "plain, search, hidden, two, absent, by commas (default: all of these); demo: its rooms"},
    )
    scenes: int = field(default=200, metadata={"help": "scenes per situation"})
    seeds: int = field(default=40, metadata={"help": "runs per situation"})
    split: str = field(
        default="test", metadata={"help": "training, validation or test, which differ in rooms, looks and words"}
    )
    words: str = field(
        default="",
        metadata={"help": "JSON file of instructions by intent (find, left, right, nearer, farther) to ask in as well"},
    )
    target: str = field(default="", metadata={"help": "directory or hub id of the target (default: the shipped one)"})
    draft: str = field(default="", metadata={"help": "directory or hub id of the draft (default: the shipped one)"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:N, for both"})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16"})
