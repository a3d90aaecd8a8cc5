"""The chat template beside an adapter, and the tokens its tokenizer adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import BASE, hand_folder, limits
from transformers.utils.chat_template_utils import _compile_jinja_template

from mstar.adapters import AdapterFacts, inspect_adapter, read_adapter
from mstar.adapters.template import template_problem


def facts(folder: Path, **files: Any) -> AdapterFacts:
    hand_folder(folder)
    for name, value in files.items():
        path = folder / {"jinja": "chat_template.jinja", "tokenizer": "tokenizer_config.json", "added": "added_tokens.json"}[name]
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return inspect_adapter(folder, BASE, limits())


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer": {"model_max_length": 5}}, None),
        ({"tokenizer": {"chat_template": None}}, None),
        ({"tokenizer": {"chat_template": "from config"}}, "from config"),
        ({"tokenizer": {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}}, "d"),
        ({"jinja": "{{ 'ä' }}"}, "{{ 'ä' }}"),
        ({"jinja": "", "tokenizer": {"chat_template": "from config"}}, ""),
        ({"jinja": "from jinja", "tokenizer": {"chat_template": "from config"}}, "from jinja"),
    ],
)
def test_the_folders_own_template_is_found(files: dict[str, Any], template: str | None, tmp_path: Path) -> None:
    assert facts(tmp_path, **files).chat_template == template
    assert read_adapter(tmp_path, BASE, limits()).facts.chat_template is None


TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ message.content | trim }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{%- set ns = namespace(a=1) -%}{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ f(messages) }}{{ strftime_now('%d') }}",
    "{{ raise_exception('no') }}",
    "{% if x is defined and x is mapping %}{{ x | items | list }}{% endif %}{% continue %}",
    "{% for m in x %}{% if m %}{% continue %}{% else %}{% break %}{% endif %}{% endfor %}",
    "{% break %}",
    "{% for m in x %}{% macro f() %}{% break %}{% endmacro %}{% endfor %}",
    "{% if a %}{{ b | nope }}{% endif %}",
    "{{ b | nope }}",
    "{% if a %}",
    "{% generation %}",
    "{% generation %}{% endfor %}",
    "{% endgeneration %}",
    "{{ a ",
    "{{ a b }}",
    "}} %}",
    "{# comment",
    "{% for %}{% endfor %}",
    "{% call f() %}{% endcall %}",
    "{% trans %}a{% endtrans %}",
    "{% import 'x' as y %}",
    "{{ 'a' is nonsense }}",
    "{% set 3 = 4 %}",
    "{{ f(a=1, 2) }}",
    "{{ 1 if }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_refused_exactly_where_transformers_could_not_compile_it(template: str) -> None:
    try:
        _compile_jinja_template(template)
    except Exception:
        assert template_problem(template), template
    else:
        assert template_problem(template) is None, template_problem(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9**9**9**9 }}",
        "{{ 'a' * 10**12 }}",
        "{% set x = 9**9**9**9 %}",
        "{% if 9**9**9**9 %}{% endif %}",
        "{% for i in range(9**9**9**9) %}{% endfor %}",
        "{{ x[9**9**9**9:] }}{{ x | join(9**9**9**9) }}",
        "{% macro f(a=9**9**9**9) %}{% endmacro %}",
        "{% autoescape 9**9**9**9 %}{% endautoescape %}",
        "{{ 'a' ~ 9**9**9**9 }}{{ (9**9**9**9) is even }}",
    ],
)
def test_nothing_of_a_template_is_computed_by_the_check(template: str) -> None:
    """Each of these would take the memory of the machine, or for ever."""
    assert ("autoescape" in template) == (template_problem(template) is not None)


def test_a_number_of_more_digits_than_the_interpreter_reads_is_a_problem_with_words_and_no_crash() -> None:
    assert "digits" in (template_problem("{{ " + "9" * 5000 + " }}") or "")


def test_a_template_may_set_autoescape() -> None:
    assert template_problem("{% autoescape true %}{{ a }}{% endautoescape %}") is None


def test_added_tokens_within_the_vocabulary_are_told(tmp_path: Path) -> None:
    decoder = {"5": {"content": "<s>", "special": True}, "127": {"content": "<last>"}, "x": {"content": "?"}, "7": "?"}
    found = facts(tmp_path, tokenizer={"added_tokens_decoder": decoder}, added={"<tool>": 100, "odd": "1"})
    assert found.added_tokens == {"<s>": 5, "<last>": 127, "<tool>": 100}
