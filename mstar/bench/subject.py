"""A server that a measurement started: what it is asked, with random prompts that it is safe to send. A request that fails ends it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mstar.bench.load import Destination, run_load
from mstar.bench.peers import BASE_NAME
from mstar.bench.plan import PlannedRequest
from mstar.bench.prompts import Prompt, token_prompt
from mstar.bench.serve import choose_pool
from mstar.bench.server import Server, ask_server
from mstar.bench.targets import Target
from mstar.errors import ConfigError

_VOCAB_SIZE = 40_000  # prompts come from the middle of it, on every server alike
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Subject:
    """Who is asked, and the token ids of prompts."""

    server: Server
    pool: Sequence[int]

    @classmethod
    def at(cls, url: str) -> Subject:
        """The server at `url`. Raises ConfigError where none answers."""
        server = ask_server(url, None)
        return cls(server, choose_pool(server, BASE_NAME, _VOCAB_SIZE, is_text=False))

    def adapters(self, count: int) -> tuple[str, ...]:
        """The first `count` of its adapters."""
        return self.server.adapter_names(BASE_NAME)[:count]

    def prompt(self, num_tokens: int, seed: int, stream: str, index: int) -> Prompt:
        """A random prompt, the same for the same arguments."""
        return token_prompt(self.pool, num_tokens, seed, stream, index)

    async def ttfts(
        self, names: Sequence[str], prompts: Sequence[Prompt], max_tokens: int, *, concurrency: int = 1, rate: float | None = None
    ) -> list[float]:
        """Seconds to the first token of each name's request: `rate` per second, or `concurrency` at once.

        Raises ConfigError if one fails.
        """
        planned = [
            PlannedRequest(index, Target(name, is_adapter=name != BASE_NAME), prompt, None if rate is None else index / rate)
            for index, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]
        destination = Destination(self.server.address, None, max_tokens, _TIMEOUT_S)
        outcome = await run_load(planned, destination, concurrency if rate is None else None, lambda record: None)
        for record in outcome.records:
            if record.failure is not None:
                raise ConfigError(f"{self.server.address.url}, {record.target.model}: {record.failure}")
        return [record.event_times_s[0] - record.start_s for record in outcome.records]
