# SPDX-License-Identifier: Apache-2.0
"""An engine drafts: the real llama-server, with the shipped draft as GGUF. Whatever it does, no token changes."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import dsd
from llama_server import LlamaServer, readable
from stepped import Unhurried
from tiny_models import make_tiny_model

from dsd_lab.bench.scenes import held_out_scenes
from dsd_lab.pair.export_gguf import export_gguf
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.constraint import ReplyForm
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.chat_request import ChatRequest
from dsd_ros.edge.engine import DraftEngine
from dsd_ros.edge.serving import ChatSession
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.navigation.run.actions import read_grammar
from dsd_ros.pictures import read_picture
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model
from dsd_ros.vlm.prompts import Chat
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.client import Limits

ROOT = Path(__file__).parents[2]
DRAFT, TARGET = ROOT / "models" / "draft", ROOT / "models" / "target"
FORM = ReplyForm(**read_grammar("dsd").written, limit=96)
WAYS = ({}, {"mode": "dsd"}, {"mode": "coupled"})  # those that an engine serves
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "grammar": {"form": FORM},
    "history": {"history": True},
    "all": {"temperature": 1.2, "seed": 8, "form": FORM, "history": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LlamaServer(*export_gguf(str(DRAFT), tmp_path_factory.mktemp("gguf"))) as server:
        yield server


@pytest.fixture(scope="module")
def target():
    return load_model(ModelSettings(str(TARGET)))


@pytest.fixture(scope="module")
def own():
    return load_model(ModelSettings(str(DRAFT)))


@pytest.fixture(scope="module")
def scenes():
    view = read_picture(ROOT / "docs" / "images" / "view.png")
    return [(view, "find the silver bottle"), (np.ascontiguousarray(view[:, ::-1]), "go to the red chair")]


@cache
def front(folder: Path):
    return load_front(ModelSettings(str(folder)), weights=False)


def engine_at(url: str, folder: Path = DRAFT):
    return DraftEngine(url, front(folder))


def decode(verifier, draft, scenes, form=None, history=False, each=None, **values):
    """The replies; ``each`` is called before each."""
    chosen = DecodeSettings(**values)
    with LocalChannel(verifier) as channel, EdgeSession(channel, draft, chosen, form=form) as session:
        found = []
        for number, (image, text) in enumerate(scenes):
            earlier = [(scenes[number - 1][0], "forward 50 cm")] if history and number else []
            if each is not None:
                each(number)
            found.append(session.decode(image, text, history=earlier))
    return found


def tokens(replies):
    return [reply.tokens for reply in replies]


def tau(replies):
    return sum(len(reply.tokens) for reply in replies) / sum(reply.rounds for reply in replies)


@pytest.mark.parametrize(("api", "kind"), [*(("", kind) for kind in KINDS), ("/v1", "greedy"), ("/v1", "all")])
def test_replies_are_the_targets_and_as_much_comes_from_drafts_as_of_the_own_model(
    server, target, own, scenes, api, kind
):
    engine, values = engine_at(server.url + api), KINDS[kind]
    with VerifierEngine(Unhurried(target)) as verifier:
        wanted = tokens(decode(verifier, None, scenes, mode="ar", **values))
        for way in WAYS[: 3 if not values.get("temperature") else 1] + WAYS[2:]:
            replies = decode(verifier, engine, scenes, **way, **values)
            assert tokens(replies) == wanted, way
            assert not any(reply.worker_error for reply in replies)
            if way:  # rounds, which wait for their drafts
                assert all(sum(reply.accepted) > 0 for reply in replies)
            if way and not (api and values.get("temperature")):  # an engine that names no tokens drafts without noise
                assert tau(replies) >= 0.9 * tau(decode(verifier, own, scenes, **way, **values))


def test_a_token_that_is_replaced_where_a_request_began_is_not_drafted_after(server, scenes):
    """The target rejects the token from which the engine goes on: what the engine said does not follow another one."""
    first, second = [engine_at(server.url).prefill(*scenes[0]) for _ in range(2)]
    bottle, word = (first.model.vocabulary.encode(f"The silver {word}") for word in ("bottle", "is"))
    assert len(bottle) == len(word)
    rows = []
    for sequence, texts in ((first, (bottle, word)), (second, (word,))):
        sequence.chosen, sequence.limits = True, Limits()
        for tokens in texts:
            sequence.rollback(0)
            sequence.append(tokens)
            rows.append(sequence.next_logits().softmax(0))
    assert torch.allclose(rows[1], rows[2], atol=0.01) and not torch.allclose(rows[0], rows[1], atol=0.1)


def test_conversations_of_other_programs_are_drafted(server, target, scenes):
    """With a marker in the text, and a picture amid it; over both APIs."""
    said = [("system", ["Steer."]), ("user", ["See <|im_end|> ", None, " and find the silver bottle"])]
    request = ChatRequest(TARGET.name, Chat.of(said), [scenes[0][0]], DecodeSettings(), False, [], False, False)
    with VerifierEngine(Unhurried(target)) as verifier, LocalChannel(verifier) as channel:
        found = []
        for engine in (engine_at(server.url), engine_at(server.url + "/v1")):
            session = ChatSession(channel, engine, DecodeSettings(mode="coupled"), LinkSettings())
            settings = replace(request, settings=session.settings)
            found.append(session.decode(settings, lambda *_: None, lambda: False))
            assert sum(found[-1].accepted) > 0
            session.close()
    assert found[0].tokens == found[1].tokens == alone(target, request)


def alone(target, request):
    """The target's own greedy reply."""
    sequence = target.prefill(request.pictures[0], request.chat)
    while not set(sequence.tokens) & target.eos_token_ids and len(sequence.tokens) < request.settings.max_tokens:
        sequence.append([int(sequence.next_logits().argmax())])
    return sequence.tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_replies(server, target, own, kind):
    engine, values = engine_at(server.url), KINDS[kind]
    scenes = [(scene.image, scene.instruction) for scene in held_out_scenes(100)]
    with VerifierEngine(target) as verifier:
        wanted = tokens(decode(verifier, None, scenes, mode="ar", **values))
        assert tokens(decode(verifier, engine, scenes, **values)) == wanted
        replies = decode(verifier, engine, scenes, mode="coupled", **values)
        assert tokens(replies) == wanted
        assert tau(replies) >= 0.97 * tau(decode(verifier, own, scenes, mode="coupled", **values))


