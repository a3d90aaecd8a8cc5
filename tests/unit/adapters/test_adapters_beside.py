"""The chat template beside an adapter, and the tokens its tokenizer adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import BASE, hand_folder, limits

from mstar.adapters import AdapterFacts, inspect_adapter, read_adapter


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


def test_added_tokens_within_the_vocabulary_are_told(tmp_path: Path) -> None:
    decoder = {"5": {"content": "<s>", "special": True}, "127": {"content": "<last>"}, "x": {"content": "?"}, "7": "?"}
    found = facts(tmp_path, tokenizer={"added_tokens_decoder": decoder}, added={"<tool>": 100, "odd": "1"})
    assert found.added_tokens == {"<s>": 5, "<last>": 127, "<tool>": 100}
