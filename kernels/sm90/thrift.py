"""What builds of the Hopper backward kernel do again or later for want of registers.

Each row is for builds in which `ptxas` spills otherwise (`python -m benchmarks.registers`); all others keep what they
have found once. The producer's threads have 24 registers, and consumers' 240 beside 63 uniform ones, which addresses
of products nearly fill: so what the three warpgroups have in common is what is spilled first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..problem.features import NO_FEATURES, Features


@dataclass(frozen=True)
class Thrift:
    """`roles`: each of the producer and the consumers finds out itself which keys and tiles the block works on.

    `heads`: consumers do so again for every query head, and behind the last one. `decides`: what dropout drops of a
    tile is decided before its scores are there. `late`: dP of "masked" tiles, or of "all", is started behind P and
    not before. `places`: which keys a lane has, and where its part of dS goes, is made again by every tile;
    `lengths`: so are the lengths that a bias's queries and keys are cut to. `turned`: of blocks in turn, which see
    tiles from the last one on, the last step says that its tile is the first. `tiles`: the producer finds out once
    more which keys and tiles there are when K and V are on their way; not of blocks in turn. `masks`: all tiles are
    masked, in one loop instead of three. `piece`: every tile finds out from ids which piece of dQ is the consumer's.
    """

    roles: bool = False
    heads: bool = False
    decides: bool = False
    late: str | None = None
    places: bool = False
    lengths: bool = False
    turned: bool = False
    tiles: bool = False
    masks: bool = False
    piece: bool = False

    def is_late(self, masked: bool) -> bool:
        """Whether dP of a tile, `masked` or not, is."""
        return self.late == "all" or (self.late == "masked" and masked)


@dataclass(frozen=True)
class Build:
    """Of `Sm90BackwardOptions`, what decides that; `dim`: the larger head dimension."""

    dim: int
    causal: bool
    packed: bool
    features: Features
    biased: bool
    loads: bool
    ordered: bool
    apart: bool
    clears: bool
    paired: bool

    @property
    def with_slopes(self) -> bool:
        """Whether scores get ALiBi's slopes."""
        return "alibi_slopes" in self.features.operands

    @property
    def by_head(self) -> bool:
        """Whether scores take numbers of a query head, loaded for all of its tiles: these are better kept."""
        return self.loads or self.with_slopes

    @property
    def sloped(self) -> bool:
        """Whether scores get ALiBi's slopes, and there is nothing else."""
        of = self.features
        return of.operands == ("alibi_slopes",) and of.score_mod is None and of.mask_mod is None and not self.packed

    @property
    def capped(self) -> bool:
        """Whether scores get a cap, or a bias of keys."""
        return not self.by_head and bool({"softcap", "bias"} & {*self.features.operands})

    @property
    def added(self) -> bool:
        """Whether scores get a bias."""
        return "bias" in self.features.operands

    @property
    def changes_little(self) -> bool:
        """Whether there are no packed sequences and no dropout, but a cap, a bias, a window, a sink or a function."""
        of = self.features
        windowed = self.limited and "attention_chunk" not in of.operands
        function = of.score_mod is not None and not self.by_head
        any_of = self.capped or windowed or function or of.operands == ("sink",)
        return any_of and not (self.packed or of.drops)

    @property
    def limited(self) -> bool:
        """Whether there is a window, or chunks."""
        return not self.by_head and (self.features.windowed or self.features.ends_early)

    @property
    def dropped(self) -> bool:
        """Whether there is dropout."""
        return not self.by_head and self.features.drops

    @property
    def mixed(self) -> bool:
        """Whether scores get a cap, or a bias of keys, and weights are dropped."""
        return self.capped and self.dropped

    @property
    def lists_and_drops(self) -> bool:
        """Whether there are a block mask and dropout."""
        return self.features.drops and self.features.block_size is not None


@dataclass(frozen=True)
class Row:
    """`thrift` of builds of head dimensions above `above` and up to `most` that fulfil `when`."""

    above: int
    most: int
    when: Callable[[Build], bool]
    thrift: Thrift

    def has(self, build: Build) -> bool:
        """Whether it is a build's."""
        return self.above < build.dim <= self.most and self.when(build)


