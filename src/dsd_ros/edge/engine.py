# SPDX-License-Identifier: Apache-2.0
"""A draft engine: a server beside the robot's nodes that drafts, asked over HTTP.

llama-server (llama.cpp) is asked by its own ``/completion``, which names tokens by id; any other by OpenAI's chat
completions, whose text is tokenized here (vLLM, TensorRT-Edge-LLM). Both stream, and both keep the prompt in their
prefix cache, so that going on from other tokens costs these tokens alone. What an engine says is a hint: it may die,
hang or talk nonsense.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np

from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.startup import import_transformers
from dsd_ros.vlm.backbones import resize
from dsd_ros.vlm.front import ModelFront, check_pictures
from dsd_ros.vlm.loading import load_front, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.prompts import IMAGE_PLACEHOLDER, prompt_ids, shown_markers
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.pictures import encode_picture

_log = logging.getLogger(__name__)
CANDIDATES = 40  # of each token, where the likeliest may not be the one: sampled or constrained replies
_HELLO_S = 1.0  # for an engine's first answer
_SILENCE_S = 10.0  # then it hangs; a first token may take seconds, after a long history
_PAUSE_S = 0.5  # after a failure, before the engine is asked again
_MAX_LINE = 1 << 20  # bytes
_PICTURE = f"<|vision_start|>{IMAGE_PLACEHOLDER}<|vision_end|>"
_TURN, _TEXT = "\x1e", "\x1f"
# Writes a conversation so that it can be taken apart again.
_PARTS = (
    "{% for message in messages %}" + _TURN + "{{ message['role'] }}" + _TEXT + "{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + IMAGE_PLACEHOLDER
    + "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class EngineError(Exception):
    """What an engine did not do; one sentence."""


class EnginePrompt(NamedTuple):
    """A prompt for an engine.

    text: as the model's chat template writes it, with one placeholder for each picture. messages: OpenAI's, for what
    reads no ``text``. pictures: PNG in base64. tokens: how many the model reads it as.
    """

    text: str
    messages: list[dict[str, Any]]
    pictures: list[str]
    tokens: int


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


class _Api(Protocol):
    """How an engine is asked. ``hello`` gives what every request needs, which changes when the engine restarts."""

    hello_path: str
    path: str

    def hello(self, answer: bytes) -> str: ...

    def body(self, known: str, prompt: EnginePrompt, said: str, count: int, candidates: int) -> dict[str, Any]: ...

    def piece(self, line: bytes) -> Piece: ...


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
    stop_type: str = ""
    completion_probabilities: list[_Candidates] = []


class _LlamaProps(msgspec.Struct):
    media_marker: str


class _Llama:
    """llama-server's own API."""

    hello_path, path = "/props", "/completion"

    def hello(self, answer: bytes) -> str:
        return msgspec.json.decode(answer, type=_LlamaProps).media_marker

    def body(self, known: str, prompt: EnginePrompt, said: str, count: int, candidates: int) -> dict[str, Any]:
        text: Any = prompt.text + said
        if prompt.pictures:  # the server writes the tokens around a picture itself
            text = {"prompt_string": text.replace(_PICTURE, known), "multimodal_data": prompt.pictures}
        return {
            "prompt": text, "n_predict": count, "n_probs": candidates, "temperature": 0, "top_k": 1, "stream": True,
            "cache_prompt": True, "return_tokens": True,
        }  # fmt: skip

    def piece(self, line: bytes) -> Piece:
        found = msgspec.json.decode(line, type=_LlamaChunk)
        likely = found.completion_probabilities[0].top_logprobs if found.completion_probabilities else []
        candidates = [(each.id, each.logprob) for each in likely if each.logprob is not None]
        ended = found.stop_type == "eos"
        return Piece(found.content, found.tokens, candidates, ended, found.stop, found.tokens_evaluated)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    choices: list[_Choice]


class _ModelCard(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelCard]


