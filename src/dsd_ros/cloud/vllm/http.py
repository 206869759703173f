# SPDX-License-Identifier: Apache-2.0
"""A vLLM that somebody else runs, asked over HTTP: ``POST /inference/v1/generate``, token ids in and out.

Greedy: one request for a round, whose ``prompt_logprobs`` say what follows each drafted token. vLLM computes them for
positions that its prefix cache does not hold, and gives unwritten memory for the others (vllm-project/vllm#42019). So
a row counts only if ``cached_tokens`` is at most its position; otherwise a token is generated there instead.

Coupled: one request for each position, all at once, since logits processors see only the token that is generated; vLLM
batches them. It needs ``worker.CoupledChoice`` there. vLLM gives no distributions, so every other method is refused.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx2
import msgspec
import numpy as np
import torch

from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.verification import RoundRefused
from dsd_ros.cloud.vllm.target import ARGMAX, COUPLED, EngineLost, EnginePrefix, Wish
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.vlm.backbones import ImageProcessor
from dsd_ros.vlm.errors import ModelError, VlmError
from dsd_ros.vlm.front import ModelFront, PreparedPicture, PreparedPrompt
from dsd_ros.wire.channel import bearer, read_token
from dsd_ros.wire.messages import RefusalCode
from dsd_ros.wire.pictures import encode_picture

_log = logging.getLogger(__name__)

FLAGS = "--enable-scale-out --enable-prompt-tokens-details"
PLUGIN = "--logits-processors dsd_ros.cloud.vllm.worker:CoupledChoice"
START = f"start it with `vllm serve MODEL {FLAGS}`"
MOST_BYTES = 64 << 20  # of an answer; one of a round takes about 100 bytes for each token of the prompt
_CONNECT_S = 5.0
_BUSY = (429, 502, 503, 504)  # of vLLM or a proxy in front of it
_NAMED = 2  # tokens named for each position: a second one shows a tie
_NO_NUMBER = "not JSON compliant"  # vLLM's answer, with 400, where unwritten memory holds NaN
_IMPOSSIBLE = -9000.0  # vLLM sends -9999 for what is not a number
_RAW = 3  # msgpack's extension type of a tensor's bytes, see vllm.v1.serial_utils
T = TypeVar("T")


class _Entry(msgspec.Struct):
    logprob: float


class _Top(msgspec.Struct):
    token_id: int
    logprob: float


class _Generated(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Generated] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """What ``/inference/v1/generate`` answers, as far as it is used."""

    choices: list[_Choice]
    usage: _Usage
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None

    @property
    def cached(self) -> int:
        """Tokens whose positions were not computed; all, unless the server says how many."""
        details = self.usage.prompt_tokens_details
        return self.usage.prompt_tokens if details is None or details.cached_tokens is None else details.cached_tokens


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Rendered(msgspec.Struct):
    features: dict[str, Any]


class _RefusedRequest(VlmError):
    """vLLM answers with an error; one sentence."""

    def __init__(self, sentence: str, status: int, said: str) -> None:
        super().__init__(sentence)
        self.status, self.said = status, said


class HttpEngine:
    """An ``EngineClient`` of a vLLM server at an address: for greedy rounds, and with the plug-in for coupled ones."""

    returns = True
    constrains = False

    def __init__(self, model: ModelFront, settings: BackendSettings) -> None:
        """ValueError, one sentence, for an API key that cannot be read."""
        self._model, self._url, self._name = model, settings.engine_url.rstrip("/"), settings.engine_model
        key = settings.engine_key_file
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": bearer(read_token(key))} if key else {}
        )
        self._max_length, self._timeout_s = model.max_length, settings.engine_timeout_s
        self._http: httpx2.AsyncClient | None = None
        self._raw_pixels = False  # the engine normalises pictures itself
        self._no_coupling = ""  # why coupled rounds cannot be served

    async def start(self) -> None:
        """See ``EngineClient``: connect and probe. ModelError names the flag that the server lacks."""
        if self._http is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._http = httpx2.AsyncClient(
                base_url=self._url,
                headers=self._headers,
                limits=limits,
                timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            )
        try:
            await asyncio.wait_for(self._probe(), self._timeout_s)
        except EngineLost as error:
            raise ModelError(f"{error}; {START}, or give another engine_url") from error
        except RoundRefused as error:
            raise ModelError(f"{error}; try again later") from error
        except asyncio.TimeoutError:
            raise ModelError(f"{self._url} gave no answer for {self._timeout_s:g} s; is it vLLM?") from None

    def check(self, want: str) -> None:
        """See ``EngineClient``."""
        if want == COUPLED and self._no_coupling:
            raise ValueError(self._no_coupling)
        if want not in (ARGMAX, COUPLED):
            raise ValueError(
                "this verifier asks a vLLM over HTTP, which gives no distributions: use temperature 0, or proof "
                "coupled (the verifier's backend vllm serves every method)"
            )

    async def healthy(self) -> bool:
        """See ``EngineClient``."""
        try:
            return (await asyncio.wait_for(self._send("GET", "/health"), _CONNECT_S))[0] == 200
        except (EngineLost, VlmError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """See ``EngineClient``."""
        if self._http is not None:
            await self._http.aclose()

    async def ask(self, prefix: EnginePrefix, tail: Sequence[int], rows: int, wish: Wish) -> torch.Tensor:
        """See ``EngineClient``: (rows, 2), never logits."""
        if wish.want == COUPLED:
            ends = range(len(tail) - rows + 1, len(tail) + 1)
            found = await asyncio.gather(*(self._coupled(prefix, tail[:end], wish) for end in ends))
        else:
            found = await self._greedy(prefix, tail, rows)
        return torch.tensor([(token, min(probability, 1.0)) for token, probability in found], dtype=torch.float64)

    # ------------------------------------------------------------------------------------------------- rounds

    async def _greedy(self, prefix: EnginePrefix, tail: Sequence[int], rows: int) -> list[tuple[int, float]]:
        """The likeliest token after each of the last ``rows`` positions, and its probability."""
        asked = {"prompt_logprobs": _NAMED, "skip_reading_prefix_cache": False} if rows > 1 else {}
        answer: _Answer | None = None
        try:
            answer = await self._generate(prefix, tail, asked)
        except _RefusedRequest as error:
            if not asked or _NO_NUMBER not in error.said:
                raise
        given = (answer and answer.prompt_logprobs) or []
        before = prefix.prompt_length + len(prefix.tokens)

        async def after(end: int) -> tuple[int, float]:
            if end == len(tail):
                return await self._emitted(prefix, tail, answer)
            place = before + end  # of the drafted token, whose row comes from the position before it
            row = given[place] if answer and answer.cached < place < len(given) else None
            found = _likeliest(row, tail[end]) if row else None
            if found is None or found[0] >= self._model.known_tokens:  # what is generated there decides
                return await self._emitted(prefix, tail[:end])
            return found

        return await asyncio.gather(*(after(end) for end in range(len(tail) - rows + 1, len(tail) + 1)))

    async def _emitted(
        self, prefix: EnginePrefix, tail: Sequence[int], answer: _Answer | None = None
    ) -> tuple[int, float]:
        """The token after ``tail`` and its probability; ``answer``: what the engine generated there, if known."""
        token, probability = _generated(answer or await self._generate(prefix, tail, {}))
        known, size = self._model.known_tokens, self._model.vocab_size
        if token >= known:  # padding of the vocabulary, which the model was not trained to avoid
            bias = {str(padding): -100.0 for padding in range(known, size)}
            token, probability = _generated(await self._generate(prefix, tail, {"logit_bias": bias}))
        if token >= known:
            raise VlmError(f"the engine chooses token {token}, and {self._model.name} has {known}")
        return token, probability

    async def _coupled(self, prefix: EnginePrefix, tail: Sequence[int], wish: Wish) -> tuple[int, float]:
        """The token that the round's noise chooses after ``tail``."""
        sampling, position = wish.sampling, len(prefix.tokens) + len(tail)
        asked = {
            "want": COUPLED,
            "tokens": self._model.known_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "names": [(wish.seed, wish.reply, position)],
        }
        return _generated(await self._generate(prefix, tail, {"extra_args": {"dsd": asked}}))

    async def _generate(self, prefix: EnginePrefix, tail: Sequence[int], sampling: dict[str, Any]) -> _Answer:
        """One token after prefix and ``tail``, drawn greedily. RoundRefused, VlmError, EngineLost."""
        tokens = [*prefix.prompt.tokens, *prefix.tokens, *tail]
        body: dict[str, Any] = {
            "token_ids": tokens,
            "cache_salt": prefix.salt,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": _NAMED, "detokenize": False}
            | sampling,
        } | ({"model": self._name} if self._name else {})
        pictures = prefix.prompt.pictures
        for whole in dict.fromkeys([not prefix.shown, True]):
            if pictures:
                body["features"] = self._features(pictures, whole)
            try:
                answer = await self._call("/inference/v1/generate", _Answer, body)
            except _RefusedRequest as error:
                # A picture that the engine has forgotten is an internal error.
                if pictures and not whole and error.status == 500:
                    continue
                raise
            break
        if answer.usage.prompt_tokens != len(tokens):
            raise VlmError(
                f"the engine at {self._url} read {answer.usage.prompt_tokens} tokens of {len(tokens)}; "
                "does it run another model?"
            )
        prefix.shown = True
        return answer

    def _features(self, pictures: Sequence[PreparedPicture], whole: bool) -> dict[str, Any]:
        """Pictures as vLLM takes them; without ``whole`` by name alone."""
        names, images = [picture.name for picture in pictures], self._model.images
        if self._raw_pixels:  # other pixels need another name
            names = [f"raw-{name}" for name in names]
        data = [_packed(picture, images if self._raw_pixels else None) if whole else None for picture in pictures]
        places = [{"offset": picture.offset, "length": picture.tokens} for picture in pictures]
        return {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, "kwargs_data": {"image": data}}

    # --------------------------------------------------------------------------------------------------- HTTP

    async def _call(self, path: str, kind: type[T], body: Any = None) -> T:
        """What the server answers; ``body``: what is posted. _RefusedRequest, RoundRefused, VlmError, EngineLost."""
        status, content = await self._send("GET" if body is None else "POST", path, body)
        if status == 200:
            try:
                return msgspec.json.decode(content, type=kind)
            except msgspec.DecodeError as error:
                raise VlmError(f"the answer of {self._url} to {path} is not vLLM's: {error}") from error
        said = _message(content)
        if status in _BUSY and not await self.healthy():
            raise EngineLost(f"the engine at {self._url} is down ({status} {said})")
        if status in _BUSY:
            raise RoundRefused(RefusalCode.OVERLOADED, f"the engine at {self._url} is busy ({status} {said})")
        if status == 500 and not await self.healthy():
            raise EngineLost(f"the engine at {self._url} has died")
        raise _RefusedRequest(f"the engine at {self._url} refuses a request ({status}): {said}", status, said)

    async def _send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        assert self._http is not None, "not started"
        data = None if body is None else msgspec.json.encode(body)
        content = bytearray()
        try:
            async with self._http.stream(method, path, content=data) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MOST_BYTES:
                        raise VlmError(f"{self._url} answers {path} with more than {MOST_BYTES >> 20} MB; is it vLLM?")
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise EngineLost(f"nothing answers at {self._url} ({str(error) or type(error).__name__})") from error
        return response.status_code, bytes(content)

    # -------------------------------------------------------------------------------------------------- probe

    async def _probe(self) -> None:
        """ModelError, one sentence with the remedy, unless the server can be asked and runs this model."""
        try:
            await self._call("/version", _Version)
        except VlmError as error:
            raise ModelError(
                f"{self._url} is no vLLM server: {error}; give the address of one as engine_url"
            ) from error
        most = await self._choose_model()
        await self._check_vocabulary()
        await self._check_rows(most)
        if self._model.images is not None:
            await self._check_pictures(self._model.images)
        self._no_coupling = await self._coupling_problem()

    async def _choose_model(self) -> int:
        """The length of the served model's context."""
        try:
            served = (await self._call("/v1/models", _Models)).data
        except _RefusedRequest as error:
            if error.status not in (401, 403):
                raise
            raise ModelError(f"{self._url} wants its API key; give a file with it as engine_key_file") from error
        chosen = next((model for model in served if self._name in ("", model.id)), None)
        if chosen is None:
            names = ", ".join(model.id for model in served) or "none"
            raise ModelError(f"{self._url} serves {names}, not {self._name}; name one of them as engine_model")
        self._name = chosen.id
        # The engine generates a token, for which its context needs room.
        self._model.max_length = min(self._max_length, (chosen.max_model_len or self._max_length + 1) - 1)
        return self._model.max_length

    def _other_model(self, why: str) -> ModelError:
        return ModelError(
            f"{self._url} serves {self._name}, which is not the model in {self._model.directory}: {why}; give the "
            "folder of the served model as model, or engine_url another server"
        )

    async def _check_vocabulary(self) -> None:
        text = "find the silver bottle: Größe 1.5 m, \u5de6"
        asked = {"model": self._name, "prompt": text, "add_special_tokens": False}
        own = self._model.tokenizer.encode(text, add_special_tokens=False).ids
        if (await self._call("/tokenize", _Tokens, asked)).tokens != own:
            raise self._other_model("its tokenizer makes other tokens")
        for token, known in ((self._model.vocab_size - 1, True), (self._model.vocab_size, False)):
            try:
                await self._generate(_text([*own, token]), (), {})
                took = True
            except _RefusedRequest as error:
                self._explain(error)
                took = False
            if took != known:
                raise self._other_model(f"its vocabulary is {'smaller' if known else 'larger'}")

    def _explain(self, error: _RefusedRequest) -> None:
        """ModelError for a flag that is missing."""
        if "scale-out" in error.said or error.status in (404, 405):
            raise ModelError(
                f"the vLLM at {self._url} takes no token ids: it lacks --enable-scale-out; {START}"
            ) from error
        if error.status in (401, 403):
            raise ModelError(f"{self._url} wants its API key; give a file with it as engine_key_file") from error
        if "logprobs" in error.said:
            raise ModelError(
                f"the vLLM at {self._url} gives too few logprobs ({error.said}); start it without --max-logprobs, or "
                f"with {_NAMED} or more"
            ) from error

    async def _check_rows(self, most: int) -> None:
        """The rows of a long prompt, with and without its cache, must say what is generated at their positions."""
        words = self._model.tokenizer.encode("find the silver bottle and go there. ", add_special_tokens=False).ids
        tokens = (words * 200)[: min(300, most - 1)]
        split = len(tokens) - 5
        prefix = _text(tokens[:split])
        try:
            answers = [await self._generate(prefix, tokens[split:end], {}) for end in range(split, len(tokens) + 1)]
            answer = await self._generate(prefix, tokens[split:], {"prompt_logprobs": _NAMED})
        except _RefusedRequest as error:
            self._explain(error)
            raise
        details = answer.usage.prompt_tokens_details
        if details is None or details.cached_tokens is None:
            raise ModelError(
                f"the vLLM at {self._url} does not say how much of a prompt its cache held: it lacks "
                f"--enable-prompt-tokens-details; {START}"
            )
        if not answers[-1].cached:
            _log.warning("the vLLM at %s has no prefix cache, so each round reads its whole prompt again", self._url)
        together = await self._greedy(prefix, tokens[split:], len(answers))
        alone = [_generated(answer) for answer in answers]
        others = sum(one[0] != other[0] for one, other in zip(alone, together, strict=True))
        apart = max(abs(math.log(one[1] / other[1])) for one, other in zip(alone, together, strict=True))
        # Two tokens may be equally likely to the last digits, so one may differ.
        if others > 1 or apart > 0.1 or max(probability for _, probability in alone) > 1.001:
            raise ModelError(
                f"the vLLM at {self._url} generates other tokens than its prompt_logprobs say, or with other "
                "probabilities; start it without --logprobs-mode, speculative decoding and other logits processors"
            )

    async def _check_pictures(self, images: ImageProcessor) -> None:
        """Learn how the engine wants its pixels, and let it read a picture."""
        side = images.patch_size * images.merge_size
        size = math.ceil(math.sqrt(images.min_pixels) / side) * side
        noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
        prompt = self._model.prompt(noise, "go")
        prefix = EnginePrefix(prompt)
        url = "data:image/png;base64," + base64.b64encode(encode_picture(noise)).decode()
        shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "go"}]
        asked = {"model": self._name, "messages": [{"role": "user", "content": shown}]}
        try:
            rendered = await self._call("/v1/chat/completions/render", _Rendered, asked)
            data = msgspec.msgpack.decode(base64.b64decode(rendered.features["kwargs_data"]["image"][0]))
            dtype, shape, pixels = data["pixel_values"]["data"]
            theirs = torch.frombuffer(bytearray(pixels.data), dtype=getattr(torch, dtype)).reshape(shape).float()
        except Exception as error:
            raise ModelError(f"{self._url} does not say how it prepares pictures: {error}; {START}") from error
        self._raw_pixels = dtype == "uint8"
        own = prompt.pictures[0].pixels
        if self._raw_pixels:
            own = images.raw(own).float()
        if theirs.shape != own.shape or (theirs - own).abs().max() > (1.0 if self._raw_pixels else 0.02):
            raise self._other_model("it prepares pictures in another way")
        for _ in range(2):  # in full, then by its name
            await self._generate(prefix, (), {})

    async def _coupling_problem(self) -> str:
        """Why coupled rounds cannot be served; "" if they can. At a high temperature the noise alone chooses."""
        known = self._model.known_tokens
        prefix = _text(self._model.tokenizer.encode("go", add_special_tokens=False).ids)
        for seed in range(3):
            wish = Wish(COUPLED, SamplingSettings(100.0), seed, 1)
            noise = gumbel(seed, 1, 0, known)
            try:
                token, _ = await self._coupled(prefix, (), wish)
            except VlmError:
                token = -1
            if not 0 <= token < known or noise[token] < noise.max() - 1.0:
                return (
                    "the vLLM behind this verifier serves no proof coupled: install dsd_ros beside it and start it "
                    f"with {PLUGIN}, or use temperature 0"
                )
        return ""


