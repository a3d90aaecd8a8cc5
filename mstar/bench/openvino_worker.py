"""Runs in the peer's own environment, never in ours: openvino-genai on a GGUF file, a line `requests seed` in, a line `tokens seconds` out.

The file is rewritten with float16 tensors first (`TARGET`, kept), so that the peer reads as many bytes as the others, not 4-bit weights.

    python -P openvino_worker.py SOURCE.gguf TARGET.gguf PROMPT_TOKENS MAX_TOKENS
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def rewrite(source: Path, target: Path) -> None:
    """The same model with matrices in float16 and vectors in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    building = target.with_suffix(".part")
    writer = gguf.GGUFWriter(building, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *of = field.types
        writer.add_key_value(name, field.contents(), kind, sub_type=of[0] if of else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if len(tensor.shape) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    building.replace(target)


def make_pipeline(model: Path) -> Any:
    """Continuous batching with the bounds that the other servers have."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 512, 64
    scheduler.enable_prefix_caching = False
    return openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU")


def say(line: str) -> None:
    """A line for the other side of the pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(source: str, target: str, prompt_tokens: str, max_tokens: str) -> None:
    """Until stdin ends."""
    import openvino
    import openvino_genai

    if not Path(target).exists():
        rewrite(Path(source), Path(target))
    pipeline = make_pipeline(Path(target))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = int(max_tokens)
    config.ignore_eos, config.do_sample = True, False
    say("ready")
    for line in sys.stdin:
        count, seed = map(int, line.split())
        draw = random.Random(seed)
        ids = [np.array([[draw.randrange(5000, 35000) for _ in range(int(prompt_tokens))]], dtype=np.int64) for _ in range(count)]
        began = time.perf_counter()
        results = pipeline.generate([openvino.Tensor(array) for array in ids], [config] * count)
        took = time.perf_counter() - began
        say(f"{sum(len(result.m_generation_ids[0]) for result in results)} {took}")


if __name__ == "__main__":
    main(*sys.argv[1:])
