"""The registry on disk: what a front that starts again finds, also after a write that was cut."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from mstar.conductor import registry_file
from mstar.conductor.registry import Adapter
from mstar.conductor.registry_file import RegistryFile


def adapter(name, number=1):
    return Adapter(name, f"{name}@e.{number}", f"/adapters/{name}", f"{name}", "ab" * 32, 1_700_000_000, pinned=name == "p")


class Served:
    """A registry that writes every change, as the conductor's does."""

    def __init__(self, path, run="run"):
        self.adapters = {}
        self.file = RegistryFile(path, run)
        self.file.begin([])

    def put(self, new):
        self.adapters[new.name] = new
        self.file.changed(new.name, new, len(self.adapters), self.adapters.values)

    def pop(self, name):
        del self.adapters[name]
        self.file.changed(name, None, len(self.adapters), self.adapters.values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.json"


@pytest.fixture
def served(path):
    return Served(path)


def names(path, run="run"):
    return [item.name for item in RegistryFile(path, run).load()[1]]


def test_every_change_comes_back_to_the_same_run(path, served):
    served.put(adapter("p"))
    served.put(adapter("sql", 7))
    served.put(adapter("gone"))
    served.put(adapter("sql", 8))
    served.pop("gone")
    assert RegistryFile(path, "run").load() == (True, [adapter("p"), adapter("sql", 8)])


def test_another_run_gets_the_adapters_and_is_told_so(path, served):
    served.put(adapter("a"))
    assert RegistryFile(path, "another").load() == (False, [adapter("a")])


def test_without_a_file_nothing_was_served(path):
    assert RegistryFile(path, "run").load() == (False, [])


def test_only_the_two_files_are_left_after_many_starts(path):
    for _ in range(5):
        file = RegistryFile(path, "run")
        file.begin([adapter("a")])
    assert {item.name for item in path.parent.iterdir()} == {"registry.json", "registry.json.last"}


def test_a_file_torn_at_any_byte_gives_what_stands_before_the_tear(path, served):
    ends = {path.stat().st_size: []}
    for name in "abc":
        served.put(adapter(name))
        ends[path.stat().st_size] = [*ends[max(ends)], name]
    whole = path.read_bytes()
    path.with_name("registry.json.last").unlink(missing_ok=True)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = [names for end, names in ends.items() if end <= length]
        assert names(path) == (complete[-1] if complete else [])


def test_a_tear_in_the_first_line_gives_the_file_before(path, served):
    served.put(adapter("before"))
    RegistryFile(path, "run").begin([adapter("before"), adapter("after")])
    path.write_bytes(path.read_bytes()[:20])
    assert RegistryFile(path, "run").load() == (True, [adapter("before")])


def test_any_changed_byte_is_found(path, served):
    served.put(adapter("a"))
    whole = bytearray(path.read_bytes())
    path.with_name("registry.json.last").unlink(missing_ok=True)
    for index in range(len(whole)):
        for flip in (1, 0x80):
            changed = bytearray(whole)
            changed[index] ^= flip
            path.write_bytes(changed)
            assert RegistryFile(path, "run").load() in ((False, []), (True, []))


def test_a_crash_between_the_two_renames_leaves_the_file_before(path, served):
    served.put(adapter("a"))
    path.rename(path.with_name("registry.json.last"))
    assert RegistryFile(path, "run").load() == (True, [adapter("a")])


def test_where_both_are_torn_nothing_comes_back_and_both_are_named(path, served, caplog):
    served.put(adapter("a"))
    RegistryFile(path, "run").begin([adapter("a")])
    path.write_text("{")
    path.with_name("registry.json.last").write_text("x y\n")
    with caplog.at_level(logging.ERROR):
        assert RegistryFile(path, "run").load() == (False, [])
    assert [str(path) in record.message for record in caplog.records] == [True, True]


@pytest.mark.parametrize("text", ["", "\n", "null\n", "a b c\n", "\x00\n", '{"run": "run"}\n', "é\n"])
def test_a_file_of_another_shape_is_not_usable(path, text):
    path.write_text(text)
    assert RegistryFile(path, "run").load() == (False, [])


def test_a_disk_that_takes_nothing_is_logged_and_serving_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.ERROR):
        served = Served(tmp_path / "missing" / "registry.json")
        served.put(adapter("a"))
    assert caplog.text.count("could not be written") == 2


def test_a_line_cut_by_a_full_disk_hides_nothing_that_is_written_once_there_is_room_again(path, served, monkeypatch, caplog):
    served.put(adapter("a"))
    opened = Path.open

    def full(self, mode="r", **options):
        file = opened(self, mode, **options)
        if mode != "ab":
            return file
        os.write(file.fileno(), b"0123456789abcdef {")  # half a line, then no space
        file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    served.put(adapter("b"))
    monkeypatch.undo()
    assert "No space left" in caplog.text
    assert names(path) == ["a"]
    served.put(adapter("c"))
    assert names(path) == ["a", "b", "c"]


def test_history_is_dropped_when_most_of_the_file_is_history(path, served, monkeypatch):
    monkeypatch.setattr(registry_file, "SLACK", 10)
    for number in range(200):
        served.put(adapter("a", number))
    assert len(path.read_bytes().splitlines()) < 20
    assert RegistryFile(path, "run").load() == (True, [adapter("a", 199)])
