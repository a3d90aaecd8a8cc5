"""What the routes share: the conductor, the tokenizer, the configuration, metrics, seeds.

Front process, asyncio loop; made once by `create_app`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mstar.api.choice import Choice
from mstar.api.parameters import Limits
from mstar.api.seeds import SeedSource, fold_seed
from mstar.api.text import TextProcessor
from mstar.conductor.metrics import Metrics
from mstar.conductor.types import ConductorApi, ServedModel
from mstar.config import ServeConfig
from mstar.errors import ModelNotFound


@dataclass(frozen=True)
class Services:
    """Handed to every router."""

    conductor: ConductorApi
    text: TextProcessor
    config: ServeConfig
    metrics: Metrics
    seeds: SeedSource

    async def find(self, model: str) -> ServedModel:
        """The model that a request names, loaded if need be. An unknown one is counted and raises ModelNotFound."""
        try:
            return await self.conductor.find(model)
        except ModelNotFound:
            self.metrics.unknown_model()
            raise

    @property
    def max_sequences(self) -> int:
        """Sequences of one request beyond which it could never be accepted."""
        return self.config.max_num_seqs + self.config.max_waiting_requests

    def limits(self) -> Limits:
        """The bounds of a request as they are now."""
        return Limits(self.conductor.max_model_len(), self.config.max_logprobs, self.text.vocab_size)

    def seed(self, asked: int | None) -> int:
        """The request's seed: the client's, else a drawn one."""
        return fold_seed(asked) if asked is not None else self.seeds.draw()


def response_head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every answer (and every event of a stream) begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(num_prompt_tokens: int, choices: Sequence[Choice], num_choices_per_prompt: int) -> dict[str, Any]:
    """Tokens used. Prompts count once, however many choices they have; cached ones as the first choice of each found them."""
    num_output_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices[::num_choices_per_prompt])},
    }
