# SPDX-License-Identifier: Apache-2.0
"""Bags of other recorders and robots, or damaged ones: read as far as they go, and what is missing is named."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest
from bag_maker import SECOND, make_bag, put, text_bag
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from mcap.writer import CompressionType, Writer
from nav_msgs.msg import Odometry

from dsd_ros.cli.main import main
from dsd_ros.edge.results import SpeculativeDecoding
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.report import summary
from dsd_ros.observe.bag.run import read_run
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.observe.ros.message_types import definition


def rewrite(bag, path: Path, change, compression=CompressionType.ZSTD) -> None:
    """A bag's messages as another program writes them; ``change`` gives (topic, data) for a message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = Writer(file, compression=compression)
        writer.start(profile="ros2", library="another")
        messages = list(bag.messages())
        texts = {kind: about.data.encode() for kind, about in bag.definitions.items()}
        kinds = {kind: writer.register_schema(kind, "ros2msg", text) for kind, text in texts.items()}
        channels: dict[str, int] = {}
        for record in messages:
            for topic, data in change(record):
                if topic not in channels:
                    channels[topic] = writer.register_channel(topic, "cdr", kinds[record.kind])
                writer.add_message(channels[topic], record.at, data, record.at)
        writer.finish()


@pytest.mark.parametrize("compression", [CompressionType.LZ4, CompressionType.NONE])
def test_every_compression_is_read(tmp_path, compression):
    bag = make_bag(tmp_path / "bag")
    rewrite(bag, tmp_path / "other.mcap", lambda record: [(record.topic, record.data)], compression)
    found = open_bag(tmp_path / "other.mcap")
    assert [bytes(one.data) for one in found.messages()] == [bytes(one.data) for one in bag.messages()]
    assert len(read_run(found).steps) == 2 and found.whole


def test_a_missing_file_is_named_and_the_others_are_read(tmp_path, capsys):
    sent = text_bag(tmp_path / "bag", 10)
    file = tmp_path / "bag" / "metadata.yaml"
    text = file.read_text()
    assert "- bag.mcap\n" in text
    file.write_text(text.replace("- bag.mcap\n", "- bag.mcap\n  - bag_1.mcap\n"))
    bag = open_bag(tmp_path / "bag")
    assert not bag.whole and "bag_1.mcap" in bag.notes[0]
    assert [record.data for record in bag.messages()] == sent
    assert main(["inspect", str(tmp_path / "bag")]) == 1
    assert "bag_1.mcap" in capsys.readouterr().out


def humble(bag, path: Path) -> None:
    """A database as Humble writes it: without definitions, and without a metadata table."""
    path.parent.mkdir()
    base = sqlite3.connect(path)
    base.executescript(
        "CREATE TABLE schema(schema_version INTEGER PRIMARY KEY, ros_distro TEXT NOT NULL);"
        "INSERT INTO schema VALUES(3, 'humble');"
        "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT NOT NULL, type TEXT NOT NULL,"
        " serialization_format TEXT NOT NULL, offered_qos_profiles TEXT NOT NULL);"
        "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER NOT NULL, timestamp INTEGER NOT NULL,"
        " data BLOB);"
    )
    numbers = {topic: number for number, topic in enumerate(bag.kinds, 1)}
    base.executemany(
        "INSERT INTO topics VALUES(?, ?, ?, 'cdr', '')", [(n, t, bag.kinds[t]) for t, n in numbers.items()]
    )
    rows = [(numbers[record.topic], record.at, record.data) for record in bag.messages()]
    base.executemany("INSERT INTO messages(topic_id, timestamp, data) VALUES(?, ?, ?)", rows)
    base.commit()
    base.close()


def test_a_bag_of_humble_is_read_with_the_types_of_this_installation(tmp_path):
    bag = make_bag(tmp_path / "bag")
    humble(bag, tmp_path / "humble" / "humble_0.db3")
    found = open_bag(tmp_path / "humble" / "humble_0.db3")
    run = read_run(found)
    assert len(run.steps) == 2 and found.whole
    assert any("does not define" in note for note in found.notes)


def test_what_another_robot_says_is_not_this_robots(tmp_path):
    writer = BagWriter(tmp_path / "bag", definition)
    for at, name in enumerate(("go2_1/navigation_node", "go2_2/navigation_node", "navigation_node"), 1):
        status = DiagnosticStatus(name=name, message=f"STUCK: it {name}")
        put(writer, "/diagnostics", at * SECOND, DiagnosticArray(status=[status]))
    writer.set_metadata("parameters", json.dumps({"/go2_2/draft_node": {"a": 2}, "/go2_1/draft_node": {"a": 1}}))
    for robot in ("/go2_1", "/go2_2"):
        put(writer, f"{robot}/odom", SECOND, Odometry())
    writer.close()
    for number in (1, 2):
        run = read_run(open_bag(tmp_path / "bag", f"go2_{number}"))
        assert [what for _, what in run.ends] == [f"STUCK: it go2_{number}/navigation_node"]
        assert run.parameters_of("draft_node") == {"a": number}