class _OpenAi:
    """OpenAI's chat completions. What is verified is an assistant's message that the engine continues, as in vLLM."""

    def __init__(self, base: str) -> None:
        self.hello_path, self.path = f"{base}/models", f"{base}/chat/completions"

    def hello(self, answer: bytes) -> str:
        models = msgspec.json.decode(answer, type=_Models).data
        if not models:
            raise EngineError("it serves no model")
        return models[0].id

    def body(self, known: str, prompt: EnginePrompt, said: str, count: int, candidates: int) -> dict[str, Any]:
        begun = [{"role": "assistant", "content": said}] if said else []
        return {
            "model": known, "messages": [*prompt.messages, *begun], "max_tokens": count, "temperature": 0,
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

    def __init__(self, url: str, front: ModelFront) -> None:
        parts = urlsplit(url)
        self.url, self._front = url, front
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        base = parts.path.rstrip("/")
        self.names_tokens = not base.endswith("/v1")
        self._api: _Api = _Llama() if self.names_tokens else _OpenAi(base)
        self._lock = threading.Lock()
        self._known = ""  # what its hello gave; "": it has to be asked
        self._rests_until = 0.0
        self.trouble = ""  # why it failed last, one sentence
        self._down = False
        self._told = False  # that it reads another number of tokens
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

    def prompt(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]] = ()
    ) -> EnginePrompt:
        """What the engine is to read; errors as of ``VisionLanguageModel.prefill`` but for its length.

        Pictures have the size at which the model reads them, and so as many tokens as in the own draft.
        """
        front = self._front
        check_pictures(front.name, self.reads_pictures, image, history)
        shown = [earlier for earlier, _ in history] + ([] if image is None else [image])
        past, counts, pictures = [(1, action) for _, action in history], [], []
        for picture in shown:
            assert front.images is not None
            sides = picture.shape[:2]
            counts.append(front.images.image_tokens(*sides))
            pictures.append(base64.b64encode(encode_picture(resize(picture, *front.images.resized(*sides)))).decode())
        asked = instruction, int(image is not None), past
        text = front.template.render(*asked)
        length = len(prompt_ids(front.tokenizer, text)) + sum(counts) - len(counts)
        parted = "" if self.names_tokens else replace(front.template, chat_template=_PARTS).render(*asked)
        return EnginePrompt(shown_markers(text), _messages(shown_markers(parted), pictures), pictures, length)

    def ask(self, prompt: EnginePrompt, said: str, count: int, candidates: int) -> EngineStream:
        """Let it go on from the reply's text ``said``, for ``count`` tokens, each with so many ``candidates``."""
        stream = EngineStream(self, prompt, said, count, candidates)
        stream.start()
        return stream

    @property
    def rests(self) -> bool:
        """Whether it has just failed, so that it is not asked yet."""
        return time.monotonic() < self._rests_until

    def failed(self, error: Exception) -> str:
        """It died, hung or talked nonsense; returns that as a sentence, which is logged once."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "it does not answer"
        sentence = f"the draft engine at {self.url} failed, so replies are not drafted: {reason[:200]}"
        with self._lock:
            self._known, self._rests_until, self.trouble = "", time.monotonic() + _PAUSE_S, sentence
            news, self._down = not self._down, True
        if news:
            _log.warning("%s", sentence)
        return sentence

    def heard(self, prompt: EnginePrompt, read: int) -> None:
        """It has answered, after ``read`` tokens of ``prompt``, or 0 for an unknown number."""
        with self._lock:
            news, self._down = self._down, False
            tell, self._told = 0 < read != prompt.tokens and not self._told, self._told or 0 < read != prompt.tokens
        if news:
            _log.info("the draft engine at %s answers again", self.url)
        if tell:
            _log.warning(
                "the draft engine at %s reads a prompt as %d tokens that the model in %s reads as %d, so it sees "
                "another picture: start it with the vision tower of the same model, and with its bounds for pictures",
                self.url, read, self._front.directory, prompt.tokens,
            )  # fmt: skip

    def request(self, stream: EngineStream) -> Iterator[Piece]:
        """What it says to a stream's request, piece by piece. EngineError, OSError, HTTPException, MsgspecError."""
        known = self._known
        if not known:
            with self._connected(_HELLO_S, stream) as connection:
                connection.request("GET", self._api.hello_path)
                known = self._known = self._api.hello(_answered(connection).read(_MAX_LINE))
        body = msgspec.json.encode(self._api.body(known, *stream.asked))
        with self._connected(_SILENCE_S, stream) as connection:
            connection.request("POST", self._api.path, body, {"Content-Type": "application/json"})
            answer = _answered(connection)
            left, heard = stream.asked[2], time.monotonic()
            while line := answer.readline(_MAX_LINE):
                if line.startswith((b"data:", b"error:")):
                    piece, heard = self._api.piece(line.partition(b":")[2]), time.monotonic()
                    yield piece
                    left -= 1
                    if piece.last or not left:
                        return
                if time.monotonic() > heard + _SILENCE_S:  # it sends other lines, to keep the connection
                    raise TimeoutError
        raise EngineError("it broke off")

    @contextlib.contextmanager
    def _connected(self, timeout: float, stream: EngineStream) -> Iterator[http.client.HTTPConnection]:
        with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=timeout)) as connection:
            connection.connect()
            stream.uses(connection.sock)
            yield connection


