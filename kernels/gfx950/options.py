"""Builds of the gfx950 forward kernels: their static parameters, and the shape of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import fly
from fly.errors import ShapeError

from ..problem.contract import Request
from ..problem.features import NO_FEATURES, Features
from .copies import TILE_KEYS
from .wide import WIDEST, widths

WAVE_ROWS, WAVES, BLOCK_N = 32, 8, TILE_KEYS
HEAD_DIMS = range(8, 256 + 1, 8)
BLOCK_M = WAVES * WAVE_ROWS
LDS_BYTES = 160 * 1024
# registers of a lane for queries and output: of two waves on a SIMD, and of two whatever the features are
MOST_KEPT, ROOMY = 152, 96
# of two waves on a SIMD that have registers for more: a window's, or those of changed scores and of dropout
MOST_WITH_WINDOW, MOST_WITH_BOTH = 140, 92


def kept(head_dim: int, value_dim: int) -> int:
    """Registers of a lane for its part of the wave's queries and output."""
    return 4 * -(-head_dim // 16) + 16 * -(-value_dim // 32)


@dataclass(frozen=True)
class DualWaveOptions:
    """The static parameters of one build. The switches exist to measure what each device is worth.

    `ahead`: at D=128, packed FMAs come before a cluster's matrix instructions, and maxima before the last of them.
    `features`: what the operands are; `page_size`: of keys in pages. `waves` of a block: two groups of four, or one,
    which has nothing to `stagger`: of lists, or because a SIMD's registers hold one wave. `head_dim_v`: V's and the
    output's head dimension (None: `head_dim`). `packed`: sequences are.

    Raises:
        ShapeError: a head dimension that the kernel does not have, a page size without a table or the reverse, or
            waves that do not go with the other options.
    """

    head_dims: ClassVar[Sequence[int]] = HEAD_DIMS
    most_staged: ClassVar[int] = WIDEST  # head dimension of queries in one tile
    element_bytes: ClassVar[int] = 2

    head_dim: int
    causal: bool
    lazy_rescale: bool = True
    setprio: bool = True
    stagger: bool = True
    daz: bool = False
    waves_per_eu: int = 2
    ahead: bool = True
    features: Features = NO_FEATURES
    page_size: int | None = None
    waves: int = WAVES
    head_dim_v: int | None = None
    packed: bool = False

    @property
    def value_dim(self) -> int:
        """Head dimension of V and of the output."""
        return self.head_dim_v or self.head_dim

    @property
    def alone(self) -> bool:
        """Whether a SIMD has one wave."""
        return self.waves < WAVES and self.waves_per_eu == 1

    @property
    def staged(self) -> bool:
        """Whether queries go through LDS, which they do where there is room for them and for scalar registers."""
        # two tiles of K and of V, and the block's rows; tiles are padded, so not all of LDS is theirs
        columns = (2 + self.block_m // BLOCK_N) * sum(widths(self.head_dim)) + 2 * sum(widths(self.value_dim))
        fits = columns * BLOCK_N * self.element_bytes < LDS_BYTES
        many = self.page_size is not None or self.features.block_size is not None
        return fits and not many and self.head_dim <= self.most_staged

    def tell_compiler(self) -> None:
        """What the compiler is told of the build, in its kernel."""
        fly.occupancy(waves_per_eu=self.waves_per_eu)
        if self.daz:
            fly.flush_denormals()
        if self.narrows:
            fly.narrow_splats()

    @property
    def scarce(self) -> bool:
        """Whether scalar registers are: what the epilogue needs is made again.

        They are with a list of tiles and dropout, or ALiBi.
        """
        many = self.features.drops or (self.slopes and not self.alone)
        return many and self.features.block_size is not None

    @property
    def slopes(self) -> bool:
        """Whether there is ALiBi."""
        return "alibi_slopes" in self.features.operands

    @property
    def narrows(self) -> bool:
        """Whether numbers of dropout or ALiBi would take a scalar register an element: see `fly.narrow_splats`.

        Other features leave these registers.
        """
        of = self.features
        capped = "softcap" in of.operands
        if self.alone:
            paged = self.page_size is not None and not self.causal
            both = (self.slopes and (of.windowed or capped or paged)) or (of.drops and of.windowed and capped)
            return both or (of.drops and not of.modifies)
        if not of.drops:
            return self.scarce
        beside = self.slopes or "bias" in of.operands or of.masks_every_tile
        return "attention_chunk" in of.operands or (beside and self.crowded) or (self.slopes and self.packed)

    @property
    def remakes_rows(self) -> bool:
        """Whether masked tiles make their rows again: what a window makes of them is kept over the loop else."""
        return self.features.windowed and not self.alone and self.kept > MOST_WITH_WINDOW

    @property
    def later(self) -> tuple[int, int]:
        """Steps of K and of V whose operands are read later, for what other features take beside dropout."""
        biased, of = "bias" in self.features.operands, self.features
        return (of.per_score + biased, int(biased or self.slopes)) if self.crowded else (0, 0)

    @property
    def crowded(self) -> bool:
        """Whether dropout leaves two waves on a SIMD no registers for other features."""
        return self.features.drops and not self.alone and self.kept > MOST_WITH_BOTH

    @property
    def kept(self) -> int:
        """Registers of a lane for its part of the wave's queries and output."""
        return kept(self.head_dim, self.value_dim)

    @property
    def block_m(self) -> int:
        """Query rows of a block."""
        return self.waves * WAVE_ROWS

    @property
    def together(self) -> int:
        """How many neighbouring keys of a tile lie one after the other in memory."""
        return min(self.page_size or BLOCK_N, BLOCK_N)

    def __post_init__(self) -> None:
        if (self.page_size is None) == ("block_table" in self.features.operands):
            raise ShapeError(f"page_size is {self.page_size}; expected one with block_table and only then")
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.value_dim)):
            if value not in self.head_dims:
                raise ShapeError(f"{name} is {value}; the gfx950 kernel takes {_listed(self.head_dims)}")
        if self.waves not in (WAVES, WAVES // 2):
            raise ShapeError(f"waves is {self.waves}; the gfx950 kernel has {WAVES // 2} or {WAVES} in a block")
        if self.waves < WAVES and self.stagger:
            raise ShapeError(f"stagger with {self.waves} waves; a block needs {WAVES} for two groups: leave it out")

    @classmethod
    def block_of(cls, request: Request) -> tuple[bool, int]:
        """Whether a wave has a SIMD for itself, and how many waves a block has: its rows divide those of a mask's."""
        small = has_small_blocks(request)
        alone = _alone(request, small)
        return alone, WAVES // 2 if alone or small else WAVES

    @classmethod
    def of(cls, request: Request) -> Self:
        """Those of the build for one kind of call."""
        tuning = request.tuning
        switches = {"lazy_rescale": "lazy_rescale", "setprio": "setprio", "stagger": "enable_stagger"}
        given = {name: tuning.get(f"dualwave_swp_{keyword}") for name, keyword in switches.items()}
        alone, waves = cls.block_of(request)
        return cls(
            request.head_dim,
            request.causal,
            daz=bool(tuning.get("daz")),
            waves_per_eu=tuning.get("waves_per_eu") or (1 if alone else 2),
            features=request.static_features,
            page_size=request.page_size,
            waves=waves,
            head_dim_v=request.head_dim_v,
            packed="packed" in request.features,
            **{"stagger": waves == WAVES} | {name: value for name, value in given.items() if value is not None},
        )


def has_small_blocks(request: Request) -> bool:
    """Whether the blocks of a mask are no multiples of a block's rows."""
    block = request.static_features.block_size
    return block is not None and block[0] % BLOCK_M > 0


def _listed(head_dims: Sequence[int]) -> str:
    """Head dimensions, in words."""
    if isinstance(head_dims, range):
        return f"multiples of {head_dims.step} from {head_dims[0]} to {head_dims[-1]}"
    return f"{', '.join(map(str, head_dims[:-1]))} and {head_dims[-1]}"


def _alone(request: Request, small: bool) -> bool:
    """Whether a wave needs the registers of a whole SIMD; `small`: a block has four waves anyway."""
    of_queries, features = kept(request.head_dim, request.value_dim), request.static_features
    # beside small blocks of wide heads LDS has no room for a second one
    crowded = small or features.per_score or features.drops
    return of_queries > MOST_KEPT or (of_queries > ROOMY and crowded)
