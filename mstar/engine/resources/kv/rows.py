"""Where each row of a step lives in the paged KV cache: what the page table's plan says and all that attention reads.

Pure data, made once per step from the page table; the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KvRows:
    """The rows of one step, in the order in which their tokens are packed.

    Row i computes positions `[starts[i], starts[i] + num_tokens[i])`; `block_tables[i]` are its pages in order, at least as
    many as those positions need. `fresh_pages` were handed out since the last step: attention zeroes them before it writes.
    """

    block_tables: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    fresh_pages: tuple[int, ...] = ()
