# SPDX-License-Identifier: Apache-2.0
"""Every room has a README, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
ROOMS = sorted(path.parent for package in ("dsd_ros", "dsd_lab") for path in (SOURCE / package).glob("*/__init__.py"))
PAGES = sorted(page for package in ("dsd_ros", "dsd_lab") for page in (SOURCE / package).rglob("README.md"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: f"{room.parent.name}.{room.name}")
def test_every_room_has_a_readme(room: Path) -> None:
    assert (room / "README.md").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(SOURCE)))
def test_files_and_folders_that_a_readme_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert (page.parent / name).is_file() or (SOURCE.parent / name).is_file(), f"{page} names {name}"
    for name in re.findall(r"`(test/[\w/]+)/`", text):
        assert (SOURCE.parent / name).is_dir(), f"{page} names {name}"
