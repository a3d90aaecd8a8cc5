"""The one table of what is served and what is refused, and the only place that words a refusal.

The loader raises through `refuse`, `docs/adapters.md` is `catalogue_markdown()`: the two cannot say different things.
A message is one sentence: what was found (with the field or key), `, but `, what is allowed. Values that come from a file
pass through `shown`, so a message is short, printable and ASCII whatever the file holds.

Pure data; used by every process that reads adapters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mstar.errors import AdapterError

MAX_SHOWN = 120


@dataclass(frozen=True)
class Served:
    """One feature that is applied exactly as PEFT applies it."""

    feature: str
    where: str
    meaning: str


@dataclass(frozen=True)
class Refusal:
    """One reason to refuse. `found` is a format string; `allowed` a clause that also stands alone in the docs."""

    code: str
    where: str
    found: str
    allowed: str
    example: str
    status: int = 400


SERVED: tuple[Served, ...] = (
    Served("ranks", "`r`, `rank_pattern`", "any integer from 1 to the server's `max_lora_rank`, mixed over modules and layers"),
    Served("alpha", "`lora_alpha`, `alpha_pattern`", "any finite number; the scale is alpha / r"),
    Served("patterns", "`rank_pattern`, `alpha_pattern`", "names and regular expressions, first match in file order, by PEFT's rule"),
    Served("rank-stabilised scale", "`use_rslora`", "the scale is alpha / sqrt(r)"),
    Served(
        "any choice of modules", "`target_modules`, `exclude_modules`", "list, regex or `all-linear`: information only, the tensors decide"
    ),
    Served(
        "any choice of layers",
        "`layers_to_transform`, `layers_pattern`",
        "information only, the tensors decide; other layers stay the base's",
    ),
    Served("projections", "q, k, v, o, gate, up, down", "any subset, in any layer, of those in the server's `lora_target_modules`"),
    Served(
        "head and embedding",
        "`lm_head.lora_*`, `embed_tokens.lora_embedding_*`",
        "where `lora_target_modules` names them, tied or not (a pair is applied to the one module that it names)",
    ),
    Served(
        "DoRA",
        "`use_dora`, `*.lora_magnitude_vector`",
        "the rows of W + delta are brought to the magnitudes' lengths",
    ),
    Served("biases", '`bias: "lora_only"`, `*.base_layer.bias`', "the adapter's bias takes the place of the base's, once over all ranks"),
    Served("fused projections", "`qkv_proj`, `gate_up_proj`", "A is shared, the rows of B are split by the widths of the parts"),
    Served(
        "key prefixes",
        "tensor keys",
        "with or without `base_model.model.`, `model.` and `language_model.`; with or without the infix `.default`",
    ),
    Served("dtypes", "F32, F16, BF16", "also mixed; cast once to the slots' dtype"),
    Served("shards", "`adapter_model.safetensors.index.json`", "several safetensors files with an index"),
    Served("initialisations", "`init_lora_weights`", "all that leave the base as it is: true, false, gaussian, eva, orthogonal, mica"),
    Served(
        "copies of base weights",
        "`*.base_layer.weight`, `embed_tokens.weight`, `lm_head.weight`",
        "ignored where equal to the served base",
    ),
    Served("chat template", "`chat_template.jinja`, `tokenizer_config.json`", "used for this adapter's chat requests"),
)

_CONFIG = "adapter_config_invalid"
_FILE = "adapter_file_invalid"

REFUSALS: dict[str, Refusal] = {
    # where the folder lies
    "path_not_allowed": Refusal(
        "adapter_path_not_allowed", "path", "The path {path} does not lie in an allowed folder",
        "an adapter must lie in one of the server's `lora_root` folders", "`../../etc`, a link that leads out, a NUL"),
    "not_found": Refusal(
        "adapter_not_found", "path", "There is no folder {path} in the allowed folders",
        "the path must name a folder with an adapter", "a typing error", status=404),
    # the configuration
    "config_missing": Refusal(
        "adapter_config_missing", "adapter_config.json", "The folder has no adapter_config.json",
        "a PEFT adapter has one beside its tensors", "a folder of something else"),
    "config_unreadable": Refusal(
        _CONFIG, "adapter_config.json", "adapter_config.json {problem}", "it must be one JSON object in UTF-8 of at most 1 MiB",
        "a truncated file, a key given twice"),
    "peft_type": Refusal(_CONFIG, "`peft_type`", "`peft_type` is {value}", "only \"LORA\" is served", "`\"IA3\"`, or the field is missing"),
    "rank_invalid": Refusal(_CONFIG, "`r`, `rank_pattern`", "`{field}` is {value}", "a rank is an integer of at least 1", "`\"r\": 0`"),
    "alpha_invalid": Refusal(
        _CONFIG, "`lora_alpha`, `alpha_pattern`", "`{field}` is {value}", "alpha must be a finite number that float32 holds",
        "`\"lora_alpha\": null`"),
    "field_type": Refusal(_CONFIG, "any field", "`{field}` is {value}", "it must be {expected}", "`\"use_rslora\": \"false\"`"),
    "dora": Refusal(
        "adapter_dora_mismatch", "`use_dora`, `*.lora_magnitude_vector`", "{what}",
        "with DoRA every module has its magnitude and without it none, else the answers would be wrong",
        "`\"use_dora\": true` with plain LoRA tensors"),
    "bias": Refusal(
        "adapter_bias_unsupported", "`bias`, `lora_bias`, `*.bias`", "{what}",
        "only `bias: \"none\"` and `\"lora_only\"` are served: biases of the base's own that belong to adapted modules",
        "`\"bias\": \"all\"`, `\"lora_bias\": true`, a bias where the base has none"),
    "modules_to_save": Refusal(
        "adapter_modules_to_save_unsupported", "`modules_to_save`", "{what}", "whole trained modules are not served, only LoRA pairs are",
        "`\"modules_to_save\": [\"lm_head\"]`"),
    "trainable_tokens": Refusal(
        "adapter_trainable_tokens_unsupported", "`trainable_token_indices`", "{what}", "trained token embeddings are not served",
        "`\"trainable_token_indices\": {\"embed_tokens\": [5]}`"),
    "layer_replication": Refusal(
        "adapter_layer_replication_unsupported", "`layer_replication`", "`layer_replication` is {value}",
        "the served base has its own layers and no copies of them", "`[[0, 4], [2, 5]]`"),
    "fan_in_fan_out": Refusal(
        "adapter_fan_in_fan_out_unsupported", "`fan_in_fan_out`", "`fan_in_fan_out` is true",
        "the served base stores its weights as [out, in]", "`\"fan_in_fan_out\": true`"),
    "alora": Refusal(
        "adapter_alora_unsupported", "`alora_invocation_tokens`", "`alora_invocation_tokens` is {value}",
        "adapters that start at a token are not served, as plain LoRA their answers would be wrong", "`[128, 7]`"),
    "init": Refusal(
        "adapter_init_unsupported", "`init_lora_weights`", "`init_lora_weights` is {value}, which changes the base's weights",
        "the tensors must fit the base as it is (PEFT converts on saving with `path_initial_model_for_weight_conversion`)",
        "`\"pissa\"`, `\"olora\"`, `\"loftq\"`, `\"corda\"`, `\"lora_ga\"`"),
    "unsupported_field": Refusal(
        "adapter_unsupported_field", "any other field", "`{field}` is {value}",
        "a field that may change the result must be known or empty", "`\"use_qalora\": true`, `\"target_parameters\": [\"w\"]`"),
    "pattern_unsupported": Refusal(
        "adapter_pattern_unsupported", "`rank_pattern`, `alpha_pattern`", "The key {pattern} of `{field}` {problem}",
        "keys are module names or plain regular expressions without look-around, back-references and flags", "`(?=q)`, `(a`"),
    # the files
    "weights_missing": Refusal(
        "adapter_weights_missing", "adapter_model.safetensors", "The folder has no adapter_model.safetensors",
        "the tensors must be in that file or in shards with an index", "an upload that did not end"),
    "pickle": Refusal(
        "adapter_pickle_refused", "`*.bin`, `*.pt`", "The folder holds its tensors only as {names}",
        "only safetensors is read, because a pickle file can run code", "`adapter_model.bin`"),
    "files_ambiguous": Refusal(
        "adapter_files_ambiguous", "safetensors files", "The folder has {what}", "it must be clear which files are the adapter",
        "shards without an index, or an index beside adapter_model.safetensors"),
    "index_invalid": Refusal(
        "adapter_index_invalid", "adapter_model.safetensors.index.json", "The index {problem}",
        "its `weight_map` must name every tensor and the file beside it that holds it", "a shard that is not there"),
    "file_invalid": Refusal(
        _FILE, "safetensors files", "{file} {problem}", "it must be one complete safetensors file",
        "a truncated download, a header that leaves holes"),
    "file_kind": Refusal(_FILE, "any file", "{file} is not a regular file", "an adapter's files are plain files", "a folder, a pipe"),
    "file_too_large": Refusal(_FILE, "any JSON or template", "{file} has {size} bytes", "at most {limit} are read", "a config of 1 GiB"),
    "file_outside": Refusal(
        "adapter_path_not_allowed", "any file", "{file} is a link that leads out of the allowed folders",
        "an adapter's files must lie in its own folder or in one of the server's `lora_root` folders", "a link to `/etc/passwd`"),
    "unreadable": Refusal("adapter_unreadable", "any file", "{file} cannot be read ({problem})", "the server must be able to", "mode 000"),
    "changed": Refusal(
        "adapter_changed", "any file", "{what}", "the files must stay as they were when the adapter was validated", "a copy still running"),
    "cancelled": Refusal(
        "adapter_read_cancelled", "the read", "The read of the adapter was cancelled", "a load that is given up leaves nothing behind",
        "a load that took too long", status=503),
    # the tensors
    "no_tensors": Refusal(
        "adapter_no_lora_tensors", "tensor keys", "The adapter holds no LoRA tensors", "without them it would answer as the base does",
        "an empty safetensors file"),
    "unknown_keys": Refusal(
        "adapter_unknown_keys", "tensor keys", "{count} keys are not known: {keys}",
        "this base takes keys such as {expected}", "keys of another framework, or of another model"),
    "layer_out_of_range": Refusal(
        "adapter_layer_out_of_range", "tensor keys", "{key} is for layer {layer}", "this base has the layers 0 to {last}",
        "an adapter of a deeper model"),
    "duplicate_module": Refusal(
        "adapter_duplicate_module", "tensor keys", "{first} and {second} are for the same weights", "every module has one A and one B",
        "`qkv_proj` beside `q_proj`"),
    "half_pair": Refusal(
        "adapter_half_pair", "tensor keys", "{key} has no lora_{missing} beside it", "every module needs both its A and its B",
        "a lost tensor"),
    "shape": Refusal(
        "adapter_shape_mismatch", "tensor shapes", "{key} has the shape {shape}", "it must be {expected} here",
        "an adapter of a wider model; an A and a B of different ranks"),
    "zero_size": Refusal(
        "adapter_zero_size", "tensor shapes", "{key} has the shape {shape}", "no size may be 0",
        "an export under ZeRO-3 that did not gather its parameters"),
    "dtype": Refusal(
        "adapter_dtype_unsupported", "tensor dtypes", "{key} is {dtype}", "F32, F16 and BF16 are served",
        "`F64`, `I8`, `F8_E4M3`"),
    "rank_too_large": Refusal(
        "adapter_rank_too_large", "tensor shapes", "{key} has rank {rank}", "this server's `max_lora_rank` is {limit}",
        "rank 256 where 64 is the cap"),
    "rank_mismatch": Refusal(
        "adapter_rank_mismatch", "`r`, `rank_pattern`", "`{field}` gives the rank {value} where {key} has {rank}",
        "they must agree, else the scale is wrong", "`r` edited by hand"),
    "fused_pattern": Refusal(
        "adapter_pattern_mismatch", "`rank_pattern`, `alpha_pattern`", "`{field}` has the key {pattern} for a part of {key}",
        "a fused module has one rank and one alpha", "`{\"q_proj\": 32}` with `qkv_proj` tensors"),
    "non_finite": Refusal(
        "adapter_non_finite", "tensor values", "{key} holds values that are not finite", "every value must be a finite number", "NaN"),
    "overflow": Refusal(
        "adapter_dtype_overflow", "tensor values", "{key} holds {value}",
        "this server's slots are {dtype}, whose largest number is {largest} (`--dtype`)", "70000 where the slots are float16"),
    "host_tier": Refusal(
        "adapter_exceeds_host_tier", "the read", "The adapter's copy on this rank takes {size} bytes",
        "this server's `max_cpu_lora_bytes` is {limit}", "a rank 64 adapter of a large base where a few MB are allowed"),
    "vocab": Refusal(
        "adapter_vocab_mismatch", "`embed_tokens`, `lm_head`, added tokens", "{what}", "the vocabulary of this base has {vocab} entries",
        "an adapter trained with added tokens"),
    "target_modules": Refusal(
        "adapter_target_module_not_served", "tensor keys", "{key} adapts `{module}`",
        "this server was started to adapt {served} alone (`--lora-target-modules`)", "`lm_head`, which is off by default"),
    "tied_ends": Refusal(
        "adapter_tied_pair_missing", "`ensure_weight_tying`", "`ensure_weight_tying` is true and there are tensors for {found} alone",
        "the tied {missing} must have its pair in the file as well", "a file whose `lm_head` pair was taken out"),
    "base_copy_shape": Refusal(
        "adapter_base_copy_mismatch", "`*.base_layer.weight`", "{key} has the shape {shape}", "the served base's weight is {expected}",
        "a copy of another base"),
    "base_copy_values": Refusal(
        "adapter_base_copy_mismatch", "`*.base_layer.weight`, `embed_tokens.weight`, `lm_head.weight`",
        "{key} differs from the base's weight in row {row}", "a copy of a base weight must equal the served base's",
        "an adapter trained on another base, an embedding that was trained whole"),
    "base_unreadable": Refusal(
        "adapter_base_unreadable", "the base's files", "The base's tensor {tensor}, which the adapter needs, {problem}",
        "the base's files must stay in place and as they are while it is served", "a model folder that was moved", status=500),
    # beside the adapter
    "chat_template": Refusal(
        "adapter_chat_template_invalid", "`chat_template.jinja`, `tokenizer_config.json`", "{file} {problem}",
        "it must hold the chat template as a text that Jinja can compile or be left away",
        "a truncated tokenizer_config.json, an `{% if %}` without its end"),
    "added_tokens": Refusal(
        "adapter_added_tokens", "`tokenizer_config.json`, `added_tokens.json`",
        "The tokenizer beside the adapter adds {token} with the id {number}, which the served tokenizer {has}",
        "requests are tokenised by the served tokenizer, so an adapter must do without tokens of its own", "a new token `[tool]`"),
    # from the hub
    "hub_not_found": Refusal(
        "adapter_hub_not_found", "path", "The hub shows this server no {what}", "it must exist there, and the server's token must open it",
        "a typing error, a private or gated repository", status=404),
    "hub_no_adapter": Refusal(
        "adapter_hub_no_adapter", "path", "The hub's repository {name} {problem}",
        "an adapter's repository has adapter_config.json and safetensors at its top", "a repository of a whole model, or of `.bin` files"),
    "hub_too_large": Refusal(
        "adapter_hub_too_large", "path", "The adapter files of the hub's repository {name} have {size} bytes",
        "at most {limit} are fetched", "a repository of a whole model"),
    "hub_unreachable": Refusal(
        "adapter_hub_unreachable", "path", "{name} is not in the local cache and could not be fetched from the hub ({problem})",
        "the server must reach the hub, or the adapter must be in its cache", "no network, `HF_HUB_OFFLINE=1`", status=503),
}  # fmt: skip


def refuse(reason: str, **values: object) -> AdapterError:
    """The error for one row of REFUSALS, worded with `values`; the caller raises it."""
    row = REFUSALS[reason]
    return AdapterError(f"{row.found}, but {row.allowed}.".format(**values), code=row.code, status=row.status)


def shown(value: Any) -> str:
    """`value` as it stands in JSON, ASCII and at most MAX_SHOWN long, so that no file can shape a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def catalogue_markdown() -> str:
    """`docs/adapters.md`: both tables as Markdown."""
    lines = [
        "# Adapters: what is served, what is refused",
        "",
        "Written by `mstar.adapters.catalogue_markdown()` from the table that the loader uses. What decides is the tensors in the",
        "file: every tensor is either applied as PEFT applies it or refused by name.",
        "",
        "## Served",
        "",
        "| what | where | how |",
        "|---|---|---|",
        *(f"| {row.feature} | {row.where} | {row.meaning} |" for row in SERVED),
        "",
        "## Refused",
        "",
        "A refusal is an HTTP 4xx (503 for a read that was cancelled) with the code below and one sentence: what was found, and what is",
        "allowed.",
        "",
        "| code | where | allowed | for example |",
        "|---|---|---|---|",
        *(f"| `{row.code}` | {row.where} | {_placeholders(row.allowed)} | {row.example} |" for row in REFUSALS.values()),
    ]
    return "\n".join(line.replace("||", "\\|\\|") for line in lines) + "\n"


def _placeholders(text: str) -> str:
    return text.replace("{", "<").replace("}", ">")
