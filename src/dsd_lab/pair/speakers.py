"""Models that answer about pictures: the shipped shape many at once, any other Qwen2-VL one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_lab.train.architecture import IMAGE_TOKENS, SPECIAL_TOKENS
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH, shrink
from dsd_lab.train.language_stage import image_tokens
from dsd_lab.train.replies import followed, greedy_replies
from dsd_lab.train.text import prompt_ids
from dsd_ros.robot.sim.scene import IMAGE_HEIGHT, IMAGE_WIDTH
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence as Reply

MAX_TOKENS = 64
_EOS, _IMAGE = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|image_pad|>")
_TOLD = "find the red box"

Tell = Callable[[float], None]
Past = Sequence[tuple[np.ndarray, str]]


class Speaker:
    """A model of ``vlm`` that is asked about pictures, uint8 (224, 336, 3) RGB, and answers greedily.

    batched: the shipped pair's shape, so that many replies are computed at once from cached image tokens;
    else each goes through the same code as on the robot.
    """

    def __init__(self, model: VisionLanguageModel, batched: bool) -> None:
        self.model, self.batched = model, batched

    @classmethod
    def load(cls, settings: ModelSettings, one_by_one: bool = False) -> Speaker:
        """The model of a directory or hub id; ModelError as of ``load_model``, or where it reads no pictures."""
        model = load_model(settings)
        if not model.reads_pictures:
            raise ValueError(f"{settings.path} reads text alone: give a Qwen2-VL.")
        return cls(model, not one_by_one and _has_shipped_shape(model, settings))

    def replies(
        self,
        pictures: Sequence[np.ndarray],
        instructions: Sequence[str],
        pasts: Sequence[Past] | None = None,
        tell: Tell | None = None,
    ) -> list[list[int]]:
        """The reply's tokens to each picture with its instruction, the end token included.

        ``pasts``: of each, earlier pictures with what was done then, oldest first. ``tell(share)`` hears how far it is.
        """
        if self.batched and not any(pasts or ()):
            prompts = self._prompts(instructions)
            with torch.inference_mode():
                features = image_tokens(self.model.hf.model.visual, _shrunk(pictures))
            return greedy_replies(self.model.hf, features, prompts, max_tokens=MAX_TOKENS)
        said = []
        for n, (picture, instruction) in enumerate(zip(pictures, instructions, strict=True)):
            past = pasts[n] if pasts is not None else ()
            said.append(self._greedy(self.model.prefill(picture, instruction, past)))
            if tell is not None:
                tell((n + 1) / len(pictures))
        return said

    def followed(
        self, pictures: Sequence[np.ndarray], instructions: Sequence[str], replies: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """What it would have said at each place of given replies, of its own tokenizer."""
        if self.batched:
            features = image_tokens(self.model.hf.model.visual, _shrunk(pictures))
            return followed(self.model.hf, features, self._prompts(instructions), [list(r) for r in replies])
        said = []
        for picture, instruction, reply in zip(pictures, instructions, replies, strict=True):
            rows = self.model.prefill(picture, instruction).verify(list(reply)[:-1])
            said.append(rows.argmax(-1).tolist())
        return said

    def text(self, tokens: Sequence[int]) -> str:
        """A reply's tokens as text."""
        return self.model.decode_text(tokens)

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether a reply came to its end by itself."""
        return bool(tokens) and tokens[-1] in self.model.eos_token_ids

    @property
    def parameters(self) -> int:
        """Of the whole model, without exits."""
        return sum(p.numel() for p in self.model.hf.parameters())

    def _prompts(self, instructions: Sequence[str]) -> list[list[int]]:
        return [prompt_ids(self.model.tokenizer, text) for text in instructions]

    def _greedy(self, sequence: Reply) -> list[int]:
        while len(sequence.tokens) < MAX_TOKENS and not self.ended(sequence.tokens):
            try:
                token = int(sequence.next_logits().argmax())
            except ContextError:
                break
            sequence.append([token])
        return list(sequence.tokens)


def _shrunk(pictures: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([shrink(picture) for picture in pictures])


def _has_shipped_shape(model: VisionLanguageModel, settings: ModelSettings) -> bool:
    """Whether training's batched forward passes say of this model what it says itself."""
    size: Any = (MODEL_HEIGHT, MODEL_WIDTH)
    return (
        settings.device == "cpu"
        and settings.dtype == "float32"
        and settings.quantization == "none"
        and model.images.resized(IMAGE_HEIGHT, IMAGE_WIDTH) == size
        and model.eos_token_ids == {_EOS}
        and model.hf.config.image_token_id == _IMAGE
        and model.prompt_tokens(_TOLD, IMAGE_TOKENS) == prompt_ids(model.tokenizer, _TOLD)
    )


def weights_mb(directory: Path) -> float:
    """Megabytes (10^6) of a model directory's weights, exits included."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e6