def _text(tokens: Sequence[int]) -> EnginePrefix:
    return EnginePrefix(PreparedPrompt(list(tokens), []))


def _message(content: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        said = msgspec.json.decode(content)
        said = said.get("error", said.get("detail", said))
        said = said.get("message", said) if isinstance(said, dict) else said
    except (msgspec.DecodeError, AttributeError):
        said = content.decode(errors="replace")
    return " ".join(str(said).split())[:300]


def _generated(answer: _Answer) -> tuple[int, float]:
    """The token that was generated, -1 where the logits are not finite, and the likeliest one's probability."""
    choice = answer.choices[0] if answer.choices else _Choice()
    content = (choice.logprobs and choice.logprobs.content) or []
    if not choice.token_ids or len(choice.token_ids) != 1 or len(content) != 1:
        raise VlmError("the engine generated no token; its log says why")
    found = content[0]
    best = max(found.logprob, *(top.logprob for top in found.top_logprobs), _IMPOSSIBLE)
    if found.logprob <= _IMPOSSIBLE:
        return -1, 0.0
    return choice.token_ids[0], math.exp(min(best, 700.0))


def _likeliest(entries: dict[int, _Entry], drafted: int) -> tuple[int, float] | None:
    """The likeliest of the tokens that a row names, and its probability; None where two are equally likely.

    VlmError for a row that is no distribution's, such as memory that was never written.
    """
    ranked = sorted(((entry.logprob, token) for token, entry in entries.items()), reverse=True)
    total = sum(math.exp(min(logprob, 700.0)) for logprob, _ in ranked)
    if drafted not in entries or len(ranked) < _NAMED or total > 1.001 or ranked[0][0] <= _IMPOSSIBLE:
        raise VlmError("the engine gave a row that holds no probabilities")
    (best, token), (second, _), *_ = ranked
    return None if best == second else (token, math.exp(best))


def _packed(picture: PreparedPicture, raw: ImageProcessor | None) -> str:
    """A picture as ``vllm.multimodal.inputs.MultiModalKwargsItem`` is sent; ``raw``: what undoes the normalising."""
    pixels = picture.pixels if raw is None else raw.raw(picture.pixels)

    def packed(tensor: torch.Tensor) -> Any:
        data = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data

    whole = {"slices": [[0, len(pixels), None]], "dim": 0, "keep_on_cpu": False}
    item = {
        "pixel_values": {"data": packed(pixels), "field": ("flat", whole)},
        "image_grid_thw": {"data": packed(picture.grid[0]), "field": ("batched", {"keep_on_cpu": True})},
    }
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()
