"""Pools, decoders and real adapter folders on N ranks in one process, against transformers + peft in float32.

Ranks are threads; collectives go over a barrier. All else is the code that serves: reading the folder, the admit, the slots, the
deltas. The reference is peft's own unmerged forward of the same folder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mstar.adapters import BaseShapes
from mstar.distributed.comm import CommGroup
from mstar.engine.resources.base import ResourceReqConfig, StepContext
from mstar.engine.resources.lora.backends.base import LoraBackend
from mstar.engine.resources.lora.pool import LoraAdapterPool, LoraStep
from mstar.engine.resources.lora.slots import IN_FLIGHT
from mstar.errors import RequestError
from mstar.models.arch import load_arch
from mstar.models.lora_targets import lora_spec
from mstar.types import EMBEDDING, HEAD, PROJECTIONS, Row, SamplingParams, Step
from tests.unit.models.tiny import make_engine, some_tokens

TOLERANCE = 1e-3
ALL = (*PROJECTIONS, HEAD, EMBEDDING)
WEIGHTS = "adapter_model.safetensors"
PATIENCE_S = 60


def peft_folder(base: Path, folder: Path, seed: int = 0, change: Callable[[PeftModel], None] | None = None, **lora: Any) -> Path:
    """A folder as peft saves it, of an adapter whose A and B are random; `change` may move what else peft trains."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **lora})
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                    parameter.normal_(std=0.2)
            if change is not None:
                change(model)
        model.save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Rewrite the folder's tensors."""
    save_file({key: value.contiguous() for key, value in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS)
    return folder


@functools.lru_cache(maxsize=16)
def peft_model(base: Path, folder: Path | None) -> torch.nn.Module:
    """transformers' model, with the folder's adapter in it where there is one. Folders are not edited after their first use here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        return (model if folder is None else PeftModel.from_pretrained(model, folder)).eval()


@torch.inference_mode()
def peft_logits(base: Path, folder: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    """What transformers + peft say at every position, `[tokens, vocab]` float32; without a folder the base."""
    logits: torch.Tensor = peft_model(base, folder)(torch.tensor([list(tokens)])).logits[0].float()
    return logits


class Exchange:
    """What every rank brings to a collective, for all of them."""

    def __init__(self, tp_size: int) -> None:
        self.barrier = threading.Barrier(tp_size)
        self.table: list[Any] = [None] * tp_size
        self.num_sums = 0

    def __call__(self, tp_rank: int, value: Any) -> list[Any]:
        self.table[tp_rank] = value
        self.barrier.wait(PATIENCE_S)
        everyone = list(self.table)
        self.barrier.wait(PATIENCE_S)
        return everyone


class ThreadComm(CommGroup):
    """One rank's collectives over an exchange."""

    def __init__(self, tp_rank: int, tp_size: int, exchange: Exchange) -> None:
        super().__init__(tp_rank, tp_size)
        self.exchange = exchange

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(self.tp_rank, x.clone())).sum(dim=0))

    def all_gather_columns(self, x: torch.Tensor, cuts: Any) -> torch.Tensor:
        assert x.shape[1] == cuts[self.tp_rank][1] - cuts[self.tp_rank][0]
        return torch.cat(self.exchange(self.tp_rank, x), dim=1)

    def agree_max(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self.exchange(self.tp_rank, list(values)), strict=True)]

    def agree_sum(self, values: torch.Tensor) -> torch.Tensor:
        shares = self.exchange(self.tp_rank, values)
        self.exchange.num_sums += self.tp_rank == 0
        return torch.stack(shares).sum(dim=0)


@dataclasses.dataclass
class Request:
    """Tokens of one row and its adapter's folder; the last `num_logits` of them give logits, all by default."""

    adapter: Path | None
    tokens: list[int]
    num_logits: int | None = None

    @property
    def wanted(self) -> int:
        return len(self.tokens) if self.num_logits is None else self.num_logits


