# SPDX-License-Identifier: Apache-2.0
"""A draft engine: a server beside the robot's nodes that drafts, asked over HTTP in a draft model's place.

llama-server (llama.cpp) is asked by its own ``/completion``, which names tokens by id; any other by OpenAI's chat
completions, whose text is tokenized here (vLLM, TensorRT-Edge-LLM). Both stream, and both keep the prompt in their
prefix cache, so that going on from other tokens costs these tokens alone. What an engine says is a hint: it may die,
hang or talk nonsense. Then the rest of the reply is not drafted, and the next reply asks it again.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from dsd_ros.decoding.constraint import Constraint
from dsd_ros.decoding.generation import processed
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.startup import import_transformers
from dsd_ros.vlm.backbones import resize
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.front import ModelFront, check_pictures
from dsd_ros.vlm.loading import load_front, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER, prompt_ids, shown_markers
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.client import Limits
from dsd_ros.wire.pictures import encode_picture

_log = logging.getLogger(__name__)
# Of each token, where the likeliest may not be the one: sampled or constrained replies. With all 500 no more drafts are
# right (temperature 1.2, test_a_hundred_replies), and a reply takes up to twice as long.
CANDIDATES = 20
_COUNT = 32  # tokens of a request: as many as are drafted ahead (``drafters.LEAD``)
_LOOK_S = 0.002  # a robot that waits for a token looks at its link as often
_SILENCE_S = 10.0  # until a connection ends that nothing comes from: a long history is read in seconds
_NEVER = -1e4  # the logit of tokens that the engine does not name
_INCOMPLETE = "\ufffd"
_PICTURE = f"<|vision_start|>{IMAGE_PLACEHOLDER}<|vision_end|>"


class EngineError(ContextError):
    """What an engine did not do, one sentence. As a full context does, it ends the drafts of a reply."""


class NotYet(Exception):
    """An engine has not said its next token yet."""


@dataclass
class EnginePrompt:
    """A reply's prompt for an engine.

    text: as the model's chat template writes it, with one placeholder for each picture. messages: OpenAI's, for what
    reads no ``text``. pictures: PNG in base64. tokens: how many the model reads it as. known: what every request needs
    of the engine, "" until it has said so; it changes when the engine restarts.
    """

    text: str
    messages: list[dict[str, Any]]
    pictures: list[str]
    tokens: int
    known: str = ""


class Piece(NamedTuple):
    """What an engine says at once: text, its tokens where it names them, and whether the reply ends with it.

    candidates: the token's likeliest alternatives, itself included, with their log probabilities. last: whether the
    engine says no more. read: tokens of the prompt, 0: unknown.
    """

    text: str
    tokens: list[int] = []  # never changed
    candidates: list[tuple[int, float]] = []
    ended: bool = False
    last: bool = False
    read: int = 0


class _Candidate(msgspec.Struct):
    id: int
    logprob: float | None = None


class _Candidates(msgspec.Struct):
    top_logprobs: list[_Candidate] = []


class _LlamaChunk(msgspec.Struct):
    content: str
    tokens: list[int]
    stop: bool
    tokens_evaluated: int = 0
    completion_probabilities: list[_Candidates] = []


class _Llama:
    """llama-server's own API. ``hello`` gives ``EnginePrompt.known``; ``said`` is the reply's text so far."""

    hello_path, path = "/props", "/completion"

    def hello(self, answer: bytes) -> str:
        return str(msgspec.json.decode(answer, type=dict[str, Any]).get("media_marker", ""))

    def body(self, prompt: EnginePrompt, said: str, candidates: int) -> dict[str, Any]:
        text: Any = prompt.text + said
        if prompt.pictures:  # the server writes the tokens around a picture itself
            text = {"prompt_string": text.replace(_PICTURE, prompt.known), "multimodal_data": prompt.pictures}
        return {
            "prompt": text, "n_predict": _COUNT, "n_probs": candidates, "temperature": 0, "top_k": 1, "stream": True,
            "cache_prompt": True, "return_tokens": True,
        }  # fmt: skip

    def piece(self, line: bytes) -> Piece:
        found = msgspec.json.decode(line, type=_LlamaChunk)
        likely = found.completion_probabilities[0].top_logprobs if found.completion_probabilities else []
        candidates = [(each.id, each.logprob) for each in likely if each.logprob is not None]
        return Piece(found.content, found.tokens, candidates, last=found.stop, read=found.tokens_evaluated)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_Choice]


class _OpenAi:
    """OpenAI's chat completions. What is verified is an assistant's message that the engine continues, as in vLLM."""

    def __init__(self, base: str) -> None:
        self.hello_path, self.path = f"{base}/models", f"{base}/chat/completions"

    def hello(self, answer: bytes) -> str:
        models = msgspec.json.decode(answer, type=dict[str, Any]).get("data")
        if not models:
            raise EngineError("it serves no model")
        return str(models[0]["id"])

    def body(self, prompt: EnginePrompt, said: str, candidates: int) -> dict[str, Any]:
        begun = [{"role": "assistant", "content": said}] if said else []
        return {
            "model": prompt.known, "messages": [*prompt.messages, *begun], "max_tokens": _COUNT, "temperature": 0,
            "stream": True, "continue_final_message": bool(said), "add_generation_prompt": not said,
        }  # fmt: skip

    def piece(self, line: bytes) -> Piece:
        choices = msgspec.json.decode(line, type=_ChatChunk).choices
        if not choices:
            return Piece("")
        reason = choices[0].finish_reason
        return Piece(choices[0].delta.content or "", ended=reason == "stop", last=reason is not None)


class DraftEngine:
    """A server that drafts, and its model's tokenizer and prompts: takes a draft model's place in a session.

    Thread-safe. ``url``: of llama-server, or, if it ends in /v1, of an OpenAI API.
    """

    device: torch.device | None = None

    def __init__(self, url: str, front: ModelFront) -> None:
        parts = urlsplit(url)
        self.url, self._front = url, front
        self.address = parts.hostname or "127.0.0.1", parts.port or 80
        base = parts.path.rstrip("/")
        self.api: _OpenAi | _Llama = _OpenAi(base) if base.endswith("/v1") else _Llama()
        self._down = self._told = False  # whether it was said that it fails, and that it reads another prompt
        self.name, self.template = front.name, front.template
        self.max_length = sys.maxsize  # it does not say how long a prompt may be
        self.tokenizer, self.constrainer = front.tokenizer, front.constrainer
        self.eos_token_ids, self.vocab_size = front.eos_token_ids, front.vocab_size
        self.known_tokens, self.tokenizer_fingerprint = front.known_tokens, front.tokenizer_fingerprint
        self.reads_pictures = front.images is not None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer as text is compared by."""
        return Vocabulary(self.tokenizer.to_str())

    def decode_text(self, tokens: Sequence[int]) -> str:
        """The text of reply tokens, without special tokens and padding ids."""
        return self.vocabulary.decode_text(tokens)

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]] = ()
    ) -> EngineSequence:
        """A reply to come, of which nothing is asked yet; errors as of ``VisionLanguageModel.prefill`` but for length.

        Pictures have the size at which the model reads them, and so as many tokens as in the own draft.
        """
        front = self._front
        check_pictures(front.name, self.reads_pictures, image, history)
        shown = [earlier for earlier, _ in history] + ([] if image is None else [image])
        counts, pictures = [], []
        for picture in shown:
            assert front.images is not None
            sides = picture.shape[:2]
            counts.append(front.images.image_tokens(*sides))
            pictures.append(base64.b64encode(encode_picture(resize(picture, *front.images.resized(*sides)))).decode())
        asked = instruction, int(image is not None), [(1, action) for _, action in history]
        text = front.template.render(*asked)
        length = len(prompt_ids(front.tokenizer, text)) + sum(counts) - len(counts)
        messages = _shown(front.template.messages(*asked), pictures)
        return EngineSequence(self, EnginePrompt(shown_markers(text), messages, pictures, length))

    def failed(self, error: Exception) -> EngineError:
        """It died, hung or talked nonsense: that as a sentence, which is logged once."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "it does not answer"
        sentence = f"the draft engine at {self.url} failed, so replies are not drafted: {reason[:200]}"
        if not self._down:
            _log.warning("%s", sentence)
        self._down = True
        return EngineError(sentence)

    def heard(self, prompt: EnginePrompt, read: int) -> None:
        """It has answered, after ``read`` tokens of ``prompt``, or 0 for an unknown number."""
        self._down = False
        if 0 < read != prompt.tokens and not self._told:
            self._told = True
            _log.warning(
                "the draft engine at %s reads a prompt as %d tokens that the model in %s reads as %d, so it sees "
                "another picture: start it with the vision tower of the same model, and with its bounds for pictures",
                self.url, read, self._front.directory, prompt.tokens,
            )  # fmt: skip


def _answered(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise EngineError(f"it answers with {answer.status}: {answer.read().decode(errors='replace')}")
    return answer


class _Stream(threading.Thread):
    """One request to an engine, read by a thread of its own: ``pieces`` come, at last None or what went wrong."""

    def __init__(self, engine: DraftEngine, prompt: EnginePrompt, said: str, candidates: int) -> None:
        super().__init__(name="draft engine", daemon=True)
        self.pieces: SimpleQueue[Piece | Exception | None] = SimpleQueue()
        self._engine, self._asked = engine, (prompt, said, candidates)
        self._socket: socket.socket | None = None
        self._closed = False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self._engine.address, timeout=_SILENCE_S)
        try:
            with contextlib.closing(connection):
                connection.connect()
                self._socket = connection.sock
                if not self._closed:
                    self._ask(self._engine.api, connection, *self._asked)
            self.pieces.put(None)
        except Exception as error:  # whatever an engine does, the target goes on
            self.pieces.put(error)

    def _ask(
        self, api: _OpenAi | _Llama, connection: http.client.HTTPConnection, prompt: EnginePrompt, *how: Any
    ) -> None:
        if not prompt.known:
            connection.request("GET", api.hello_path)
            prompt.known = api.hello(_answered(connection).read())
        body = msgspec.json.encode(api.body(prompt, *how))
        connection.request("POST", api.path, body, {"Content-Type": "application/json"})
        for line in _answered(connection):
            if line.startswith((b"data:", b"error:")):
                piece = api.piece(line.partition(b":")[2])
                self.pieces.put(piece)
                if piece.last:
                    return
        raise EngineError("it broke off")

    def close(self) -> None:
        """Let the engine stop: nothing more is needed."""
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_RDWR)


class EngineSequence:
    """One reply at an engine: what a drafter needs of ``vlm.sequence.Sequence``. For one thread.

    The engine goes on by its own likeliest token. Where another is appended (the target's, or one that shared noise or
    a grammar chose among the likeliest), it is asked to go on from there.

    Attributes: ``error``, why it says nothing, one sentence. ``chosen``, whether candidates are wanted. ``limits`` of
    a wait for the next token; None: do not wait.
    """

    def __init__(self, engine: DraftEngine, prompt: EnginePrompt) -> None:
        self.model, self._prompt = engine, prompt
        self.tokens: list[int] = []
        self.constraint: Constraint | None = None
        self.chosen = False
        self.limits: Limits | None = None
        self.error, self._heard = "", False
        self._stream: _Stream | None = None
        self._text, self._from = "", list[int]()  # what the engine goes on from, and the tokens of that text
        self._said: list[tuple[int, list[tuple[int, float]]]] = []  # tokens after these, each with its candidates

    def __del__(self) -> None:
        self._stop()  # else the engine would be busy when the next reply begins

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.tokens[length:]

    def append(self, tokens: Sequence[int]) -> None:
        """Go on from these."""
        self.tokens += tokens

    def next_logits(self, on_layer: object = None) -> torch.Tensor:
        """Log probabilities (vocabulary,) as far as the engine names them; EngineError, and ``NotYet`` or its limits'.

        Without candidates the engine's token alone is likely.
        """
        while (found := self._next()) is None:
            if self.limits is None:
                raise NotYet
            self.limits.check()
        token, candidates = found
        known = [each for each in candidates if 0 <= each[0] < self.model.known_tokens] or [(token, 0.0)]
        row = torch.full((self.model.vocab_size,), _NEVER)
        row[[each for each, _ in known]] = torch.tensor([chance for _, chance in known])
        return row

    def constrained(self, logits: torch.Tensor, nodes: int = 0) -> torch.Tensor:
        """Logits (1, vocabulary) after all tokens, as the constraint leaves them."""
        return processed(logits, None, self.constraint, self.tokens, (), ())

    def _next(self) -> tuple[int, list[tuple[int, float]]] | None:
        """What comes after all tokens, if that is known; else one step on the way."""
        start, said = len(self._from), self._said
        ahead = self.tokens[start:]
        agrees = self.tokens[:start] == self._from and all(
            said_token == token for (said_token, _), token in zip(said, ahead, strict=False)
        )
        if self._stream is None or not agrees:
            return self._ask()
        if len(ahead) < len(said):
            return said[len(ahead)]
        self._take()
        return None

    def _ask(self) -> tuple[int, list[tuple[int, float]]] | None:
        text, start = self.model.vocabulary.decode(self.tokens)
        if self._said and start < len(self.tokens) and text == self._text:
            return max(self.model.eos_token_ids), []  # no text says half a character: an end, until the target goes on
        if not self._heard:
            self.error = f"the draft engine at {self.model.url} has not answered yet"
        self._stop()
        self._text, self._from, self._said = text, self.tokens[:start], []
        self._stream = _Stream(self.model, self._prompt, text, CANDIDATES if self.chosen or self.constraint else 0)
        return None

    def _take(self) -> None:
        """Take the next piece, if it comes at once."""
        assert self._stream is not None
        try:
            piece = self._stream.pieces.get(timeout=_LOOK_S)
        except Empty:
            return
        if piece is None:
            self._stream = None
            piece = None if self._said else EngineError("it says nothing")
        if isinstance(piece, Exception):
            failure = self.model.failed(piece)
            self.error = str(failure)
            raise failure
        if piece is not None:
            self._hear(piece)

    def _hear(self, piece: Piece) -> None:
        if not self._heard:
            self.error, self._heard = "", True
            self.model.heard(self._prompt, 0 if self._text else piece.read)
        vocabulary, tokens = self.model.vocabulary, piece.tokens
        if vocabulary.decode_text(tokens) != piece.text:  # llama-server leaves out those that only begin a character
            tokens = [] if _INCOMPLETE in piece.text else vocabulary.encode(piece.text)
        candidates = piece.candidates if len(tokens) == 1 else []
        self._said += [(token, candidates) for token in tokens if 0 <= token < self.model.known_tokens]
        if piece.ended:
            self._said.append((max(self.model.eos_token_ids), []))  # chat models number the end of turn last

    def _stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def failure_of(sequence: object) -> str:
    """What is wrong with the engine behind a sequence, one sentence; "" if nothing is."""
    return sequence.error if isinstance(sequence, EngineSequence) else ""


def load_draft(settings: ModelSettings, engine: str = "") -> VisionLanguageModel | DraftEngine:
    """The robot's draft model; with the address of an ``engine`` its tokenizer and prompts alone. ModelError."""
    if not engine:
        return load_model(settings)
    import_transformers()
    return DraftEngine(engine, load_front(settings, weights=False))


def _shown(messages: Sequence[dict[str, Any]], pictures: Sequence[str]) -> list[dict[str, Any]]:
    """A template's messages as OpenAI's, with the pictures in their places."""
    left, found = iter(pictures), []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found.append({"role": message["role"], "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{next(left)}"}}
            if part["type"] == "image" else {"type": "text", "text": shown_markers(part["text"])}
            for part in parts
        ]})  # fmt: skip
    return found
