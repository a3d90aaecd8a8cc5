"""Nothing is unpickled: no source of ours names pickle, and no process of a server asks it for a class."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.e2e.prompts import greedy, seeded, some_tokens
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.client import ask_together
from tests.support.server import BASE, ROOT, ServerSpec, running_server

PLANTED = Path(__file__).parents[1] / "support/planted"
BANNED = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_NAMES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_pyobj", "recv_pyobj"}
SPEC = ServerSpec("audit", "llama2", 2, ("--enable-runtime-lora", "--admin-key=k"))


def sources():
    return sorted([*(ROOT / "mstar").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_names_pickle(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & BANNED, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in BANNED, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            assert node.attr not in BANNED_NAMES, ast.unparse(node)
            assert ast.unparse(node) not in ("torch.load", "np.load", "numpy.load"), ast.unparse(node)


@pytest.mark.xdist_group("chaos")
def test_an_end_to_end_run_under_an_audit_hook_unpickles_nothing(tmp_path, monkeypatch):
    found = tmp_path / "audit.txt"
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("MSTAR_TEST_AUDIT", str(found))
    with running_server(SPEC.command_line(tmp_path), tmp_path, spec=SPEC) as server:
        folder = str(tiny_adapters("llama2")["extra"])
        headers = {"Authorization": "Bearer k"}
        assert server.post("/v1/load_lora_adapter", {"lora_name": "extra", "lora_path": folder}, headers=headers).status_code == 200
        models = (BASE, *ADAPTERS, "extra")
        ask_together(server, [greedy(model, some_tokens(12, 80), 12) for model in models])
        ask_together(server, [seeded(model, some_tokens(12, 81), 3, 12) for model in models])
        chat = {"model": "extra", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        assert server.get("/metrics").status_code == server.get("/mstar/status").status_code == 200
    lines = found.read_text(encoding="utf-8").splitlines()
    armed = [line for line in lines if line.startswith("armed")]
    assert sum("mstar.worker" in line for line in armed) == 2 and sum("mstar.api.front" in line for line in armed) == 1, armed
    assert [line for line in lines if line.startswith("pickle.find_class")] == []