# ------------------------------------------------------------------------------------------------ engines that fail


def test_an_engine_that_is_killed_and_restarted_in_mid_reply_costs_no_token_and_drafts_again(server, target, scenes):
    kill_and_restart(server, target, scenes * 2, times=1)


@pytest.mark.slow
def test_ten_times(server, target, scenes):
    kill_and_restart(server, target, scenes * 15, times=10)


def kill_and_restart(server, target, scenes, times):
    engine, killers = engine_at(server.url), []

    def die():
        time.sleep(0.02)
        server.kill()
        server.start()

    def each(number):
        if number < 2 * times and number % 2 == 0:
            killers.append(threading.Thread(target=die))
            killers[-1].start()
        elif killers:
            killers[-1].join()

    with VerifierEngine(Unhurried(target)) as verifier:
        wanted = tokens(decode(verifier, None, scenes, mode="ar"))
        for values in ({}, {"mode": "dsd"}):
            killers.clear()
            replies = decode(verifier, engine, scenes, each=each, **values)
            assert tokens(replies) == wanted
            assert any(reply.worker_error for reply in replies[: 2 * times])
            assert all(sum(reply.accepted) for reply in decode(verifier, engine, scenes[:1], mode="dsd"))


def test_an_engine_that_hangs_delays_nothing_and_drafts_again(server, target, scenes, caplog):
    engine = engine_at(server.url)
    with VerifierEngine(Unhurried(target)) as verifier:
        wanted = tokens(decode(verifier, None, scenes, mode="ar"))
        began = time.monotonic()
        server.pause()
        try:
            hung = decode(verifier, engine, scenes * 2)
        finally:
            server.go_on()
        assert time.monotonic() - began < 5.0
        assert tokens(hung) == wanted * 2 and not any(sum(reply.accepted) for reply in hung)
        assert all(sum(reply.accepted) for reply in decode(verifier, engine, scenes, mode="dsd"))


class Talker(BaseHTTPRequestHandler):
    """Answers every request with the same."""

    def do_GET(self):
        self.answer(b'{"media_marker": "<m>", "data": [{"id": "m"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, said = self.server.said
        self.answer(said, status)

    def answer(self, said, status=200):
        try:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said)
        except OSError:
            pass

    def log_message(self, *_):
        pass


def chunk(**values):
    return b"data: " + json.dumps({"content": "", "tokens": [], "stop": False} | values).encode() + b"\n\n"