_ROLES = Thrift(roles=True)
_TILES = Thrift(roles=True, tiles=True)
_AGAIN = Thrift(roles=True, heads=True)
_DECIDES = Thrift(roles=True, decides=True)
_AGAIN_DECIDES = Thrift(roles=True, heads=True, decides=True)
_PLACES = Thrift(roles=True, heads=True, places=True)
_BIASED = Thrift(roles=True, heads=True, late="all", places=True, lengths=True)
_MIXED = Thrift(roles=True, heads=True, decides=True, late="masked")

# in order: the first that a build has
TOGETHER: tuple[Row, ...] = (
    # an address for each of a tile's elements of a bias, beside dP in registers
    Row(
        120,
        128,
        lambda b: b.biased and b.features.drops and b.causal,
        Thrift(decides=True, late="all", lengths=True),
    ),
    Row(
        112,
        128,
        lambda b: b.biased and b.features.drops,
        Thrift(roles=True, late="all", lengths=True, masks=True),
    ),
    Row(96, 128, lambda b: b.biased, Thrift(roles=True, heads=True, late="all", places=True)),
    Row(
        72,
        96,
        lambda b: b.biased and b.features.drops and not b.causal,
        Thrift(roles=True, late="masked", lengths=True),
    ),
    Row(64, 96, lambda b: b.biased, Thrift(roles=True, late="masked")),
    # beside dropout's predicates, where ptxas loads what addresses of sums start from in every tile else
    Row(48, 64, lambda b: b.features.drops and b.causal and (b.biased or not b.packed), _ROLES),
    Row(80, 88, lambda b: b.features.drops and b.causal and b.features.mask_mod is not None, _ROLES),
    # P in two forms and dropout's words beside dP
    Row(112, 128, lambda b: b.mixed, _MIXED),
    # loops for part and for whole blocks of the list
    Row(120, 128, lambda b: b.lists_and_drops, Thrift(roles=True, decides=True)),
    # a head's slope beside that
    Row(112, 128, lambda b: b.with_slopes and b.features.block_size is not None, Thrift(roles=True, late="masked")),
    Row(
        120,
        128,
        lambda b: b.causal and b.with_slopes and "softcap" in b.features.operands,
        Thrift(roles=True, heads=True, late="all"),
    ),
    Row(112, 128, lambda b: b.packed and b.features.drops, _ROLES),
    Row(112, 128, lambda b: b.causal and b.with_slopes and b.features.drops, Thrift(places=True)),
    # loops over pairs of tiles
    Row(120, 128, lambda b: b.paired and b.causal and b.packed, Thrift(roles=True, late="masked")),
    Row(112, 128, lambda b: b.paired and (b.causal or b.packed), _ROLES),
)
# here all blocks have the turn's numbers besides
IN_TURN: tuple[Row, ...] = (
    Row(112, 128, lambda b: b.biased and not b.causal, replace(_BIASED, turned=True)),
    Row(112, 128, lambda b: b.biased, replace(_BIASED, masks=True, piece=True)),
    Row(96, 128, lambda b: b.biased, _BIASED),
    Row(64, 96, lambda b: b.biased, Thrift(roles=True, heads=True, late="all")),
    Row(0, 64, lambda b: b.biased and b.causal, _PLACES),
    Row(0, 64, lambda b: b.biased, _AGAIN),
    Row(96, 128, lambda b: b.mixed, Thrift(roles=True, heads=True, decides=True, late="all")),
    Row(88, 96, lambda b: b.mixed, _AGAIN),
    Row(96, 128, lambda b: b.capped, _AGAIN),
    Row(112, 128, lambda b: b.dropped, Thrift(roles=True, heads=True, decides=True)),
    Row(112, 128, lambda b: b.limited, _AGAIN),
    Row(96, 128, lambda b: b.sloped and b.causal, _PLACES),
    Row(112, 128, lambda b: b.sloped, replace(_PLACES, turned=True)),
    Row(120, 128, lambda b: b.by_head, Thrift(roles=True)),
    Row(120, 128, lambda b: b.packed, _AGAIN),
    Row(96, 120, lambda b: b.packed and b.causal, _AGAIN),
    Row(64, 96, lambda b: b.packed, Thrift(roles=True)),
)


