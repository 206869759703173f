# SPDX-License-Identifier: Apache-2.0
"""Bags of other recorders and robots, damaged or hostile: read as far as they go, and what is missing is named."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import sqlite3
import struct
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
import zstandard
from bag_maker import SECOND, Maker, make_bag, text_bag
from mcap.writer import CompressionType, Writer

from dsd_ros.cli.main import main
from dsd_ros.edge.results import SpeculativeDecoding
from dsd_ros.observe.bag.reader import open_bag, repair
from dsd_ros.observe.bag.replay_tokens import _path
from dsd_ros.observe.bag.report import summary
from dsd_ros.observe.bag.run import read_run
from dsd_ros.observe.bag.storage import BagError
from dsd_ros.observe.bag.writer import BagWriter, RecordError
from dsd_ros.observe.ros.message_types import definition

MAGIC = b"\x89MCAP0\r\n"


def framed(opcode: int, body: bytes) -> bytes:
    return bytes([opcode]) + struct.pack("<Q", len(body)) + body


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


HEAD = MAGIC + framed(1, text("ros2") + text("x"))
OPENING = (
    HEAD
    + framed(3, struct.pack("<H", 1) + text("std_msgs/msg/String") + text("ros2msg") + text("string data\n"))
    + framed(4, struct.pack("<HH", 1, 1) + text("/words") + text("cdr") + struct.pack("<I", 0))
)


def chunk(packed: bytes, size: int) -> bytes:
    return framed(6, struct.pack("<QQQI", 0, 1, size, 0) + text("zstd") + struct.pack("<Q", len(packed)) + packed)


def zeros(size: int) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    parts = [packer.compress(bytes(min(1 << 24, size - at))) for at in range(0, size, 1 << 24)]
    return b"".join([*parts, packer.flush()])


def rewrite(bag, path: Path, change, pack=bytes, **options) -> None:
    """A bag's messages as another program writes them; ``change`` gives (topic, data) for a message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = Writer(file, **options)
        writer.start(profile="ros2", library="another")
        kinds = {kind: writer.register_schema(kind, f"ros2{f}", t.encode()) for kind, (f, t) in bag.definitions.items()}
        channels: dict[str, int] = {}
        for record in bag.messages():
            for topic, data in change(record):
                if topic not in channels:
                    channels[topic] = writer.register_channel(topic, "cdr", kinds[record.kind])
                writer.add_message(channels[topic], record.at, pack(data), record.at)
        notes = writer.register_channel("/notes", "json", writer.register_schema("note", "jsonschema", b"{}"))
        writer.add_message(notes, SECOND, b'{"a": 1}', SECOND)
        writer.finish()


def same(record):
    return [(record.topic, record.data)]


def metadata(folder: Path, **about) -> None:
    (folder / "metadata.yaml").write_text(yaml.safe_dump({"rosbag2_bagfile_information": about}))


@pytest.mark.parametrize("compression", [CompressionType.LZ4, CompressionType.ZSTD, CompressionType.NONE])
@pytest.mark.parametrize("packed", ["", "message", "file"])
def test_every_compression_is_read_and_json_is_left_out(tmp_path, compression, packed):
    bag = make_bag(tmp_path / "bag")
    pack = zstandard.ZstdCompressor().compress if packed == "message" else bytes
    file = tmp_path / "other" / "other_0.mcap"
    rewrite(bag, file, same, pack, compression=compression)
    if packed == "file":
        file.with_name(file.name + ".zstd").write_bytes(zstandard.ZstdCompressor().compress(file.read_bytes()))
        file.unlink()
    found = open_bag(tmp_path / "other")
    assert [record.data for record in found.messages()] == [record.data for record in bag.messages()]
    assert [step.tokens for step in read_run(found).steps] == [[4, 5, 6], [4, 5, 6]]
    assert found.whole and any("left out: 1 on /notes (json)" in note for note in found.notes)
    assert repair(found, tmp_path / "whole") == sum(found.counts.values())
    assert main(["inspect", str(tmp_path / "other")]) == 0


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_file_of_a_split_bag_is_named(tmp_path, capsys, gone, listed):
    text_bag(tmp_path / "bag", 3000, file_bytes=20_000)
    if not listed:
        (tmp_path / "bag" / "metadata.yaml").unlink()
    (tmp_path / "bag" / f"bag_{gone}.mcap").unlink()
    bag = open_bag(tmp_path / "bag")
    assert not bag.whole and f"Files of the bag are missing, with all messages in them: bag_{gone}.mcap." in bag.notes
    assert main(["inspect", str(tmp_path / "bag")]) == 1
    assert f"bag_{gone}.mcap" in capsys.readouterr().out


