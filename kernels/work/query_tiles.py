"""Numbers of query tiles among those of all sequences, for workspaces that have rows for whole tiles."""

from __future__ import annotations

from typing import Any

from .sequences import Sequence


def tile_of_all(queries: Sequence, batch: Any, tile: Any, rows: int) -> tuple[Any, Any]:
    """(entry, tile) of a sequence's tile of so many rows in a workspace of `tiles_of_all` tiles an entry.

    A packed sequence's tiles up to the next one's first are its own, and are enough.
    """
    return (batch, tile) if queries.index is not None else (0, queries.start // rows + batch + tile)


def tiles_of_all(tokens: int, sequences: int, packed: bool, rows: int) -> int:
    """Tiles of an entry: of `tokens` queries of one sequence, or of all that are packed."""
    return tokens // rows + sequences if packed else -(-tokens // rows)
