# SPDX-License-Identifier: Apache-2.0
"""A question answered by two sides over real websockets that break: the same tokens as in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from asking import Letters, Shelf, in_one_thread
from table_model import TableModel
from tiny_text import make_tiny_text

from dsd_lab.dragon.ablations import AblationClient, AblationServer
from dsd_lab.dragon.settings import AblationSettings
from dsd_lab.links.proxy import LinkProxy
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.dragon.answers import AnswerRefused
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.dragon.server import WithDocuments
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.websocket import WebsocketChannel

torch.set_num_threads(1)
OURS = Shelf(("The chair that its owner likes is the Viola.", 0.4), ("Chairs have legs.", 0.1))
THEIRS = Shelf(("The Viola chair is red.", 0.6), ("The Cello chair is blue.", -0.3))
DEVICE, CLOUD = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.8, padding=3)
QUESTION = "bring me to the chair I like"
EVERYTHING = [
    pytest.param(evidence, window, schedule, temperature, id=f"{evidence}-{window}-{schedule}-{temperature}")
    for evidence, window, schedule, temperature in (
        ("sparse", 5, "random", 0.0), ("sparse", 4, "cloud", 1.0),
        ("full", 1, "device", 1.0), ("sparse", 8, "auto", 1.0),
    )
]  # fmt: skip


def reference(device, cloud, settings, asking, reply: int = 1) -> list[int]:
    return in_one_thread((device, asking(device), OURS), (cloud, asking(cloud), THEIRS), settings, QUESTION, reply)


@contextlib.contextmanager
def serving(model, asking, settings: AblationSettings | None = None) -> Iterator[str]:
    service = AblationServer(settings or AblationSettings(), model, THEIRS, asking=asking(model))
    with (
        WithDocuments(VerifierEngine(model), service) as both,
        VerifierServer(both, VerifierSettings(port=0)) as server,
    ):
        yield server.url


@contextlib.contextmanager
def asking_at(url: str, settings: AblationSettings | None = None) -> Iterator[AblationClient]:
    with (
        WebsocketChannel(url) as channel,
        AblationClient(channel, DEVICE, OURS, settings, asking=Letters(12)) as asking,
    ):
        yield asking


def letters(_model) -> Letters:
    return Letters(12)


@pytest.fixture(scope="module")
def tables() -> Iterator[str]:
    with serving(CLOUD, letters) as url:
        yield url


@pytest.mark.parametrize(("evidence", "window", "schedule", "temperature"), EVERYTHING)
def test_the_answer_is_that_of_both_mixtures(evidence, window, schedule, temperature):
    settings = AblationSettings(
        evidence=evidence, window=window, schedule=schedule, temperature=temperature, max_tokens=24,
        head=2, seed=11,
    )  # fmt: skip
    with serving(CLOUD, letters, settings) as url, asking_at(url, settings) as asking:
        answer = asking.answer(QUESTION)
    assert answer.tokens == reference(DEVICE, CLOUD, settings, letters)
    statistics = answer.statistics
    if schedule == "random":
        assert statistics.switches > 3 and set(statistics.aggregators) == {"device", "cloud"}
    assert (statistics.attempts, statistics.alone_from) == (1, -1)
    assert min(statistics.bytes_up, statistics.bytes_down) > 24 and statistics.bytes_per_token < 400
    assert len(statistics.token_seconds) == 24 and statistics.passes >= 24


def test_a_verifier_with_documents_still_verifies(tables):
    with WebsocketChannel(tables) as channel:
        settings = DecodeSettings(mode="dsd", max_tokens=12)
        with EdgeSession(channel, DEVICE, settings) as edge:
            image = np.full((1, 1, 3), 3, np.uint8)
            sequence = CLOUD.prefill(image, "go")
            for _ in range(12):
                sequence.append([int(sequence.next_logits().argmax())])
            assert edge.decode(image, "go").tokens == sequence.tokens


def test_a_verifier_without_documents_says_so():
    with (
        VerifierEngine(CLOUD) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        asking_at(server.url) as asking,
        pytest.raises(AnswerRefused, match="without documents"),
    ):
        asking.answer(QUESTION)


@pytest.mark.parametrize(("schedule", "happens"), [("device", "cut"), ("cloud", "silence"), ("random", "cut")])
def test_a_link_lost_in_mid_reply_changes_no_token(tables, schedule, happens):
    settings = AblationSettings(
        temperature=1.0, schedule=schedule, max_tokens=24, window=4, patience_s=0.4, attempts=8, seed=7
    )
    parts = urlsplit(tables)
    lost: list[int] = []
    with LinkProxy((parts.hostname, parts.port)) as proxy, asking_at(proxy.url, settings) as asking:

        def lose(_text: str, tokens: list[int]) -> None:
            if len(tokens) in (5, 14) and len(tokens) not in lost:
                lost.append(len(tokens))
                getattr(proxy, happens)()
                if happens == "cut":
                    proxy.restore()
                else:
                    threading.Timer(1.0, proxy.restore).start()

        answer = asking.answer(QUESTION, on_token=lose)
    assert answer.tokens == reference(DEVICE, CLOUD, settings, letters)
    assert lost and answer.statistics.attempts > 1


@pytest.mark.parametrize("schedule", ["device", "cloud"])
def test_a_cloud_restarted_in_mid_reply_changes_no_token(schedule):
    settings = AblationSettings(
        temperature=1.0, schedule=schedule, max_tokens=20, window=4, patience_s=2, attempts=8, seed=3
    )
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as cloud:
        parts = urlsplit(cloud.enter_context(serving(CLOUD, letters)))
        proxy = stack.enter_context(LinkProxy((parts.hostname, parts.port)))
        channel = stack.enter_context(WebsocketChannel(proxy.url))
        asking = stack.enter_context(AblationClient(channel, DEVICE, OURS, settings, asking=Letters(12)))
        restarts: list[int] = []

        def restart(_text: str, tokens: list[int]) -> None:
            if len(tokens) == 6 and not restarts:
                restarts.append(6)
                cloud.close()
                anew = urlsplit(stack.enter_context(serving(CLOUD, letters)))
                proxy.target = anew.hostname, anew.port

        answer = asking.answer(QUESTION, on_token=restart)
        assert answer.tokens == reference(DEVICE, CLOUD, settings, letters)
        assert restarts


def test_real_models_answer_together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    device = load_model(ModelSettings(str(make_tiny_text(folder / "device", seed=3))))
    cloud = load_model(ModelSettings(str(make_tiny_text(folder / "cloud", seed=3, noise=0.05))))
    settings = AblationSettings(temperature=1.0, schedule="random", max_tokens=16, window=4, seed=1)
    with (
        serving(cloud, DocumentPrompt) as url,
        WebsocketChannel(url) as channel,
        AblationClient(channel, device, OURS, settings) as asking,
    ):
        answer = asking.answer(QUESTION)
    assert answer.tokens == reference(device, cloud, settings, DocumentPrompt)
    assert answer.text == device.decode_text(answer.tokens)