def test_messages_that_metadata_counts_are_missed(tmp_path):
    text_bag(tmp_path / "bag", 10)
    metadata(tmp_path / "bag", message_count=11, relative_file_paths=["bag_0.mcap"])
    bag = open_bag(tmp_path / "bag")
    assert not bag.whole and "metadata.yaml counts 11 messages, and 10 can be read." in bag.notes


def test_a_converted_copy_beside_the_bag_is_not_read_twice(tmp_path):
    sent = text_bag(tmp_path / "bag", 10)
    file = tmp_path / "bag" / "bag_0.mcap"
    file.with_name(file.name + ".zstd").write_bytes(zstandard.ZstdCompressor().compress(file.read_bytes()))
    text_bag(tmp_path / "copy", 10, "sqlite3")
    shutil.copy(tmp_path / "copy" / "copy_0.db3", tmp_path / "bag" / "bag_0.db3")
    os.mkfifo(tmp_path / "bag" / "bag_1.mcap")
    bag = open_bag(tmp_path / "bag")
    assert [record.data for record in bag.messages()] == sent and "left out: bag_0.db3" in bag.notes[0]


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
    found = open_bag(tmp_path / "humble")
    run = read_run(found)
    assert [step.tokens for step in run.steps] == [[4, 5, 6], [4, 5, 6]] and found.whole
    assert any("does not define" in note for note in found.notes)
    assert repair(found, tmp_path / "whole") == sum(found.counts.values())


def test_a_database_in_wal_mode_is_read_where_nothing_can_be_written(tmp_path):
    sent = text_bag(tmp_path / "bag", 50, "sqlite3")
    base = sqlite3.connect(tmp_path / "bag" / "bag_0.db3")
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("PRAGMA wal_autocheckpoint=0")
    base.execute("INSERT INTO messages(topic_id, timestamp, data) SELECT topic_id, timestamp + 1, data FROM messages")
    base.commit()
    shutil.copytree(tmp_path / "bag", tmp_path / "killed")  # with what stands in the -wal file alone
    base.close()
    for name, count in (("bag", 100), ("killed", 100)):
        before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / name).iterdir()}
        found = open_bag(tmp_path / name)
        assert len(list(found.messages())) == count == 2 * len(sent)
        assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / name).iterdir()} == before


def diagnostics(name: str, message: str) -> bytes:
    maker, kind = Maker(), "diagnostic_msgs/msg/DiagnosticArray"
    maker.make(kind)
    status = maker.make("diagnostic_msgs/msg/DiagnosticStatus", name=name, message=message)
    return maker.cdr(kind, maker.make(kind, header=maker.header(0), status=[status]))


def test_what_another_robot_says_is_not_this_robots(tmp_path):
    kind = "diagnostic_msgs/msg/DiagnosticArray"
    writer = BagWriter(tmp_path / "bag", definition)
    for at, (name, message) in enumerate(
        itertools.product(("go2_1/navigation_node", "go2_2/navigation_node", "navigation_node"), ("idle", "STUCK: it")),
        1,
    ):
        writer.write("/diagnostics", kind, (), at * SECOND, diagnostics(name, f"{message} {name}"))
    writer.set_metadata("parameters", json.dumps({"/go2_2/draft_node": {"a": 2}, "/go2_1/draft_node": {"a": 1}}))
    maker, odom = Maker(), "nav_msgs/msg/Odometry"
    for robot in ("/go2_1", "/go2_2"):
        writer.write(f"{robot}/odom", odom, (), SECOND, maker.cdr(odom, maker.make(odom)))
    writer.close()
    for number in (1, 2):
        run = read_run(open_bag(tmp_path / "bag", f"go2_{number}"))
        assert [what for _, what in run.ends] == [f"STUCK: it go2_{number}/navigation_node"]
        assert run.parameters_of("draft_node") == {"a": number}


def test_a_second_robot_is_named_and_can_be_chosen(tmp_path, capsys):
    bag = make_bag(tmp_path / "bag")
    other = lambda record: [(record.topic, record.data), (record.topic.replace("go2_1", "go2_2"), record.data)]  # noqa: E731
    rewrite(bag, tmp_path / "two" / "two_0.mcap", other)
    found = open_bag(tmp_path / "two")
    assert found.namespace == "/go2_1" and any("left out: /go2_2" in note for note in found.notes)
    assert main(["inspect", str(tmp_path / "two"), "--namespace", "go2_2"]) == 0
    assert "2 replies" in capsys.readouterr().out
    with pytest.raises(BagError, match="holds no robot 'go2_3'; it holds /go2_1, /go2_2"):
        open_bag(tmp_path / "two", "go2_3")


