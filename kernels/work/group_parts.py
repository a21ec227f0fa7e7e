"""How long a backward launch takes whose query heads of a key head are in parts, each with blocks of its own."""

from __future__ import annotations


def time_in_parts(
    parts: int, *, group: int, tiles: int, blocks: int, units: int, start: float, uneven: bool
) -> float:
    """Predicted, in the time of one tile of queries, without what adding the parts up takes.

    `blocks` of keys of all key heads and sequences have a key head's `group` query heads in as many `parts`, with
    `tiles` for each query head and what `start` tiles take besides, on so many `units`. Where they are `uneven`, as
    under a causal mask, they have half of the tiles on average, and begin longest first: the launch ends when its
    work is done, but not before its longest block. Else they run in rounds.
    """
    heads, count = group // parts, blocks * parts
    longest = heads * tiles + start
    if not uneven:
        return longest * -(-count // units)
    return max(longest, (heads * tiles / 2 + start) * count / units)
