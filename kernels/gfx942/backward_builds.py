"""Builds of the gfx942 backward kernel: their static parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..gfx950.backward import Gfx950BackwardOptions


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


@dataclass(frozen=True)
class Gfx942BackwardOptions(Gfx950BackwardOptions):
    """The static parameters of one build: as of the gfx950 kernel, whose sums of dQ are the same, and more.

    `weigh`, `pull`: see `Build`. `late`: products of dK behind the barrier, whose operands are read before it.
    `before`: products of dP whose operands are read with the tile before.
    """

    weigh: tuple[int, int] = field(kw_only=True)
    pull: tuple[int, int] = field(kw_only=True)
    late: int = 6
    before: int = 8

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
        return not NARROWED[self.row_tiles].isdisjoint(self.features.operands)

    @property
    def hides_by_tile(self) -> bool:
        """Whether column tiles are masked one after the other: `tile_by_tile`."""
        return self.features.masks_every_tile and self.row_tiles > 1
