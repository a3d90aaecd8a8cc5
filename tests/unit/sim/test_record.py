"""A recording: whole records only, whatever the crash left; and nothing else is ever taken for one."""

from __future__ import annotations

import msgpack
import pytest

from mstar.engine.lockstep.record import Agreed, Header, Ingested, NodeHeader, Ran, Recorder, Served, Unserved, read_records
from mstar.errors import ConfigError
from mstar.types import Remove, Row, Step

HEADER = Header((NodeHeader("llm", 2),), num_pages=8, block_size=4, prefix_caching=True, tp_size=2, started="today")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.rec"


def test_every_kind_of_record_comes_back_as_it_was(path):
    records = [
        Served("a@1", ("llm",)),
        Ingested("r0", (1, 2, 3), (4,), adapter="a@1", cache_key=b"k"),
        Step(1, (Row("r0", 0, 4),), ("r9",), fingerprint_seq=0),
        Remove("r0", 1),
        Unserved("a@1"),
    ]
    recorder = Recorder(path, HEADER)
    for record in records:
        recorder.note(record)
    recorder.agreed("llm", [0, 2])
    recorder.ran(1, b"f", {"r0": 7}, {"r1": "adapter_read_failed"}, {"r2": "slot"})
    recorder.close()
    ran = Ran(1, b"f", {"r0": 7}, {"r1": "adapter_read_failed"}, {"r2": "slot"})
    assert list(read_records(path)) == [HEADER, *records, Agreed("llm", (0, 2)), ran]


def test_waits_are_written_where_they_change(path):
    recorder = Recorder(path, HEADER)
    for seq, waits in enumerate(({"a": "slot", "b": "read"}, {"a": "slot", "b": "slot"}, {"b": "slot"}), start=1):
        recorder.ran(seq, b"", {}, {}, waits)
    recorder.close()
    assert [ran.waits for ran in list(read_records(path))[1:]] == [{"a": "slot", "b": "read"}, {"b": "slot"}, {"a": None}]


def test_frames_are_plain_messagepack_behind_length_and_crc(path):
    recorder = Recorder(path, HEADER)
    recorder.close()
    data = path.read_bytes()
    assert int.from_bytes(data[:4], "big") == len(data) - 8
    assert msgpack.unpackb(data[8:])["type"] == "header"


def test_a_step_reaches_the_file_when_it_ends_not_when_the_recorder_closes(path):
    recorder = Recorder(path, HEADER)
    recorder.note(Step(1, (Row("r0", 0, 1),)))
    recorder.ran(1, b"f", {}, {}, {})
    assert [type(record) for record in read_records(path)] == [Header, Step, Ran]
    recorder.close()


def test_a_full_disk_ends_the_recording_with_one_line_and_nothing_else(path, caplog):
    recorder = Recorder(path, HEADER)
    recorder.ran(1, b"f", {}, {}, {})
    recorder._file.close()
    with open("/dev/full", "wb", buffering=0) as full:
        recorder._file = full
        for seq in range(2, 5):
            recorder.ran(seq, b"f", {}, {}, {})
        recorder.close()
    assert caplog.text.count("ends here: No space left") == 1
    assert [type(record) for record in read_records(path)] == [Header, Ran]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_torn_last_frame_is_left_out(path, cut):
    recorder = Recorder(path, HEADER)
    recorder.ran(1, b"f", {}, {}, {})
    recorder.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_records(path)) == [HEADER]


def test_a_broken_byte_ends_the_records_before_it(path):
    recorder = Recorder(path, HEADER)
    recorder.ran(1, b"f", {}, {}, {})
    recorder.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert list(read_records(path)) == [HEADER]


def test_a_new_start_goes_on_behind_the_last_whole_frame(path):
    Recorder(path, HEADER).close()
    with path.open("ab") as file:
        file.write(b"\x00\x00\x00\x10torn")
    recorder = Recorder(path, HEADER)
    recorder.ran(1, b"f", {}, {}, {})
    recorder.close()
    assert [type(record) for record in read_records(path)] == [Header, Header, Ran]


def test_another_file_is_neither_read_nor_overwritten(path):
    path.write_text("a diary\n" * 10)
    with pytest.raises(ConfigError, match="not a recording"):
        list(read_records(path))
    with pytest.raises(ConfigError, match="not a recording"):
        Recorder(path, HEADER)
    assert path.read_text().startswith("a diary")


def test_a_missing_folder_is_a_readable_error(path):
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(path / "below", HEADER)
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_records(path))
