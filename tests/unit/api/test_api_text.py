"""The tokenizer and the chat template: loading, encoding, rendering, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mstar.api.text import TextProcessor
from mstar.errors import ConfigError, RequestError
from tests.unit.api.tiny_text import save_tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def test_the_front_loads_everything_without_torch(tmp_path: Path):
    save_tiny_tokenizer(tmp_path)
    program = f"""
import sys
from mstar.api.app import create_app
from mstar.api.server import serve_app
from mstar.api.text import TextProcessor
from mstar.cli.app import app
text = TextProcessor.load({str(tmp_path)!r})
text.encode("hello", add_special_tokens=True)
text.render_chat([{{"role": "user", "content": "hi"}}])
text.detokenizer((3,)).push(4)
assert "torch" not in sys.modules, sorted(name for name in sys.modules if name.startswith("torch"))[:3]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_tokenizer_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        TextProcessor.load(tmp_path)


def test_a_broken_tokenizer_is_a_config_error_on_one_line(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        TextProcessor.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_chat_template_file_is_a_config_error(tmp_path: Path):
    save_tiny_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        TextProcessor.load(tmp_path, tmp_path / "none.jinja")


def test_the_truncation_that_a_tokenizer_file_carries_is_not_applied(tmp_path: Path):
    save_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(raw))
    text = TextProcessor.load(tmp_path)
    assert len(text.encode("one two three four one two three four", add_special_tokens=False)) > 4


def test_the_models_vocabulary_bounds_token_ids(tmp_path: Path):
    save_tiny_tokenizer(tmp_path)
    assert TextProcessor.load(tmp_path).vocab_size == 334  # the tokenizer's own
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 384}))
    assert TextProcessor.load(tmp_path).vocab_size == 384
    small = TextProcessor.load(tmp_path, vocab_size=50)
    with pytest.raises(RequestError, match="the model with 50 tokens has not"):
        small.encode("hello", add_special_tokens=False)


def test_lone_surrogates_are_refused(text: TextProcessor):
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        text.encode("a\ud800", add_special_tokens=False)
    assert caught.value.status == 400


def test_the_template_is_rendered_with_and_without_the_generation_prompt(text: TextProcessor):
    assert text.render_chat(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_continue_final_message_leaves_the_last_message_open(text: TextProcessor):
    messages = [*HELLO, {"role": "assistant", "content": "Well"}]
    rendered = text.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nWell")


def test_template_kwargs_reach_the_template_but_not_the_renderer(text: TextProcessor):
    assert "LOUD" in text.render_chat(HELLO, template_kwargs={"shout": True})
    for name in ("chat_template", "tokenize", "tools", "conversation", "self"):
        with pytest.raises(RequestError, match=f"must not set '{name}'"):
            text.render_chat(HELLO, template_kwargs={name: "x"})


def test_what_the_template_raises_is_a_400(text: TextProcessor):
    with pytest.raises(RequestError, match="role banned is not allowed") as caught:
        text.render_chat([{"role": "banned", "content": "x"}])
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


def test_without_a_template_a_chat_is_refused_and_a_file_gives_one(tmp_path: Path):
    save_tiny_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        TextProcessor.load(tmp_path).render_chat(HELLO)
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    text = TextProcessor.load(tmp_path, tmp_path / "mine.jinja")
    assert text.render_chat(HELLO) == "[hello]"
    assert text.render_chat(HELLO, chat_template="adapter: {{ messages[0]['content'] }}") == "adapter: hello"


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: Path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(save_tiny_tokenizer(tmp_path)))
    tokenizer.chat_template = {"default": "D{{ messages[0]['content'] }}", "rag": "R"}
    assert TextProcessor(tokenizer).render_chat(HELLO) == "Dhello"


def test_a_template_cannot_reach_python(text: TextProcessor):
    with pytest.raises(RequestError, match="chat template"):
        text.render_chat(HELLO, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_token_bytes_show_parts_of_characters(text: TextProcessor):
    ids = text.encode("😀 hello", add_special_tokens=False)
    assert b"".join(text.token_bytes(token) for token in ids) == "😀 hello".encode()
    assert text.token_text(ids[0]) == "bytes:\\xf0"
    assert text.token_text(2) == "<|im_end|>"
    assert text.token_bytes(10_000) == b"" and text.token_text(10_000) == ""
