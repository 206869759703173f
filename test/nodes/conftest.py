from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from ros_rig import Rig  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Directories of a tiny target and of a draft that often, not always, agrees with it."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny_model(folder / "target", seed=5, vocab_rows=272)
    return target, make_tiny_model(folder / "draft", seed=5, noise=0.15)


@pytest.fixture
def rig(ros_domain, tmp_path):
    """A node of the test's own in a domain of its own, and the processes it starts."""
    with Rig(tmp_path) as made:
        yield made


@pytest.fixture
def without_shared_memory(monkeypatch):
    """For tests that freeze or kill a node.

    In a lock of its shared memory it would hold up each that writes to it, which is Fast DDS's matter and not the
    test's.
    """
    monkeypatch.setenv("FASTDDS_BUILTIN_TRANSPORTS", "UDPv4")
