# SPDX-License-Identifier: Apache-2.0
"""What one reply is to be about, as stream, rounds and drafters have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from dsd_ros.decoding.constraint import Constraint
from dsd_ros.edge.engine import DraftEngine, EngineSequence
from dsd_ros.edge.observation import History
from dsd_ros.edge.results import Progress
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.client import Limits


@dataclass(frozen=True)
class ReplyRequest:
    """One reply to be decoded. ``text`` turns tokens into text; ``image`` is RGB uint8 (H, W, 3), or None.

    ``constrain``: what holds a draft to the grammar of constrained replies, by the target's end tokens. ``sampled``:
    whether tokens are drawn.
    """

    number: int
    image: np.ndarray | None
    instruction: str
    on_progress: Progress | None
    text: Callable[[list[int]], str]
    limits: Limits
    history: History = ()
    constrain: Callable[[frozenset[int]], Constraint] | None = None
    sampled: bool = False

    def prefill(self, model: VisionLanguageModel | DraftEngine, ends: frozenset[int], wait: bool = False) -> Sequence:
        """Let a draft model read the prompt; errors as of ``VisionLanguageModel.prefill``.

        ``wait``: whether an engine's next token is waited for, within the limits.
        """
        sequence = model.prefill(self.image, self.instruction, self.history)
        if self.constrain is not None:
            sequence.constraint = self.constrain(ends)
        if isinstance(sequence, EngineSequence):
            sequence.chosen, sequence.limits = self.sampled, self.limits if wait else None
        return cast("Sequence", sequence)  # an engine's has what drafts without branches need
