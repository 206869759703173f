# SPDX-License-Identifier: Apache-2.0
"""tools/record_bags.py records the shipped bags and rejects incomplete ones."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import yaml

from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run

ROOT = Path(__file__).resolve().parents[2]
BAGS = ROOT / "test" / "bags"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("record_bags", ROOT / "tools" / "record_bags.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_records_the_bags_that_ship_and_would_take_them(tool) -> None:
    assert set(tool.RUNS) == {path.name for path in BAGS.iterdir() if path.is_dir()}
    for name in tool.RUNS:
        assert tool.missing(name, BAGS / name) == ""


def test_a_bag_without_its_fault_or_its_end_is_not_taken(tool, tmp_path) -> None:
    assert "link" in tool.missing("faults", BAGS / "straight")
    assert tool.missing("straight", tmp_path / "none") == "no bag was written"
    shutil.copytree(BAGS / "straight", tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.mcap")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.6)])
    assert tool.missing("straight", tmp_path / "cut") != ""


def test_the_settings_it_changes_are_there_once(tool, tmp_path) -> None:
    for file, old, new in (tool.SPARE, *tool.PATIENT):
        shutil.copy(ROOT / "config" / file, tmp_path)
        tool.replace_in(tmp_path / file, old, new)
        assert (tmp_path / file).read_text().count(new) == 1
        with pytest.raises(SystemExit, match="0 times, not once"):
            tool.replace_in(tmp_path / file, old, new)


def test_a_trimmed_bag_begins_with_the_run_and_what_is_latched(tool, tmp_path):
    tool.trim(BAGS / "straight", tmp_path / "straight")
    bag, whole = open_bag(tmp_path / "straight"), open_bag(BAGS / "straight")
    instruction = next(record.at for record in whole.messages([whole.topic("dsd/instruction")]))
    times = [record.at for record in bag.messages()]
    assert times == sorted(times) and times[0] == instruction - tool.TRIM_NS
    assert bag.custom == whole.custom and bag.counts[bag.topic("ground_truth/collisions")] == 1
    assert [step.tokens for step in read_run(bag).steps] == [step.tokens for step in read_run(whole).steps]
    late = sorted((record.at, record.topic, record.data) for record in whole.messages() if record.at >= times[0])
    assert sorted((record.at, record.topic, record.data) for record in bag.messages())[-len(late) :] == late
    information = [yaml.safe_load((place / "straight" / "metadata.yaml").read_text()) for place in (tmp_path, BAGS)]
    profiles = [
        {t["topic_metadata"]["name"]: t["topic_metadata"]["offered_qos_profiles"] for t in topics}
        for each in information
        for topics in [each["rosbag2_bagfile_information"]["topics_with_message_count"]]
    ]
    assert profiles[0].items() <= profiles[1].items()
