# SPDX-License-Identifier: Apache-2.0
"""Bags as files: other programs open them, and they stay readable after a kill, a full disk or a cut."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest
from bag_maker import SECOND, killed_bag, text_bag
from hypothesis import given, settings, strategies as st
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.writer import BagWriter, RecordError
from dsd_ros.observe.ros.message_types import TypeUnknown, definition, message_class


def data_of(bag) -> list[bytes]:
    return [bytes(record.data) for record in bag.messages()]


def test_other_libraries_open_what_was_written(tmp_path):
    sent = text_bag(tmp_path / "bag", 1234)
    with Reader(tmp_path / "bag") as reader:
        (connection,) = reader.connections
        found = list(reader.messages())
        assert [bytes(data) for _, _, data in found] == sent
        assert [at for _, at, _ in found] == [SECOND + n * 1_000_000 for n in range(1234)]
        assert connection.digest == definition("std_msgs/msg/String")[1] != ""
        store = get_typestore(Stores.EMPTY)  # knows what the bag says, and nothing else
        store.register(get_types_from_msg(connection.msgdef.data, connection.msgtype))
        assert store.deserialize_cdr(found[7][2], connection.msgtype).data.startswith("000007 ")
    assert sorted(path.name for path in (tmp_path / "bag").iterdir()) == ["bag.mcap", "metadata.yaml"]
    with (tmp_path / "bag" / "bag.mcap").open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()], validate_crcs=True)
        decoded = list(reader.iter_decoded_messages())
        assert [message.data for _, _, message, _ in decoded] == sent and decoded[3][3].data.startswith("000003 ")
        assert [m.name for m in reader.iter_metadata()] == ["rosbag2"]
    bag = open_bag(tmp_path / "bag")
    assert data_of(bag) == sent and bag.whole and not bag.notes
    assert json.loads(bag.custom["versions"]) == {"dsd_ros": "x"}
    assert data_of(open_bag(tmp_path / "bag" / "bag.mcap")) == sent


def test_what_a_killed_writer_had_saved_can_be_read(tmp_path):
    saved = killed_bag(tmp_path / "bag")
    bag = open_bag(tmp_path / "bag")
    found = [bag.decode(record).data for record in bag.messages()]
    assert [int(text.split()[0]) for text in found] == list(range(len(found)))
    assert len(found) >= saved
    assert not bag.whole and "was not closed" in " ".join(bag.notes)
    assert bag.custom == {"versions": "{}"}
    assert data_of(open_bag(tmp_path / "bag" / "bag.mcap")) == data_of(bag)  # the file stands alone


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bag's only file, of several chunks, and the messages in it."""
    folder = tmp_path_factory.mktemp("whole") / "bag"
    sent = text_bag(folder, 600)
    return (folder / "bag.mcap").read_bytes(), sent


@settings(max_examples=30)
@given(share=st.floats(0.0, 1.0))
def test_a_cut_file_is_read_up_to_the_cut_or_refused(whole, tmp_path_factory, share):
    content, sent = whole
    path = tmp_path_factory.mktemp("cut") / "cut.mcap"
    path.write_bytes(content[: int(share * len(content))])
    try:
        bag = open_bag(path)
    except BagError as error:
        assert "cut.mcap" in str(error)
        return
    found = data_of(bag)
    assert found == sent[: len(found)] and found
    assert bag.notes or found == sent


@settings(max_examples=30)
@given(at=st.integers(0, 10_000), junk=st.binary(min_size=1, max_size=40))
def test_damage_is_never_more_than_an_error(whole, tmp_path_factory, at, junk):
    content, _sent = whole
    at %= len(content)
    path = tmp_path_factory.mktemp("damage") / "damaged.mcap"
    path.write_bytes(content[:at] + junk + content[at + len(junk) :])
    try:
        assert data_of(open_bag(path)) is not None
    except BagError as error:
        assert str(error)


def _fill_up(folder, limit) -> None:
    """Write until files must not grow; exit code 0 when that ended as it should."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer = BagWriter(folder, lambda _: ("string data\n", "RIHS01_0"))
    payload = os.urandom(20_000)
    try:
        for number in range(10_000):
            writer.write("/words", "std_msgs/msg/String", (), number + 1, payload)
            writer.save()
    except RecordError as error:
        os._exit(0 if writer.closed and "cannot be written any further" in str(error) else 3)
    os._exit(4)


def test_a_full_disk_leaves_a_bag(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            _fill_up(tmp_path / "bag", 4 << 20)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bag = open_bag(tmp_path / "bag")
    times = [record.at for record in bag.messages()]
    assert times == list(range(1, len(times) + 1)) and len(times) > 190


def test_what_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="exists already"):
        BagWriter(tmp_path / "there", definition)
    with pytest.raises(RecordError, match="cannot be created"):
        BagWriter(tmp_path / "file" / "new", definition)
    for path, sentence in (
        (tmp_path / "nothing", "There is no bag"),
        (tmp_path / "there", "is not a bag"),
        (tmp_path / "file", "is not a bag"),
    ):
        with pytest.raises(BagError, match=sentence):
            open_bag(path)
    text_bag(tmp_path / "empty", 0)
    with pytest.raises(BagError, match="holds no message"):
        open_bag(tmp_path / "empty")
    with pytest.raises(TypeUnknown, match="not installed"):
        message_class("moon_msgs/msg/Cheese")
    with pytest.raises(TypeUnknown, match="not a message type"):
        definition("String")