BOMBS = (
    "chunk.mcap", "liar.mcap", "many.mcap", "record.mcap", "string.mcap", "packed.mcap.zstd", "view.db3", "topics.db3",
    "computed.db3",
)  # fmt: skip


def bombs(folder: Path) -> dict[str, Path]:
    message = framed(5, struct.pack("<HIQQ", 1, 0, 5, 5))
    many = chunk(zstandard.ZstdCompressor().compress(message * 1_100_000), len(message) * 1_100_000)
    files = {
        "chunk.mcap": HEAD + chunk(zeros(1 << 20), 4 << 30),
        "liar.mcap": HEAD + chunk(zeros(512 << 20), 1000),
        "many.mcap": OPENING + many,
        "record.mcap": HEAD + bytes([5]) + struct.pack("<Q", 1 << 60),
        "string.mcap": HEAD + framed(3, struct.pack("<HI", 1, 0xFFFFFFFF) + b"x"),
        "packed.mcap.zstd": zeros(512 << 20),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    topics = (
        "CREATE TABLE topics(id, name, type, serialization_format);"
        "INSERT INTO topics VALUES(1, '/odom', 'a/msg/B', 'cdr');"
    )
    endless = (
        "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id, 1 AS topic_id, id AS timestamp"
    )
    for name, script in {
        "view.db3": f"CREATE VIEW messages AS {endless}, zeroblob(1000) AS data FROM c;",
        "topics.db3": "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, data);"
        "DROP TABLE topics; CREATE VIEW topics AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c)"
        " SELECT id, 'n' AS name, 't' AS type, 'cdr' AS serialization_format FROM c;",
        "computed.db3": "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp,"
        " data GENERATED ALWAYS AS (zeroblob(900000000))); INSERT INTO messages(topic_id, timestamp) VALUES(1, 1);",
    }.items():
        base = sqlite3.connect(folder / name)
        base.executescript(topics + script)
        base.close()
    return {path.name: path for path in folder.iterdir()}


def test_bombs_are_refused_before_they_take_memory(tmp_path):
    found = bombs(tmp_path)
    assert set(found) == set(BOMBS)
    for name, path in found.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is in use now
        before = peak_memory()
        try:
            bag = open_bag(path)
            assert not bag.whole and "more than its size justifies" in " ".join(bag.notes), name
        except BagError as error:
            assert name in str(error)
        assert peak_memory() - before < 300 << 20, name


def peak_memory() -> int:
    """Bytes of this process at most, since clear_refs."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_memory_taken_and_given_back_is_noticed():
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    bytearray(b"x") * (301 << 20)
    assert peak_memory() - before > 300 << 20


@pytest.mark.parametrize(
    "content",
    [
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
        + "rosbag2_bagfile_information: {custom_data: {x: *a11}, relative_file_paths: *a11}\n",
        "rosbag2_bagfile_information: " + "[" * 100_000,
        "rosbag2_bagfile_information: !!python/object/apply:os.system ['true']\n",
        "rosbag2_bagfile_information: {message_count: " + "9" * 5000 + "}\n",
        "x" * (5 << 20),
        "[]",
    ],
)  # fmt: skip
def test_evil_metadata_is_named_and_the_messages_are_read(tmp_path, content):
    sent = text_bag(tmp_path / "bag", 10)
    (tmp_path / "bag" / "metadata.yaml").write_text(content)
    bag = open_bag(tmp_path / "bag")
    assert [record.data for record in bag.messages()] == sent
    assert not bag.whole and bag.notes[0].startswith("metadata.yaml cannot be read (")


@pytest.mark.parametrize("array", ["Nothing[4000000000] x", "Nothing[] x", "uint8[0] x", "Odd[2] x"])
def test_a_definition_cannot_make_a_message_endless(tmp_path, array):
    kind = "odd_msgs/msg/Odd"
    evil = f"{array}\n{'=' * 80}\nMSG: odd_msgs/Nothing\nuint8[0] y\n"
    writer = BagWriter(tmp_path / "bag", lambda _: (evil, ""))
    writer.write("/odom", kind, (), SECOND, b"\0\1\0\0" + b"\xff" * 8)
    writer.close()
    bag = open_bag(tmp_path / "bag")
    assert read_run(bag).path == [] and not bag.whole


def test_a_draft_whose_tree_is_a_circle_has_no_path():
    draft = type("Draft", (), {"tokens": [5, 6], "parents": [2, 1]})
    assert _path(draft, 2) is None
    draft.parents = [0, 1]
    assert _path(draft, 2) == [5, 6]


def test_a_damaged_chunk_is_left_out_and_the_rest_is_read(tmp_path):
    sent = text_bag(tmp_path / "bag", 600)
    file = tmp_path / "bag" / "bag_0.mcap"
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    content[at : at + 8] = bytes(8)
    file.write_bytes(bytes(content))
    bag = open_bag(tmp_path / "bag")
    found = [record.data for record in bag.messages()]
    assert not bag.whole and set(found) < set(sent) and found[-1] == sent[-1]


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_a_disk_that_is_full_from_the_start_is_named_and_leaves_nothing(tmp_path, monkeypatch, storage):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RecordError, match=r"cannot be created: the disk is full \(ENOSPC\)"):
        BagWriter(tmp_path / "bag", definition, storage)
    assert not (tmp_path / "bag").exists()


def test_a_full_disk_under_the_metadata_ends_the_bag_by_name(tmp_path, monkeypatch):
    writer = BagWriter(tmp_path / "bag", definition)
    maker, kind = Maker(), "std_msgs/msg/String"
    data = maker.cdr(kind, maker.make(kind, data="word"))
    writer.write("/words", kind, (), SECOND, data)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(RecordError, match=r"any further: the disk is full \(ENOSPC\). It can be read"):
            writer.set_metadata("parameters", "{}")
    assert writer.closed and [record.data for record in open_bag(tmp_path / "bag").messages()] == [data]


def text_of(folder: Path) -> Path:
    text_bag(folder / "bag", 600, file_bytes=8_000)
    return folder / "bag"


def without_a_file(folder: Path) -> Path:
    next(text_of(folder).glob("*_1.mcap")).unlink()
    return folder / "bag"


def cut(folder: Path) -> Path:
    text_bag(folder / "bag", 600)
    file = folder / "bag" / "bag_0.mcap"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder / "bag"


def with_evil_metadata(folder: Path) -> Path:
    (text_of(folder) / "metadata.yaml").write_text("rosbag2_bagfile_information: " + "[" * 100_000)
    return folder / "bag"


def empty(folder: Path) -> Path:
    text_bag(folder / "bag", 0)
    return folder / "bag"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.mcap")
    return folder / "pipe.mcap"


def slow_where(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name == "many.mcap" else []  # a million records


def no_bag(folder: Path) -> Path:
    (folder / "text.mcap").write_text("no bag")
    return folder / "text.mcap"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (text_of, "has nothing to replay. It has no complete reply. It has no messages on /"),
        (without_a_file, "Files of the bag are missing, with all messages in them: bag_1.mcap."),
        (cut, "was not closed"),
        (with_evil_metadata, "metadata.yaml cannot be read ("),
        (empty, "holds no message"),
        (pipe, "There is no bag"),
        (no_bag, "it is not an MCAP file"),
        *(
            pytest.param(lambda folder, name=name: bombs(folder)[name], name, id=name, marks=slow_where(name))
            for name in BOMBS
        ),
    ],
)
def test_a_replay_of_an_odd_bag_ends_with_a_sentence(tmp_path, capsys, make, sentence):
    assert main(["replay", str(make(tmp_path))]) == 2
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told, told


@pytest.mark.slow
def test_what_odd_bags_hold_is_replayed_and_compared(ros_domain, tmp_path, capsys):
    """Their replies are made up, so each differs: exit code 1, and the step is named."""
    bag = make_bag(tmp_path / "bag", {"decode.mode": "dsd"})
    pack = zstandard.ZstdCompressor().compress
    rewrite(bag, tmp_path / "packed" / "packed_0.mcap", same, pack, compression=CompressionType.LZ4)
    humble(bag, tmp_path / "humble" / "humble_0.db3")
    bags = [str(tmp_path / name) for name in ("bag", "packed", "humble")]
    assert main(["replay", *bags]) == 1
    told = capsys.readouterr()
    assert "3 replies replayed" in told.out and "3 of them differ" in told.out
    assert "does not define all its message types" in told.err and "left out: 1 on /notes (json)" in told.err


def test_a_bag_says_how_its_drafts_did_under_vllms_names(tmp_path):
    run = read_run(make_bag(tmp_path / "bag"))
    own = SpeculativeDecoding.of([2], [2], 2)
    assert own is not None and [step.stats["speculative_decoding"] for step in run.steps] == [asdict(own)] * 2
    whole = summary(run)["speculative_decoding"]
    assert whole == {
        "mean_acceptance_length": 3.0, "draft_acceptance_rate": 1.0, "acceptance_histogram": [0, 0, 2],
        "num_spec_steps": 2, "num_accepted_draft_tokens": 4, "num_draft_tokens": 4, "num_spec_tokens": 2,
    }  # fmt: skip
