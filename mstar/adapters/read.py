"""Inspecting (headers) and reading (every byte, once) one adapter folder.

A read goes: headers -> all checks that they allow -> one buffer per weight file -> `pread` in one pass -> values -> digest. A thread of
its own hashes what has been read while the next bytes and the values are looked at; nothing is returned before the digest is known,
and where it is another, that is what is said, whatever the values are. The header's bytes are not read again: they are what the
buffer starts with. Run by the CLI, by the front's validation and by each rank's reader thread; a file that is cut or changed
meanwhile is a refusal there, never a crash.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mstar.adapters.base import BaseShapes
from mstar.adapters.beside import read_beside
from mstar.adapters.catalogue import refuse, shown
from mstar.adapters.facts import AdapterFacts, AdapterLimits, AdapterTensors, BaseCopy, Dtype, LoraPair, as_float32
from mstar.adapters.files import CHUNK_BYTES, AdapterFile, frame, never, open_folder
from mstar.adapters.keys import LORA_KINDS
from mstar.adapters.plan import Plan, PlannedPair, PlannedTensor, Run, make_plan
from mstar.adapters.safetensors_header import Header, TensorEntry
from mstar.errors import AdapterError

ALIGNMENT = 64
CHECKED_AT_ONCE = 1 << 20  # values
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# The exponent's bits: all ones in an infinity or a NaN.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
# By slot dtype: its name and largest number, the first number that rounds to infinity, and the dtypes that hold such numbers.
_RANGES = {
    "F16": ("float16", 65504.0, 65520.0, ("F32", "BF16")),
    "BF16": ("bfloat16", 2.0**127 * (2 - 2.0**-7), 2.0**127 * (2 - 2.0**-8), ("F32",)),
}

Buffer = NDArray[np.uint8]
Cancelled = Callable[[], bool]
Made = TypeVar("Made")


def inspect_adapter(folder: Path, base: BaseShapes, limits: AdapterLimits) -> AdapterFacts:
    """Check all that config, headers and the tokenizer's files tell; no tensor is read, no more than a few MiB allocated.

    `folder` comes from `resolve_path`. Raises AdapterError for the first thing that cannot be served.
    """
    with open_folder(folder, limits.roots) as files:
        facts = make_plan(files, base, limits).facts
    template, added = read_beside(folder, limits.roots, base.vocab_size)
    return dataclasses.replace(facts, chat_template=template, added_tokens=MappingProxyType(added))


def read_adapter(
    folder: Path, base: BaseShapes, limits: AdapterLimits, digest: str | None = None, cancelled: Cancelled = never
) -> AdapterTensors:
    """Read the adapter in one pass and check header, digest (if one is given) and values.

    `cancelled` is asked between chunks of some MiB. The facts are those of `inspect_adapter` without the tokenizer's files.
    Raises AdapterError: `adapter_changed` where the bytes are not those of `digest` or change during the read,
    `adapter_read_cancelled`, or what header and values say. Nothing is kept then.
    """
    return read_adapter_into(lambda tensors: tensors, folder, base, limits, digest, cancelled)


def read_adapter_into(
    make: Callable[[AdapterTensors], Made],
    folder: Path,
    base: BaseShapes,
    limits: AdapterLimits,
    digest: str | None = None,
    cancelled: Cancelled = never,
) -> Made:
    """What `make` makes of what `read_adapter` would return. With a `digest`, it is called while the bytes are still being hashed.

    What it made, or raised, counts only if they turn out to be the right ones: else `adapter_changed` is raised.
    """
    hashing = ThreadPoolExecutor(1, thread_name_prefix="adapter-digest")
    try:
        with open_folder(folder, limits.roots) as files:
            plan = make_plan(files, base, limits)
            hasher = files.start_digest()
            feed = _Feed(hashing, hasher)
            datas = [_read_data(file, header, feed, cancelled) for file, header in zip(files.weights, plan.headers, strict=True)]
        hashed = hashing.submit(hasher.hexdigest)
        if digest is None:
            return make(_tensors(plan, datas, limits, hashed.result(), cancelled))
        try:
            made = make(_tensors(plan, datas, limits, digest, cancelled))
        except AdapterError as error:
            if error.code != refuse("cancelled").code:
                _check_digest(hashed.result(), digest)
            raise
        _check_digest(hashed.result(), digest)
        return made
    finally:
        hashing.shutdown(cancel_futures=True)


def _check_digest(found: str, wanted: str) -> None:
    if found != wanted:
        raise refuse("changed", what=f"The digest is {found[:12]}..., not {shown(wanted[:12])[1:-1]}...")


@dataclasses.dataclass(frozen=True)
class _Feed:
    """Hands bytes to a digest in order, on the one thread of `hashing`; the bytes must not change any more."""

    hashing: ThreadPoolExecutor
    hasher: hashlib._Hash

    def update(self, data: bytes | memoryview, /) -> None:
        """As hashlib's, later."""
        self.hashing.submit(self.hasher.update, data)


def _tensors(plan: Plan, datas: Sequence[Buffer], limits: AdapterLimits, digest: str, cancelled: Cancelled) -> AdapterTensors:
    """Every tensor's values. Raises AdapterError for the first that cannot be served."""
    tensors = {tensor.entry.key: tensor for pair in plan.pairs.values() for tensor in pair.tensors()}
    tensors |= {tensor.entry.key: tensor for tensor in plan.base_copies}
    if not all(_are_fine(run, datas[run.file], limits.slot_dtype, cancelled) for run in plan.runs):
        for tensor in tensors.values():
            _check_values(tensor, datas[tensor.file], limits.slot_dtype, cancelled)
    views = {key: _view(tensor.entry, datas[tensor.file]) for key, tensor in tensors.items()}
    return AdapterTensors(
        facts=plan.facts,
        digest=digest,
        pairs=MappingProxyType({key: _pair(pair, views) for key, pair in plan.pairs.items()}),
        base_copies=MappingProxyType(
            {copy.entry.key: BaseCopy(str(copy.parsed.module), views[copy.entry.key], _dtype(copy)) for copy in plan.base_copies}
        ),
    )


