"""Instances that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.engine.lora_pools import Instance


@pytest.fixture
def instances() -> Iterator[Callable[..., Instance]]:
    made: list[Instance] = []

    def make(tp_size: int = 1, **fields: Any) -> Instance:
        made.append(Instance(tp_size, **fields))
        return made[-1]

    yield make
    for instance in made:
        instance.close()
