"""What can go wrong in this room; each message is one sentence naming the input and the remedy."""

from __future__ import annotations


class VlmError(ValueError):
    """The root of this room's errors."""


class ModelError(VlmError):
    """A model directory or its settings cannot be used."""


class PromptError(VlmError):
    """An instruction cannot be put to a model."""


class ImageError(VlmError):
    """A picture cannot be shown to a model."""


class SequenceError(VlmError):
    """A sequence is asked for what it cannot do: a token or a length out of range."""


class ContextError(VlmError):
    """Prompt and reply together are longer than the model's context."""
