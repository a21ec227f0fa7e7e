"""Builds of the Hopper backward kernel: their static parameters, and which build serves which shape."""

from __future__ import annotations

from dataclasses import dataclass

from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile, WarpgroupAtom
from fly.errors import ShapeError

from ..problem.features import NO_FEATURES, Features

CONSUMERS = 2
REGISTERS = 24, 240  # a thread of the producer, of a consumer
SHARED_BYTES = 227 << 10
ALONG = 4  # numbers of 32 bits in the 16 bytes that rows of tensor maps and copies are multiples of
SLOT_ALIGNMENT = 128  # of what bulk copies fill
DS_STAGES = 2  # so that one barrier a tile is enough: see `flash_attn_sm90_bwd`


@dataclass(frozen=True)
class Sm90BackwardOptions:
    """The static parameters of one build.

    A block has 128 keys, of which two consumer warpgroups have 64 each. Queries come in tiles of `block_m`, 64 or
    128, with `stages` slots for Q, `dout_stages` for dO and `kv_stages` for K and V. `packed`: sequences are.
    `features`: what the operands are.

    Raises:
        ShapeError: a value that no build has.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    block_m: int
    stages: int = 2
    dout_stages: int = 2
    kv_stages: int = 1
    packed: bool = False
    features: Features = NO_FEATURES

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128):
            raise ShapeError(f"block_m is {self.block_m}; expected 64 or 128")
        if self.shared_bytes > SHARED_BYTES:
            raise ShapeError(
                f"a block of {self.shared_bytes} bytes of shared memory; expected {SHARED_BYTES} at most"
            )

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return 64 * CONSUMERS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + CONSUMERS)

    @property
    def tiles(self) -> dict[str, PanelTile]:
        """What bulk copies fill, by the tensors' names."""
        return {
            "q": PanelTile.widest(self.block_m, self.head_dim),
            "k": PanelTile.widest(self.block_n, self.head_dim),
            "v": PanelTile.widest(self.block_n, self.head_dim_v),
            "dout": PanelTile.widest(self.block_m, self.head_dim_v),
        }

    @property
    def slots(self) -> dict[str, int]:
        """Of each tile."""
        return {"q": self.stages, "k": self.kv_stages, "v": self.kv_stages, "dout": self.dout_stages}

    @property
    def ds_tile(self) -> PanelTile:
        """dS, turned: keys by queries."""
        return PanelTile.widest(self.block_n, self.block_m)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one consumer makes, of 64 rows: all of half of the tile's, or half of all."""
        return self.head_dim * self.block_m // 64 // CONSUMERS

    @property
    def numbers(self) -> int:
        """Statistics that come with a tile, one for each query; packed ones do not begin where copies may."""
        return self.block_m + (ALONG if self.packed else 0)

    @property
    def shared_bytes(self) -> int:
        """Of a block, without barriers."""
        statistics = slot_bytes(self.numbers) * (self.stages + self.dout_stages)
        tiles = sum(tile.bytes * self.slots[name] for name, tile in self.tiles.items())
        return tiles + DS_STAGES * self.ds_tile.bytes + statistics

    def atom(self, n: int, dtype: str) -> WarpgroupAtom:
        return WarpgroupAtom(n, dtype)


def slot_bytes(numbers: int) -> int:
    """Of so many statistics in shared memory."""
    return -(-4 * numbers // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


TILES = {64: 128, 128: 64}  # block_m by head dimension


def options_for(
    head_dim: int, head_dim_v: int, causal: bool, features: Features = NO_FEATURES, *, packed: bool = False
) -> Sm90BackwardOptions:
    """The build that serves a shape."""
    return Sm90BackwardOptions(head_dim, head_dim_v, causal, TILES[head_dim], packed=packed, features=features)
