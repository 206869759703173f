# SPDX-License-Identifier: Apache-2.0
"""Every room has a README, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from every import every

SOURCE = Path(__file__).resolve().parents[2] / "src"
ROOMS = sorted(path.parent for package in ("dsd_ros", "dsd_lab") for path in (SOURCE / package).glob("*/__init__.py"))
PAGES = sorted(page for package in ("dsd_ros", "dsd_lab") for page in (SOURCE / package).rglob("README.md"))


@every(ROOMS)
def test_every_room_has_a_readme(room: Path) -> None:
    assert (room / "README.md").is_file()


@every(PAGES)
def test_files_and_folders_that_a_readme_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert (page.parent / name).is_file() or (SOURCE.parent / name).is_file(), f"{page} names {name}"
    for name in re.findall(r"`(test/[\w/]+)/`", text):
        assert (SOURCE.parent / name).is_dir(), f"{page} names {name}"


def test_what_tests_share_is_listed_and_used() -> None:
    support = SOURCE.parent / "test" / "support"
    there = {path.name for path in support.glob("*.py")}
    listed = re.findall(r"^\| `(\w+\.py)` \|", (support / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(there)
    texts = {path: path.read_text(encoding="utf-8") for path in (SOURCE.parent / "test").rglob("*.py")}
    for name in there:
        used = re.compile(rf"(from|import) {name[:-3]}\b|\b{name[:-3]}\.py\b|import_module\(.{name[:-3]}")
        assert any(used.search(text) for path, text in texts.items() if path.name != name), name