# consumers apart (`flash_attn_sm90_bwd_wide`)
APART: tuple[Row, ...] = (
    Row(240, 256, lambda b: b.biased and b.features.drops and not b.causal, replace(_AGAIN_DECIDES, lengths=True)),
    Row(
        232,
        256,
        lambda b: b.biased and b.features.drops and b.causal,
        replace(_AGAIN_DECIDES, lengths=True, masks=True, piece=True),
    ),
    Row(224, 256, lambda b: b.biased and b.features.drops, replace(_AGAIN_DECIDES, places=True, lengths=True)),
    Row(248, 256, lambda b: b.mixed, replace(_AGAIN, piece=True)),
    Row(248, 256, lambda b: b.biased, replace(_AGAIN, places=True, lengths=True)),
    Row(240, 248, lambda b: b.biased, replace(_AGAIN, lengths=True)),
    Row(192, 256, lambda b: b.features.drops, _AGAIN_DECIDES),
    Row(192, 256, lambda b: b.packed or b.features != NO_FEATURES, _AGAIN),
    Row(128, 160, lambda b: b.causal and b.dropped and not (b.packed or b.mixed), replace(_AGAIN, piece=True)),
    Row(128, 192, lambda b: b.features.drops and (b.packed or b.by_head or b.biased), _AGAIN),
    Row(160, 192, lambda b: b.dropped, _DECIDES),
    Row(160, 192, lambda b: b.packed or b.added or (b.causal and b.features.masks_every_tile), _ROLES),
    Row(160, 192, lambda b: b.limited and (b.capped or b.features.score_mod is not None), _TILES),
    Row(128, 192, lambda b: b.causal and b.with_slopes and "softcap" in b.features.operands, _AGAIN),
    Row(160, 192, lambda b: b.limited or (b.capped and b.causal), _ROLES),
    Row(128, 160, lambda b: b.dropped, _AGAIN),
    Row(128, 160, lambda b: b.clears and not b.causal, _ROLES),
    Row(128, 160, lambda b: b.features == NO_FEATURES and b.packed and not b.causal, _AGAIN),
    Row(128, 160, lambda b: b.causal and b.changes_little, _ROLES),
    Row(128, 152, lambda b: b.causal and not b.packed and (b.limited or b.loads), _ROLES),
    Row(128, 160, lambda b: not (b.causal or b.packed) and b.limited, _ROLES),
    Row(152, 160, lambda b: not (b.causal or b.packed) and b.added and not b.biased, _ROLES),
)
APART_IN_TURN: tuple[Row, ...] = (
    Row(240, 256, lambda b: b.mixed, replace(_AGAIN, piece=True)),
    Row(192, 256, lambda b: b.features.drops, _AGAIN_DECIDES),
    Row(240, 256, lambda b: b.biased and b.causal, replace(_AGAIN, lengths=True, turned=True, masks=True)),
    Row(248, 256, lambda b: b.biased, replace(_AGAIN, lengths=True, turned=True)),
    Row(192, 256, lambda b: True, _AGAIN),
    Row(184, 192, lambda b: b.dropped, _DECIDES),
    Row(160, 184, lambda b: b.mixed, _DECIDES),
    Row(128, 160, lambda b: b.dropped, _DECIDES),
    Row(160, 192, lambda b: b.sloped and b.causal, _ROLES),
    Row(128, 160, lambda b: b.sloped, _ROLES),
    Row(184, 192, lambda b: b.packed or b.biased, _AGAIN),
    Row(160, 184, lambda b: b.packed or (b.biased and b.causal), _AGAIN),
    Row(128, 160, lambda b: b.packed, _AGAIN),
    Row(128, 160, lambda b: b.capped or (b.causal and b.features == NO_FEATURES), _ROLES),
)


def thrift_of(build: Build) -> Thrift:
    """What a build does."""
    together, in_turn = (APART, APART_IN_TURN) if build.apart else (TOGETHER, IN_TURN)
    rows = in_turn if build.ordered else together
    return next((row.thrift for row in rows if row.has(build)), Thrift())
