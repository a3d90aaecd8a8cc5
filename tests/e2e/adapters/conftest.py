"""One server for the tests of an adapter's life: two ranks, a `lora_dir`, a hub, few names, and files that fail on one rank.

It has the six adapters of the tiny model, two slots, and room for eight names more. After each test nothing is held and no name is left.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.specs import ADMIN_KEY, LLAMA
from tests.support.adapters import ADAPTERS, tiny_adapters
from tests.support.client import Ask, ask_one
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.processes import wait_for
from tests.support.reference import Reference, tiny_reference
from tests.support.server import BASE, Server, running_server

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
ROOM = 8
FAULTS = Path(__file__).parents[2] / "support/faults"
WEIGHTS = "adapter_model.safetensors"


class Faults:
    """Files of one rank that fail or wait: see tests/support/faults."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fail(self, tp_rank: int, adapter: Path) -> None:
        (self._folder / f"fail-{tp_rank}").write_text(str(adapter))

    def hold(self, tp_rank: int, adapter: Path) -> None:
        (self._folder / f"hold-{tp_rank}").write_text(str(adapter))

    def wait_held(self, tp_rank: int) -> None:
        wait_for(f"rank {tp_rank} to open the file", (self._folder / f"held-{tp_rank}").exists)

    def mend(self) -> None:
        for kind in ("fail", "hold"):
            for path in self._folder.glob(f"{kind}-*"):
                path.unlink()


@dataclass(frozen=True)
class Life:
    """The server and what is around it."""

    server: Server
    hub: FakeHub
    faults: Faults
    lora_dir: Path
    reference: Reference

    @property
    def folders(self) -> dict[str, Path]:
        """The adapters that the reference knows, by name. Never changed: copy one to change it."""
        return tiny_adapters("llama2")

    def copy(self, adapter: str, name: str) -> Path:
        """A folder of its own, below the server's roots, with the weights of `adapter`."""
        place = self.server.scratch / name
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(self.folders[adapter], place))

    def load(self, name: str, path: Path | str, **more: Any) -> httpx.Response:
        return self.server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}, headers=ADMIN)

    def loaded(self, name: str, path: Path | str, **more: Any) -> None:
        answer = self.load(name, path, **more)
        assert answer.status_code == 200, answer.text

    def unload(self, name: str) -> httpx.Response:
        return self.server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)

    def names(self) -> list[str]:
        """Served adapters beside the six."""
        cards = self.server.get("/v1/models").json()["data"]
        return [card["id"] for card in cards if card["id"] not in (BASE, *ADAPTERS)]

    def refused(self, answer: httpx.Response, status: int, code: str) -> str:
        """Checks a refusal; returns its words."""
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        return str(answer.json()["error"]["message"])

    def answers_with(self, name: str, adapter: str, prompt: tuple[int, ...], num_tokens: int = 8) -> int:
        """`name` answers with the weights of `adapter`, as the reference does; returns how many prompt tokens were cached."""
        answer = ask_one(self.server, Ask(name, prompt, num_tokens))
        self.reference.check_greedy(prompt, answer.token_ids, adapter, answer.logprobs)
        self.reference.assert_adapter_matters(prompt, adapter)
        return answer.cached_tokens


@pytest.fixture(scope="session")
def lifecycle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("lifecycle")
    faults, lora_dir = folder / "faults", folder / "lazy"
    faults.mkdir()
    lora_dir.mkdir()
    more = (f"--lora-dir={lora_dir}", "--enable-hub-adapters", f"--max-registered-loras={len(ADAPTERS) + ROOM}")
    with ExitStack() as stack:
        hub = stack.enter_context(fake_hub())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(FAULTS))
            patch.setenv("MSTAR_TEST_FAULTS", str(faults))
            patch.setenv("HF_ENDPOINT", hub.url)
            patch.setenv("HF_HOME", str(folder / "hf"))
            patch.setenv("HF_HUB_DISABLE_XET", "1")
            server = stack.enter_context(running_server([*LLAMA.command_line(folder), *more], folder, spec=LLAMA))
        yield Life(server, hub, Faults(faults), lora_dir, tiny_reference("llama2"))


@pytest.fixture
def life(lifecycle: Life) -> Iterator[Life]:
    yield lifecycle
    lifecycle.faults.mend()
    lifecycle.hub.failing = None
    for name in lifecycle.names():
        lifecycle.unload(name)
    status = lifecycle.server.wait_until_idle()
    assert lifecycle.names() == status["pinned"] == []
