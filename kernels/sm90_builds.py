"""The builds of the Hopper kernel: its static parameters, and which build serves which shape.

A row of the table `kernels/flash_attn_sm90_tiles.py` is a build: (head_dim, head_dim_v, causal, consumers, longest)
→ the other fields of `Sm90Options`, and `cost`. `longest`: the most keys that it is for, None for any number; `cost`:
the time of one of its tiles against that of the shape's largest (1). Rows without a note were measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import ShapeError
from kernels.dispatch import Request
from kernels.flash_attn_sm90_tiles import TILES

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Sm90Options:
    """The static parameters of one build.

    `consumers` warpgroups of 64 query rows, tiles of `block_n` keys, `stages` slots in each of the K and V rings and
    `q_stages` in Q's; `ping_pong`: consumers take turns in starting products; `lazy_rescale`: O keeps its scale while
    maxima grow little; `hold`: a tile's exponentials come before the wait for the last one's product.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    consumers: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    lazy_rescale: bool = True
    hold: bool = False

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ShapeError(f"consumers is {self.consumers}; expected 1, 2 or 3")

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def tiles(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """Of Q, K and V in shared memory."""
        return (
            PanelTile.widest(self.block_m, self.head_dim),
            PanelTile.widest(self.block_n, self.head_dim),
            PanelTile.widest(self.block_n, self.head_dim_v),
        )

    @property
    def tile_bytes(self) -> int:
        """Shared memory that the rings' slots take; barriers come on top."""
        q, k, v = self.tiles
        return q.bytes * self.q_stages + (k.bytes + v.bytes) * self.stages

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of a consumer: 512 a lane of the four schedulers in all."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]


def key_for(
    head_dim: int, head_dim_v: int, causal: bool, seq_len: int, seq_len_kv: int, slices: int, units: int
) -> Key:
    """The row for a shape: `slices` (sequences x heads x splits) of `seq_len` query rows, on `units` multiprocessors.

    Of rows with as many consumers the first that is long enough counts; of those, the one that takes least time: what
    decides when the launch does not fill the device.

    Raises:
        LookupError: no row has these head dimensions.
    """
    rows: dict[int, Key] = {}
    for key in TILES:
        *shape, consumers, longest = key
        if shape == [head_dim, head_dim_v, causal] and (longest is None or seq_len_kv <= longest):
            rows.setdefault(consumers, key)
    if not rows:
        raise LookupError(f"the sm90 kernel's table has no {(head_dim, head_dim_v, causal)} for {seq_len_kv} keys")

    def time(key: Key) -> float:
        rounds = -(-seq_len // (64 * key[3])) * slices / units
        # causal tiles differ in length, and short ones fill the gaps
        return TILES[key].get("cost", 1.0) * (max(1.0, rounds) if causal else math.ceil(rounds))

    return min(rows.values(), key=time)


def options_of(key: Key, tiles: Mapping[str, Any] | None = None) -> Sm90Options:
    """The build of a row, or of a row with other tiles."""
    *shape, consumers, _ = key
    fields = {name: value for name, value in (tiles or TILES[key]).items() if name != "cost"}
    return Sm90Options(*shape, consumers, **fields)


_SECTION_BYTES = {False: 8 << 20, True: 16 << 20}  # by causality
_LEAST_CAUSAL = 32


def section_for(request: Request, head_dim_v: int) -> int:
    """How many heads to work on at a time: those whose K and V stay in the second-level cache.

    Causal tiles differ in length: with fewer than 32 heads a section ends with too few blocks at work. Measured on an
    H200 for 512 to 16384 keys.
    """
    heads = request.batch * request.num_heads
    head_bytes = 2 * request.seq_len_kv * (request.head_dim + head_dim_v)
    section = _SECTION_BYTES[request.causal] // max(1, head_bytes)
    return min(max(section, _LEAST_CAUSAL if request.causal else 1), heads)
