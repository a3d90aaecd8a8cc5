"""`mstar adapters`: what it prints, its JSON, its exit codes; and that docs/adapters.md is the loader's own table."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from mstar.adapters import AdapterLimits, BaseShapes, catalogue_markdown, cli, read_adapter
from mstar.adapters import progress as progress_module
from mstar.adapters.admin_client import AdminClient
from mstar.adapters.outline import spans
from mstar.adapters.progress import ReadProgress, while_waiting
from mstar.adapters.tables import served_rows, size_text
from mstar.errors import AdapterError
from tests.unit.adapters.adapter_folders import CONFIG, WEIGHTS, base_weights, hand_folder, pair

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run() -> Run:
    """The command in this process: exit code, stdout, stderr."""

    def call(*argv: Any) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, [*map(str, argv)], env={"COLUMNS": "160", "MSTAR_ADMIN_KEY": "s3cret"})
        assert isinstance(result.exception, SystemExit | None), result.exc_info
        return result.exit_code, result.stdout, result.stderr

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base with its weights and a tokenizer of two tokens."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: weight.numpy() for name, weight in base_weights().items()}, folder / "model.safetensors")
    Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


# docs


def test_docs_adapters_md_is_the_catalogue():
    """Written by `make docs`; run it after a change of the table."""
    assert (ROOT / "docs/adapters.md").read_text(encoding="utf-8") == catalogue_markdown()


def test_the_catalogue_is_printed_or_written(run: Run, tmp_path: Path):
    assert run("catalogue") == (0, catalogue_markdown(), "")
    assert run("catalogue", "--write", tmp_path / "x.md")[0] == 0
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == catalogue_markdown()


# check


def test_check_says_that_it_would_be_served(run: Run, model: Path, tmp_path: Path):
    folder = hand_folder(tmp_path / "good", pair() | pair(1))
    code, out, _ = run("check", folder, "--model", model)
    assert code == 0 and out.startswith("would be served: 2 modules, rank 4")
    code, out, _ = run("check", folder, "--model", model, "--json")
    said = json.loads(out)
    assert code == 0 and said["served"] and said["num_modules"] == 2 and len(said["digest"]) == 64


def test_check_sees_what_only_the_ranks_would_see(run: Run, model: Path, tmp_path: Path):
    """Values, and copies of base weights."""
    tensors = pair()
    next(iter(tensors.values()))[0, 0] = np.inf
    code, _, error = run("check", hand_folder(tmp_path / "inf", tensors), "--model", model)
    assert code == 1 and error.startswith("refused: ") and "not finite" in error
    name = "model.layers.0.self_attn.q_proj"
    copy = {f"base_model.model.{name}.base_layer.weight": base_weights()[f"{name}.weight"].numpy()}
    assert run("check", hand_folder(tmp_path / "same", pair() | copy), "--model", model)[0] == 0
    other = {key: values + 1 for key, values in copy.items()}
    code, out, _ = run("check", hand_folder(tmp_path / "other", pair() | other), "--model", model, "--json")
    assert code == 1 and json.loads(out)["error"]["code"] == "adapter_base_copy_mismatch"


@pytest.mark.parametrize(
    ("options", "fields", "beside", "code", "message"),
    [
        (("--max-lora-rank", 3), {}, None, "adapter_rank_too_large", "max_lora_rank` is 3"),
        ((), {"lora_alpha": None}, None, "adapter_config_invalid", "`lora_alpha` is null"),
        ((), {}, {"7": {"content": "<|tool|>"}}, "adapter_added_tokens", "does not have"),
        (("--lora-root", "/nowhere"), {}, None, "adapter_path_not_allowed", "does not lie in an allowed folder"),
        (("--lora-target-modules", "v_proj"), {}, None, None, "q_proj"),
    ],
)
def test_check_refuses_with_the_servers_words(run: Run, model: Path, tmp_path: Path, options, fields, beside, code, message):
    folder = hand_folder(tmp_path / "bad", **fields)
    if beside is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": beside}))
    exit_code, out, _ = run("check", folder, "--model", model, "--json", *options)
    said = json.loads(out)
    assert exit_code == 1 and said["served"] is False
    assert code in (None, said["error"]["code"]) and message in said["error"]["message"]
    _, _, plain = run("check", folder, "--model", model, *options)
    assert " ".join(plain.split()) == " ".join(f"refused: {said['error']['message']}".split())


def test_c24_check_and_a_rank_refuse_a_value_beyond_the_slots_range_in_the_same_words(run: Run, model: Path, tmp_path: Path):
    tensors = pair()
    next(iter(tensors.values()))[0, 0] = 70000
    folder = hand_folder(tmp_path / "loud", tensors)
    assert run("check", folder, "--model", model)[0] == 0  # a float32 model
    base = BaseShapes.from_config(CONFIG)
    half = tmp_path / "half"
    shutil.copytree(model, half)
    for key in ("dtype", "torch_dtype"):
        (half / "config.json").write_text(json.dumps({**CONFIG, key: "float16"}))
        with pytest.raises(AdapterError) as rank:
            read_adapter(folder, base, AdapterLimits(64, (tmp_path,), slot_dtype="F16"))
        for argv in ((half,), (model, "--dtype", "float16"), (half, "--dtype=auto")):
            code, out, _ = run("check", folder, "--json", "--model", *argv)
            assert (code, json.loads(out)["error"]["code"]) == (1, "adapter_dtype_overflow")
            assert json.loads(out)["error"]["message"] == rank.value.message
        for dtype in ("bfloat16", "float32"):
            assert run("check", folder, "--model", half, "--dtype", dtype)[0] == 0
    code, _, error = run("check", folder, "--model", model, "--dtype", "int8")
    assert code == 2 and "int8" in error
    (half / "config.json").write_text(json.dumps({**CONFIG, "dtype": "int8"}))
    code, _, error = run("check", folder, "--model", half)
    assert code == 2 and "int8" in error


def test_check_refuses_a_template_that_cannot_be_compiled(run: Run, model: Path, tmp_path: Path):
    folder = hand_folder(tmp_path / "cut")
    (folder / "chat_template.jinja").write_text("{% if messages %}")
    code, out, _ = run("check", folder, "--json", "--model", model)
    assert (code, json.loads(out)["error"]["code"]) == (1, "adapter_chat_template_invalid")


def test_check_of_what_is_no_folder_or_with_what_is_no_model(run: Run, model: Path, tmp_path: Path):
    assert run("check", tmp_path / "nope", "--model", model)[0] == 1
    for bad in (tmp_path, tmp_path / "nope"):
        code, _, error = run("check", hand_folder(tmp_path / "good"), "--model", bad)
        assert code == 2 and "config.json" in error
    (tmp_path / "config.json").write_text("[1]")
    assert run("check", tmp_path / "good", "--model", tmp_path)[0] == 2
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    assert run("check", tmp_path / "good", "--model", tmp_path)[0] == 2
    code, _, error = run("check", tmp_path / "good", "--model", model, "--tokenizer", tmp_path)
    assert code == 2 and "tokenizer.json" in error
    assert run("check", tmp_path / "good")[0] == 2


# inspect


def test_inspect_shows_what_lies_there_without_a_model(run: Run, tmp_path: Path):
    tensors = {**pair(0), **pair(1), **pair(3), **pair(0, "mlp.down_proj", rank=2)}
    tensors = {key: values.astype(np.float16) if "layers.3" in key else values for key, values in tensors.items()}
    folder = hand_folder(tmp_path / "mixed", tensors, rank_pattern={"down_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 16})
    code, out, _ = run("inspect", folder)
    assert code == 0
    (q_row,) = (line for line in out.splitlines() if "q_proj" in line)
    assert [cell.strip() for cell in q_row.split("│")[1:-1]] == ["self_attn.q_proj", "0-1, 3", "4", "2, 4", "F16, F32", "lora_A, lora_B"]
    (down_row,) = (line for line in out.splitlines() if "down_proj" in line)
    assert [cell.strip() for cell in down_row.split("│")[1:5]] == ["mlp.down_proj", "0", "2", "4"]
    assert "r 4, lora_alpha 8, scale = alpha / r" in out and "not compared with a base model" in out
    code, out, _ = run("inspect", folder, "--json")
    said = json.loads(out)
    assert code == 0 and said["size_bytes"] == (folder / WEIGHTS).stat().st_size and len(said["digest"]) == 64
    assert [module["module"] for module in said["modules"]] == ["mlp.down_proj", "self_attn.q_proj"]
    assert said["modules"][1]["layers"] == [0, 1, 3] and said["problems"] == []


def test_inspect_with_a_model_adds_its_warnings_and_refusals(run: Run, model: Path, tmp_path: Path):
    folder = hand_folder(tmp_path / "good", target_modules=["v_proj"])
    code, out, _ = run("inspect", folder, "--model", model)
    assert code == 0 and "note: `target_modules` does not name" in out and "not compared" not in out
    deep = hand_folder(tmp_path / "deep", pair(5))
    code, out, _ = run("inspect", deep, "--model", model)
    assert code == 1 and "refused: " in out and "is for layer 5" in " ".join(out.split())


def test_inspect_shows_a_folder_that_no_server_would_take(run: Run, tmp_path: Path):
    tensors = pair() | {"model.layers.0.mystery.weight": np.ones((2, 2), np.float32)}
    code, out, _ = run("inspect", hand_folder(tmp_path / "odd", tensors, r=0), "--json")
    said = json.loads(out)
    assert code == 1 and said["config"] is None and said["modules"][0]["ranks"] == [4] and said["modules"][0]["scales"] == []
    assert [problem.partition(" ")[0] for problem in said["problems"]] == ["`r`", "Keys"]
    (tmp_path / "odd" / WEIGHTS).write_bytes(b"")
    code, _, error = run("inspect", tmp_path / "odd")
    assert code == 1 and error.startswith("refused: ") and "is empty" in error


# the server


def card(name: str) -> dict[str, Any]:
    return {"id": name, "root": f"/adapters/{name}", "created": 1_700_000_000, "parent": "base"}


STATUS = {
    "ranks": [
        {"slots": [{"slot": 1, "adapter": "a", "holders": 3}, {"slot": 2, "adapter": None, "holders": 0}], "host_adapters": ["a", "b"]},
        {
            "slots": [{"slot": 1, "adapter": "a", "holders": 3}, {"slot": 2, "adapter": None, "holders": 0}],
            "host_adapters": ["a", "b", "c"],
        },
    ],
    "pinned": ["a"],
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """A server that plays `answer(request)`; the requests as they came."""
    seen: list[httpx.Request] = []
    answers: dict[str, Callable[[httpx.Request], httpx.Response]] = {}

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answers[request.url.path](request)

    def client(url: str, api_key: str | None, admin_key: str | None) -> AdminClient:
        return AdminClient(url, api_key, admin_key, httpx.MockTransport(handle))

    monkeypatch.setattr(cli, "_client", client)
    return seen, answers


def error(status: int, code: str, message: str = "no") -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, json={"error": {"message": message, "code": code, "type": "x", "param": None}})


def test_ls_reads_every_page_and_says_where_each_adapter_is(run: Run, server):
    seen, answers = server
    names = ["base", "a", "b", "c"]

    def models(request: httpx.Request) -> httpx.Response:
        start = names.index(request.url.params.get("after", "")) + 1 if "after" in request.url.params else 0
        page = names[start : start + 2]
        cards = [card(name) | ({"parent": None} if name == "base" else {}) for name in page]
        return httpx.Response(200, json={"data": cards, "last_id": page[-1], "has_more": start + 2 < len(names)})

    answers["/v1/models"] = models
    answers["/mstar/status"] = lambda _: httpx.Response(200, json=STATUS)
    code, out, _ = run("ls", "--url", "http://s:1/v1/", "--json", "--api-key", "k")
    rows = json.loads(out)["adapters"]
    assert code == 0 and [(row["name"], row["slot"], row["requests"], row["in_host_memory"], row["pinned"]) for row in rows] == [
        ("a", 1, 2, True, True),
        ("b", None, 0, True, False),
        ("c", None, 0, False, False),
    ]
    assert {request.headers["authorization"] for request in seen} == {"Bearer k"}
    code, out, _ = run("ls")
    assert code == 0 and "3 adapters" in out
    assert [line.split("│")[2].strip() for line in out.splitlines() if "│" in line] == ["slot 1, pinned", "host memory", "disk"]


def test_ls_still_lists_while_the_ranks_start(run: Run, server):
    _, answers = server
    answers["/v1/models"] = lambda _: httpx.Response(200, json={"data": [card("[red]x")], "last_id": "x", "has_more": False})
    answers["/mstar/status"] = error(503, "server_not_ready")
    code, out, _ = run("ls")
    assert code == 0 and "1 adapter" in out and "[red]x" in out and "?" in out
    assert served_rows([card("x")], None) == [{"name": "x", "path": "/adapters/x", "loaded_at": 1_700_000_000}]


@pytest.mark.parametrize(
    ("argv", "path", "body"),
    [
        (
            ("load", "x", "/a", "--inplace"),
            "/v1/load_lora_adapter",
            {"lora_name": "x", "lora_path": "/a", "load_inplace": True, "pinned": False},
        ),
        (("unload", "x"), "/v1/unload_lora_adapter", {"lora_name": "x"}),
        (("pin", "x"), "/v1/pin_lora_adapter", {"lora_name": "x"}),
        (("unpin", "x"), "/v1/unpin_lora_adapter", {"lora_name": "x"}),
    ],
)
def test_changes_send_the_admin_key_and_exit_with_what_the_server_says(run: Run, server, argv, path, body):
    seen, answers = server
    answers[path] = lambda _: httpx.Response(200, text="Success")
    code, out, _ = run(*argv, "--json")
    assert code == 0 and json.loads(out)["name"] == "x"
    assert json.loads(seen[-1].content) == body and seen[-1].headers["authorization"] == "Bearer s3cret"
    for status, expected in ((400, 1), (404, 1), (409, 1), (401, 1), (503, 3), (500, 3)):
        answers[path] = error(status, "some_code", "said so [bold]")
        assert run(*argv)[0] == expected and "said so [bold]" in run(*argv)[2]
        assert json.loads(run(*argv, "--json")[1]) == {"error": {"message": "said so [bold]", "code": "some_code"}}
    answers[path] = error(404, "not_found")
    assert "--enable-runtime-lora" in run(*argv)[2]
    answers[path] = lambda _: httpx.Response(502, text="<html>")
    assert run(*argv)[0] == 3


def test_no_server_is_exit_3_and_no_admin_key_is_sent_as_none(run: Run):
    code, _, message = run("ls", "--url", "http://127.0.0.1:9")
    assert code == 3 and "no server answers at http://127.0.0.1:9" in message
    assert run("ls", "--url", "http://[")[0] == 3
    assert run("load", "x")[0] == run("nonsense")[0] == 2


# parts


def test_spans_and_sizes():
    assert [spans(layers) for layers in ((), (3,), (0, 1, 2), (5, 0, 1, 3))] == ["", "3", "0-2", "0-1, 3, 5"]
    assert [size_text(size) for size in (0, 999, 1000, 1_874_552, 2 * 10**9, 3 * 10**13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.9 MB",
        "2.0 GB",
        "30.0 TB",
    ]


def test_progress_shows_nothing_for_what_is_quick_and_something_for_what_is_not(monkeypatch: pytest.MonkeyPatch):
    from rich.console import Console

    for patience, shown in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(progress_module, "PATIENCE_S", patience)
        console = Console(record=True, force_terminal=True, width=80)
        with ReadProgress("reading", 100, console) as asked:
            assert asked() is False and asked() is False
        assert ("reading" in console.export_text()) is shown
    assert while_waiting("loading", lambda: 7, Console(quiet=True)) == 7
    with pytest.raises(ValueError, match="passed on"):
        while_waiting("loading", lambda: int("passed on"), Console(quiet=True))


def test_the_command_is_registered_and_reaches_neither_torch_nor_transformers():
    script = "import sys\nfrom mstar.cli import main\ntry:\n    main(['adapters', 'ls', '--url', 'http://127.0.0.1:9'])\n"
    script += "except SystemExit as error:\n    assert error.code == 3, error.code\n"
    script += "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
