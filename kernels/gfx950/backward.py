"""Builds of the gfx950 backward kernel: their static parameters."""

from __future__ import annotations

from dataclasses import dataclass

from fly.errors import ShapeError

from ..problem.features import NO_FEATURES, Features

WAVES = 4  # of a block, one on each SIMD
BLOCK_M = 32  # queries of a tile
LINK_ROWS = 32  # keys of an accumulator tile, and of a tile of K in LDS
STAGES = 2  # slots of Q, of dO and of dS


@dataclass(frozen=True)
class Build:
    """What was found best for head dimensions: keys of a wave, as many as dK and dV have registers for, and `ahead`.

    `ahead`: registers for operands that are read from LDS before their turn; `behind`: the same behind a tile's
    barrier, where P and dS are done with.
    """

    wave_keys: int
    ahead: int
    behind: int = 48


BUILDS = {(64, 64): Build(64, 40), (128, 128): Build(64, 16), (192, 128): Build(32, 32)}  # by (head_dim, head_dim_v)
CAUSAL_BUILDS = {**BUILDS, (128, 128): Build(64, 12, 40)}
PART_BUILDS = {**BUILDS, (128, 128): Build(64, 8, 40)}  # of query heads in parts, whose results are stored in float32


def build_of(dims: tuple[int, int], causal: bool, parts: int) -> Build:
    """The build of a call's head dimensions, whose query heads of a key head are in `parts`."""
    return (PART_BUILDS if parts > 1 else CAUSAL_BUILDS if causal else BUILDS)[dims]


@dataclass(frozen=True)
class Gfx950BackwardOptions:
    """The static parameters of one build.

    A block has `wave_keys` keys a wave; `ahead`, `behind`: see `Build`. `features`: what the operands are.

    Raises:
        ShapeError: head dimensions that panels and waves do not divide, or keys that tiles do not.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    wave_keys: int
    ahead: int
    features: Features = NO_FEATURES
    behind: int = 48

    def __post_init__(self) -> None:
        if any(dim <= 0 or dim % 64 for dim in (self.head_dim, self.head_dim_v)):
            raise ShapeError(
                f"(head_dim, head_dim_v) is ({self.head_dim}, {self.head_dim_v}); expected multiples of 64"
            )
        if self.wave_keys <= 0 or self.wave_keys % LINK_ROWS:
            raise ShapeError(f"wave_keys is {self.wave_keys}; expected a multiple of {LINK_ROWS}")

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return WAVES * self.wave_keys

    @property
    def row_tiles(self) -> int:
        """Accumulator tiles along a wave's keys."""
        return self.wave_keys // LINK_ROWS
