# SPDX-License-Identifier: Apache-2.0
"""Early outcomes and rounds sent ahead change no final outcome, even if lost or reordered."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from by_hand import Robot
from hypothesis import given, settings as profile, strategies as st
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.packing import pack_distributions
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample, transform
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.messages import Outcome, Refusal, RefusalCode, prefix_digest
from dsd_ros.wire.pictures import encode_picture

GAMMA, ROUNDS, SEED = 3, 7, 11
IMAGE = np.random.default_rng(3).integers(0, 256, (56, 56, 3), dtype=np.uint8)
PICTURE = {"image": encode_picture(IMAGE), "height": 56, "width": 56}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = make_tiny_model(tmp_path_factory.mktemp("exits") / "target", seed=5, layers=4)
    model = load_model(ModelSettings(str(directory)))
    model.exits = ExitAdapters.untrained(model)
    return model


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exits") / "draft"
    options = dict(layers=4, noise=0.04, vocab_rows=320)
    return load_model(ModelSettings(str(make_tiny_model(directory, 5, **options))))


@pytest.fixture(scope="module")
def engine(target):
    with VerifierEngine(target, EngineSettings(exit_share=1.0)) as engine:
        yield engine


class Player:
    """Decodes one reply by hand: ``ahead`` sends each next round before the outcome is known."""

    def __init__(self, engine, drafter, temperature: float, **asked) -> None:
        self.robot = Robot(engine)
        self.settings = SamplingSettings(temperature)
        said = self.robot.open(temperature=temperature, seed=SEED, vocab_size=drafter.vocab_size, mode="fsd", **asked)
        assert said.error == ""
        self.drafter = drafter
        self.tokens: list[int] = []
        self.early: dict[int, list[Outcome]] = {}
        self.refusals: list[Refusal] = []

    def drafted(self, prefix: list[int], number: int):
        """Tokens and packed q of round ``number`` after ``prefix``, and a guess of what follows them."""
        sequence = self.drafter.prefill(IMAGE, "go")
        sequence.append(prefix)
        generator = generator_for("draft", SEED, 1, number)
        rows = []
        for _ in range(GAMMA):
            rows.append(transform(sequence.next_logits(), self.settings))
            sequence.append([sample(rows[-1], generator)])
        guess = int(sequence.next_logits().argmax())
        q = b"" if self.settings.greedy else pack_distributions(torch.stack(rows))
        return sequence.tokens[len(prefix) :], q, guess

    def send(self, prefix, number, tokens, q, assumed=b"", **rest) -> None:
        self.robot.draft(number, len(prefix), tokens, evidence=q, assumed=assumed, **rest)

    def wait(self, number: int) -> Outcome:
        while True:
            message = self.robot.get()
            if isinstance(message, Refusal):
                assert message.code == RefusalCode.ASSUMPTION_FAILED
                self.refusals.append(message)
            elif not message.is_final:
                assert message.layer < 4
                self.early.setdefault(message.round, []).append(message)
            elif message.round == number:
                return message

    def play(self, misfortune=None) -> list[Outcome]:
        """The final outcomes. ``misfortune(player, prefix, number, tokens, q)`` follows each draft out."""
        self.robot.observe(**PICTURE)
        finals = []
        for number in range(1, ROUNDS + 1):
            tokens, q, _ = self.drafted(self.tokens, number)
            self.send(self.tokens, number, tokens, q)
            if misfortune is not None:
                misfortune(self, self.tokens, number, tokens, q)
            final = self.wait(number)
            finals.append(final)
            self.tokens += [*tokens[: final.accepted], final.next_token]
        return finals


def verdicts(finals: list[Outcome]) -> list[tuple[int, int]]:
    return [(o.accepted, o.next_token) for o in finals]


@pytest.fixture(scope="module")
def undisturbed(engine, drafter):
    return {temperature: verdicts(Player(engine, drafter, temperature).play()) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_that_sees_what_the_final_layer_sees_predicts_it(engine, target, drafter, temperature):
    """Untrained adapters after layers that change nothing: every exit draws as the final layer will."""
    held = target._language.layers
    target._language.layers = torch.nn.ModuleList([held[0], *(Same() for _ in held[1:])])
    try:
        player = Player(engine, drafter, temperature, exits=True, exit_layers=[1])
        finals = player.play()
        for final in finals:
            (early,) = player.early[final.round]
            assert (early.accepted, early.next_token) == (final.accepted, final.next_token)
            assert early.confidence == pytest.approx(final.confidence, abs=1e-5)
    finally:
        target._language.layers = held


class Same(torch.nn.Module):
    def forward(self, hidden, **_):
        return hidden


@given(seed=st.integers(0, 1 << 30), temperature=st.sampled_from([0.0, 1.0]))
@profile(max_examples=12)
def test_whatever_is_sent_ahead_doubled_or_late(engine, drafter, undisturbed, seed, temperature):
    chance = random.Random(seed)
    sent: list[tuple] = []

    def misfortune(player, prefix, number, tokens, q):
        sent.append((list(prefix), number, tokens, q, b""))
        for _ in range(chance.randrange(4)):
            what = chance.choice(["double", "guess", "far", "late", "nonsense"])
            if what == "double":
                player.send(prefix, number, tokens, q)
            elif what == "late":
                player.send(*chance.choice(sent))
            elif what == "nonsense":
                digest = chance.randbytes(chance.choice([1, 8]))
                player.send(prefix, number + chance.randrange(3), tokens, q, digest)
            else:
                assumed, ahead = list(prefix), number
                for _ in range(1 if what == "guess" else 2):
                    more, _, guess = player.drafted(assumed, ahead)
                    assumed += [*more, guess]
                    ahead += 1
                draft = (assumed, ahead, *player.drafted(assumed, ahead)[:2], prefix_digest(assumed))
                player.send(*draft)
                sent.append(draft)

    player = Player(engine, drafter, temperature, exits=chance.random() < 0.5)
    assert verdicts(player.play(misfortune)) == undisturbed[temperature]
    player.send([], 0, [], b"", bytes(8))
    while not (isinstance(last := player.robot.get(), Refusal) and last.round == 0):
        pass  # turns are taken in order: now nothing waits any more
    session = engine._sessions.find(player.robot.session, player.robot.peer)
    # What failed has left nothing in the cache or in the record.
    sequence = session.reply.sequence
    # A round sent ahead of the last one may have been verified as well.
    done = len(session.reply.outcomes)
    assert done >= ROUNDS and sequence.tokens[: len(player.tokens)] == player.tokens
    assert sequence._cache.length <= sequence.prompt_length + len(sequence.tokens)
    assert len(sequence.tokens) == sum(o.accepted + 1 for o in session.reply.outcomes)
