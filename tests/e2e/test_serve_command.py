"""`mstar serve` with a configuration that cannot be served: exit 2 and one readable line, before any process starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.support.server import ROOT
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.xdist_group("commands")


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama2"))


def refused_line(*argv):
    """The one line that `mstar serve` wrote on exit 2. It must not come to starting anything."""
    command = [sys.executable, "-m", "mstar.cli", "serve", *map(str, argv)]
    environment = {**os.environ, "COLUMNS": "500"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line and "starting" not in line
    return line


def test_a_missing_model_folder_is_refused():
    assert "/nowhere/model" in refused_line("--model=/nowhere/model", "--port=0")


def test_a_model_folder_without_weights_or_tokenizer_is_refused(model, tmp_path):
    for missing in ("model.safetensors", "tokenizer.json", "config.json"):
        folder = tmp_path / missing
        shutil.copytree(model, folder)
        (folder / missing).unlink()
        line = refused_line(f"--model={folder}", "--port=0")
        assert str(folder) in line and missing.removeprefix("model") in line


def test_an_unknown_configuration_key_is_refused(model, tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text(f"model: {model}\nmax_lora: 3\n")
    line = refused_line(config, "--port=0")
    assert "max_lora" in line and str(config) in line


def test_c25_a_quantised_base_is_refused_at_start(model, tmp_path):
    """Its products would need the delta of an activation that was not rounded: none is served, with adapters or without."""
    folder = tmp_path / "fp8"
    shutil.copytree(model, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "fp8"}}))
    for more in ((), ("--no-enable-lora",)):
        line = refused_line(f"--model={folder}", "--port=0", *more)
        assert "quantization_config" in line and "float32, bfloat16 or float16" in line


def test_c90_more_than_one_front_is_refused_at_start(model, tmp_path):
    """One front has the one registry; there is no setting for more, and none is taken in silence."""
    config = tmp_path / "serve.yaml"
    for name in ("workers", "api_server_count", "num_fronts"):
        config.write_text(f"model: {model}\n{name}: 4\n")
        assert name in refused_line(config, "--port=0")


def test_more_ranks_than_heads_are_refused(model):
    line = refused_line(f"--model={model}", "--tensor-parallel-size=5", "--port=0")
    assert "5" in line and "4" in line and "tensor_parallel_size" in line


def test_an_unusable_adapter_folder_is_refused(model, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        line = refused_line(f"--model={model}", f"--lora-modules=bad={folder}", "--port=0")
        assert "bad" in line and str(folder) in line


def test_a_port_that_is_taken_is_refused(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused_line(f"--model={model}", f"--port={port}")


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-loras=4", "--max-cpu-loras=3"),
        ("--max-model-len=4096",),
        ("--num-gpu-blocks-override=2", "--max-model-len=512"),
        ("--max-num-batched-tokens=8", "--max-num-seqs=9"),
        ("--enable-runtime-lora",),
        ("--lora-root=/nowhere/adapters",),
        ("--chat-template=/nowhere/template.jinja",),
    ],
    ids=lambda flags: flags[-1],
)
def test_settings_that_contradict_each_other_are_refused(model, flags):
    name = flags[-1].removeprefix("--").partition("=")[0].replace("-", "_")
    assert name in refused_line(f"--model={model}", "--port=0", *flags)
