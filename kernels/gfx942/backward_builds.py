"""Builds of the gfx942 backward kernel: their static parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..gfx950.backward import Gfx950BackwardOptions
from ..problem.contract import Request


@dataclass(frozen=True)
class Build:
    """What was found best for a head dimension: keys of a wave, and how many steps stand behind how many products.

    `weigh`: of those that make P, `pull`: of those that make dS. `crowded`: registers for operands that are read
    before their turn where scores are changed and weights dropped, which takes the others.
    """

    wave_keys: int
    weigh: tuple[int, int]
    pull: tuple[int, int]
    crowded: int


BUILDS = {64: Build(64, (2, 1), (1, 1), 12), 128: Build(32, (3, 4), (1, 2), 24)}  # by head_dim
# operands that all scores of a lane are compared with or multiplied by, and of which LLVM would keep a register an
# element, which are not there beside the rest; by accumulator tiles along a wave's keys
NARROWED = {
    1: {"softcap", "alibi_slopes", "dropped"},
    2: {"softcap", "dropped", "window_left", "window_right", "attention_chunk"},
}
REREAD = ("bias",)  # operands of which every tile makes its addresses again: over the loops they would be spilled
AHEAD = 40  # registers for operands that are read before their turn
FEW = 8  # the same where almost all others are taken
LATE = 6  # products of dK behind the barrier


def build_of(request: Request) -> Build:
    """The build of a call: dropout and biases of 64 keys a wave together take more registers than there are."""
    build, features = BUILDS[request.head_dim], request.static_features
    biased = features.drops and "bias" in features.operands
    return replace(build, wave_keys=32) if biased else build


def ahead_of(request: Request) -> int:
    """Registers for operands that are read before their turn, as many as leave no other to be spilled."""
    features, wide = request.static_features, request.head_dim == 128
    if not features.drops:
        return AHEAD
    if not features.modifies:
        return AHEAD - 4 if features.masks_every_tile and not wide else AHEAD
    limited = features.windowed or "alibi_slopes" in features.operands
    crowded = "bias" in features.operands if wide else limited
    return FEW if crowded else BUILDS[request.head_dim].crowded


def late_of(request: Request, parts: int) -> int:
    """Products of dK behind the barrier, whose operands are read before it: fewer where a register is missing.

    `parts`: of a key head's query heads.
    """
    features = request.static_features
    if request.head_dim == 128 or features.drops or not features.windowed:
        return LATE
    capped = "softcap" in features.operands and parts > 1
    return 2 if capped or features.score_mod is not None else LATE


def is_narrow(request: Request, parts: int) -> bool:
    """Whether a build spills unless it narrows splats, but for what `NARROWED` names; `parts`: see `late_of`."""
    function = request.static_features.score_mod is not None and not request.aux_tensors
    return request.head_dim == 64 and function and "packed" in request.features and parts == 1


@dataclass(frozen=True)
class Gfx942BackwardOptions(Gfx950BackwardOptions):
    """The static parameters of one build: as of the gfx950 kernel, whose sums of dQ are the same, and more.

    `weigh`, `pull`: see `Build`. `late`: products of dK behind the barrier, whose operands are read before it.
    `before`: products of dP whose operands are read with the tile before. `narrow`: see `is_narrow`.
    """

    weigh: tuple[int, int] = field(kw_only=True)
    pull: tuple[int, int] = field(kw_only=True)
    late: int = LATE
    before: int = 8
    narrow: bool = False

    @property
    def hides_tail(self) -> bool:
        """Whether weights of keys past the end have to be hidden.

        Operands of S repeat the last key there, and those of dQ are zeros: nothing comes of weights that are finite.
        A function of the key's number may make others of them.
        """
        return self.features.modifies or self.features.masks_every_tile

    @property
    def narrows(self) -> bool:
        """Whether the build takes `fly.narrow_splats`."""
        return self.narrow or not NARROWED[self.row_tiles].isdisjoint(self.features.operands)

    @property
    def hides_by_tile(self) -> bool:
        """Whether column tiles are masked one after the other: `tile_by_tile`."""
        return self.features.masks_every_tile and self.row_tiles > 1
