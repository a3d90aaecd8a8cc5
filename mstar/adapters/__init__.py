"""PEFT adapter folders: which may be named, what is in them, whether they can be served, and their bytes.

What decides is the tensors in the file: every tensor is either applied or refused by name. numpy and the standard library only (and
jinja2, where a chat template lies beside): no torch, no pickle, no mapping. Used by the CLI, by the front (`inspect_adapter` before a
load) and by every rank (`read_adapter`).

    resolve_path -> inspect_adapter (headers, all checks) + digest_adapter -> … -> read_adapter(digest) on every rank

    catalogue   the one table of what is served and refused     config, keys, safetensors_header   what each part means
    paths       which folders may be named                      patterns, regex                    rank_pattern, alpha_pattern
    files       open, pread, digest                             plan                               all checks before the data
    base        shapes of the base                              read, beside, template             tensors; chat template
    base_files  rows of the base's weights                      base_copies                        copies of them in an adapter
    examine     all that the front checks, in one call          hub                                folders fetched by a hub id
    cli, admin_client, dry_run, outline, tables, progress: `mstar adapters` (these alone use typer, rich, httpx; none is imported here)
"""

from mstar.adapters.base import BaseShapes
from mstar.adapters.base_copies import check_base_copies
from mstar.adapters.base_files import BaseFiles
from mstar.adapters.catalogue import REFUSALS, SERVED, Refusal, Served, catalogue_markdown
from mstar.adapters.facts import (
    AdapterFacts,
    AdapterLimits,
    AdapterTensors,
    BaseCopy,
    BaseCopyFacts,
    Dtype,
    LoraPair,
    ModuleFacts,
    ModuleKey,
    as_float32,
)
from mstar.adapters.files import digest_adapter
from mstar.adapters.paths import resolve_path
from mstar.adapters.read import inspect_adapter, read_adapter, read_adapter_into

__all__ = [
    "REFUSALS",
    "SERVED",
    "AdapterFacts",
    "AdapterLimits",
    "AdapterTensors",
    "BaseCopy",
    "BaseCopyFacts",
    "BaseFiles",
    "BaseShapes",
    "Dtype",
    "LoraPair",
    "ModuleFacts",
    "ModuleKey",
    "Refusal",
    "Served",
    "as_float32",
    "catalogue_markdown",
    "check_base_copies",
    "digest_adapter",
    "inspect_adapter",
    "read_adapter",
    "read_adapter_into",
    "resolve_path",
]
