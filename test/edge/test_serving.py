# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API on the robot, asked by plain HTTP: what comes is the target's own reply, whatever happens on the way."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from PIL import Image
from stepped import Stepped, Unhurried
from tcp_tap import TcpTap
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge import serving
from dsd_ros.edge.chat_request import MAX_BODY_BYTES, MAX_PICTURES
from dsd_ros.edge.serving import ApiServer, ChatSession
from dsd_ros.edge.settings import LinkSettings, ServeSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.prompts import Chat
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

LINK = LinkSettings(response_timeout_s=1.0, attempts=8)
SETTINGS = DecodeSettings(max_tokens=24)
PICTURES = [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8) for seed in (1, 2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target, draft), tiny; a token is a byte."""
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_model(folder / "target", seed=1)
    make_tiny_model(folder / "draft", seed=1, noise=0.05)
    return tuple(load_model(ModelSettings(str(folder / name))) for name in ("target", "draft"))


@contextmanager
def served(channel, draft, settings=SETTINGS, **serve):
    session = ChatSession(channel, draft, settings, LINK)
    with ApiServer(session, ServeSettings(**{"port": 0} | serve)) as server:
        yield server


@pytest.fixture(scope="module")
def server(pair):
    target, draft = pair
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel, served(channel, draft) as server:
        yield server


def call(server, method: str, path: str, body=None, headers=None) -> tuple[int, dict]:
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def ask(server, messages="go", **fields):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return call(server, "POST", "/v1/chat/completions", {"model": "target", "messages": messages} | fields)


def events(server, messages="go", **fields) -> list:
    """The events of a stream, the last one's text as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    body = {"model": "target", "messages": [{"role": "user", "content": messages}], "stream": True} | fields
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.getheader("Content-Type").startswith("text/event-stream")
    *parts, last = answer.read().decode().removesuffix("\n\n").split("\n\n")
    connection.close()
    return [json.loads(part.removeprefix("data: ")) for part in parts] + [last.removeprefix("data: ")]


def text_of(parts: list) -> str:
    return "".join(choice["delta"].get("content", "") for part in parts[:-1] for choice in part["choices"])


def data_url(picture: np.ndarray) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def alone(target, chat: Chat, length: int = 24, pictures=()) -> tuple[str, int, int]:
    """The target's own greedy reply: its text, tokens of the prompt and of the reply."""
    image, history = (pictures[-1] if pictures else None), [(picture, "") for picture in pictures[:-1]]
    sequence = target.prefill(image, chat, history)
    while len(sequence.tokens) < length and not set(sequence.tokens) & target.eos_token_ids:
        sequence.append([int(sequence.next_logits().argmax())])
    return target.decode_text(sequence.tokens), sequence.prompt_length, len(sequence.tokens)


def test_the_target_is_the_model(server):
    status, listed = call(server, "GET", "/v1/models")
    assert status == 200 and [model["id"] for model in listed["data"]] == ["target"] and listed["object"] == "list"
    for method, path in (("GET", "/v1/other"), ("GET", "/"), ("POST", "/v1/embeddings")):
        status, answer = call(server, method, path)
        assert status == 404 and answer["error"]["type"] == "invalid_request_error", path
    status, answer = call(server, "POST", "/v1/chat/completions", {"model": "gpt-4o", "messages": [{"role": "user"}]})
    assert status == 404 and answer["error"]["code"] == "model_not_found" and "'target'" in answer["error"]["message"]


