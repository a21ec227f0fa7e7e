"""Builds of the gfx950 backward kernel: their static parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fly.errors import ShapeError

from ..problem.contract import Request
from ..problem.features import NO_FEATURES, Features

WAVES = 4  # of a block, one on each SIMD
BLOCK_M = 32  # queries of a tile
LINK_ROWS = 32  # keys of an accumulator tile, and of a tile of K in LDS
# what every tile reads from memory, or where it is, where weights are dropped
REREAD = ("softcap", "dropped", "bias")
STAGES = 2  # slots of Q, of dO and of dS


@dataclass(frozen=True)
class Build:
    """What was found best for head dimensions: keys of a wave, as many as dK and dV have registers for, and `ahead`.

    `ahead`: registers for operands that are read from LDS before their turn; `behind`: the same behind a tile's
    barrier, where P and dS are done with. `waiting`: steps over the columns of V whose operands wait in LDS.
    """

    wave_keys: int
    ahead: int
    behind: int = 48
    waiting: int = 0


BUILDS = {(64, 64): Build(64, 40), (128, 128): Build(64, 16), (192, 128): Build(32, 32)}  # by (head_dim, head_dim_v)
CAUSAL_BUILDS = {**BUILDS, (128, 128): Build(64, 12, 40)}
PART_BUILDS = {**BUILDS, (128, 128): Build(64, 8, 40)}  # of query heads in parts, whose results are stored in float32
# where scores are changed, or weights dropped: a tile's P and dS are made at once
WHOLE_BUILDS = {**BUILDS, (128, 128): Build(64, 8, 40, waiting=3)}
# of these, with a number of its own beside every score
BY_SCORE_BUILDS = {**BUILDS, (128, 128): Build(32, 40)}


def build_of(request: Request, parts: int = 1) -> Build:
    """The build of a call whose query heads of a key head are in `parts`; `wave_keys` is the same for all of them."""
    features = request.static_features
    if features.weighs_whole:
        by_score = request.bias_by_query or "alibi_slopes" in features.operands
        builds = BY_SCORE_BUILDS if by_score else WHOLE_BUILDS
    elif parts > 1:
        builds = PART_BUILDS
    else:
        builds = CAUSAL_BUILDS if request.causal else BUILDS
    build = builds[request.head_dim, request.value_dim]
    sloped = features.drops and "alibi_slopes" in features.operands and "packed" in request.features
    fewer = sloped and request.head_dim == 192 and not request.causal
    return replace(build, ahead=24) if fewer else build


def counts_lanes(request: Request) -> bool:
    """Whether a build spills a vector register unless lanes are counted again (`fly.reread_ids`)."""
    features = request.static_features
    limited = request.causal or features.windowed or features.ends_early
    changed = features.weighs_whole or features.masks_every_tile
    return request.head_dim == 192 and not ("packed" in request.features or limited or changed)


def is_sparing(request: Request) -> bool:
    """Whether a build spills scalar registers unless copies add up their places (`fly.DirectCopy`)."""
    features = request.static_features
    if features.drops:
        return request.head_dim == 192 and "packed" in request.features
    functions = features.score_mod is not None and features.mask_mod is not None and request.head_dim != 128
    biased = {"bias", "softcap"} <= {*features.operands} and request.head_dim == 64
    return not request.causal and (functions or biased)


@dataclass(frozen=True)
class Gfx950BackwardOptions:
    """The static parameters of one build.

    A block has `wave_keys` keys a wave; `ahead`, `behind`, `waiting`: see `Build`. `features`: what the operands are.
    `counts_lanes`: whether lanes are counted anew behind the loops (`fly.reread_ids`), where those take all vector
    registers. `sparing`: see `fly.DirectCopy`.

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
    waiting: int = 0
    counts_lanes: bool = False
    sparing: bool = False

    def __post_init__(self) -> None:
        if any(dim <= 0 or dim % 64 for dim in (self.head_dim, self.head_dim_v)):
            raise ShapeError(
                f"(head_dim, head_dim_v) is ({self.head_dim}, {self.head_dim_v}); expected multiples of 64"
            )
        if self.wave_keys <= 0 or self.wave_keys % LINK_ROWS:
            raise ShapeError(f"wave_keys is {self.wave_keys}; expected a multiple of {LINK_ROWS}")

    @property
    def scarce(self) -> bool:
        """Whether scalar registers are.

        Numbers that all scores of a lane are compared with or multiplied by, of which LLVM keeps one an element, and
        conditions, two an element, were spilled.
        """
        of = self.features
        return of.weighs_whole or of.masks_every_tile or of.windowed or of.ends_early

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return WAVES * self.wave_keys

    @property
    def row_tiles(self) -> int:
        """Accumulator tiles along a wave's keys."""
        return self.wave_keys // LINK_ROWS