def test_a_second_robot_is_named_and_can_be_chosen(tmp_path, capsys):
    bag = make_bag(tmp_path / "bag")
    other = lambda record: [(record.topic, record.data), (record.topic.replace("go2_1", "go2_2"), record.data)]  # noqa: E731
    rewrite(bag, tmp_path / "two.mcap", other)
    found = open_bag(tmp_path / "two.mcap")
    assert found.namespace == "/go2_1" and any("left out: /go2_2" in note for note in found.notes)
    assert main(["inspect", str(tmp_path / "two.mcap"), "--namespace", "go2_2"]) == 0
    assert "2 replies" in capsys.readouterr().out
    with pytest.raises(BagError, match="holds no robot 'go2_3'; it holds /go2_1, /go2_2"):
        open_bag(tmp_path / "two.mcap", "go2_3")


@pytest.mark.parametrize("jump", [-60, -5, 56 * 365 * 86400])
def test_a_recorders_clock_that_is_set_is_a_note_and_changes_no_time(tmp_path, jump, capsys):
    bag = make_bag(tmp_path / "bag")
    records = list(bag.messages())
    writer = BagWriter(tmp_path / "set", definition)
    for place, one in enumerate(records):
        late = place >= len(records) - 4  # in the last reply
        writer.write(one.topic, one.kind, (), one.at + late * jump * SECOND, one.data)
    writer.close()
    expected, run = read_run(bag), read_run(open_bag(tmp_path / "set"))
    assert [one.data for one in run.bag.messages()] == [one.data for one in records]
    for step, other in zip(run.steps, expected.steps, strict=True):
        assert (step.text, step.instruction, step.executed) == (other.text, other.instruction, other.executed)
        assert step.at - run.began == pytest.approx(other.at - expected.began, abs=0.2 * SECOND)
    assert 0 < run.seconds <= expected.seconds and run.bag.whole
    assert main(["inspect", str(tmp_path / "set")]) == 0
    way = "back" if jump < 0 else "ahead"
    assert f"note: The recorder's clock jumped {way} by " in capsys.readouterr().out


def test_evil_metadata_runs_nothing_and_the_messages_are_read(tmp_path):
    sent = text_bag(tmp_path / "bag", 10)
    for content in ("[" * 100_000, f"!!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n"):
        (tmp_path / "bag" / "metadata.yaml").write_text(f"rosbag2_bagfile_information: {content}")
        bag = open_bag(tmp_path / "bag")
        assert [record.data for record in bag.messages()] == sent
        assert not bag.whole and "was not closed, or is damaged (" in bag.notes[0] and not (tmp_path / "made").exists()


def test_a_file_is_read_up_to_a_damaged_chunk(tmp_path):
    sent = text_bag(tmp_path / "bag", 600)
    file = tmp_path / "bag" / "bag.mcap"
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    content[at : at + 8] = bytes(8)
    file.write_bytes(bytes(content))
    bag = open_bag(tmp_path / "bag")
    found = [record.data for record in bag.messages()]
    assert not bag.whole and 0 < len(found) < 600 and found == sent[: len(found)]


def test_a_replay_of_an_odd_bag_ends_with_a_sentence(tmp_path, capsys):
    text_bag(tmp_path / "whole", 600)
    text_bag(tmp_path / "cut", 600)
    file = tmp_path / "cut" / "cut.mcap"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    os.mkfifo(tmp_path / "pipe.mcap")
    (tmp_path / "text.mcap").write_text("no bag")
    for name, sentence in (
        ("whole", "has nothing to replay. It has no complete reply. It has no messages on /"),
        ("cut", "was not closed"),
        ("pipe.mcap", "There is no bag"),
        ("text.mcap", "holds no message that can be read"),
    ):
        assert main(["replay", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert sentence in told and "Traceback" not in told, told


def test_a_bag_says_how_its_drafts_did_under_vllms_names(tmp_path):
    run = read_run(make_bag(tmp_path / "bag"))
    own = SpeculativeDecoding.of([2], [2], 2)
    assert own is not None and [step.stats["speculative_decoding"] for step in run.steps] == [asdict(own)] * 2
    whole = summary(run)["speculative_decoding"]
    assert whole == {
        "mean_acceptance_length": 3.0, "draft_acceptance_rate": 1.0, "acceptance_histogram": [0, 0, 2],
        "num_spec_steps": 2, "num_accepted_draft_tokens": 4, "num_draft_tokens": 4, "num_spec_tokens": 2,
    }  # fmt: skip
