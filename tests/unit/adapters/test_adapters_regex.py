"""The pattern matcher says what `re` says, by PEFT's rule, and cannot be made to hang."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from mstar.adapters.patterns import PatternTable
from mstar.adapters.regex import Budget, PatternProblem, Regex
from mstar.errors import AdapterError

TEXTS = st.text(alphabet="ab1._", max_size=9)

ATOMS = st.sampled_from(
    ["a", "b", "1", "_", r"\.", ".", r"\d", r"\w", r"\D", r"\S", "[ab]", "[^a]", "[a-b1]", r"[\d_]", "[^.]", "[]a]", "[a-]", r"[\-a]"]
)


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    grouped = inner.map(lambda text: f"({text})") | inner.map(lambda text: f"(?:{text})")
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,2}", "*?", "+?", "??", "{0}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(ATOMS | grouped, repeats).map("".join),
        grouped,
        inner.map(lambda text: "^" + text),
        inner.map(lambda text: text + "$"),
    )


PATTERNS = st.recursive(ATOMS | st.just(""), _grow, max_leaves=8)


def by_re(pattern: str, text: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", text) is not None


@settings(max_examples=1500, deadline=None)
@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=6))
def test_it_says_what_re_says(pattern: str, texts: list[str]) -> None:
    regex = Regex(pattern)
    for text in texts:
        assert regex.matches(text, Budget(10**6)) == by_re(pattern, text), text


@settings(max_examples=1000, deadline=None)
@given(st.text(alphabet="ab.1|()[]{}*+?\\^$-,:dwPQ\0é", max_size=12), st.lists(TEXTS, min_size=1, max_size=4))
def test_any_text_is_a_problem_or_means_what_re_says(pattern: str, texts: list[str]) -> None:
    try:
        regex = Regex(pattern)
    except PatternProblem:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except re.error:
            assume(False)
        for text in texts:
            assert regex.matches(text, Budget(10**6)) == by_re(pattern, text), text


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(a*)*", "(a|a)*", "(.*)*b", "(.*.*.*.*.*.*)*b", "(a?){30}a{30}", "((a+)+)+", "(a|aa)+", "(.*a){20}"]
)
def test_c11_patterns_that_hang_a_backtracking_matcher_do_not_hang_this_one(pattern: str) -> None:
    assert not Regex(pattern).matches("a" * 200 + "!", Budget(200_000))


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a)", "(a", "[a", "[z-a]", "*", "+a", "a**", "a*+", "a{2}{3}", "{2}", "a{", "a{x}", "a{9999}", "a{3,2}", "\\", r"(a)\1",
     "(?=a)", "(?!a)", "(?<=a)", "(?P<n>a)", "(?i)a", r"\b", r"\Z", r"\p", "(?#c)", "(" * 100 + ")" * 100, "((a{99}){99}){99}",
     "((a{0}){1000}){1000}", "x" * 1025],
)  # fmt: skip
def test_what_is_not_served_is_a_problem(pattern: str) -> None:
    with pytest.raises(PatternProblem):
        Regex(pattern)


def test_the_budget_ends() -> None:
    with pytest.raises(PatternProblem, match="too long"):
        Regex("(a|b)*c").matches("ab" * 100, Budget(50))


NAMES = [f"model.layers.{layer}.{leaf}" for layer in (0, 1, 10) for leaf in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")]
KEYS = st.sampled_from(
    ["q_proj", "self_attn.q_proj", "self.attn.q_proj", "layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj", "proj", "_proj", "",
     r"layers\.1\..*", ".*", "^model.layers.0.*", "^q_proj", "[qk]_proj", r"self_attn\.q_proj", ".", "..proj", "layers.1", r".\.q_proj",
     "model.layers.10.self_attn.k_proj", "k_proj|up_proj", "Q_proj", "xmodel.layers.0.mlp.up_proj", r"\d+.mlp.up_proj"]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(KEYS, unique=True, max_size=6), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
def test_the_first_key_is_the_one_that_peft_takes(keys: list[str], names: list[str]) -> None:
    table = PatternTable("alpha_pattern", keys)
    for name in names:
        expected = get_pattern_key(keys, name)
        assert table.match(name) == (expected if expected in keys else None)
    unused = [key for key in keys if not any(by_re(key, name) for name in names)]
    assert table.unused() == unused


def test_tables_without_bound_are_refused() -> None:
    with pytest.raises(AdapterError):
        PatternTable("rank_pattern", [f"k{number}" for number in range(20_001)])
    table = PatternTable("rank_pattern", ["a" * length + "." * dots for length in range(1, 60) for dots in range(300)])
    with pytest.raises(AdapterError) as refused:
        [table.match(f"model.layers.{layer}.self_attn.q_proj") for layer in range(1000)]
    assert refused.value.code == "adapter_pattern_unsupported"
