# SPDX-License-Identifier: Apache-2.0
"""What each proof sends, and nothing that is not needed. Its tokens: test_reference.py; its bytes: docs/protocol.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from table_model import TableModel

import dsd_ros
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Draft, Outcome

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
SIZE = TARGET.vocab_size


class Watched(LocalChannel):
    """Keeps the drafts that went up, and the outcomes that came down."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.drafts: list[Draft] = []
        self.outcomes: list[Outcome] = []

    def send(self, message):
        if isinstance(message, Draft):
            self.drafts.append(message)
        super().send(message)

    def receive(self, timeout):
        message = super().receive(timeout)
        if isinstance(message, Outcome):
            self.outcomes.append(message)
        return message


def watched(**values) -> Watched:
    chosen = DecodeSettings(**({"mode": "dsd", "temperature": 1.0, "seed": 3, "max_tokens": 96} | values))
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        with EdgeSession(channel, DRAFT, chosen) as session:
            session.decode(IMAGE, "go")
        return channel


def test_ids_are_all_where_nothing_else_is_needed():
    for values in ({"mode": "coupled"}, *({"proof": p, "temperature": 0.0} for p in ("full", "split", "truncated"))):
        for draft in watched(**values).drafts:
            assert not (draft.evidence or draft.resampled or draft.parents)


@pytest.mark.parametrize("top_k", [0, 5])
def test_split_sends_12_bits_a_token_and_gets_a_row_where_one_is_rejected(top_k):
    channel = watched(mode="dssd", top_k=top_k)
    for draft in channel.drafts:
        assert len(draft.evidence) == -(-3 * len(draft.tokens) // 2)
    assert sum(bool(draft.resampled) for draft in channel.drafts) > 0
    row = 5 + (5 * 4 + 7) // 8 + 4 * 5 if top_k else 1 + 4 * SIZE
    for outcome in channel.outcomes:
        rejected = outcome.accepted < len(channel.drafts[outcome.round - 1].tokens)
        assert len(outcome.distribution) == (row if rejected else 0)


def test_truncated_sends_half_floats_and_packed_ids():
    for draft in watched(mode="tslt", top_k_proof=3).drafts:
        gamma = len(draft.tokens)
        # A count, 3 ids of 4 bits for a vocabulary of 15, 3 float16.
        assert len(draft.evidence) == (1 + gamma * (2 + 2 + 6) if gamma else 0)


def test_a_draft_that_no_message_could_hold_is_refused_at_once():
    wide = TableModel(4, 12, padding=200_000)
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as channel:
        chosen = DecodeSettings(temperature=1.0, draft_length=64, mode="dsd")
        with pytest.raises(ValueError, match="draft_length 64 is too long.* use 52 or less"):
            EdgeSession(channel, wide, chosen)
        EdgeSession(channel, wide, replace(chosen, draft_length=52))
        EdgeSession(channel, wide, replace(chosen, proof="coupled"))


ADDED = """
import numpy as np
from table_model import TableModel
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession, check_settings
from dsd_ros.wire.channel import LocalChannel

def reply(**values):
    settings = DecodeSettings(temperature=1.0, seed=3, max_tokens=48, **values)
    with VerifierEngine(TableModel(4, 12, ends=False)) as engine, LocalChannel(engine) as channel:
        with EdgeSession(channel, TableModel(4, 12, ends=False, noise=0.6, padding=3), settings) as session:
            return session.decode(np.zeros((2, 2, 3), np.uint8), "go").tokens

assert reply(mode="whole") == reply(mode="dsd")
wide = TableModel(4, 12, padding=200_000)
check_settings(DecodeSettings(mode="whole", temperature=1.0, draft_length=64), wide)  # it declares no rows to send
assert reply(mode="half") == reply(mode="dssd")
assert reply(mode="alike", shape="budget") == reply(mode="ar")
assert DecodeSettings(mode="alike", temperature=1.0).drawn_by == DecodeSettings(mode="ar", temperature=1.0).drawn_by
"""


def test_a_method_added_as_contributing_says_works_by_what_it_declares(tmp_path):
    methods = tmp_path / "dsd_ros" / "decoding" / "methods"
    shutil.copytree(Path(dsd_ros.__file__).parent, tmp_path / "dsd_ros", copy_function=os.symlink)
    for name, as_, declares in (
        ("whole", "full", ""),
        ("half", "split", "recovers=True"),
        ("alike", "coupled", "draws_alike=True"),
    ):
        shutil.copyfile(methods / f"{as_}.py", methods / f"{name}.py")
        imports, modes = methods / "__init__.py", methods.parent / "modes.py"
        add_before(imports, "from dsd_ros.decoding.methods ", f"from dsd_ros.decoding.methods import {name}")
        add_before(imports, "    Proof.FULL:", f"    Proof.{name.upper()}: {name},")
        add_before(modes, "    FULL =", f"    {name.upper()} = '{name}', Declared({declares})")
        add_before(modes, '        Mode("dsd"', f"        Mode('{name}', Proof.{name.upper()}, ''),")
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1] / "support")))
    run = subprocess.run(
        [sys.executable, "-c", ADDED], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def add_before(file: Path, before: str, line: str) -> None:
    text = file.read_text()
    file.unlink()  # it is a link to the original
    file.write_text(text.replace(before, f"{line}\n{before}", 1))
