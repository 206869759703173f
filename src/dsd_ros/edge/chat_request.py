# SPDX-License-Identifier: Apache-2.0
"""A chat completion as a client of OpenAI's API asks for it: checked, bounded, and ready for a session.

Names of fields and errors are those of OpenAI's "Create chat completion"; ``top_k`` is vLLM's. What would change the
reply and is not supported is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.limits import MAX_HISTORY
from dsd_ros.pictures import PictureError, read_picture
from dsd_ros.vlm.prompts import MAX_MESSAGES, Chat

MAX_BODY_BYTES = 32 << 20
MAX_PICTURES = MAX_HISTORY + 1
MAX_TOKENS = 4096  # of a reply, as in DecodeSettings
# They say nothing of the reply.
_IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}


class ApiError(Exception):
    """What a client is told: an HTTP status, a sentence, and the names by which programs know it."""

    def __init__(self, status: int, sentence: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


class _Url(Struct):
    url: str


class _Text(Struct, tag_field="type", tag="text"):
    text: str


class _Picture(Struct, tag_field="type", tag="image_url"):
    image_url: _Url


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text | _Picture] | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None


class _StreamOptions(Struct):
    include_usage: bool = False


_Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_StopText = Annotated[str, Meta(min_length=1, max_length=256)]


class _Body(Struct):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True)
class ChatRequest:
    """``pictures``: RGB uint8 (H, W, 3), as ``chat`` shows them. ``seeded``: whether the request names its seed, so
    that asked again the reply is the same.
    """

    model: str
    chat: Chat
    pictures: list[np.ndarray]
    settings: DecodeSettings
    seeded: bool
    stops: list[str]
    streams: bool
    with_usage: bool


def read_request(body: bytes, settings: DecodeSettings) -> ChatRequest:
    """The request in a body; ``settings`` are what it leaves out. ApiError names the field at fault."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the body is no JSON object: {error}") from error
    for name in fields.keys() - _Body.__struct_fields__ - _IGNORED:
        if fields[name]:  # else it changes nothing
            raise ApiError(400, f"{name[:64]} is not supported here; leave it out", name[:64], "unsupported_parameter")
    try:
        asked = msgspec.convert(fields, _Body)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), _param(str(error))) from error
    pictures: list[np.ndarray] = []
    turns = [
        ("system" if message.role == "developer" else message.role, _parts(message, f"messages[{place}]", pictures))
        for place, message in enumerate(asked.messages)
    ]
    sampling = {name: getattr(asked, name) for name in ("temperature", "top_p", "seed")} | {
        "max_tokens": asked.max_completion_tokens or asked.max_tokens,
        "top_k": None if asked.top_k is None else max(0, asked.top_k),
    }
    return ChatRequest(
        model=asked.model,
        chat=Chat.of(turns),
        pictures=pictures,
        settings=replace(settings, **{name: value for name, value in sampling.items() if value is not None}),
        seeded=asked.seed is not None,
        stops=[asked.stop] if isinstance(asked.stop, str) else asked.stop or [],
        streams=bool(asked.stream),
        with_usage=asked.stream_options is not None and asked.stream_options.include_usage,
    )


def _parts(message: _Message, where: str, pictures: list[np.ndarray]) -> list[str | None]:
    """A message's parts, as of ``Chat``; its pictures are added to ``pictures``."""
    if message.content is None or isinstance(message.content, str):
        return [message.content or ""]
    parts: list[str | None] = []
    for place, part in enumerate(message.content):
        if isinstance(part, _Text):
            parts.append(part.text)
            continue
        param = f"{where}.content[{place}].image_url"
        if len(pictures) == MAX_PICTURES:
            raise ApiError(400, f"there are more than {MAX_PICTURES} pictures; leave out the earliest", param)
        pictures.append(_picture(part.image_url.url, param))
        parts.append(None)
    return parts


def _picture(url: str, param: str) -> np.ndarray:
    """The picture in a data URL: nothing is fetched."""
    head, _, data = url.partition(",")
    if not re.fullmatch(r"data:image/[\w.+-]+;base64", head):
        raise ApiError(400, f"{param} is no data URL; give the picture itself, as data:image/png;base64,...", param)
    try:
        return read_picture(base64.b64decode(data, validate=True), param)
    except (binascii.Error, PictureError) as error:
        raise ApiError(400, f"{param}: {error}", param) from error


def _param(sentence: str) -> str | None:
    """The field that an error of msgspec is about."""
    missing, place = re.search(r"required field `(\w+)`", sentence), re.search(r"`\$\.?([^`]+)`$", sentence)
    names = [found[1] for found in (place, missing) if found]
    return ".".join(names) or None
