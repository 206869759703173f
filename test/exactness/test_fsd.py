# SPDX-License-Identifier: Apache-2.0
"""fsd gives the tokens of dsd, greedy and sampled, with any exits and any pre-drafting worker."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
from table_model import TableModel
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.settings import PREDRAFT_SOURCES, DecodeSettings
from dsd_ros.edge import ahead
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Draft, Outcome

INSTRUCTIONS = ("find the silver bottle", "go to the red chair", "stop")
IMAGE = np.full((2, 2, 3), 5, np.uint8)
EVERY_EXIT = EngineSettings(exit_share=1.0)


THREADS, BATCH = 64, 1  # processors: one for each worker, and too few for them


@pytest.fixture(autouse=True)
def processors(request, monkeypatch):
    """As many processors as the test says; else one for each worker, whatever this machine has."""
    count = getattr(request, "param", THREADS)
    monkeypatch.setattr(ahead, "processors", lambda: count)
    return count


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A target of three layers with an exit after each but the last."""
    directory = make_tiny_model(tmp_path_factory.mktemp("fsd") / "target", seed=5, layers=3)
    model = load_model(ModelSettings(str(directory)))
    model.exits = ExitAdapters.untrained(model)
    return model


def waiting(pool) -> bool:
    """Whether a pool has any work to do, or does any."""
    with pool._lock:
        for level in pool._levels:
            past, next_round = level.past, level.ahead
            if past.stepping or not past.begun:
                return True
            if level.followed and level is pool._levels[-1]:  # a further round is about to be sent
                return True
            if next_round is not None and not (next_round.complete or next_round.failed):
                return True
        if not pool._levels:
            return False
        outcomes = pool._levels[0].outcomes
        if any(named.stepping for named in outcomes._named.values()):
            return True
        spent = outcomes.begun >= outcomes._budget
        return any(named.begun or not spent for named in outcomes._waiting)


class Unhurried(LocalChannel):
    """Final outcomes arrive once the robot has nothing more to do ahead, as if the target were slow."""

    session: EdgeSession

    def receive(self, timeout):
        message = super().receive(timeout)
        if isinstance(message, Outcome) and message.is_final:
            deadline = time.monotonic() + 20
            while waiting(self.session._decoder.proposer) and time.monotonic() < deadline:
                time.sleep(0.002)
        return message


