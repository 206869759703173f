# SPDX-License-Identifier: Apache-2.0
"""The prompt of a question about one document, as token ids split where the document ends.

Everything up to the document's end is the same for every question, and so are its keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from dsd_ros.vlm.prompts import check_instruction, check_text

if TYPE_CHECKING:
    from dsd_ros.vlm.model import VisionLanguageModel

MAX_DOCUMENT_CHARS = 20_000
_DOCUMENT, _QUESTION = "<|document|>", "<|question|>"  # chat markers, which check_text refuses in texts


class Pieces(NamedTuple):
    """Token ids of a prompt up to the document's end, at least one, and from there to the answer."""

    head: list[int]
    tail: list[int]


class Asking(Protocol):
    """How a model is prompted with a document and a question."""

    def pieces(self, document: str, question: str) -> Pieces: ...


class DocumentPrompt:
    """Prompts a model with the ``document_prompt`` of its template."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self._encode = model.tokenizer.encode
        self._template = model.template
        self._rendered: dict[bool, str] = {}

    def pieces(self, document: str, question: str) -> Pieces:
        """The prompt of a question and a document, which may be empty.

        PromptError for texts that cannot be used in a prompt, ModelError for the chat template.
        """
        document = check_text(document, "a document", MAX_DOCUMENT_CHARS)
        question = check_instruction(question)
        self._template.check_markers("question", question)
        self._template.check_markers("document", document)
        text = self._prompt(bool(document)).replace(_QUESTION, question)
        head, found, tail = text.partition(_DOCUMENT)
        if not found:  # without a document only the first token can be reused
            ids = self._ids(text)
            return Pieces(ids[:1], ids[1:])
        return Pieces(self._ids(head + document), self._ids(tail))

    def _prompt(self, with_document: bool) -> str:
        """The rendered prompt with placeholders for the texts."""
        if with_document not in self._rendered:
            text = self._template.document_prompt.replace("{question}", _QUESTION)
            text = text.replace("{document}", _DOCUMENT if with_document else "").strip()
            self._rendered[with_document] = self._template.render_text(text)
        return self._rendered[with_document]

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)
