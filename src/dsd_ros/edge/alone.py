"""The draft model's own reply, for a robot that is to go on while nobody verifies. The one way that is not exact."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import numpy as np

from dsd_ros.decoding.sampling import generator_for, sample, transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.draft_model import Drafting
from dsd_ros.edge.limits import Limits
from dsd_ros.edge.results import DecodedReply, resources
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.model import VisionLanguageModel


def decode_alone(
    model: VisionLanguageModel,
    settings: DecodeSettings,
    eos_token_ids: frozenset[int],
    number: int,
    image: np.ndarray | None,
    instruction: str,
    history: Items[tuple[np.ndarray, str]],
    limits: Limits,
) -> DecodedReply:
    """Reply ``number`` by ``model`` and the sampling of ``settings`` alone, in the model's own tokens; coupled
    proofs draw with the noise that the target would have drawn with.

    Errors of ``EdgeSession.decode_alone``.
    """
    began = time.perf_counter()
    sequence = model.prefill(image, instruction, history)
    prefill_seconds = time.perf_counter() - began
    drafting = Drafting.of(settings, eos_token_ids, number)
    generator = generator_for("draft", settings.seed, number, 0)  # of no round
    tokens: list[int] = []
    finished = False
    while not finished and len(tokens) < settings.max_tokens:
        limits.check()
        try:
            logits = sequence.next_logits()
        except ContextError:
            break
        if drafting.draws:
            token = sample(transform(logits, settings.sampling), generator)
        else:
            token = int(drafting.ranking(logits.unsqueeze(0), [len(tokens)]).argmax())
        tokens.append(token)
        sequence.append([token])
        finished = token in eos_token_ids
    memory, threads = resources(model.device)
    return DecodedReply(
        tokens=tokens,
        text=model.decode_text(tokens),
        mode=settings.mode,
        finished=finished,
        seconds=time.perf_counter() - began,
        prefill_seconds=prefill_seconds,
        bytes_up=0,
        bytes_down=0,
        peak_memory=memory,
        threads=threads,
        verified=False,
    )
