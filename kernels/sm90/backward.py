"""Builds of the Hopper backward kernel: their static parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile
from fly.backends.target import target
from fly.errors import ShapeError

from ..problem.features import NO_FEATURES, Features
from .thrift import Build, Thrift, thrift_of

CONSUMERS = 2  # warpgroups
BLOCK_M = 64  # queries of a tile, and keys that a consumer works on
BLOCK_N = BLOCK_M * CONSUMERS  # keys of a block, unless consumers share them
THREADS = WARPGROUP * (1 + CONSUMERS)
REGISTERS = 24, 240  # a thread of the producer, of a consumer
ALONG = 4  # numbers of 32 bits in the 16 bytes that rows of tensor maps and copies are multiples of
WHOLE = 192  # the widest heads that there is memory for two tiles of dO of
CHUNK, CHUNKS = 64, 4  # columns of dO, of wider ones, that have a slot of their own, and slots of these
HELD = 64  # the widest heads that there are registers for K and V of, or for scores' derivatives beside a later dQ
LATER = 96  # those that there are registers for a later dQ of
FEW = 16  # the widest heads whose products are over too soon to start them one behind the other
SLOT_ALIGNMENT = 128  # of what bulk copies fill
_MOST_SHARED = target("sm_90a").shared_bytes


@dataclass(frozen=True)
class Sm90BackwardOptions:
    """The static parameters of one build.

    `packed`: sequences are. `features`: what the operands are. `ordered`: blocks add to dQ in turn (`sm90.turns`).
    `clears`: they clear sums of later heads (`sm90.ahead`). `parts`: of the query heads of a key head, each of other
    blocks (`sm90.group_parts`). `apart`: one consumer sums up dV and the other dK, of the same keys
    (`flash_attn_sm90_bwd_wide`). `bias_by_query`: there is a bias of every score, not of keys alone.
    `loads`: functions on scores have tensors. `paired`: each block of a cluster makes dQ of every other tile
    (`sm90.paired`).

    Raises:
        ShapeError: a block of more shared memory than there is.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    packed: bool = False
    features: Features = NO_FEATURES
    ordered: bool = False
    clears: bool = False
    parts: int = 1
    apart: bool = False
    bias_by_query: bool = False
    loads: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        if self.shared_bytes > _MOST_SHARED:
            raise ShapeError(
                f"a block of {self.shared_bytes} bytes of shared memory; expected {_MOST_SHARED} at most"
            )

    @property
    def _widest(self) -> int:
        """Columns of q and k, or of v where these are more."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def stages(self) -> int:
        """Slots of tiles of Q."""
        return 3 if self.batched else 2

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return BLOCK_M if self.apart else BLOCK_N

    @property
    def blocks(self) -> int:
        """Blocks of a cluster, which see the same tiles of queries; one: there are no clusters."""
        return 2 if self.apart or self.paired else 1

    @property
    def span(self) -> int:
        """Keys of a cluster."""
        return self.block_n * self.blocks

    @property
    def thrift(self) -> Thrift:
        """What is done again or later for want of registers."""
        dim, given = self._widest, (self.features, self.bias_by_query, self.loads)
        form = self.ordered, self.apart, self.clears, self.paired
        found = thrift_of(Build(dim, self.causal, self.packed, *given, *form))
        if self.parts == 1 or self.ordered:  # in turn the producer would spill more
            return found
        # the producer has no registers for the numbers of parts besides, nor consumers of the widest heads
        return replace(found, roles=True, heads=True) if self.chunked else replace(found, tiles=True)

    @property
    def sectioned(self) -> bool:
        """Whether heads are side by side (`sm90.sections`): in turn, and where causal masks make blocks uneven.

        Not where registers are full: else heads are the launch's ids, which take none.
        """
        return self.ordered or (self.causal and not self.features.windowed and not self._full)

    @property
    def _full(self) -> bool:
        """Whether consumers would spill heads' numbers."""
        if self.apart:
            return self.packed or self.features != NO_FEATURES
        names = self.features.operands
        addressed = "bias" in names or self.features.block_size is not None
        return addressed or ("alibi_slopes" in names and len(names) > 1) or (self.packed and self.features.drops)

    @property
    def crowded(self) -> bool:
        """Whether scores take registers that what each tile can make again would be kept in."""
        return self.features.modifies or self.features.drops

    @property
    def remakes_keys(self) -> bool:
        """Whether keys' numbers, for masks, are made again by every tile: not where a bias needs the same."""
        limited = self.causal or self.features.windowed or self.features.ends_early
        return self.crowded and limited and "bias" not in self.features.operands

    @property
    def ds_own(self) -> int:
        """Slots of dS that no other block needs: two, so that one barrier a tile is enough; three if `behind`.

        In pairs every other tile has a slot, and in the other clusters all of dS is sent.
        """
        return int(self.paired) if self.blocks > 1 else 2 + self.behind

    @property
    def ds_sent(self) -> int:
        """Slots of dS on its way to the other block of a cluster, which has as many for what arrives."""
        return 0 if self.blocks == 1 else 1 if self.paired else self.stages

    @property
    def ds_slots(self) -> int:
        """Slots of dS: the block's own, what it sends, what it gets."""
        return self.ds_own + 2 * self.ds_sent

    @property
    def chunked(self) -> bool:
        """Whether tiles of dO come in chunks of columns, which are read and free one after the other.

        So there is memory for about one tile, and nearly no wait for it: the next tile's first chunks arrive while dV
        is made of the last ones.
        """
        return self.apart and self._widest > WHOLE

    @property
    def chunks(self) -> int:
        """Chunks of a tile of dO."""
        return -(-self.head_dim_v // CHUNK) if self.chunked else 1

    @property
    def dout_slots(self) -> int:
        """Slots of chunks of dO."""
        return CHUNKS if self.chunked else self.stages

    @property
    def delta_slots(self) -> int:
        """Slots of statistics that come with a tile's first chunk."""
        return self.dout_slots // math.gcd(self.dout_slots, self.chunks)

    @property
    def weight_bytes(self) -> int:
        """Of the weights that one consumer hands to the other, in float32, with a bit each of dropout's decisions."""
        weights = BLOCK_M * self.block_n
        return 4 * weights + weights // 8 * self.hands_decisions if self.apart else 0

    @property
    def hands_decisions(self) -> bool:
        """Whether one consumer hands dropout's decisions to the other too.

        Not beside a bias of every score, where `ptxas` would spill the addresses that both consumers have.
        """
        return self.apart and self.features.drops and not self.bias_by_query

    @property
    def tiles(self) -> dict[str, PanelTile]:
        """What bulk copies fill, by the tensors' names; columns past the head's are zero, as copies fill them."""
        return {
            "q": PanelTile.covering(BLOCK_M, self.head_dim),
            "k": _in_pieces(PanelTile.covering(self.block_n, self._key_columns), self.pieces),
            "v": PanelTile.covering(self.block_n, self.head_dim_v),
            "dout": PanelTile.covering(BLOCK_M, CHUNK if self.chunks > 1 else self.head_dim_v),
        }

    @property
    def ds_tile(self) -> PanelTile:
        """dS, transposed: keys by queries."""
        return PanelTile.widest(self.block_n, BLOCK_M)

    @property
    def beside_tile(self) -> PanelTile:
        """Of the other block's keys: the columns that this block makes dQ of, in pairs all."""
        whole = self.tiles["k"]
        return whole if self.paired else replace(whole, columns=whole.columns // self.blocks)

    @property
    def _key_columns(self) -> int:
        """Columns of K, of which a piece that two blocks share is to be whole lines of some panel."""
        unit = self.pieces * wgmma.K if self.apart else 1
        return -(-self.head_dim // unit) * unit

    @property
    def pieces(self) -> int:
        """Products that make dQ."""
        return CONSUMERS * (self.blocks if self.apart else 1)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one product makes; the last one's may be past the head's."""
        return self.tiles["k"].columns // self.pieces

    @property
    def held(self) -> bool:
        """Whether a consumer has its keys of K and V in registers: S and dP read half as much shared memory then."""
        spare = not self.features.drops or (self.later and not self.packed)
        plain = not self.features.modifies and spare
        return plain and not self.apart and self._widest <= HELD

    @property
    def later(self) -> bool:
        """Whether a tile's dQ is made while the next one's P or dS is (`sm90.later`)."""
        features = self.features
        if self.apart or features.block_size or "bias" in features.operands:
            return False
        return self._widest <= (HELD if features.modifies or self.ordered else LATER)

    @property
    def unmet(self) -> bool:
        """Whether consumers do not meet at a barrier when they have written a tile's dS."""
        return self.later or self.paired

    @property
    def behind(self) -> bool:
        """With `later`, whether that dQ is started behind the next tile's dS, and not before its dV."""
        return self._may_be_behind and (self.alternates or not self.causal)

    @property
    def batched(self) -> bool:
        """Whether products are started one behind the other, the next tile's S and dP too (`later.Batched`)."""
        return self.behind and self._widest > FEW and not (self.features.drops or self.ordered)

    @property
    def alternates(self) -> bool:
        """Whether consumers make P in turn, with dropout, where they are `behind` (`later.Alternating`)."""
        return self._may_be_behind and self.features.drops and not self.ordered

    @property
    def reads_early(self) -> bool:
        """With `alternates`, whether statistics are loaded before the waits and starts in front of their use.

        Full attention is slower with it.
        """
        return self.alternates and self.causal

    @property
    def _may_be_behind(self) -> bool:
        return self.later and self.held and not self.features.windowed

    @property
    def numbers(self) -> int:
        """Statistics that come with a tile, one for each query; packed ones do not begin where copies may."""
        return BLOCK_M + (ALONG if self.packed else 0)

    @property
    def shared_bytes(self) -> int:
        """Of a block, without barriers."""
        statistics = slot_bytes(self.numbers) * (self.stages + self.delta_slots)
        slots = {"q": self.stages, "dout": self.dout_slots}
        tiles = sum(tile.bytes * slots.get(name, 1) for name, tile in self.tiles.items())
        tiles += self.beside_tile.bytes if self.blocks > 1 else 0
        return tiles + self.ds_slots * self.ds_tile.bytes + self.weight_bytes + statistics


def _in_pieces(tile: PanelTile, pieces: int) -> PanelTile:
    """The tile in panels that none of so many pieces of its columns begins inside of and reaches beyond."""
    piece = tile.columns // pieces
    lines = (replace(tile, swizzle=bytes_) for bytes_ in (128, 64, 32) if bytes_ <= tile.swizzle)
    return next(t for t in lines if piece % t.panel_columns == 0 or (t.panels == 1 and pieces == CONSUMERS))


def slot_bytes(numbers: int) -> int:
    """Of so many statistics in shared memory."""
    return -(-4 * numbers // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
