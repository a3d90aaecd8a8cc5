"""Which names are served, and what a `model` field means."""

from __future__ import annotations

import pytest

from mstar.conductor.registry import MAX_NAME_LENGTH, Adapter, Registry
from mstar.errors import AdapterError, ModelNotFound


def adapter(registry, name, digest="d"):
    return Adapter(name, registry.draw_generation(name), f"/{name}", name, digest, created=1)


def registry(*names, capacity=8):
    made = Registry("base", "front", capacity)
    for name in names:
        made.put(adapter(made, name))
    return made


def test_c67_generations_are_never_used_again():
    made = registry()
    drawn = [made.draw_generation("a") for _ in range(3)] + [made.draw_generation("b")]
    assert len(set(drawn)) == 4
    other = Registry("base", "another front", 8)
    assert other.draw_generation("a") not in drawn
    assert [made.client_name(generation) for generation in drawn] == ["a", "a", "a", "b"]


def test_a_name_with_marks_of_its_own_comes_back_whole():
    made = registry()
    assert made.client_name(made.draw_generation("me@home.5")) == "me@home.5"


def test_the_base_its_adapters_and_nothing_else_resolve():
    made = registry("sql", "base:odd", "deep/er")
    assert made.resolve("base") is None
    for name in ("sql", "base:odd", "deep/er"):
        assert made.resolve(name).name == name
    assert made.resolve("base:sql").name == "sql" and made.resolve("base:deep/er").name == "deep/er"
    for unknown in ("", " ", "SQL", "sql ", "base:", "base:base", ":sql", "base:sql:base", "other:sql"):
        with pytest.raises(ModelNotFound) as caught:
            made.resolve(unknown)
        assert caught.value.status == 404 and caught.value.code == "model_not_found"


def test_whole_names_win_over_the_bases_prefix():
    made = registry("sql", "base:sql")
    assert made.resolve("base:sql").name == "base:sql"


def test_a_name_points_to_its_newest_generation():
    made = registry("sql")
    first = made.get("sql")
    second = adapter(made, "sql", "e")
    assert made.put(second) is first and made.resolve("sql") is second
    assert made.pop("sql") is second and made.pop("sql") is None and made.get("sql") is None


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\x00", "x" * (MAX_NAME_LENGTH + 1), "base"])
def test_names_that_no_adapter_may_have(name):
    with pytest.raises(AdapterError):
        registry().check_name(name)


@pytest.mark.parametrize("name", ["a", "a b", "org/sql-v1.2", "é", "x" * MAX_NAME_LENGTH])
def test_names_that_one_may_have(name):
    registry().check_name(name)


def test_c61_the_limit_is_an_explicit_refusal_and_a_replace_needs_no_room():
    made = registry(*[f"a{number}" for number in range(8)], capacity=8)
    with pytest.raises(AdapterError, match="8 adapters are served, max_registered_loras allows 8") as caught:
        made.check_name("a8")
    assert caught.value.code == "adapter_limit_reached"
    made.check_name("a3")
    made.pop("a0")
    made.check_name("a8")


def test_adapters_are_listed_by_name():
    assert [found.name for found in registry("b", "a", "c").adapters()] == ["a", "b", "c"] and len(registry("b", "a")) == 2