class Served:
    """An instance of `tp_size` ranks over the model in `base`."""

    def __init__(
        self,
        base: Path,
        tp_size: int = 1,
        backend: Callable[[], LoraBackend] | None = None,
        dtype: torch.dtype = torch.float32,
        **spec: Any,
    ) -> None:
        self.base, self.tp_size, self.exchange = base, tp_size, Exchange(tp_size)
        arch = load_arch(base)
        fields = {"max_loras": 4, "max_lora_rank": 8, "max_cpu_loras": 8, "target_modules": ALL, **spec}
        made = lora_spec(arch, tp_size, **fields)
        shapes = BaseShapes.from_config(json.loads((base / "config.json").read_text()))
        made = dataclasses.replace(made, base=shapes, base_folder=str(base))
        self.pools: list[LoraAdapterPool] = []
        self.engines = []
        for tp_rank in range(tp_size):
            comm = ThreadComm(tp_rank, tp_size, self.exchange) if tp_size > 1 else CommGroup.single()
            pool = LoraAdapterPool(
                made, "cpu", tp_rank, tp_size, backend() if backend else None, dtype,
                agree=comm.agree_max, decides=tp_rank == 0, add_up=comm.agree_sum,
            )  # fmt: skip
            self.pools.append(pool)
            self.engines.append(make_engine(base, comm, self._deltas(pool), dtype=dtype))
        self._count = 0

    def load(self, folder: Path) -> None:
        """As a runtime load does: every rank reads it. Raises the first rank's AdapterError."""
        for pool in self.pools:
            pool.load_adapter_async(str(folder), str(folder)).result(PATIENCE_S)

    def refusal(self, folder: Path) -> RequestError:
        """What the load of `folder` is refused with, on the first rank that refuses it."""
        for pool in self.pools:
            error = pool.load_adapter_async(f"refused {folder}", str(folder)).exception(PATIENCE_S)
            if error is not None:
                assert isinstance(error, RequestError), error
                return error
        raise AssertionError(f"{folder} was not refused")

    def run(self, *requests: Request) -> list[torch.Tensor]:
        """One step over all of them, from ingest to remove; per request its logits."""
        rids = []
        for request in requests:
            self._count += 1
            rids.append(f"r{self._count}")
            adapter = None if request.adapter is None else str(request.adapter)
            for pool in self.pools:
                if adapter is not None and not pool.serves(adapter):
                    pool.register_adapter(adapter, adapter)
                pool.ingest_request(rids[-1], ResourceReqConfig(tuple(request.tokens), SamplingParams(1, seed=0), adapter))
        with ThreadPoolExecutor(self.tp_size) as ranks:
            per_rank = list(ranks.map(lambda tp_rank: self._rank(tp_rank, rids, requests), range(self.tp_size)))
        for rid in rids:
            for pool, engine in zip(self.pools, self.engines, strict=True):
                pool.remove_request(rid)
                engine.finish(rid)
        assert all(torch.equal(per_rank[0], other) for other in per_rank[1:]), "the ranks have different logits"
        return list(per_rank[0].split([request.wanted for request in requests]))

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def _rank(self, tp_rank: int, rids: list[str], requests: Sequence[Request]) -> torch.Tensor:
        pool, engine = self.pools[tp_rank], self.engines[tp_rank]
        for request in requests:
            if request.adapter is not None:
                assert pool.store.wait([str(request.adapter)], PATIENCE_S) and pool.store.state(str(request.adapter)) != IN_FLIGHT
        counts = [len(request.tokens) for request in requests]
        ctx = StepContext(Step(1, tuple(Row(rid, 0, count) for rid, count in zip(rids, counts, strict=True))))
        step = LoraStep(tuple(rids), tuple(counts), tuple(request.wanted for request in requests))
        pool.admit(step, ctx)
        assert not ctx.failed, {rid: outcome.error for rid, outcome in ctx.failed.items()}
        pool.plan(step, ctx)
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        wanted = [row for end, request in zip(ends, requests, strict=True) for row in range(end - request.wanted, end)]
        with torch.inference_mode():
            logits = engine.run([(rid, request.tokens) for rid, request in zip(rids, requests, strict=True)], wanted)
        pool.commit(step, ctx)
        return logits

    @staticmethod
    def _deltas(pool: LoraAdapterPool) -> Callable[[str, int], Any]:
        return lambda target, layer_idx: pool.layer_delta(target, layer_idx) if pool.spec.has_target(target) else None


def assert_equals_peft(base: Path, folders: Sequence[Path], tp_size: int, moves: float = 100 * TOLERANCE, **served: Any) -> Served:
    """One mixed step of the base and all `folders`: each row within TOLERANCE of peft, each adapter moving the logits by `moves`."""
    instance = Served(base, tp_size, **served)
    try:
        vocab = load_arch(base).vocab_size
        owners = [None, *folders, None, *reversed(folders)]
        requests = [Request(folder, some_tokens(5 + index, seed=index, vocab_size=vocab)) for index, folder in enumerate(owners)]
        for request, logits in zip(requests, instance.run(*requests), strict=True):
            expected = peft_logits(base, request.adapter, request.tokens)
            torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0, msg=lambda text, of=request: f"{of.adapter}: {text}")
            if request.adapter is not None:
                moved = (expected - peft_logits(base, None, request.tokens)).abs().max()
                assert moved > moves, f"{request.adapter} moves the logits by {moved:g} alone"
    finally:
        instance.close()
    return instance
