"""The configuration of one instance: a frozen model read from YAML and flags.

Leaf module, read by every process; no torch. Unknown keys are refused; every message names field, value and what is allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mstar.errors import ConfigError
from mstar.types import EMBEDDING, HEAD, PROJECTIONS


class LoraModule(BaseModel):
    """One adapter configured at startup: the name that clients send and the folder it lies in."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)
    pinned: bool = False


class ServeConfig(BaseModel):
    """Everything `mstar serve` takes. Field names are vLLM's flag names with underscores, plus mstar's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # the model
    model: str = Field(description="Folder of the base model (Hugging Face layout: config.json, safetensors, tokenizer).")
    served_model_name: str | None = Field(None, description="Name that clients send for the base. Default: the folder's name.")
    tokenizer: str | None = Field(None, description="Folder of the tokenizer. Default: the model's.")
    chat_template: str | None = Field(None, description="File with a Jinja chat template. Default: the tokenizer's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Weights, KV and slots. auto: the model's own.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where ranks compute: cpu (gloo) or cuda (NCCL).")
    seed: int = Field(0, ge=0, description="Seeds the draw of request seeds that clients do not set.")

    # ranks
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks; any number up to the model's query heads.")
    threads_per_rank: int | None = Field(None, ge=1, description="CPU threads of each rank. Default: cores / ranks.")

    attach: bool = Field(default=False, description="Start the front alone; the ranks come from torchrun on this or other hosts.")
    front_endpoint: str | None = Field(None, description="Where the front listens for ranks, tcp://ADDRESS:PORT. Needed with attach.")
    curve_dir: str | None = Field(None, description="Folder of CURVE keys (`mstar keys DIR`); needed off loopback.")
    max_restarts: int = Field(5, ge=0, description="Restarts of ranks or front within 5 minutes before giving up.")

    # batching and KV
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt + output in tokens. Default: the model's own, at most 8192.")
    max_num_seqs: int = Field(64, ge=1, description="Most rows in one step.")
    max_num_batched_tokens: int = Field(512, ge=1, description="Most tokens in one step; longer prompts prefill in chunks.")
    prefill_stretch: float = Field(
        2.0, ge=0, description="A step that also prefills may last so many times a step of decodes alone. 0: as long as it takes."
    )
    block_size: int = Field(16, ge=1, description="Tokens in one KV page.")
    num_gpu_blocks_override: int | None = Field(None, ge=1, description="Number of KV pages. Default: from kv_cache_memory_bytes.")
    kv_cache_memory_bytes: int = Field(1 << 30, ge=1, description="Bytes of KV pages over all ranks where no number is given.")
    enable_prefix_caching: bool = Field(default=True, description="Share KV pages between requests of one adapter with one prefix.")
    max_waiting_requests: int = Field(1024, ge=1, description="Requests waiting beyond this are answered 429.")
    deterministic: bool = Field(
        default=False, description="A request's tokens do not depend on its batch; refuses a start where they would."
    )
    max_passes: int = Field(16, ge=0, description="How many later requests may overtake one that waits for a slot or pages.")

    # LoRA
    enable_lora: bool = Field(default=True, description="Build the adapter slots. Off: no slot memory, no LoRA work at all.")
    lora_modules: tuple[LoraModule, ...] = Field((), description="Adapters to serve from the start.")
    max_loras: int = Field(8, ge=1, description="Adapter slots on the device: distinct adapters in one batch.")
    max_lora_rank: int = Field(64, ge=1, description="Largest adapter rank (r); any integer.")
    lora_target_modules: tuple[str, ...] = Field(
        PROJECTIONS, description="Modules that adapters may adapt; lm_head and embed_tokens are further ones and take slot memory."
    )
    max_cpu_loras: int | None = Field(None, ge=1, description="Adapters in the host tier. Default: twice max_loras; at least max_loras.")
    max_cpu_lora_bytes: int | None = Field(None, ge=1, description="Bytes of those on each rank. Default: no bound but their number.")
    max_registered_loras: int = Field(10_000, ge=1, description="Names that may be served at a time; a load beyond is refused.")
    lora_root: tuple[str, ...] = Field((), description="Folders that adapter folders may lie in. Default: those of lora_modules.")
    registry_file: str | None = Field(None, description="Where adapters loaded at runtime are kept. Default: only while this server runs.")
    lora_dir: str | None = Field(None, description="Folder of adapter folders, each loaded when a request first names it.")
    enable_hub_adapters: bool = Field(default=False, description="Take adapter paths of the form ORG/NAME[@REVISION] from the hub.")
    enable_runtime_lora: bool = Field(default=False, description="Serve the load and unload routes; needs admin_key.")

    # HTTP
    host: str = Field("127.0.0.1", description="Address that the HTTP server binds.")
    port: int = Field(8000, ge=0, le=65535, description="Its port; 0 takes a free one and prints it.")
    api_key: str | None = Field(None, description="Bearer key that clients must send.")
    admin_key: str | None = Field(None, description="Bearer key of the adapter routes.")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest HTTP body.")
    request_timeout_s: float | None = Field(None, gt=0, description="Longest request, ended with 504. A request's timeout_s may be less.")
    slow_client_timeout_s: float = Field(60.0, gt=0, description="A client that takes nothing of its answer for so long is cut.")
    max_logprobs: int = Field(20, ge=0, description="Most alternatives a request may ask per token.")

    # bounds of waits, in seconds; read < agreement < stuck rank
    lora_read_timeout_s: float = Field(30.0, gt=0, description="A read of an adapter longer than this has failed.")
    agreement_timeout_s: float = Field(60.0, gt=0, description="Longest wait in the load agreement.")
    stuck_rank_timeout_s: float = Field(120.0, gt=0, description="A rank that makes no progress for so long is stuck.")
    ingest_wait_s: float = Field(20.0, gt=0, description="How long a follower waits for a request that a step names.")
    hint_wait_s: float = Field(40.0, ge=0, description="Longest wait for followers' word that a read ended; above lora_read_timeout_s.")
    start_timeout_s: float = Field(300.0, gt=0, description="Longest start, until every rank is ready.")
    shutdown_timeout_s: float = Field(30.0, gt=0, description="How long running requests may finish at a stop.")

    record: str | None = Field(None, description="File in which the leader records every decision, for `mstar replay`.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _modules_from_strings(cls, value: Any) -> Any:
        """Accept `name=path` and JSON strings beside mappings, as the flag does."""
        if isinstance(value, dict):
            return tuple({"name": name, "path": path} for name, path in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(parse_lora_module(item) if isinstance(item, str) else item for item in value)
        return value

    @field_validator("lora_root", mode="before")
    @classmethod
    def _one_root(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _known_modules(cls, value: Any) -> Any:
        if not isinstance(value, (str, list, tuple)):
            return value
        names = [name for item in ([value] if isinstance(value, str) else value) for name in str(item).split(",")]
        unknown = [name for name in names if name not in (*PROJECTIONS, HEAD, EMBEDDING)]
        if unknown or not names:
            raise ValueError(f"{unknown or names} is not among {', '.join((*PROJECTIONS, HEAD, EMBEDDING))}")
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _consistent(self) -> ServeConfig:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras is {self.max_cpu_loras}, but the host tier must hold at least max_loras = {self.max_loras}")
        names = [module.name for module in self.lora_modules]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"lora_modules names {twice} more than once; every adapter needs its own name")
        for field in ("lora_modules", "lora_dir"):
            if getattr(self, field) and not self.enable_lora:
                raise ValueError(f"{field} is given, but enable_lora is false")
        if self.base_name in names:
            raise ValueError(f"lora_modules has the name {self.base_name!r}, which is the served base model's")
        if self.enable_runtime_lora and self.admin_key is None:
            raise ValueError("enable_runtime_lora needs admin_key: whoever can load adapters must be told from whoever can chat")
        if self.attach and self.front_endpoint is None:
            raise ValueError("attach needs front_endpoint: where ranks on other hosts find this front, tcp://ADDRESS:PORT")
        if not self.lora_read_timeout_s < self.agreement_timeout_s < self.stuck_rank_timeout_s:
            raise ValueError(
                f"lora_read_timeout_s {self.lora_read_timeout_s} < agreement_timeout_s {self.agreement_timeout_s} < "
                f"stuck_rank_timeout_s {self.stuck_rank_timeout_s} must hold, so that the cause of a wait is the one reported"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but each of max_num_seqs = {self.max_num_seqs} rows needs one"
            )
        return self

    @property
    def base_name(self) -> str:
        """The name that clients send for the base model."""
        return self.served_model_name or Path(self.model).name

    @property
    def adapter_roots(self) -> tuple[str, ...]:
        """Folders that adapter folders may lie in: as configured, else those that hold the configured adapters; and `lora_dir`."""
        local = (module.path for module in self.lora_modules if not self.enable_hub_adapters or Path(module.path).is_dir())
        roots = self.lora_root or tuple(sorted({str(Path(path).resolve().parent) for path in local}))
        return roots if self.lora_dir is None or self.lora_dir in roots else (*roots, self.lora_dir)

    @property
    def read_roots(self) -> tuple[str, ...]:
        """Folders that ranks may read in: where the front takes adapters from, the hub's cache included."""
        if not self.enable_hub_adapters:
            return self.adapter_roots
        from huggingface_hub.constants import HF_HUB_CACHE  # from the environment, which ranks inherit

        return (*self.adapter_roots, HF_HUB_CACHE)

    @property
    def host_tier_size(self) -> int:
        """Adapters that the host tier holds."""
        return self.max_cpu_loras if self.max_cpu_loras is not None else 2 * self.max_loras


