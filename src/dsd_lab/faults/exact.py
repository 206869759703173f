"""What the undisturbed target says about a picture, recomputed in a process of its own.

No protocol, no draft and no verifier: the target alone, token after token, likeliest first.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from dsd_lab.faults.judge import Announced
from dsd_lab.workers import begin_worker
from dsd_ros.navigation.actions import UnparsableReply, parse_reply

Answer = tuple[str, int]  # the reply, and its number of tokens
MAX_TOKENS = 96  # of a reply, as the draft node's


class Target:
    """Answers one question after the other, at low priority. Use it as a context manager."""

    def __init__(self, model: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _load, (model,))

    def ask(self, picture: np.ndarray, instruction: str) -> Future[Answer]:
        """The target's greedy reply to a picture (RGB uint8, (H, W, 3)) and an instruction."""
        return self._pool.submit(_answer, picture, instruction)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_model: Any = None


def _load(path: str) -> None:
    global _model
    os.nice(10)  # it must not slow down what it judges
    begin_worker(heed_signals=False)  # what was asked before an interruption is still answered
    import torch

    from dsd_ros.vlm.loading import ModelSettings, load_model

    torch.set_num_threads(1)
    _model = load_model(ModelSettings(path))


def _answer(picture: np.ndarray, instruction: str) -> Answer:
    sequence = _model.prefill(picture, instruction)
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        token = int(sequence.next_logits().argmax())
        tokens.append(token)
        if token in _model.eos_token_ids:
            break
        sequence.append([token])
    return _model.decode_text(tokens), len(tokens)


def difference(action: Announced, heard: Answer | None, answer: Answer) -> str:
    """What is wrong with an action, and with the reply it ends where that was heard, by the target's own answer; empty:
    nothing.
    """
    text, _ = answer
    where = f"run {action.run}, action {action.step}"
    try:
        wanted = parse_reply(text)
    except UnparsableReply as error:
        return f"{where} was carried out, and the target says nothing that may be: {error}"
    if wanted.action != action.action or wanted.reasoning[:1000] != action.reasoning:
        return f"{where} was {action.action} ({action.reasoning}); the target says {text}"
    if heard is not None and heard != answer:
        return f"{where}: the reply was {heard}, the target's is {answer}"
    return ""
