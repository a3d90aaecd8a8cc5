"""Tiny random models of every family with a tiny tokenizer, each built once and kept in a cache folder.

A folder is named after a hash of all that it is made from, is complete or absent (built beside its place and renamed), and is never
changed: any number of test processes may ask for it at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from demo.fetch_model import cache_folder

FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm2")
NUM_TOKENIZER_TOKENS = 128
MAX_MODEL_LEN = 1024
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 and 2; 2 is the Llama line's end of sequence
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = ("the", "and", "user", "assistant", "hello", "one", "two")
_SOURCES = (Path(__file__), Path(__file__).parents[1] / "unit/models/tiny.py")


def tiny_model(family: str) -> Path:
    """The folder of a random float32 model of `family` (2 layers, vocabulary 128 or 130), with its tokenizer."""

    def build(folder: Path) -> None:
        from tests.unit.models.tiny import make_model  # late: it takes seconds, and mostly the folder is there

        make_model(family, folder, max_position_embeddings=MAX_MODEL_LEN)
        save_tokenizer(folder)

    return built_once(f"model-{family}", _SOURCES, build)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 128 tokens that knows ASCII alone (other bytes have no token), with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["Ċ", "Ġ", *map(chr, range(0x21, 0x7F))]  # byte-level names of newline, space and the printable characters
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        left = word[0]
        for char in word[1:]:
            if len(vocabulary) < NUM_TOKENIZER_TOKENS and left + char not in vocabulary:
                merges.append((left, char))
                vocabulary[left + char] = len(vocabulary)
            left += char
    for char in alphabet[2:]:
        if len(vocabulary) < NUM_TOKENIZER_TOKENS:
            merges.append(("Ġ", char))
            vocabulary["Ġ" + char] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIALS[1], eos_token=SPECIALS[2])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))


def built_once(name: str, sources: tuple[Path, ...], build: Callable[[Path], None]) -> Path:
    """The cached folder `name`, built by `build(folder)` if what it is made from has changed or it is not there."""
    state = hashlib.blake2b(digest_size=8)
    for source in sources:
        state.update(source.read_bytes())
    for package in ("torch", "transformers", "peft", "tokenizers"):
        state.update(f"{package} {version(package)}".encode())
    place = cache_folder() / "tests" / f"{name}-{state.hexdigest()}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=place.parent))
    try:
        build(work)
        work.chmod(0o755)
        try:
            os.rename(work, place)
        except OSError:
            if not place.is_dir():  # another process was first: theirs is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place
