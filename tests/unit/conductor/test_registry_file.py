"""The registry on disk: what a front that starts again finds, also after a write that was cut."""

from __future__ import annotations

import json
import logging

import pytest

from mstar.conductor.registry import Adapter
from mstar.conductor.registry_file import RegistryFile


def adapter(name, number=1):
    return Adapter(name, f"{name}@e.{number}", f"/adapters/{name}", f"{name}", "ab" * 32, 1_700_000_000, pinned=name == "p")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.json"


def test_what_was_saved_comes_back_to_the_same_run(path):
    saved = [adapter("p"), adapter("sql", 7)]
    RegistryFile(path, "run").save(saved)
    assert RegistryFile(path, "run").load() == (True, saved)


def test_another_run_gets_the_adapters_and_is_told_so(path):
    RegistryFile(path, "run").save([adapter("a")])
    assert RegistryFile(path, "another").load() == (False, [adapter("a")])


def test_without_a_file_nothing_was_served(path):
    assert RegistryFile(path, "run").load() == (False, [])


def test_only_the_two_files_are_left_after_many_saves(path):
    file = RegistryFile(path, "run")
    for number in range(20):
        file.save([adapter("a", number)])
    assert {item.name for item in path.parent.iterdir()} == {"registry.json", "registry.json.last"}
    assert file.load()[1] == [adapter("a", 19)]


def test_a_file_torn_at_any_byte_is_found_and_the_last_good_one_used(path):
    file = RegistryFile(path, "run")
    file.save([adapter("before")])
    file.save([adapter("before"), adapter("after")])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert file.load() == (True, [adapter("before")])
    path.write_bytes(whole)
    assert len(file.load()[1]) == 2


def test_any_changed_byte_is_found(path):
    file = RegistryFile(path, "run")
    file.save([adapter("a")])
    whole = bytearray(path.read_bytes())
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        path.write_bytes(changed)
        loaded = file.load()
        assert loaded == (False, []) or loaded == (True, [adapter("a")]), "either it is refused, or the change means nothing"


def test_a_crash_between_the_two_renames_leaves_the_state_before(path):
    file = RegistryFile(path, "run")
    file.save([adapter("a")])
    path.rename(path.with_name("registry.json.last"))
    assert file.load() == (True, [adapter("a")])


def test_where_both_are_torn_nothing_comes_back_and_both_are_named(path, caplog):
    file = RegistryFile(path, "run")
    file.save([adapter("a")])
    file.save([adapter("b")])
    path.write_text("{")
    path.with_name("registry.json.last").write_text("")
    with caplog.at_level(logging.ERROR):
        assert file.load() == (False, [])
    assert [str(path) in record.message for record in caplog.records] == [True, True]


def test_a_file_of_another_shape_is_not_usable(path):
    file = RegistryFile(path, "run")
    for text in ("[]", '"x"', json.dumps({"sha256": "", "body": 3}), "null", "\x00"):
        path.write_text(text)
        assert file.load() == (False, [])


def test_fields_that_this_version_does_not_know_are_refused_as_a_whole(path):
    file = RegistryFile(path, "run")
    file.save([adapter("a")])
    outer = json.loads(path.read_text())
    body = json.loads(outer["body"])
    body["adapters"][0]["colour"] = "red"
    path.write_text(json.dumps({"sha256": outer["sha256"], "body": json.dumps(body)}))
    assert file.load() == (False, [])


def test_a_disk_that_takes_nothing_is_logged_and_serving_goes_on(tmp_path, caplog):
    file = RegistryFile(tmp_path / "missing" / "registry.json", "run")
    with caplog.at_level(logging.ERROR):
        file.save([adapter("a")])
    assert "could not be written" in caplog.text
