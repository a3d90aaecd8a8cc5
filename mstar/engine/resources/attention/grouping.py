"""Which rows of a step attend together in one padded batch: a pure decision.

A batch is padded to its longest query and longest history. One batch per row would cost a launch per row and layer; one batch
for all would pad a decode row to a whole prefill chunk. Rows are sorted by shape and cut where padding would cost more than a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

# Costs in score entries (one query position x one key position). Measured with the torch backend on a CPU, one thread: a batch
# costs some 60 us, a gathered key position about as much as 8 scores, a score about 30 ns over 9 heads.
_BATCH_COST = 2048
_KEY_COST = 8


def group_rows(num_queries: Sequence[int], num_keys: Sequence[int]) -> list[list[int]]:
    """Row indices in groups, each group in rising order; every row is in exactly one. Sizes are positions per row."""
    order = sorted(range(len(num_queries)), key=lambda row: (-num_queries[row], -num_keys[row], row))
    groups: list[list[int]] = []
    longest_query = longest_key = wasted = 0
    for row in order:
        real = num_queries[row] * num_keys[row] + _KEY_COST * num_keys[row]
        most_keys = max(longest_key, num_keys[row])
        wasted += longest_query * most_keys + _KEY_COST * most_keys - real
        if not groups or wasted > _BATCH_COST:
            groups.append([])
            longest_query, most_keys, wasted = num_queries[row], num_keys[row], 0
        groups[-1].append(row)
        longest_key = most_keys
    return [sorted(group) for group in groups]