def _answered(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise EngineError(f"it answers with {answer.status}: {answer.read(_MAX_LINE).decode(errors='replace')}")
    return answer


class EngineStream(threading.Thread):
    """One request to an engine, read by a thread of its own.

    Attributes: ``over``, whether nothing more comes; ``error``, why, if the engine failed.
    """

    def __init__(self, engine: DraftEngine, prompt: EnginePrompt, said: str, count: int, candidates: int) -> None:
        super().__init__(name="draft engine", daemon=True)
        self.asked = prompt, said, count, candidates
        self._engine, self._prompt = engine, prompt
        self._pieces: list[Piece] = []
        self._news = threading.Condition()
        self._socket: socket.socket | None = None
        self._given_up = False
        self.over = False
        self.error = ""

    def run(self) -> None:
        error, first = "", True
        try:
            for piece in self._engine.request(self):
                if first:
                    self._engine.heard(self._prompt, 0 if self.asked[1] else piece.read)
                first = False
                with self._news:
                    self._pieces.append(piece)
                    self._news.notify()
        except (EngineError, OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError) as wrong:
            if not self._given_up:
                error = self._engine.failed(wrong)
        with self._news:
            self.over, self.error = True, error
            self._news.notify()

    def take(self, seconds: float) -> list[Piece]:
        """What has come since the last time; waits so long at most if that is nothing."""
        with self._news:
            if not (self._pieces or self.over):
                self._news.wait(seconds)
            pieces, self._pieces = self._pieces, []
            return pieces

    def uses(self, connected: socket.socket) -> None:
        """What it is read from."""
        with self._news:
            self._socket = connected
            if self._given_up:
                raise EngineError("it is not needed any more")

    def give_up(self) -> None:
        """Let the engine stop: nothing more is needed."""
        with self._news:
            self._given_up = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it has ended
                    self._socket.shutdown(socket.SHUT_RDWR)


def load_draft(settings: ModelSettings, engine: str = "") -> VisionLanguageModel | DraftEngine:
    """The robot's draft model; with the address of an ``engine`` its tokenizer and prompts alone. ModelError."""
    if not engine:
        return load_model(settings)
    import_transformers()
    return DraftEngine(engine, load_front(settings, weights=False))


def _messages(parted: str, pictures: Sequence[str]) -> list[dict[str, Any]]:
    """OpenAI's messages of a conversation written by ``_PARTS``, with the pictures in their places."""
    left, messages = iter(pictures), []
    for turn in parted.split(_TURN)[1:]:
        role, _, content = turn.partition(_TEXT)
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(content.split(IMAGE_PLACEHOLDER)):
            if number:
                parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{next(left)}"}})
            if text:
                parts.append({"type": "text", "text": text})
        messages.append({"role": role, "content": parts})
    return messages
