"""Which queries of a step attend together in one padded batch: a pure decision.

A batch is padded to its longest query run and its longest history. One batch per row would cost a launch per row and layer; one
for all would pad a decode row to a whole prefill chunk. So rows are cut into pieces, and pieces of like shape share a batch:

    a chunk of 512 from position 0     cut in 4: piece i of 128 queries sees (i + 1) x 128 keys, not 512   (causal: less to score)
    decode rows, 130 and 90 keys       one batch of 130 keys: padding costs less than a second launch
    decode rows, 8000 and 90 keys      two batches
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Costs in scores (one query position x one key position). Measured with the torch backend, one CPU thread, 9 heads of 64: a score
# takes some 30 ns, a batch some 60 us of launches, gathering a key position about as much as 8 scores.
_BATCH_COST = 2048
_KEY_COST = 8
_PIECE = 128  # queries; shorter pieces save little more


@dataclass(frozen=True)
class Piece:
    """`num_tokens` consecutive tokens of one row from position `start`; `first_token` is the first one's place in the step."""

    row: int
    start: int
    num_tokens: int
    first_token: int

    @property
    def num_keys(self) -> int:
        """Positions that the last token sees."""
        return self.start + self.num_tokens


def cut_rows(starts: Sequence[int], num_tokens: Sequence[int]) -> Iterator[Piece]:
    """The rows in order, long chunks cut in pieces where the scores saved outweigh gathering the history again."""
    first_token = 0
    for row, (start, count) in enumerate(zip(starts, num_tokens, strict=True)):
        num_pieces = -(-count // _PIECE)
        saved = num_pieces * (num_pieces - 1) // 2 * _PIECE * _PIECE
        size = _PIECE if saved > (num_pieces - 1) * (_BATCH_COST + _KEY_COST * (start + count)) else count
        for done in range(0, count, size):
            yield Piece(row, start + done, min(size, count - done), first_token + done)
        first_token += count


def group_pieces(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Every piece in exactly one group; the pieces of a group and the groups (by their first piece) in packed order."""
    groups: list[list[Piece]] = []
    most_queries = most_keys = wasted = 0
    for piece in sorted(pieces, key=lambda piece: (-piece.num_tokens, -piece.num_keys, piece.first_token)):
        wider = max(most_keys, piece.num_keys)
        wasted += (most_queries + _KEY_COST) * wider - (piece.num_tokens + _KEY_COST) * piece.num_keys
        if not groups or wasted > _BATCH_COST:
            groups.append([])
            most_queries, wider, wasted = piece.num_tokens, piece.num_keys, 0
        groups[-1].append(piece)
        most_keys = wider
    in_order = [sorted(group, key=lambda piece: piece.first_token) for group in groups]
    return sorted(in_order, key=lambda group: group[0].first_token)