def test_a_conversation_with_pictures_gets_the_targets_own_reply(server, pair):
    content = [{"type": "text", "text": "Is "}, data_url(PICTURES[0]), {"type": "text", "text": " like"}]
    messages = [
        {"role": "developer", "content": "Two  words."},
        {"role": "user", "content": [*content, data_url(PICTURES[1]), {"type": "text", "text": "?\n"}]},
        {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Why?"},
    ]
    turns = [
        ("system", ["Two  words."]), ("user", ["Is ", None, " like", None, "?\n"]), ("assistant", ["Yes."]),
        ("user", ["Why?"]),
    ]  # fmt: skip
    text, prompt, reply = alone(pair[0], Chat.of(turns), pictures=PICTURES)
    for _ in range(2):  # the verifier has the first picture the second time
        status, answer = ask(server, messages)
        assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "target"
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == ("length" if reply == 24 else "stop")
        details = answer["usage"].pop("completion_tokens_details")
        assert answer["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply,
        }  # fmt: skip
        assert 0 <= details["accepted_prediction_tokens"] < reply and details["rejected_prediction_tokens"] >= 0


def test_a_stream_says_the_same_as_it_is_verified(server, pair):
    text, prompt, reply = alone(pair[0], Chat.of([("user", ["tell"])]), 40)
    *parts, usage, done = events(server, "tell", max_completion_tokens=40, stream_options={"include_usage": True})
    assert done == "[DONE]" and text_of([*parts, done]) == text
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant" and len(parts) > 2
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len({part["id"] for part in [*parts, usage]}) == 1
    assert all(part["object"] == "chat.completion.chunk" and part["usage"] is None for part in parts)
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == prompt
    assert usage["usage"]["completion_tokens"] == reply == 40


def test_sampling_is_the_requests(server):
    def said(**fields) -> str:
        return ask(server, "draw", temperature=1.0, top_p=0.9, top_k=-1, **fields)[1]["choices"][0]["message"][
            "content"
        ]

    assert said(seed=5) == said(seed=5) != said(seed=6)
    assert said() != said()


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_ends_the_reply_and_is_not_part_of_it(server, pair, streams):
    text, _, _ = alone(pair[0], Chat.of([("user", ["stop"])]), 40)
    stop = text[12:15]
    expected = text[: text.index(stop)]
    fields = {"stop": ["never said", stop], "max_tokens": 40}
    if streams:
        *parts, done = events(server, "stop", **fields)
        assert text_of([*parts, done]) == expected and parts[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = ask(server, "stop", **fields)[1]
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == expected and choice["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] > 0 and 0 < answer["usage"]["completion_tokens"] <= 40


def test_programs_that_ask_at_once_get_their_own_replies(server, pair):
    words = [f"word {number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        said = [answer["choices"][0]["message"]["content"] for _, answer in pool.map(partial(ask, server), words)]
    assert said == [alone(pair[0], Chat.of([("user", [word])]))[0] for word in words]


USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("fields", "status", "param", "sentence"),
    [
        ({"messages": []}, 400, "messages", "length"),
        ({"messages": [USER] * 300}, 400, "messages", "length"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "int"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[1].tool_calls", "length"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 400, None, "shorten it to 262144"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "holds"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, 400, None, "NUL"),
        ({"model": None}, 400, "model", "str"),
        ({"temperature": -1}, 400, "temperature", ">= 0.0"),
        ({"temperature": "hot"}, 400, "temperature", "float"),
        ({"top_p": 0}, 400, "top_p", "> 0.0"),
        ({"seed": -4}, 400, "seed", ">= 0"),
        ({"max_tokens": 0}, 400, "max_tokens", ">= 1"),
        ({"max_tokens": 100_000}, 400, "max_tokens", "<= 4096"),
        ({"n": 2}, 400, "n", "<= 1"),
        ({"stop": [""]}, 400, "stop[0]", "length"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"logprobs": True}, 400, "logprobs", "not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
        (b"{", 400, None, "no JSON object"),
        (b"[1]", 400, None, "no JSON object"),
        (b'{"model": "target"}', 400, "messages", "missing required field"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_what_cannot_be_done_is_refused_by_name(server, fields, status, param, sentence, streams):
    body = fields
    if isinstance(fields, dict):
        body = {"model": "target", "messages": [USER], "stream": streams} | fields
    found, answer = call(server, "POST", "/v1/chat/completions", body)
    error = answer["error"]
    assert (found, error["param"]) == (status, param) and sentence in error["message"], error
    assert error["type"] == "invalid_request_error"
    if "holds" in sentence:
        assert error["code"] == "context_length_exceeded"


def test_fields_that_change_nothing_are_taken(server):
    inert = {
        "n": 1, "tools": [], "logprobs": False, "presence_penalty": 0.0, "logit_bias": {}, "user": "somebody",
        "store": True, "metadata": {"a": "b"}, "stop": None, "service_tier": "auto", "parallel_tool_calls": True,
        "stream": False, "stream_options": None,
    }  # fmt: skip
    assert ask(server, **inert)[1]["choices"] == ask(server)[1]["choices"]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://example.org/cat.png", "is no data URL"),
        ("file:///etc/passwd", "is no data URL"),
        ("data:text/html;base64,aGk=", "is no data URL"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:image/png;base64,aGVsbG8=", "is no picture"),
    ],
)
def test_only_pictures_in_data_urls_are_taken(server, url, sentence):
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
    status, answer = ask(server, [{"role": "user", "content": content}])
    assert status == 400 and answer["error"]["param"] == "messages[0].content[1].image_url"
    assert sentence in answer["error"]["message"]


def test_pictures_and_bytes_are_bounded(server):
    status, answer = ask(server, [{"role": "user", "content": [data_url(PICTURES[0])] * (MAX_PICTURES + 1)}])
    assert status == 400 and f"more than {MAX_PICTURES} pictures" in answer["error"]["message"]
    status, answer = call(server, "POST", "/v1/chat/completions", b" " * (MAX_BODY_BYTES + 1))
    assert status == 413 and str(MAX_BODY_BYTES) in answer["error"]["message"]
    assert ask(server)[0] == 200


def test_beyond_this_machine_a_token_is_asked_for(pair, tmp_path):
    with pytest.raises(ValueError, match="lets other machines use this robot's model"):
        ServeSettings(host="0.0.0.0")
    (tmp_path / "token").write_text("correct-horse\n")
    (tmp_path / "token").chmod(0o600)
    target, draft = pair
    with (
        VerifierEngine(target) as engine, LocalChannel(engine) as channel,
        served(channel, draft, host="0.0.0.0", api_token_file=str(tmp_path / "token")) as server,
    ):  # fmt: skip
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "correct-horse"}):
            status, answer = call(server, "GET", "/v1/models", headers=headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert call(server, "POST", "/v1/chat/completions", b" " * 100_000)[0] == 401
        assert call(server, "GET", "/v1/models", headers={"Authorization": "Bearer correct-horse"})[0] == 200


def test_no_web_page_is_served(server):
    for host in ("evil.example", "127.0.0.1"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert call(server, "POST", "/v1/chat/completions", {"model": "target", "messages": [USER]}, headers)[0] == 403


def opened(server, **fields) -> http.client.HTTPResponse:
    """A stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    body = {"model": "target", "messages": [USER], "stream": True, "max_tokens": 300} | fields
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_ends_its_reply(pair, streams):
    target, draft = pair
    stepped = Stepped(target)
    with VerifierEngine(stepped) as engine, LocalChannel(engine) as channel, served(channel, draft) as server:
        asking = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
        body = {"model": "target", "messages": [USER], "stream": streams, "max_tokens": 300}
        asking.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        stepped.step(3)
        stepped.begun(4)
        asking.sock.close()
        until(lambda: engine.held_sessions() == (0, 0))  # so nothing more of the reply is decoded
        stepped.free()
        assert ask(server)[0] == 200


def test_a_client_that_takes_nothing_holds_nobody_up_for_long(pair, monkeypatch):
    monkeypatch.setattr(serving._Handler, "timeout", 0.3)
    target, draft = pair
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel, served(channel, draft) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(server.server_address)
            body = json.dumps({"model": "target", "messages": [USER], "stream": True, "max_tokens": 300})
            head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            slow.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            until(lambda: engine.held_sessions()[0])
            until(lambda: engine.held_sessions() == (0, 0))
            assert ask(server)[0] == 200


def test_the_server_ends_at_once_in_the_middle_of_a_stream(pair):
    target, draft = pair
    with VerifierEngine(Unhurried(target)) as engine, LocalChannel(engine) as channel, ThreadPoolExecutor(1) as pool:
        with served(channel, draft) as server:
            answer = opened(server)
            waiting = pool.submit(ask, server)
            began = time.monotonic()
        assert time.monotonic() - began < 1.5
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        with pytest.raises(OSError):
            waiting.result(5)
        assert engine.held_sessions() == (0, 0)


def test_too_many_that_wait_are_sent_away(pair, monkeypatch):
    monkeypatch.setattr(serving, "_MOST_WAITING", 1)
    target, draft = pair
    with VerifierEngine(Unhurried(target)) as engine, LocalChannel(engine) as channel, served(channel, draft) as server:
        answer = opened(server)
        status, refused = ask(server)
        assert status == 429 and "waiting already" in refused["error"]["message"]
        answer.close()


@pytest.mark.parametrize("mode", ["stream", "dsd"])
def test_a_link_cut_in_mid_stream_gives_the_same_tokens_later(pair, mode):
    target, draft = pair
    expected, _, _ = alone(target, Chat.of([("user", ["go"])]), 120)
    settings = DecodeSettings(mode=mode)
    with (
        VerifierEngine(Unhurried(target)) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as verifier,
        TcpTap(verifier.url) as tap,
        WebsocketChannel(tap.url) as channel,
        served(channel, draft, settings) as server,
    ):
        answer = opened(server, max_tokens=120)
        tap.cut()
        body = answer.read().decode()
        assert len(tap.up) > 1  # it dialled again
    *parts, done = body.removesuffix("\n\n").lstrip().split("\n\n")
    assert done == "data: [DONE]"
    rest = "".join(json.loads(part.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for part in parts)
    assert rest and expected.endswith(rest)


def test_a_verifier_that_is_not_there_is_a_server_error(pair):
    link = LinkSettings(response_timeout_s=0.1, attempts=1)
    with WebsocketChannel("ws://127.0.0.1:9") as channel:
        session = ChatSession(channel, pair[1], SETTINGS, link)
        with ApiServer(session, ServeSettings(port=0)) as server:
            for status, answer in (call(server, "GET", "/v1/models"), ask(server), ask(server, stream=True)):
                assert status == 503 and answer["error"]["type"] == "server_error"
                assert answer["error"]["code"] == "verifier_unavailable" and "127.0.0.1:9" in answer["error"]["message"]


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(OSError, match=r"port \d+ on 127.0.0.1 cannot be listened on"):
        ApiServer(server.session, ServeSettings(port=server.server_address[1]))