def parse_lora_module(text: str) -> dict[str, Any]:
    """`name=path`, or JSON with `name` and `path`, as a mapping. Raises ConfigError for anything else."""
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            item = json.loads(stripped)
        except json.JSONDecodeError as error:
            raise ConfigError(f"lora module {text!r} is not valid JSON: {error}") from None
        name = item.get("name", item.get("lora_name"))
        path = item.get("path", item.get("lora_path"))
        return {"name": name, "path": path, "pinned": bool(item.get("pinned", False))}
    name, equals, path = stripped.partition("=")
    if not equals or not name or not path:
        raise ConfigError(f"lora module {text!r}: give name=path, or JSON with name and path")
    return {"name": name, "path": path}


def load_config(path: str | None, overrides: dict[str, Any]) -> ServeConfig:
    """Read the YAML file (if any), lay `overrides` (flags that were given) over it, validate.

    Relative `model`, `lora_root` and adapter paths in a file are taken from the working directory, as flags are.
    Raises ConfigError with one readable message.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        try:
            parsed = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if parsed is None:
            parsed = {}
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path} must hold a mapping of settings, found {type(parsed).__name__}")
        values = {str(key).replace("-", "_"): value for key, value in parsed.items()}
    values.update(overrides)
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, where=path)) from None


def _one_line(error: ValidationError, where: str | None) -> str:
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown setting {field!r}")
        elif item["type"] == "missing":
            problems.append(f"{field} is missing")
        elif not field:
            problems.append(item["msg"].removeprefix("Value error, "))
        else:
            problems.append(f"{field} is {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return f"{where + ': ' if where else ''}" + "; ".join(problems)
