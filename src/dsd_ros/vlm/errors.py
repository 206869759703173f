# SPDX-License-Identifier: Apache-2.0
"""The errors of models and sequences; each message is one sentence that names the input and the remedy."""

from __future__ import annotations


class VlmError(ValueError):
    """The base class."""


class ModelError(VlmError):
    """A model directory, or its settings, cannot be used."""


class PromptError(VlmError):
    """An instruction cannot be used in a prompt."""


class ImageError(VlmError):
    """A picture cannot be used in a prompt."""


class SequenceError(VlmError):
    """A token, length or tree path is out of range for a sequence."""


class ContextError(VlmError):
    """Prompt and reply together exceed the model's context."""
