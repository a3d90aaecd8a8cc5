"""Incremental decoding gives the text that the whole gives, however characters lie over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mstar.api.text import TextProcessor


def pieces_of(text: TextProcessor, prompt: tuple[int, ...], ids: tuple[int, ...], *, skip: bool = True) -> list[str]:
    detokenizer = text.detokenizer(prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(written=st.text(max_size=40))
def test_the_pieces_of_any_text_join_to_the_text(text: TextProcessor, written: str):
    ids = text.encode(written, add_special_tokens=False)
    assert "".join(pieces_of(text, (), ids)) == written


@given(ids=st.lists(st.integers(0, 333), max_size=40), prompt=st.lists(st.integers(200, 333), max_size=8))
def test_random_tokens_decode_as_the_whole_does(text: TextProcessor, ids: list[int], prompt: list[int]):
    # A sequence of broken bytes has no one true form; what matters is that whole characters are all there, in order.
    out = "".join(pieces_of(text, (), tuple(ids), skip=False)).replace("\ufffd", "")
    whole = text.decode(ids).replace("\ufffd", "")
    assert out == whole


def test_a_character_over_four_tokens_comes_out_once_and_whole(text: TextProcessor):
    ids = text.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    assert pieces_of(text, (), ids) == ["", "", "", "😀", ""]


def test_a_character_that_stays_incomplete_ends_as_a_replacement(text: TextProcessor):
    ids = text.encode("a😀", add_special_tokens=False)[:-1]
    assert "".join(pieces_of(text, (), ids)) == "a\ufffd"


def test_a_character_cut_by_the_end_of_the_prompt_is_given_out_whole(text: TextProcessor):
    ids = text.encode("x😀y", add_special_tokens=False)
    assert "".join(pieces_of(text, ids[:3], ids[3:])) == "😀y"


def test_bytes_that_never_become_a_character_are_not_held_for_ever(text: TextProcessor):
    (broken,) = {text.encode("😀", add_special_tokens=False)[1]}
    pieces = pieces_of(text, (), (broken,) * 30)
    assert any(pieces[:10])
    assert set("".join(pieces)) == {"\ufffd"}


def test_special_tokens_are_left_out_or_shown(text: TextProcessor):
    ids = (*text.encode("hello", add_special_tokens=False), 2, *text.encode(" there", add_special_tokens=False))
    assert "".join(pieces_of(text, (), ids)) == "hello there"
    assert "".join(pieces_of(text, (), ids, skip=False)) == "hello<|im_end|> there"


@pytest.fixture(scope="module")
def llama_like() -> TextProcessor:
    """A tokenizer of the SentencePiece kind: `▁` for blanks, the first one dropped, single bytes as a fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581hello": 3, "\u2581world": 4, "!": 5, "\u2581": 6}
    vocab |= {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextProcessor(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_the_blank_before_the_first_output_token_is_kept_after_a_prompt(llama_like: TextProcessor):
    assert "".join(pieces_of(llama_like, (1, 3), (4, 5))) == " world!"
    assert "".join(pieces_of(llama_like, (), (3, 4))) == "hello world"


def test_the_blank_after_special_tokens_is_kept(llama_like: TextProcessor):
    assert "".join(pieces_of(llama_like, (1, 3), (2, 2, 4, 4))) == " world world"


def test_byte_fallback_tokens_join_to_a_character(llama_like: TextProcessor):
    ids = tuple(10 + byte for byte in "😀é".encode())
    assert "".join(pieces_of(llama_like, (1, 3), ids)) == "😀é"
    assert llama_like.token_bytes(10 + 0xF0) == b"\xf0"
    assert llama_like.token_text(4) == " world"
