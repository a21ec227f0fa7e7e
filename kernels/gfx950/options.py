"""Builds of the gfx950 forward kernels: their static parameters, and the shape of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from fly.errors import ShapeError

from ..problem.contract import Request
from ..problem.features import NO_FEATURES, Features
from .copies import TILE_KEYS

WAVE_ROWS, WAVES, BLOCK_N = 32, 8, TILE_KEYS
BLOCK_M = WAVES * WAVE_ROWS


@dataclass(frozen=True)
class DualWaveOptions:
    """The static parameters of one build. The switches exist to measure what each device is worth.

    `ahead`: at D=128, packed FMAs come before a cluster's matrix instructions, and maxima before the last of them.
    `features`: what the operands are; `page_size`: of keys in pages. `waves` of a block: two groups of four, or one,
    which has nothing to `stagger`.

    Raises:
        ShapeError: a head dimension that the kernel does not have, a page size without a table or the reverse, or
            waves that do not go with the other options.
    """

    head_dims: ClassVar[tuple[int, ...]] = (64, 128)

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
        if self.head_dim not in self.head_dims:
            dims = ", ".join(map(str, self.head_dims[:-1]))
            raise ShapeError(f"head_dim is {self.head_dim}; the gfx950 kernel takes {dims} and {self.head_dims[-1]}")
        if self.waves not in (WAVES, WAVES // 2):
            raise ShapeError(f"waves is {self.waves}; the gfx950 kernel has {WAVES // 2} or {WAVES} in a block")
        if self.waves < WAVES and self.stagger:
            raise ShapeError(f"stagger with {self.waves} waves; a block needs {WAVES} for two groups: leave it out")

    @staticmethod
    def waves_of(request: Request) -> int:
        """How many waves a block has, so that its rows divide the blocks of a mask."""
        block = request.static_features.block_size
        return WAVES if block is None or block[0] % BLOCK_M == 0 else WAVES // 2

    @classmethod
    def of(cls, request: Request) -> Self:
        """Those of the build for one kind of call."""
        tuning = request.tuning
        switches = {"lazy_rescale": "lazy_rescale", "setprio": "setprio", "stagger": "enable_stagger"}
        given = {name: tuning.get(f"dualwave_swp_{keyword}") for name, keyword in switches.items()}
        waves = cls.waves_of(request)
        return cls(
            request.head_dim,
            request.causal,
            daz=bool(tuning.get("daz")),
            waves_per_eu=tuning.get("waves_per_eu") or 2,
            features=request.static_features,
            page_size=request.page_size,
            waves=waves,
            **{"stagger": waves == WAVES} | {name: value for name, value in given.items() if value is not None},
        )
