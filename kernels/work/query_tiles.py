"""Query tiles: whose is a block's, and numbers among those of all sequences, for workspaces of whole tiles' rows."""

from __future__ import annotations

from typing import Any

import fly

from ..problem.features import BoundFeatures
from .sequences import Sequence, tokens_of
from .tile_scheduler import head_of_block


def queries_of_block(
    rows: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    sequences: Any,
    given: BoundFeatures,
    *,
    folded: bool,
    last_first: bool = False,
) -> tuple[fly.Value, fly.Value, Sequence, Any]:
    """(head, batch, the sequence's queries, how many) of a block in a grid of (query tiles, H, B), or `folded`.

    `rows`: (B, Sq, H, D) or (total_q, H, D). A spare block of a `folded` grid has no queries; `last_first`: as of
    `head_of_block`.
    """
    head, batch, exists = head_of_block(rows.shape[-2], sequences, folded=folded, last_first=last_first)
    queries = Sequence.of(tokens_of(rows, cu_seqlens_q), cu_seqlens_q, batch, given.get("seqused_q"))
    return head, batch, queries, queries.length if exists is None else fly.select(exists, queries.length, 0)


def tile_of_all(queries: Sequence, batch: Any, tile: Any, rows: int) -> tuple[Any, Any]:
    """(entry, tile) of a sequence's tile of so many rows in a workspace of `tiles_of_all` tiles an entry.

    A packed sequence's tiles up to the next one's first are its own, and are enough.
    """
    return (batch, tile) if queries.index is not None else (0, queries.start // rows + batch + tile)


def tiles_of_all(tokens: int, sequences: int, packed: bool, rows: int) -> int:
    """Tiles of an entry: of `tokens` queries of one sequence, or of all that are packed."""
    return tokens // rows + sequences if packed else -(-tokens // rows)
