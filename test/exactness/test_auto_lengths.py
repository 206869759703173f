# SPDX-License-Identifier: Apache-2.0
"""Automatic lengths and trees change no token and no distribution of tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from joint import ALPHA, IMAGE as PIXEL, INSTRUCTION, LENGTH, PER_REPLY, count, p_value
from simulated_rounds import Probing
from table_model import TableModel, joint_distribution

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.proposer import Plan
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession, tuner_for
from dsd_ros.edge.strategies import ALONE, BATCH, IN_FLIGHT, IN_TURN, strategy_of
from dsd_ros.edge.tuner import Tuner
from dsd_ros.wire.channel import LocalChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
MODES = ({"mode": "dsd"}, {"mode": "auto"}, {"mode": "fsd", "pipeline_depth": 3, "predraft_batch": 4})


def decode(engine, replies: int = 2, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(**({"seed": 3, "max_tokens": 50, "draft_length": 0} | values))
    with LocalChannel(engine) as channel, EdgeSession(channel, DRAFT, chosen) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


@pytest.mark.parametrize("shape", ["sequence", "budget", "expansion"])
@pytest.mark.parametrize("sampling", [{}, {"proof": "coupled", "temperature": 0.8, "top_k": 6}])
def test_tokens_are_the_targets(shape, sampling):
    with VerifierEngine(TARGET) as engine:
        wanted = [reply.tokens for reply in decode(engine, mode="ar", **sampling)]
        for values in MODES:
            if values["mode"] == "auto" and shape == "expansion":
                continue  # refused
            replies = decode(engine, shape=shape, **sampling, **values)
            assert [reply.tokens for reply in replies] == wanted, values
            assert not any(reply.worker_error for reply in replies)
            records = [record for reply in replies for record in reply.records]
            assert all(record.depth <= record.length for record in records)
            if shape == "expansion":
                assert {record.length for record in records} == {3}
                continue
            assert len({record.length for record in records}) > 1
            for reply in replies:
                lengths = [record.length for record in reply.records]
                assert reply.draft_length == sum(lengths) / len(lengths)
            if shape == "budget":
                assert all(record.drafted <= record.budget for record in records)
                assert len({record.budget for record in records}) > 1


class Restless(Tuner):
    """Its choice leans on the past as hard as can be: on the outcome of the last round it knows."""

    def learn(self, plan, record, ranks=()):
        super().learn(plan, record, ranks)
        self._choice = Plan(1 if record.accepted == record.drafted else 5, strategy=plan.strategy)


@pytest.mark.parametrize("strategy", [IN_TURN, BATCH, IN_FLIGHT], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "coupled"])
def test_drafts_go_on_after_rounds_that_the_target_decodes_alone(strategy, sampling):
    with VerifierEngine(TARGET) as engine:
        wanted = [reply.tokens for reply in decode(engine, 4, mode="ar", proof="coupled", **sampling)]
        chosen = DecodeSettings(mode="auto", seed=3, max_tokens=50, **sampling)
        tuner = Probing([strategy, ALONE])
        with LocalChannel(engine) as channel, EdgeSession(channel, DRAFT, chosen, tuner=tuner) as session:
            replies = [session.decode(IMAGE, f"go {n}") for n in range(4)]
    assert [reply.tokens for reply in replies] == wanted
    names = [record.strategy for reply in replies for record in reply.records]
    assert ("alone", strategy.name) in itertools.pairwise(names)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"mode": "dsd"}, Restless),
        pytest.param({"mode": "fsd", "predraft_workers": 2}, Restless, marks=pytest.mark.slow),
        pytest.param({"mode": "dssd"}, Restless, marks=pytest.mark.slow),
        pytest.param({"mode": "dsd"}, None, marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_are_the_targets(values, kind):
    target = TableModel(2, ends=False, period=LENGTH)
    draft = TableModel(2, ends=False, period=LENGTH, noise=0.7, padding=4)
    chosen = DecodeSettings(draft_length=0, temperature=1.0, seed=7, max_tokens=LENGTH * PER_REPLY, **values)
    tuner = kind([strategy_of(chosen)]) if kind else None
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen, tuner=tuner) as session,
    ):
        counts = count(session, 8, 2_000)
    wanted = joint_distribution(target, PIXEL, INSTRUCTION, chosen.sampling, LENGTH)
    assert p_value(counts, wanted) > ALPHA


def test_what_was_learned_can_be_handed_to_the_next_session():
    chosen = DecodeSettings(mode="dsd", draft_length=0, max_tokens=50)
    tuner = tuner_for(chosen, DRAFT.vocab_size)
    lengths = []
    with VerifierEngine(TARGET) as engine:
        for _ in range(2):
            with LocalChannel(engine) as channel, EdgeSession(channel, DRAFT, chosen, tuner=tuner) as session:
                records = session.decode(IMAGE, "go").records
            lengths.append([record.length for record in records])
    assert lengths[0][0] == 4
    assert tuner.way.times.known > len(lengths[0])
    assert tuner_for(DecodeSettings(mode="dsd"), DRAFT.vocab_size) is None
    assert tuner_for(DecodeSettings(draft_length=0, mode="mc-dsd"), DRAFT.vocab_size) is None


def test_no_longer_drafts_are_chosen_than_a_message_holds():
    chosen = DecodeSettings(mode="dsd", draft_length=0, temperature=1.0)
    tuner = tuner_for(chosen, 1 << 20)
    assert tuner.way.longest == 10
    assert tuner.choice == Plan(4)
