"""The command line: flags to configuration, errors on one line with exit code 2, nothing heavy imported."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mstar.cli import main
from mstar.cli.serve import spread_lora_modules
from mstar.config import ServeConfig
from mstar.types import PROJECTIONS


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch):
    """Run `mstar serve …` with a supervisor that only notes its configuration; gives (configuration, exit code)."""
    seen: list[ServeConfig] = []
    stub = types.ModuleType("mstar.supervise")

    def serve(config: ServeConfig) -> int:
        seen.append(config)
        return 7

    stub.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mstar.supervise", stub)

    def run(*argv: str) -> tuple[ServeConfig | None, Any]:
        seen.clear()
        with pytest.raises(SystemExit) as caught:
            main(["serve", *argv])
        return (seen[0] if seen else None), caught.value.code

    return run


def config_of(parse: Any, *argv: str) -> ServeConfig:
    config, code = parse(*argv)
    assert code == 7  # the supervisor's code is the command's
    return config


def test_flags_have_vllms_names(parse: Any):
    config = config_of(
        parse,
        *("--model", "/m/base", "--served-model-name", "base", "--tensor-parallel-size", "3", "--max-loras", "4", "--max-lora-rank", "24"),
        *("--max-cpu-loras", "9", "--max-model-len", "512", "--block-size", "8", "--num-gpu-blocks-override", "99", "--dtype", "float32"),
        *("--host", "0.0.0.0", "--port", "0", "--api-key", "k", "--admin-key", "a", "--enable-runtime-lora", "--no-enable-prefix-caching"),
        *("--lora-root", "/a", "--lora-root", "/b", "--enable-lora", "--lora-read-timeout-s", "1.5"),
    )
    assert (config.model, config.base_name, config.tensor_parallel_size, config.max_loras, config.max_lora_rank) == (
        "/m/base",
        "base",
        3,
        4,
        24,
    )
    assert (config.max_cpu_loras, config.max_model_len, config.block_size, config.num_gpu_blocks_override) == (9, 512, 8, 99)
    assert (config.dtype, config.host, config.port, config.api_key, config.admin_key) == ("float32", "0.0.0.0", 0, "k", "a")
    assert config.enable_runtime_lora and not config.enable_prefix_caching and config.enable_lora
    assert (config.lora_root, config.lora_read_timeout_s) == (("/a", "/b"), 1.5)


def test_what_is_not_given_keeps_its_default(parse: Any):
    assert config_of(parse, "--model", "/m") == ServeConfig(model="/m")


@pytest.mark.parametrize("argv", [("-tp", "2"), ("-tp=2",), ("--tensor-parallel-size=2",)])
def test_tp_has_vllms_short_form(parse: Any, argv: Sequence[str]):
    assert config_of(parse, "--model", "/m", *argv).tensor_parallel_size == 2


@pytest.mark.parametrize(
    "argv",
    [
        ("--lora-modules", "a=/a", "b=/b"),
        ("--lora-modules", "a=/a", "--lora-modules", "b=/b"),
        ("--lora-paths", "a=/a", "b=/b"),
        ("--lora-modules=a=/a", "--lora-modules", "b=/b"),
        ("--lora-modules", '{"name": "a", "path": "/a"}', "b=/b"),
        ("--lora-modules", "a=/a", "--lora-paths", '{"lora_name": "b", "lora_path": "/b"}'),
    ],
)
def test_lora_modules_may_be_repeated_or_given_several_values(parse: Any, argv: Sequence[str]):
    config = config_of(parse, "--model", "/m", *argv, "--max-loras", "2")
    assert [(module.name, module.path) for module in config.lora_modules] == [("a", "/a"), ("b", "/b")]
    assert config.max_loras == 2


def test_spreading_leaves_other_words_alone():
    argv = ["serve", "--lora-modules", "a=/a", "b=/b", "conf.yaml", "x=y", "--seed", "1", "--", "--lora-modules", "c=/c", "d=/d"]
    spread = ["serve", "--lora-modules", "a=/a", "--lora-modules", "b=/b", "conf.yaml", "x=y", "--seed", "1"]
    assert spread_lora_modules(argv) == [*spread, "--", "--lora-modules", "c=/c", "d=/d"]
    assert spread_lora_modules(["serve", "--lora-modules"]) == ["serve", "--lora-modules"]


def test_a_yaml_file_is_read_and_flags_win(parse: Any, tmp_path: Path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: /m\nmax-loras: 3\nport: 9000\nlora_modules: {a: /a}\nenable_prefix_caching: false\n")
    config = config_of(parse, str(path), "--port", "9001")
    assert (config.model, config.max_loras, config.port, config.enable_prefix_caching) == ("/m", 3, 9001, False)
    assert config.lora_modules[0].path == "/a"
    assert config_of(parse, "--port", "9001", str(path), "--enable-prefix-caching").enable_prefix_caching


def test_keys_may_come_from_the_environment(parse: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MSTAR_API_KEY", "from-env")
    assert config_of(parse, "--model", "/m").api_key == "from-env"
    assert config_of(parse, "--model", "/m", "--api-key", "flag").api_key == "flag"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "model is missing"),
        (("--model", "/m", "--max-loras", "0"), "max_loras is 0"),
        (("--model", "/m", "--max-loras", "9", "--max-cpu-loras", "3"), "max_cpu_loras is 3"),
        (("--model", "/m", "--lora-modules", "nonsense"), "lora module 'nonsense'"),
        (("--model", "/m", "--lora-modules", "a=/a", "a=/b"), "more than once"),
        (("--model", "/m", "--enable-runtime-lora"), "admin_key"),
        (("--model", "/m", "--no-enable-lora", "--lora-modules", "a=/a"), "enable_lora is false"),
        (("none.yaml",), "cannot read the configuration none.yaml"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(parse: Any, capsys: pytest.CaptureFixture[str], argv: Sequence[str], words: str):
    config, code = parse(*argv)
    assert (config, code) == (None, 2)
    error = capsys.readouterr().err
    assert error.startswith("mstar: ") and words in error and error.count("\n") == 1


def test_an_unknown_key_in_the_file_is_named(parse: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text("model: /m\nmax_lora: 3\n")
    assert parse(str(path)) == (None, 2)
    assert "unknown setting 'max_lora'" in capsys.readouterr().err


def test_a_folder_instead_of_a_file_is_explained(parse: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert parse(str(tmp_path)) == (None, 2)
    assert "did you mean --model" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("--port", "abc"), ("--dtype", "int4"), ("--no-such-flag",), ("--model",)])
def test_a_bad_flag_is_exit_code_2(parse: Any, argv: Sequence[str]):
    assert parse("--model", "/m", *argv) == (None, 2)


def test_a_config_error_of_the_supervisor_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from mstar.errors import ConfigError

    stub = types.ModuleType("mstar.supervise")

    def serve(config: ServeConfig) -> int:
        raise ConfigError("model: /m has no config.json\nat all")

    stub.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mstar.supervise", stub)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--model", "/m"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "mstar: model: /m has no config.json at all\n"


def test_help_names_every_field_with_its_description_in_a_panel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code in (0, None)
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    for name, field in ServeConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description is not None and field.description in shown
    for panel in ("Model", "Ranks", "Batching and KV cache", "LoRA adapters", "HTTP", "Timeouts"):
        assert f"─ {panel} ─" in shown
    assert "Further" not in shown  # every field has its place
    assert "[required]" in shown and "[default: 8000]" in shown and "[default: on]" in shown


def test_version_and_the_tree(capsys: pytest.CaptureFixture[str]):
    from mstar import __version__

    with pytest.raises(SystemExit):
        main(["version"])
    assert capsys.readouterr().out == f"{__version__}\n"
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2


def test_help_and_refusals_import_neither_torch_nor_the_server():
    program = """
import sys
from mstar.cli import main
for argv in (["serve", "--help"], ["serve", "--model", "/m", "--max-loras", "0"], ["version"]):
    try:
        main(argv)
    except SystemExit:
        pass
heavy = [name for name in ("torch", "transformers", "fastapi", "uvicorn", "mstar.bench.cli", "zmq") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_m_works():
    done = subprocess.run([sys.executable, "-m", "mstar.cli", "serve"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "mstar: model is missing\n")


def test_the_modules_that_adapters_may_adapt_are_listed_or_repeated(parse: Any):
    flag = "--lora-target-modules"
    assert config_of(parse, "--model", "/m").lora_target_modules == PROJECTIONS
    for given in (["q_proj,lm_head"], ["q_proj", "lm_head"]):
        flags = [word for item in given for word in (flag, item)]
        assert config_of(parse, "--model", "/m", *flags).lora_target_modules == ("q_proj", "lm_head")
    config, code = parse("--model", "/m", flag, "q_proj,c_attn")
    assert config is None and code == 2
