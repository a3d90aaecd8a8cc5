"""Stop strings: the rule is that of a reader who stops at the first character which completes one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.api.stops import StopMatcher


def cut_by_reader(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The rule, written as it is said."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(
    pieces=st.lists(st.text("abE", max_size=4), max_size=12),
    stops=st.lists(st.text("abE", min_size=1, max_size=4), max_size=4, unique=True),
    include=st.booleans(),
)
def test_the_cut_of_the_text_never_changes_the_result(pieces: list[str], stops: list[str], include: bool):
    matcher = StopMatcher(stops, include_stop=include)
    out = "".join([matcher.push(piece) for piece in pieces] + [matcher.flush()])
    assert (out, matcher.matched) == cut_by_reader("".join(pieces), stops, include=include)


@given(
    pieces=st.lists(st.text("abE", max_size=4), max_size=12),
    stops=st.lists(st.text("abE", min_size=1, max_size=4), max_size=4, unique=True),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stops: list[str]):
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        out += matcher.push(piece)
        if matcher.matched is None:
            held = seen[len(out) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_across_three_pieces_is_found_and_held_back():
    matcher = StopMatcher(["END"])
    assert [matcher.push("a E"), matcher.push("N"), matcher.push("D b")] == ["a ", "", ""]
    assert matcher.matched == "END"
    assert matcher.push("more") == matcher.flush() == ""


def test_the_held_start_comes_out_when_it_was_no_stop_string():
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ""
    assert matcher.push("ENx") == "ENENx"
    assert matcher.push("E") == "" and matcher.flush() == "E"


def test_before_min_tokens_text_passes_and_completes_nothing():
    matcher = StopMatcher(["END"])
    assert matcher.push("END", armed=False) == "END"
    assert matcher.push("D", armed=True) == "D"
    assert matcher.matched is None


@pytest.mark.parametrize(("include", "out"), [(False, "x"), (True, "xab")])
def test_of_two_that_end_together_the_longer_is_cut(include: bool, out: str):
    matcher = StopMatcher(["b", "ab"], include_stop=include)
    assert matcher.push("xab") == out
    assert matcher.matched == "ab"
