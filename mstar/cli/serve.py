"""`mstar serve`: flags over a YAML file, one configuration, then the supervisor.

Own process. The flags are made from `ServeConfig`'s fields (names, types, descriptions, defaults), so there is no second list to keep:
a new field is a flag at once and stands under "Further" until `_PANELS` names it. Names are vLLM's, dashes for underscores.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from mstar.config import ServeConfig, load_config
from mstar.errors import ConfigError

_PANELS: dict[str, tuple[str, ...]] = {
    "Model": ("model", "served_model_name", "tokenizer", "chat_template", "dtype", "device", "seed"),
    "Ranks": ("tensor_parallel_size", "threads_per_rank", "attach", "front_endpoint", "curve_dir", "max_restarts"),
    "Batching and KV cache": (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefill_stretch", "block_size", "num_gpu_blocks_override"),
        *("kv_cache_memory_bytes", "enable_prefix_caching", "max_waiting_requests", "max_passes", "deterministic"),
    ),
    "LoRA adapters": (
        *(
            "enable_lora",
            "lora_modules",
            "max_loras",
            "max_lora_rank",
            "lora_target_modules",
            "max_cpu_loras",
            "max_cpu_lora_bytes",
            "max_registered_loras",
            "lora_root",
        ),
        *("lora_dir", "enable_hub_adapters", "registry_file", "enable_runtime_lora"),
    ),
    "HTTP": ("host", "port", "api_key", "admin_key", "max_body_bytes", "max_logprobs", "log_level", "record"),
    "Timeouts": (
        *("lora_read_timeout_s", "agreement_timeout_s", "stuck_rank_timeout_s", "ingest_wait_s", "hint_wait_s", "start_timeout_s"),
        *("shutdown_timeout_s", "request_timeout_s", "slow_client_timeout_s"),
    ),
}
_FURTHER = "Further"
_ALIASES: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("-tp",),
    "lora_modules": ("--lora-paths",),
}
_METAVARS = {
    **dict.fromkeys(("lora_root", "lora_dir", "model", "tokenizer"), "DIR"),
    "lora_modules": "NAME=PATH|JSON",
    "chat_template": "FILE",
}
_ENVIRONMENT = {"api_key": "MSTAR_API_KEY", "admin_key": "MSTAR_ADMIN_KEY"}  # secrets that `ps` need not show
_MODULE_FLAGS = ("--lora-modules", "--lora-paths")


def make_serve() -> Callable[..., None]:
    """The command function, with one keyword per field of ServeConfig and the positional YAML file."""

    def serve(config: str | None, **flags: Any) -> None:
        """Serve one base model and many LoRA adapters over HTTP.

        Settings come from CONFIG (YAML, the flags' names with underscores) and from flags; a flag wins.

        Example: mstar serve --model ./llama --lora-modules pirate=./pirate json=./json -tp 2
        """
        run_serve(config, {name: value for name, value in flags.items() if value is not None})

    parameters = [_config_parameter(), *(_flag(name, field) for name, field in _ordered_fields())]
    serve.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def run_serve(config_path: str | None, overrides: dict[str, Any]) -> None:
    """Load the configuration, hand it to the supervisor, exit with its code. Raises ConfigError before any process starts."""
    if config_path is not None and Path(config_path).is_dir():
        raise ConfigError(f"{config_path} is a folder, the configuration is a YAML file; did you mean --model {config_path}?")
    config = load_config(config_path, overrides)
    from mstar.supervise import serve

    raise typer.Exit(serve(config))


def spread_lora_modules(argv: Sequence[str]) -> list[str]:
    """`--lora-modules a=p b=q` as `--lora-modules a=p --lora-modules b=q`: vLLM's form, which the parser itself cannot take.

    Words behind the flag belong to it as long as they look like an adapter (NAME=PATH or a JSON object).
    """
    out: list[str] = []
    flag: str | None = None
    for at, word in enumerate(argv):
        if word == "--":
            return [*out, *argv[at:]]
        if word in _MODULE_FLAGS:
            flag = word
            if at + 1 < len(argv) and _is_module(argv[at + 1]):
                continue  # written again before each module
        elif flag is not None and _is_module(word):
            out.append(flag)
        else:
            flag = None
        out.append(word)
    return out


def _is_module(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.lstrip().startswith("{"))


def _ordered_fields() -> list[tuple[str, FieldInfo]]:
    """The fields in the order of the panels, then those that no panel names."""
    fields = ServeConfig.model_fields
    named = [name for names in _PANELS.values() for name in names if name in fields]
    return [(name, fields[name]) for name in (*named, *(name for name in fields if name not in named))]


def _config_parameter() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(metavar="CONFIG.yaml", show_default=False, help="YAML file with settings.")]
    return inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The typer option of one field. Its default is None, "not given"; the help shows the field's own default."""
    annotation, is_bool = _flag_type(field.annotation)
    dashed = name.replace("_", "-")
    declared = [f"--{dashed}/--no-{dashed}" if is_bool else f"--{dashed}", *_ALIASES.get(name, ())]
    option = typer.Option(
        *declared,
        help=_help(field),
        show_default=False,
        metavar=_METAVARS.get(name),
        envvar=_ENVIRONMENT.get(name),
        rich_help_panel=next((panel for panel, names in _PANELS.items() if name in names), _FURTHER),
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option])


def _flag_type(annotation: Any) -> tuple[Any, bool]:
    """What the parser reads for a field's type, and whether it is a switch."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(item for item in get_args(annotation) if item is not type(None))
    if get_origin(annotation) is tuple:
        return list[str], False
    if get_origin(annotation) is Literal or annotation in (str, int, float, bool):
        return annotation, annotation is bool
    return str, False


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default()
    if field.is_required():
        return f"{text} [required]".replace("[", r"\[")
    if default is None or default == ():
        return escape(text)
    if isinstance(default, tuple):
        default = ",".join(default)
    shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    return rf"{escape(text)} [dim]\[default: {shown}][/dim]"
