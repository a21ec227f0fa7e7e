"""Which calls two blocks of a cluster load the keys of together, each a half of every tile for both.

Rows of an odd number of 16 bytes begin inside 32-byte sectors, and a bulk copy then asks the second-level cache for
each sector by itself, twice as often as for other rows. Where that takes longest, halves of the copies are worth the
wait for the other block; nowhere else (notebook, "Key tiles for two blocks"). The blocks have neighbouring tiles of
queries, so that they see the same keys, or under a causal mask nearly so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fly.backends.nvvm import cluster

from ..problem.contract import Request
from ..problem.features import NO_FEATURES

TOGETHER = 2  # blocks
_ANY = 1 << 31
_CAUSAL_STEP = 128  # of causal lengths: others between were slower with it, or were not measured


@dataclass(frozen=True)
class Row:
    """Calls of head dimensions from `least` to `most`, and of `shortest` to `longest` queries."""

    least: int
    most: int
    causal: bool
    shortest: int = 0
    longest: int = _ANY

    def has(self, request: Request) -> bool:
        """Whether it is for a call."""
        dim = max(request.head_dim, request.value_dim)
        fits = self.least <= dim <= self.most and self.shortest <= request.seq_len <= self.longest
        whole = not self.causal or request.seq_len % _CAUSAL_STEP == 0
        return fits and whole and self.causal == request.causal


# measured on an H100, 512 to 16384 queries and as many keys
SHARED: tuple[Row, ...] = (
    Row(72, 104, False, longest=4096),
    Row(72, 88, True, longest=1024),
    Row(104, 104, True, longest=4096),
    Row(152, 152, False, longest=4096),
    Row(168, 168, False),
    Row(168, 168, True, shortest=4096),
    Row(184, 184, False, shortest=1024),
    Row(184, 184, True, shortest=2048),
    Row(200, 248, False),
    Row(200, 200, True, shortest=4096),
    Row(216, 216, True, shortest=1024),
    Row(232, 232, True, shortest=4096),
    Row(248, 248, True, shortest=16384),
)


def blocks_for(request: Request, queries: int, slices: int, units: int) -> int:
    """How many blocks, with `queries` each, load the keys of a call together: 1 or `TOGETHER`.

    `slices`: heads, or packed sets of them, of all sequences; `units`: the device's multiprocessors.
    Only of calls as they were measured: as many keys as queries, tiles of queries that are whole sets of
    so many and at least one for each multiprocessor; and that ask for no feature, as lengths, windows and lists could
    give neighbours other keys.
    """
    uneven = bool((request.head_dim | request.value_dim) & 8)
    tiles = -(-request.seq_len // queries)
    fills = tiles % TOGETHER == 0 and tiles * slices >= units
    asks = bool(request.features) or request.static_features != NO_FEATURES
    plain = uneven and not asks and request.seq_len == request.seq_len_kv
    return TOGETHER if fills and plain and any(row.has(request) for row in SHARED) else 1


def begin_cluster(blocks: int) -> None:
    """Behind the initialisation of mbarriers: blocks are in clusters of so many, if that is more than one."""
    if blocks > 1:
        cluster.declare(blocks)
        cluster.sync()


def end_cluster(blocks: int) -> None:
    """The last thing that a block does: nobody reaches into one that has ended."""
    if blocks > 1:
        cluster.sync()