def _are_fine(run: Run, data: Buffer, slot_dtype: Dtype, cancelled: Cancelled) -> bool:
    """Whether all values are finite, also as slots hold them."""
    values = data[run.begin : run.end].view(_NUMPY[run.dtype])
    limit = _first_infinite(run.dtype, slot_dtype) if run.is_for_slots else None
    for part in _parts(values, cancelled):
        if not _all_finite(part, run.dtype) or (limit is not None and _largest(part, run.dtype) >= limit):
            return False
    return True


def _read_data(file: AdapterFile, header: Header, hasher: _Feed, cancelled: Cancelled) -> Buffer:
    """All data bytes of `file` (what follows the header), aligned and read-only; hashed once they are there."""
    size, start = file.size - len(header.raw), len(header.raw)
    frame(hasher, file.name, file.size)
    hasher.update(header.raw)
    space = np.empty(size + ALIGNMENT, dtype=np.uint8)
    pad = -space.ctypes.data % ALIGNMENT
    data = space[pad : pad + size]
    bytes_of_data = data.data
    for offset in range(0, size, CHUNK_BYTES):
        if cancelled():
            raise refuse("cancelled")
        part = bytes_of_data[offset : offset + CHUNK_BYTES]
        file.read_into(part, start + offset)
        hasher.update(part)
    file.check_unchanged()
    space.flags.writeable = False
    data.flags.writeable = False
    return data


def _view(entry: TensorEntry, data: Buffer) -> NDArray[Any]:
    """The tensor's values, read-only (a copy where the file has them at an odd place)."""
    values = data[entry.begin : entry.end].view(_NUMPY[entry.dtype]).reshape(entry.shape)
    if not values.flags.aligned:
        values = values.copy()
        values.flags.writeable = False
    return values


def _check_values(tensor: PlannedTensor, data: Buffer, slot_dtype: Dtype, cancelled: Cancelled) -> None:
    """Raises where a value is not finite, or one for a slot would not be in the slots' dtype."""
    key, dtype = shown(tensor.entry.key), _dtype(tensor)
    flat = _view(tensor.entry, data).reshape(-1)
    if not all(_all_finite(part, dtype) for part in _parts(flat, cancelled)):
        raise refuse("non_finite", key=key)
    limit = _first_infinite(dtype, slot_dtype)
    if limit is None or tensor.parsed.kind not in LORA_KINDS:
        return
    for part in _parts(flat, cancelled):
        if (found := _largest(part, dtype)) >= limit:
            name, largest = _RANGES[slot_dtype][:2]
            raise refuse("overflow", key=key, value=f"{found:g}", dtype=name, largest=f"{largest:g}")


def _parts(flat: NDArray[Any], cancelled: Cancelled) -> Iterator[NDArray[Any]]:
    """`flat` in parts of a bounded size. Raises AdapterError `adapter_read_cancelled`."""
    for start in range(0, len(flat), CHECKED_AT_ONCE):
        if cancelled():
            raise refuse("cancelled")
        yield flat[start : start + CHECKED_AT_ONCE]


def _first_infinite(dtype: Dtype, slot_dtype: Dtype) -> float | None:
    """From which number on a value becomes infinite in the slots' dtype; None where none does."""
    _, _, first, wider = _RANGES.get(slot_dtype, ("", 0.0, 0.0, ()))
    return first if dtype in wider else None


def _largest(values: NDArray[Any], dtype: Dtype) -> float:
    """The largest absolute value."""
    found = as_float32(values, dtype)
    return max(float(found.max()), -float(found.min()))


def _all_finite(values: NDArray[Any], dtype: str) -> bool:
    if dtype == "F32":
        return bool(np.isfinite(values).all())
    mask = np.uint16(_EXPONENT[dtype])
    return not bool(((values.view(np.uint16) & mask) == mask).any())


def _pair(pair: PlannedPair, views: dict[str, NDArray[Any]]) -> LoraPair:
    lora_a = views[pair.lora_a.entry.key]
    lora_b = views[pair.lora_b.entry.key][pair.rows[0] : pair.rows[1]]
    dtype = _dtype(pair.lora_a)
    if dtype != _dtype(pair.lora_b):
        # One pair has one dtype; float32 holds both exactly.
        lora_a, lora_b, dtype = as_float32(lora_a, dtype), as_float32(lora_b, _dtype(pair.lora_b)), "F32"
        lora_a.flags.writeable = lora_b.flags.writeable = False
    return LoraPair(lora_a, lora_b, pair.scaling, dtype, _row_values(pair, pair.bias, views), _row_values(pair, pair.magnitude, views))


def _row_values(pair: PlannedPair, tensor: PlannedTensor | None, views: dict[str, NDArray[Any]]) -> NDArray[np.float32] | None:
    """One number for each output row of the pair, widened."""
    if tensor is None:
        return None
    values = as_float32(views[tensor.entry.key][pair.rows[0] : pair.rows[1]], _dtype(tensor))
    values.flags.writeable = False
    return values


def _dtype(tensor: PlannedTensor) -> Dtype:
    return cast("Dtype", tensor.entry.dtype)