def decode(channel, draft, image, instruction, replies: int = 1, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(seed=3, **({"mode": "dsd", "max_tokens": 14} | values))
    with EdgeSession(channel, draft, chosen, LinkSettings(response_timeout_s=10)) as session:
        channel.session = session
        return [session.decode(image, instruction) for _ in range(replies)]


@pytest.fixture(scope="module")
def plain(speaking, draft, picture):
    """plain(seed, temperature): the tokens of dsd about a picture, checked against ar where greedy."""
    known: dict[tuple[int, float], list[int]] = {}

    def tokens(seed: int, temperature: float) -> list[int]:
        if (seed, temperature) not in known:
            replies = {}
            with VerifierEngine(speaking) as engine:
                for mode in ("ar", "dsd"):
                    with LocalChannel(engine) as channel:
                        (reply,) = decode(
                            channel, draft, picture(seed), INSTRUCTIONS[seed % 3],
                            mode=mode, temperature=temperature,
                        )  # fmt: skip
                        replies[mode] = reply.tokens
            assert temperature or replies["ar"] == replies["dsd"]
            known[seed, temperature] = replies["dsd"]
        return known[seed, temperature]

    return tokens


@pytest.mark.parametrize(("depth", "processors"), [(1, THREADS), (3, BATCH)], indirect=["processors"])
@pytest.mark.parametrize("source", PREDRAFT_SOURCES)
def test_every_combination_gives_the_tokens_of_dsd(speaking, draft, picture, plain, source, processors, depth):
    seed = random.Random(f"{source}{processors}{depth}").randrange(5)
    with VerifierEngine(speaking, EVERY_EXIT) as engine:
        for temperature, kind in ((0.0, Unhurried), (1.0, LocalChannel), (1.0, Unhurried)):
            with kind(engine) as channel:
                (reply,) = decode(
                    channel, draft, picture(seed), INSTRUCTIONS[seed % 3], mode="fsd",
                    temperature=temperature, predraft_source=source, pipeline_depth=depth,
                    predraft_workers=4, predraft_budget=8,
                )  # fmt: skip
            assert reply.tokens == plain(seed, temperature) and not reply.worker_error
            assert source != "guesses" or reply.exits == 0
            if kind is Unhurried and source != "exits":
                assert reply.predrafts_used + reply.predrafts_wasted > 0


BUDGET = {"shape": "budget", "tree_budget": 10}
EXPANSION = {"shape": "expansion", "tree_expansion": "2,2,1"}


@pytest.mark.parametrize(("depth", "processors"), [(1, THREADS), (3, BATCH)], indirect=["processors"])
@pytest.mark.parametrize("values", [BUDGET, EXPANSION | {"temperature": 1.0}], ids=str)
def test_trees_give_the_tokens_of_dsd(speaking, draft, picture, values, depth):
    """Exits judge trees, pre-drafts follow outcomes on any branch, and tree rounds are in flight."""
    with VerifierEngine(speaking, EVERY_EXIT) as engine:
        with LocalChannel(engine) as channel:
            (plain,) = decode(channel, draft, picture(1), "go", mode="dsd", **values)
        with Unhurried(engine) as channel:
            (reply,) = decode(
                channel, draft, picture(1), "go", mode="fsd", predraft_workers=4,
                predraft_budget=8, pipeline_depth=depth, **values,
            )  # fmt: skip
    assert reply.tokens == plain.tokens and not reply.worker_error
    assert reply.predrafts_used + reply.predrafts_wasted > 0
    assert reply.records[0].drafted > reply.records[0].depth > 0


@pytest.mark.parametrize("processors", [THREADS, BATCH], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_like_its_target_is_always_guessed(target, picture, temperature):
    values = {"temperature": temperature, "max_tokens": 30}
    with VerifierEngine(target) as engine:
        with LocalChannel(engine) as channel:
            (dsd,) = decode(channel, target, picture(1), "go", mode="dsd", **values)
        with Unhurried(engine) as channel:
            (fsd,) = decode(
                channel, target, picture(1), "go", mode="fsd", predraft_source="guesses", **values,
            )  # fmt: skip
    assert fsd.tokens == dsd.tokens and dsd.miss_rate == 1.0
    # Its distributions are so flat that greedy it has to learn first how far it can trust itself.
    late = 1 if temperature else 3
    assert all(record.ready and record.source == "guess" for record in fsd.records[late:])
    assert fsd.miss_rate < 0.5 and fsd.predrafts_used >= fsd.rounds - late
    assert fsd.sync_seconds > 0 and fsd.draft_seconds < fsd.draft_round_seconds * fsd.rounds
    assert fsd.drafted_ahead and fsd.mean_exit == 0 and fsd.exits == 0
    for word in ("miss rate", "gamma T_p", "T_q", "T_c", "T_r", "threads", "peak memory"):
        assert word in fsd.summary()
    figures = fsd.as_json()
    assert figures["miss_rate"] == fsd.miss_rate and figures["records"][-1]["source"] == "guess"
    assert figures["peak_memory"] > 1e6 and figures["threads"] >= 2


@pytest.mark.parametrize(
    ("temperature", "shape", "depth"), [(0.0, "sequence", 2), (1.0, "sequence", 4), (1.0, "expansion", 4)]
)
def test_rounds_fly_while_what_they_assume_holds(target, picture, temperature, shape, depth):
    values = {"temperature": temperature, "max_tokens": 30, "shape": shape}
    sent = []

    class Watched(Unhurried):
        def send(self, message):
            if isinstance(message, Draft):
                sent.append(message)
            super().send(message)

    with VerifierEngine(target) as engine:
        with LocalChannel(engine) as channel:
            (dsd,) = decode(channel, target, picture(2), "go", mode="dsd", **values)
        with Watched(engine) as channel:
            (fsd,) = decode(channel, target, picture(2), "go", mode="fsd", pipeline_depth=depth, **values)
    assert fsd.tokens == dsd.tokens
    late = 1 if shape == "sequence" else 5  # which branch is the likeliest has to be learned
    assert {record.source for record in fsd.records[late:]} == {"flight"}
    assert sum(record.bytes_down for record in fsd.records) == fsd.bytes_down
    if shape != "sequence":
        return
    assert fsd.miss_rate == 0.0
    # Each round went once, all but the first ahead of the outcome in front of it.
    assert [message.round for message in sent] == list(range(1, fsd.rounds + 1))
    assert [bool(message.assumed) for message in sent] == [False] + [True] * (fsd.rounds - 1)


class Meddling(LocalChannel):
    """Early outcomes get lost, doubled, late, out of order, or say something else."""

    def __init__(self, engine, seed: int) -> None:
        super().__init__(engine)
        self._fate = random.Random(seed)
        self._held: list[Outcome] = []

    def receive(self, timeout):
        if self._held and self._fate.random() < 0.3:
            return self._held.pop(self._fate.randrange(len(self._held)))
        message = super().receive(timeout)
        while isinstance(message, Outcome) and not message.is_final:
            fate = self._fate.randrange(5)
            if fate == 0:
                return message
            if fate == 1:
                self._held += [message, message]
            elif fate == 2:
                self._held.insert(0, message)
            elif fate == 3:
                values = {name: getattr(message, name) for name in message.__struct_fields__}
                values |= {
                    "accepted": self._fate.randrange(7),
                    "next_token": self._fate.randrange(1000),
                    "confidence": self._fate.random(),
                }
                return Outcome(**values)
            message = super().receive(timeout)
        return message


@pytest.mark.parametrize(("source", "depth", "temperature"), [("exits", 1, 0.0), ("both", 3, 1.0)])
def test_whatever_early_exits_say_the_reply_stays(speaking, draft, picture, plain, source, depth, temperature):
    with VerifierEngine(speaking, EVERY_EXIT) as engine:
        for seed in range(2):
            with Meddling(engine, seed) as channel:
                (reply,) = decode(
                    channel, draft, picture(seed), INSTRUCTIONS[seed % 3], mode="fsd",
                    temperature=temperature, predraft_source=source, pipeline_depth=depth,
                )  # fmt: skip
            assert reply.tokens == plain(seed, temperature) and not reply.worker_error


def test_a_target_without_exits_is_drafted_for_by_guesses(target, draft, picture):
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        chosen = DecodeSettings(mode="fsd", max_tokens=8)
        with EdgeSession(channel, draft, chosen) as session:
            assert session.verifier.exit_layers == []
            assert session.decode(picture(0), "go").exits == 0


TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
PATIENT = LinkSettings(response_timeout_s=0.05, attempts=60)


def over(channel, replies: int = 2, model=DRAFT, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(**({"mode": "dsd", "temperature": 1.0, "seed": 3, "max_tokens": 24} | values))
    with EdgeSession(channel, model, chosen, PATIENT) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


@pytest.fixture(scope="module")
def undisturbed():
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as channel:
        return [reply.tokens for reply in over(channel)]


class Failing(TableModel):
    """Fails whenever a worker thread asks."""

    def forward_tokens(self, *arguments):
        if threading.current_thread().name.startswith("predraft"):
            raise RuntimeError("no memory left")
        return super().forward_tokens(*arguments)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_that_fails_costs_no_token_and_is_reported(undisturbed, depth):
    failing = Failing(4, 12, ends=False, noise=0.6, padding=3)
    with VerifierEngine(TARGET) as engine, Unhurried(engine) as channel:
        chosen = DecodeSettings(mode="fsd", temperature=1.0, seed=3, max_tokens=24, pipeline_depth=depth)
        with EdgeSession(channel, failing, chosen) as session:
            channel.session = session
            replies = [session.decode(IMAGE, f"go {n}") for n in range(2)]
    assert [reply.tokens for reply in replies] == undisturbed
    for reply in replies:
        assert reply.worker_error == "a pre-draft failed: RuntimeError: no memory left"
        assert reply.worker_error in reply.summary() and reply.predrafts_used == 0


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("predraft")]


def test_threads_end_with_the_session_and_start_again_with_the_next_reply():
    before = len(workers())
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as channel:
        session = EdgeSession(channel, DRAFT, DecodeSettings(mode="fsd", predraft_workers=5))
        assert len(workers()) == before
        first = session.decode(IMAGE, "go").tokens
        assert len(workers()) == before + 5
        session.close()
        assert len(workers()) == before
        assert session.decode(IMAGE, "go").tokens == first
        session.close()
    assert len(workers()) == before


def test_nothing_is_kept_of_replies_that_are_over():
    def sequences() -> int:
        gc.collect()
        return sum(type(thing) is Sequence for thing in gc.get_objects())

    before = sequences()
    chosen = DecodeSettings(mode="fsd", max_tokens=16, pipeline_depth=2)
    with (
        VerifierEngine(TARGET) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, DRAFT, chosen) as session,
    ):
        for number in range(40):
            session.decode(IMAGE, f"go {number}")
            assert not session._decoder.proposer._levels and not session._link._early
        deadline = time.monotonic() + 20
        while sequences() > before + 1:  # the verifier's own; workers may be in their last pass
            assert time.monotonic() < deadline
            time.sleep(0.05)
