# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.ros import link_keeper
from dsd_ros.ros.link_keeper import FIRST_WAIT_S, LONGEST_WAIT_S, LinkKeeper
from dsd_ros.ros.settings import BridgeNodeSettings, DraftNodeSettings
from dsd_ros.wire.channel import Backoff, LinkClosed
from dsd_ros.wire.client import DecodeCancelled

WAIT_S = 20.0


class Link:
    """Fails as scripted, and records what the keeper does."""

    def __init__(self, monkeypatch, *attempts: Exception | None) -> None:
        monkeypatch.setattr(link_keeper, "FIRST_WAIT_S", 0.001)
        self.attempts = list(attempts)
        self.failures: list[str] = []
        self.found = threading.Event()
        self.tried = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.keeper = LinkKeeper(self.reconnect, self.found.set, lambda error: self.failures.append(str(error)))

    def reconnect(self) -> None:
        self.tried.release()
        assert self.go_on.wait(WAIT_S)
        failure = self.attempts.pop(0) if self.attempts else None
        if failure is not None:
            raise failure


@pytest.fixture
def link(monkeypatch):
    made = []

    def make(*attempts):
        made.append(Link(monkeypatch, *attempts))
        return made[-1]

    yield make
    for one in made:
        one.go_on.set()
        one.keeper.close(WAIT_S)
        assert not one.keeper._thread.is_alive()


def test_it_tries_until_it_works_whatever_is_raised(link):
    one = link(LinkClosed("no network"), DecodeCancelled(), RuntimeError("a defect"), LinkClosed("x"))
    assert not one.keeper.down
    one.keeper.lost()
    assert one.found.wait(WAIT_S)
    assert one.failures == ["no network", "the session cannot be restored: RuntimeError('a defect')", "x"]
    assert not one.keeper.down
    # The next loss is repaired, too.
    one.found.clear()
    one.keeper.lost()
    assert one.found.wait(WAIT_S)


def test_a_link_found_meanwhile_is_not_reported(link):
    one = link(LinkClosed("no network"))
    one.go_on.clear()
    one.keeper.lost()
    assert one.tried.acquire(timeout=WAIT_S)
    one.keeper.found()  # by a decode
    one.go_on.set()
    one.keeper.close(WAIT_S)
    assert not one.failures and not one.found.is_set()


def test_a_loss_during_an_attempt_starts_another(link):
    one = link()
    one.go_on.clear()
    one.keeper.lost()
    assert one.tried.acquire(timeout=WAIT_S)
    one.keeper.lost()
    one.go_on.set()
    assert one.found.wait(WAIT_S)
    assert one.tried.acquire(timeout=WAIT_S)


def test_nothing_is_tried_before_a_loss_nor_after_the_end(link):
    one = link()
    one.keeper.close(WAIT_S)
    one.keeper.lost()
    assert not one.tried.acquire(timeout=0.05)


def test_the_page_on_links_names_the_defaults():
    page = (Path(__file__).parents[2] / "docs" / "safety.md").read_text(encoding="utf-8")
    for settings in (LinkSettings, DraftNodeSettings, EngineSettings):
        for name in ("response_timeout_s", "link_patience_s", "image_timeout_s", "session_expiry_s"):
            if hasattr(settings(), name):
                assert f"{name}`, {getattr(settings(), name):g} s" in page, name
    assert f"`link.attempts` ({LinkSettings().attempts})" in page
    assert f"{1000 * Backoff().first:g} ms (within a decode)" in page
    assert f"{FIRST_WAIT_S:g} s (the draft node in the background)" in page
    assert Backoff().longest == LONGEST_WAIT_S == BridgeNodeSettings().longest_wait_s
    assert f"up to {LONGEST_WAIT_S:g} s (`longest_wait_s`" in page