NONSENSE = {
    "a page": (200, b"<html>hello</html>\n" * 10),
    "nothing": (200, b""),
    "no JSON": (200, b"data: {\n\n"),
    "another JSON": (200, b'data: {"choices": 3}\n\n'),
    "an error": (500, b"out of memory"),
    "an error in its stream": (200, b'data: {"error": {"code": 500, "message": "no slot"}}\n\n'),
    "texts for ids": (200, chunk(tokens=["a"])),
    "ids that are none": (200, chunk(tokens=[-1]) + chunk(tokens=[1 << 40]) + chunk(tokens=[511 + 1])),
    "other tokens": (200, b"".join(chunk(tokens=[20], content=".") for _ in range(50))),
    "more than it was asked for": (200, b"".join(chunk(tokens=[301], content=" is") for _ in range(5000))),
    "half characters": (200, chunk(tokens=[130], content="\ufffd") * 40),
    "chances that are none": (
        200, chunk(tokens=[20], content=".", completion_probabilities=[{"top_logprobs": [{"id": -7, "logprob": None}]}])
    ),
    "an end at once": (200, chunk(stop=True, stop_type="limit")),
    "only the end": (200, chunk(tokens=[2], stop=True, stop_type="eos")),
}  # fmt: skip


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_costs_no_token(target, scenes, said):
    with ThreadingHTTPServer(("127.0.0.1", 0), Talker) as talker, VerifierEngine(target) as verifier:
        talker.said = said
        threading.Thread(target=talker.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{talker.server_address[1]}"
        sampled = {"temperature": 0.9, "seed": 7, "form": FORM}
        for api, values in (("", {}), ("", sampled | {"mode": "coupled"}), ("/v1", {"mode": "dsd"})):
            wanted = tokens(decode(verifier, None, scenes[:1], **values | {"mode": "ar"}))
            assert tokens(decode(verifier, engine_at(url + api), scenes[:1], **values)) == wanted
        talker.shutdown()


def test_where_nobody_listens_the_target_decodes_alone_and_one_line_says_why(target, scenes, caplog):
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    engine = engine_at(url)
    with VerifierEngine(target) as verifier:
        replies = decode(verifier, engine, scenes * 2, mode="coupled")
        assert tokens(replies) == 2 * tokens(decode(verifier, None, scenes, mode="ar"))
        assert f"the draft engine at {url} failed" in replies[0].worker_error
        assert caplog.text.count("failed, so replies are not drafted") == 1
        with pytest.raises(LinkClosed, match="the draft engine at"):
            EdgeSession(LocalChannel(verifier), engine, DecodeSettings()).decode_alone(*scenes[0])


def test_gibberish_of_bytes_that_are_no_characters_costs_no_token(tmp_path, picture):
    target = load_model(ModelSettings(str(readable(make_tiny_model(tmp_path / "target", 5)))))
    folder = readable(make_tiny_model(tmp_path / "draft", 5, noise=0.05))
    asked = [(picture(number), "go") for number in range(2)]
    with LlamaServer(*export_gguf(str(folder), tmp_path)) as server, VerifierEngine(Unhurried(target)) as verifier:
        for values in ({}, {"temperature": 1.0, "seed": 3}):
            wanted = tokens(decode(verifier, None, asked, mode="ar", max_tokens=24, **values))
            for api, mode in (("", "stream"), ("", "coupled"), ("/v1", "coupled")):
                engine = engine_at(server.url + api, folder)
                assert tokens(decode(verifier, engine, asked, mode=mode, max_tokens=24, **values)) == wanted


# -------------------------------------------------------------------------------------------------------- around it


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "dsd", "temperature": 0.9}, {"mode": "dssd", "temperature": 0.9}, {"mode": "tslt", "temperature": 0.9},
        {"mode": "mc-dsd"}, {"mode": "mc-tslt"}, {"mode": "fsd"}, {"mode": "coupled", "shape": "budget"},
    ],
    ids=str,
)  # fmt: skip
def test_a_mode_that_needs_more_than_tokens_refuses_an_engine(values):
    with pytest.raises(ValueError, match="a draft engine gives tokens alone; use stream"):
        EdgeSession(None, engine_at("http://127.0.0.1:1"), DecodeSettings(**values))


def test_a_folder_without_weights_is_enough_for_an_engine(server, target, scenes, tmp_path):
    for file in DRAFT.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "draft.gguf").touch()
    with VerifierEngine(target) as verifier:
        found = decode(verifier, engine_at(server.url, tmp_path), scenes, mode="dsd")
        assert tokens(found) == tokens(decode(verifier, None, scenes, mode="ar"))
        assert all(sum(reply.accepted) for reply in found)


def test_a_picture_that_the_engine_reads_as_other_tokens_is_told_of(server, target, scenes, tmp_path, caplog):
    folder = shutil.copytree(DRAFT, tmp_path / "draft")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"min_pixels": 3136, "max_pixels": 21168}))
    with VerifierEngine(target) as verifier:
        decode(verifier, engine_at(server.url, folder), scenes, mode="dsd")
    assert "with its bounds for pictures" in caplog.text and caplog.text.count("draft engine") == 1


def test_a_reply_without_the_link_is_the_drafts_own(server, target, own, scenes):
    with VerifierEngine(target) as verifier, LocalChannel(verifier) as channel:
        for values in ({}, {"temperature": 0.9, "seed": 7}):
            chosen = DecodeSettings(**values)
            wanted = EdgeSession(channel, own, chosen).decode_alone(*scenes[0])
            for api in ("", "/v1") if not values else ("",):
                found = EdgeSession(channel, engine_at(server.url + api), chosen).decode_alone(*scenes[0])
                assert found.tokens == wanted.tokens and found.text == wanted.text and found.finished


def test_the_command_drafts_by_an_engine(server, capsys):
    asked = ["--image", ROOT / "docs" / "images" / "view.png", "--instruction", "find the silver bottle", "--json"]
    code, alone, _ = dsd(capsys, "decode", *asked, "--mode", "ar")
    assert code == 0
    code, found, _ = dsd(capsys, "decode", *asked, "--draft-engine", server.url)
    assert code == 0 and json.loads(found)["tokens"] == json.loads(alone)["tokens"]
    code, _, wrong = dsd(capsys, "decode", *asked, "--draft-engine", "ws://127.0.0.1:8080")
    assert code == 2 and "use http://host:port for llama-server" in wrong and wrong.count("\n") == 1
