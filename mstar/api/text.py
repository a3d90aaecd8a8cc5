"""Text and tokens: the tokenizer and the chat template of the base model.

Front process; never imports torch (`PreTrainedTokenizerFast` does not, `AutoTokenizer` does). One object, made at start, then only read:
encode may run in worker threads, since the backend's own `encode` changes nothing (the wrapper's call would set truncation on it).
Raises ConfigError while loading and RequestError for what a client sent.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mstar.api.detokenizer import Detokenizer
from mstar.errors import ConfigError, RequestError

THREAD_SIZE = 8192  # characters; more is encoded in a thread, so that running streams go on
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What `apply_chat_template` takes beside the template's own variables, and variables that other fields set.
_RESERVED_KWARGS = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "self"),
        "return_assistant_tokens_mask",
    )
)


class TextProcessor:
    """Encodes prompts, renders chats, decodes tokens. `vocab_size` bounds every token id that a client may name."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, chat_template: str | None = None, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may carry the truncation of its training run; served prompts are refused, never cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        own = tokenizer.chat_template
        self._chat_template = chat_template if chat_template is not None else own.get("default") if isinstance(own, dict) else own
        self.vocab_size = vocab_size if vocab_size is not None else len(tokenizer)
        self._special_ids = frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in repr(self._backend.decoder) else None

    @classmethod
    def load(cls, folder: str | Path, chat_template_path: str | Path | None = None, *, vocab_size: int | None = None) -> TextProcessor:
        """Read the tokenizer in `folder` (Hugging Face layout) and, if given, a chat template that replaces its own.

        `vocab_size` is the model's; None takes it from a config.json in the folder, else the tokenizer's. Raises ConfigError.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"tokenizer: {folder} has no tokenizer.json")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever a broken folder makes transformers raise
            raise ConfigError(f"tokenizer: {folder} cannot be read: {' '.join(str(error).split())}") from error
        template = None if chat_template_path is None else _read_template(Path(chat_template_path))
        return cls(tokenizer, chat_template=template, vocab_size=vocab_size if vocab_size is not None else _model_vocab_size(folder))

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """The text's token ids. Raises RequestError where it is not text (lone surrogates) or gives an id the model has not."""
        try:
            ids = tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):
            raise RequestError(f"'{param}' is not valid Unicode text.", code="invalid_value", param=param) from None
        if ids and max(ids) >= self.vocab_size:
            raise RequestError(
                f"'{param}' holds token {max(ids)}, which the model with {self.vocab_size} tokens has not.",
                code="invalid_value",
                param=param,
            )
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """As `encode`, in a thread where the text is long."""
        if len(text) <= THREAD_SIZE:
            return self.encode(text, add_special_tokens=add_special_tokens, param=param)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens, param=param)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The chat as the model's prompt text. `chat_template` (an adapter's own) goes before the base's. Raises RequestError."""
        template = chat_template if chat_template is not None else self._chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                code="no_chat_template",
                param="messages",
            )
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(_RESERVED_KWARGS & kwargs.keys()):
            raise RequestError(
                f"'chat_template_kwargs' must not set {reserved[0]!r}.",
                code="unsupported_parameter",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except Exception as error:  # the template is a program run on the client's messages: whatever it raises is about them
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"The chat template refuses these messages: {reason or type(error).__name__}", code="chat_template_error", param="messages"
            ) from None
        assert isinstance(rendered, str)
        return rendered

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of whole sequences; incomplete characters come out as U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for what follows `prompt`."""
        backend = self._backend
        return Detokenizer(lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens)), prompt)

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary; None where there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for: also where they are only a part of a character."""
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._byte_of is not None:
            return b"".join(bytes((self._byte_of[char],)) if char in self._byte_of else char.encode() for char in piece)
        if (match := _BYTE_FALLBACK.fullmatch(piece)) is not None:
            return bytes((int(match[1], 16),))
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; `bytes:\\xNN…` (as OpenAI writes it) where it is not a whole number of characters."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token, as /tokenize shows it."""
        piece: str | None = self._backend.id_to_token(token_id)
        return "" if piece is None else piece


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character for every byte, the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error}") from None


def _model_vocab_size(folder: Path) -> int | None:
    """`vocab_size` of a config.json in the folder, None without one: the model's reader reports a broken file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size")) if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
