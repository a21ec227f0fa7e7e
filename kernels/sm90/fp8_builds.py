"""The builds of the Hopper kernel for 8-bit inputs: its static parameters, and which build serves which shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import ShapeError

from ..problem.contract import Request
from .builds import OF_KEYS, Key, Sm90Options

OFFSET = 8  # probabilities are 2 ** OFFSET times what they are, below e4m3's largest number, 448
MOST_LOG2 = 8.75  # of what probabilities with lazy maxima grow to
FIRST_ROWS = 8  # of each 16, which a warp has
ONES = 8  # columns of V that are one, the fewest that a product makes: what P is multiplied by to be added up
PIECE = 32  # columns of O that a product makes where registers are left for no more
WARPS = WARPGROUP // 32
AHEAD_WARPS = 2  # of the producer's warpgroup, where these transpose V for all blocks
SHARED_BYTES = 227 << 10  # of a block
RESERVED = 4096  # of these, for barriers and alignment

# Like kernels/sm90/tiles.py; those of 96 and 192, and with one consumer, were not measured. Without `sums` where they
# took longer than additions, without `ahead` where a launch that transposes V before was faster.
_ONE = {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.75, "sums": False}
TILES: dict[Key, Mapping[str, Any]] = {
    (64, 64, False, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2, "ping_pong": False, "ahead": True},
    (64, 64, False, 1, None): _ONE,
    (64, 64, True, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2, "sums": False},
    (64, 64, True, 1, None): _ONE,
    (96, 96, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2},
    (96, 96, False, 1, None): _ONE,
    (96, 96, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2},
    (96, 96, True, 1, None): _ONE,
    (128, 128, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2, "sums": False},
    (128, 128, False, 1, None): _ONE,
    (128, 128, True, 2, None): {
        "block_n": 128,
        "stages": 3,
        "q_stages": 2,
        "ping_pong": False,
        "hold": True,
        "sums": False,
        "ahead": True,
    },
    (128, 128, True, 1, None): _ONE,
    (192, 192, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "sums": False},
    (192, 192, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "sums": False},
    (256, 256, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "sums": False, "ahead": True},
    (256, 256, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "sums": False, "ahead": True},
}
# With `fp8_accumulate="fast"`.
_LAZY = {"chained": True, "rescale": "wave", "offset": 7, "stages": 2}
_LAZY_AHEAD = {**_LAZY, "ahead": True}
FAST_TILES: dict[Key, Mapping[str, Any]] = {
    (64, 64, False, 3, None): {**_LAZY_AHEAD, "block_n": 128, "q_stages": 2},
    (64, 64, True, 3, None): {**_LAZY_AHEAD, "block_n": 128, "q_stages": 2},
    (96, 96, False, 2, None): {**_LAZY, "block_n": 192, "q_stages": 2},
    (96, 96, True, 2, None): {**_LAZY, "block_n": 192, "q_stages": 2},
    (128, 128, False, 2, None): {**_LAZY_AHEAD, "block_n": 192, "q_stages": 2},
    (128, 128, True, 2, None): {**_LAZY_AHEAD, "block_n": 192, "q_stages": 2},
    (192, 192, False, 2, None): {**_LAZY, "block_n": 128, "q_stages": 1},
    (192, 192, True, 2, None): {**_LAZY, "block_n": 128, "q_stages": 1},
    (256, 256, False, 2, None): {**_LAZY_AHEAD, "block_n": 128, "q_stages": 1},
    (256, 256, True, 2, None): {**_LAZY_AHEAD, "block_n": 128, "q_stages": 1},
}
# Of decoding, where memory decides: the transposer has a warpgroup. More tiles in flight make blocks end less evenly.
_ONCE = {"block_n": 128, "transposed_stages": 1, "transposers": WARPS, "sums": False}
DECODING: Mapping[int, Mapping[str, Any]] = {
    64: {**_ONCE, "stages": 4},
    96: {**_ONCE, "stages": 4},
    128: {**_ONCE, "stages": 3},
    192: {**_ONCE, "stages": 2},
    256: {**_ONCE, "stages": 2},
}
# Of `cost.KEYS_ALONE`, what is so many keys that P of 8 bits is whole operands (`UNIT`), and that `ptxas` has
# registers for. Not measured on 8 bits.
UNIT = 32
_NARROW_HEADS: Mapping[Key, int] = {(64, 64, False, 1, None): 128, (64, 64, True, 1, None): 128}
ALONE: Mapping[str, Mapping[Key, int]] = {
    "bias": _NARROW_HEADS,
    OF_KEYS: {**_NARROW_HEADS, (128, 128, True, 1, None): 128},
    "function": {(128, 128, False, 2, None): 128},
}


@dataclass(frozen=True)
class Fp8Options(Sm90Options):
    """A build on 8-bit inputs: V's tiles that consumers read have head dimensions for rows and keys for columns.

    `chained`: all products of a tile of queries are added up in one chain of accumulators, and not each tile of keys'
    in f32; `sums`: products make the sums of P too, where that takes no instruction of its own; `offset`: what P is
    measured with, see `OFFSET`; `transposed_stages`: slots for transposed tiles of V; `transposers`: the warps that
    make them, of the producer's warpgroup, or all of one more. `first_rows`: a sequence and key head has
    `FIRST_ROWS` rows at most, and others of each 16 have no softmax and no output. `ahead`: where V is read by many
    tiles, blocks transpose it for each other (`sm90.values_ahead`), and no launch does before.
    """

    rescale: str = "always"
    offset: int = OFFSET
    chained: bool = False
    sums: bool = True
    transposed_stages: int = 0
    transposers: int = 0
    first_rows: bool = False
    ahead: bool = False
    most_unchained: ClassVar[int] = 128  # keys of a tile: of more, sums in a product's accumulators lose too much
    decoding: ClassVar[Mapping[int, Mapping[str, Any]]] = DECODING
    keys_alone: ClassVar[Mapping[str, Mapping[Key, int]]] = ALONE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chained and self.block_n > self.most_unchained:
            raise ShapeError(f"block_n is {self.block_n}; expected at most {self.most_unchained} where not chained")
        if self.rescale != "always" and not self.chained:
            raise ShapeError(
                f"rescale is {self.rescale!r}; expected 'always' where not chained, as O is added in f32"
            )
        if self.rescale != "always" and self.offset >= OFFSET:
            raise ShapeError(f"offset is {self.offset}; expected less than {OFFSET} where maxima are lazy")
        if self.output_first and self.hold:
            raise ShapeError("hold is True; expected False with several products, which wait for no exponentials")
        if self.first_rows and self.consumers > 1:
            raise ShapeError(f"consumers is {self.consumers}; expected 1 with first_rows")
        if self.first_rows and len(self.products) > 1:
            # ptxas would give each product registers of its own, and spill 150 words
            raise ShapeError(f"first_rows is True; expected False with head_dim_v {self.head_dim_v}")
        if self.transposers not in (0, 1, 2, WARPS):
            raise ShapeError(f"transposers is {self.transposers}; expected 0, 1, 2 or {WARPS}")
        if (self.transposers == 0) != (self.transposed_stages == 0):
            raise ShapeError(
                f"transposed_stages is {self.transposed_stages}; expected 0 without transposers and only so"
            )

    @property
    def registers(self) -> tuple[int, int]:
        """As of `Sm90Options`; where two consumers have wide outputs, the producer spills rather than they."""
        return (24, 240) if self.head_dim_v > 128 and self.consumers == 2 else super().registers

    @property
    def ones(self) -> int:
        """Columns of ones that V's tiles have besides their own; a product makes 256 columns at most."""
        return ONES if self.sums and not (self.chained and self.head_dim_v + ONES > 256) else 0

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of each of the products with a tile of V."""
        columns = self.head_dim_v + self.ones
        if self.chained or self.head_dim_v <= 128:
            return (columns,)
        pieces = self.head_dim_v // PIECE
        return (*(PIECE,) * (pieces - 1), columns - PIECE * (pieces - 1))

    @property
    def output_first(self) -> bool:
        """Whether a tile's O += P V is started before the next tile's scores, and is in O before these are there."""
        return len(self.products) > 1

    @property
    def tiles(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """Of Q, K and transposed V in shared memory."""
        return (
            PanelTile.widest(self.block_m, self.head_dim, 1),
            PanelTile.widest(self.block_n, self.head_dim, 1),
            PanelTile.widest(self.head_dim_v + self.ones, self.block_n, 1),
        )

    @property
    def ahead_tiles(self) -> tuple[PanelTile, PanelTile]:
        """Of V as it lies, and transposed, where blocks do that for each other."""
        keys, columns = self.block_n, self.head_dim_v
        return PanelTile.widest(keys, columns, 1), PanelTile.widest(columns, keys, 1)

    @property
    def raw_tile(self) -> PanelTile | None:
        return PanelTile.widest(self.block_n, self.head_dim_v, 1) if self.transposers else None

    @property
    def helper_warps(self) -> int:
        return AHEAD_WARPS if self.ahead else self.transposers or WARPS

    @property
    def v_stages(self) -> int:
        return self.transposed_stages or self.stages

    @property
    def boxes(self) -> tuple[tuple[int, ...], ...]:
        """What one bulk copy moves of q, k and v, see `Sm90Options`, or of transposed v, (B, Hkv, D, keys)."""
        q, k, v = super().boxes
        return q, k, v if self.transposers else (1, 1, self.head_dim_v, self.tiles[2].panel_columns)


def has_first_rows(request: Request, options: Fp8Options) -> bool:
    """Whether a build for decoding is better without half of the rows of its tiles: if no row is in that half.

    Where O is made in several products, memory decides, not the softmax.
    """
    return len(options.products) == 1 and request.seq_len * options.pack_gqa <= FIRST_ROWS


def transposing(options: Fp8Options) -> Fp8Options:
    """The build that transposes tiles of V itself, by two of the producer's warps.

    With as many slots as there is room for, and of fewer keys where there is none for two.
    """
    for block_n, stages in ((options.block_n, 2), (128, 2), (128, 1)):
        if block_n <= options.block_n:
            found = replace(options, block_n=block_n, stages=2, transposers=2, transposed_stages=stages, ahead=False)
            if found.tile_bytes + RESERVED <= SHARED_BYTES:
                return found
    raise ShapeError(f"tiles of {options} leave no room for transposed ones")
