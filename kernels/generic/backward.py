"""Builds of the generic backward kernels: their static parameters, and the choice of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fly
from fly.backends.target import Target
from fly.errors import ShapeError

from ..problem.features import NO_FEATURES, BoundFeatures, Features
from ..work.tile_scheduler import BlockWork, block_work
from .block_tiles import Tiles, tiles_within
from .operands import Tiling, padded


@dataclass(frozen=True)
class BackwardOptions:
    """The static parameters of one build of either kernel.

    A block has `block_m` rows, wave w those from w * block_m / waves on, and what passes by comes in tiles of
    `block_n` rows, `stages` slots, copied `vector` elements at a time. `resident`: where the rows' operands stay,
    "registers" or "shared". `results`: of `dkdv`, which to compute. `features`: what the operands are; of `dkdv`, a
    block mask's blocks are (keys, queries). `rereads`: whether every tile computes again what it copies (`dkdv`), or
    where its scores are (`dq`), which takes a few instructions and keeps fewer registers. `power_of_two`: see
    `Tiling`. `masks_in_parts`: whether the scores of a masked tile are masked for 32 rows of what passes by after the
    other (`tile_by_tile`). `counts_lanes`: whether lanes are counted anew behind the loops and, of `dkdv`, in masked
    tiles (`fly.reread_ids`), where loops take all vector registers. `scarce`: see `is_scarce`.
    `adds_bias`: of `dq`, whether several blocks have an element of the bias; `aux_gradients`: which auxiliary
    tensors' gradients come after the operands.

    Raises:
        ShapeError: a value that no build has, or some that do not go together.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    block_m: int
    block_n: int
    waves: int
    stages: int
    vector: int = 8
    resident: str = "registers"
    results: tuple[str, ...] = ("dk", "dv")
    features: Features = NO_FEATURES
    min_blocks: int | None = None
    waves_per_eu: int | None = None
    rereads: bool = False
    power_of_two: bool = False
    masks_in_parts: bool = False
    counts_lanes: bool = False
    scarce: bool = False
    adds_bias: bool = False
    aux_gradients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.vector not in (1, 2, 4, 8):
            raise ShapeError(f"vector is {self.vector}; expected 1, 2, 4 or 8 elements")
        if self.block_m % self.waves:
            raise ShapeError(f"block_m {self.block_m} does not divide into {self.waves} waves")
        if self.resident not in ("registers", "shared"):
            raise ShapeError(f"resident is {self.resident!r}; expected 'registers' or 'shared'")
        if self.resident == "shared" and self.stages < 2:
            raise ShapeError(f"rows in shared memory need asynchronous copies: two stages or more, not {self.stages}")
        if not self.results or not set(self.results) <= {"dk", "dv"}:
            raise ShapeError(f"results is {self.results!r}; expected 'dk', 'dv' or both")

    @property
    def wave_rows(self) -> int:
        """Rows of a wave."""
        return self.block_m // self.waves

    def is_scarce(self) -> bool:
        """Whether the target's scalar registers are too few for dropout.

        AMD's are at head dimensions 96, 160 and 224, and in `scarce` builds of others.
        """
        odd = padded(self.head_dim) % 64 != 0 and (self.head_dim > 64 or self.masks_in_parts)
        return (odd or self.scarce) and self.features.drops and fly.target().backend == "rocdl"

    def remakes_tiles(self) -> bool:
        """Whether every head finds out anew where its tiles are, for want of registers: with dropout on NVIDIA."""
        of = self.features
        return of.drops and not of.modifies and fly.target().backend == "nvvm"

    def block_bytes(self, kernel: str, wave_size: int) -> int:
        """Shared memory of a block, where no tile is stored transposed as well."""
        dim, dim_v = padded(self.head_dim, self.power_of_two), padded(self.head_dim_v, self.power_of_two)
        tiles = 2 * self.stages * self.block_n * (dim + dim_v)
        if self.resident == "shared":
            # dV alone needs no V
            tiles += 2 * self.block_m * (dim + dim_v * (kernel == "dq" or "dk" in self.results))
        if kernel == "dq":
            return tiles
        # the queries' log-sum-exp and delta
        return tiles + 2 * self.stages * fly.SharedVector.bytes_for(self.block_n, self.waves * wave_size, fly.f32)

    @property
    def tiling(self) -> Tiling:
        """Of what passes by."""
        return Tiling(self.block_n, self.stages, self.vector, power_of_two=self.power_of_two)


def query_block(
    tensors: tuple[fly.Tensor | None, ...], options: BackwardOptions, given: BoundFeatures, *, folded: bool
) -> BlockWork:
    """`block_work` of a build whose rows are queries, on its target."""
    return block_work(
        tensors,  # type: ignore[arg-type]
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v,
        causal=options.causal,
        block_m=options.block_m,
        block_n=options.block_n,
        xcds=fly.target().xcds,
        given=given,
        folded=folded,
    )


@dataclass(frozen=True)
class _Rows:
    """A row of the tables, of `dkdv` and of `dq`; `dv`: of the launch for dV alone. `vector`: of copies."""

    dkdv: Tiles
    dq: Tiles
    dv: Tiles | None = None
    vector: int = 8

    def tiles(self, kernel: str, results: tuple[str, ...]) -> Tiles:
        """Of a build of a kernel."""
        if kernel == "dq":
            return self.dq
        return self.dv if results == ("dv",) and self.dv is not None else self.dkdv


# By padded head dimension, the larger one of q's and v's: the first row whose blocks have the shared memory. Tiles
# are as high as all threads have a piece of them.
_NVIDIA = {
    32: (_Rows((128, 64, 8), (128, 64, 8)),),
    64: (_Rows((128, 64, 8), (128, 32, 4)),),
    96: (_Rows((128, 64, 8), (128, 64, 8)), _Rows((64, 32, 4), (64, 32, 4))),
    128: (_Rows((128, 32, 8), (128, 32, 4)), _Rows((64, 32, 4), (128, 32, 4))),
    160: (_Rows((64, 64, 4), (64, 64, 4)), _Rows((64, 32, 4), (64, 32, 4))),
    192: (_Rows((64, 32, 4), (64, 32, 4)),),
    224: (_Rows((64, 64, 4), (64, 64, 4)), _Rows((64, 16, 4), (64, 16, 4), vector=4)),
    256: (
        _Rows((128, 32, 8), (128, 32, 8), dv=(128, 32, 8)),
        _Rows((64, 32, 4), (64, 32, 4)),
        _Rows((64, 16, 4), (64, 16, 4)),
    ),
}
# Before those: where scores need nothing but causality, as a wave's rows, or a tile's, take more registers;
_NVIDIA_PLAIN = {64: _Rows((128, 32, 4), (128, 32, 4)), 128: _Rows((128, 64, 8), (128, 32, 4))}
# where there is nothing for single scores;
_NVIDIA_BARE = {256: _Rows((128, 32, 8), (128, 32, 8), dv=(128, 64, 8))}
# where weights are dropped and scores modified;
_NVIDIA_FULL = {64: _Rows((128, 32, 8), (128, 32, 4)), 128: _Rows((128, 16, 8), (128, 16, 4))}
# where biases are added;
_NVIDIA_CUT = {128: _Rows((128, 32, 8), (128, 16, 4))}
# where scores are modified within a window, or a list's blocks are small, and so what copies a tile, or of a list
# weights are dropped;
_NVIDIA_NARROW = {128: _Rows((128, 16, 8), (128, 16, 4))}
# where weights are dropped, or lists are causal; where weights are dropped, or tiles are listed.
_NVIDIA_DROPPING = {128: _Rows((128, 16, 8), (128, 32, 4))}
_NVIDIA_CROWDED = {256: _Rows((128, 16, 8), (128, 32, 8), dv=(128, 32, 8))}
# Where gradients of operands take registers beside dQ's.
_NVIDIA_OF_OPERANDS = {128: _Rows((128, 32, 8), (128, 32, 8))}
# A wave has 32 rows; what passes by goes through registers, so that it needs one slot.
_AMD = {
    32: _Rows((128, 64, 4), (128, 64, 4)),
    64: _Rows((128, 32, 4), (128, 32, 4)),
    96: _Rows((128, 64, 4), (128, 64, 4)),
    128: _Rows((128, 32, 4), (128, 32, 4)),
    160: _Rows((128, 64, 4), (128, 64, 4)),
    192: _Rows((128, 32, 4), (128, 32, 4)),
    224: _Rows((128, 32, 4), (128, 32, 4), vector=4),
    256: _Rows((128, 32, 4), (128, 32, 4)),
}
NARROWEST = 16  # rows of what passes by, of a matrix instruction
TOGETHER = 128  # head dimensions up to here have dK and dV in one launch
_LENGTHS = {"seqused_q", "seqused_kv"}
_BEFORE_HOPPER = ("sm_80", "sm_86", "sm_89")


@dataclass(frozen=True)
class _Build:
    """What decides whether ptxas or LLVM spills in a build of `kernel`, as far as walks of all of them have told.

    `dim`: the padded head dimension; `packed`: sequences are; `loads`: functions of scores load elements of tensors;
    `sums`: of `dq`, whether it adds up gradients of such elements, or of a bias over its queries. `narrow_bias`:
    there is a bias of 16 bits.
    """

    arch: str
    kernel: str
    results: tuple[str, ...]
    dim: int
    causal: bool
    packed: bool
    loads: bool
    sums: bool
    narrow_bias: bool
    features: Features

    @property
    def rereads(self) -> bool:
        """Whether it spills (`python -m benchmarks.registers`) unless every tile computes something again."""
        operands = self.features.operands
        listed = self.features.block_size is not None
        if self.kernel == "dkdv" and not _LENGTHS.isdisjoint(operands):
            return not (self.dim == 256 and self.causal)
        if self.dim == 256:
            return self.kernel == "dq" and self.causal and "bias" in operands and self.arch == "sm_80"
        if self.dim != TOGETHER:
            return self.dim == 64 and self.kernel == "dkdv" and not self.causal and self.features.drops and listed
        if self.kernel == "dkdv":
            capped = self.arch == "sm_90a" and "softcap" in operands
            return "bias" in operands or capped if self.causal else self.features.score_mod is not None
        if self.arch in _BEFORE_HOPPER and self.causal and "alibi_slopes" in operands:
            return True
        if self.arch == "sm_80" and self.features.score_mod is not None:
            return True
        if self.causal:
            return "attention_chunk" in operands or listed
        return "alibi_slopes" in operands and self.arch not in ("sm_86", "sm_89")

    @property
    def needs_half(self) -> bool:
        """Whether it spills all the same, unless what passes by comes in tiles of half the rows."""
        features = self.features
        if self.arch == "gfx950":
            modified = features.modifies and (features.windowed or features.drops)
            return self.kernel == "dq" and self.dim == 96 and (modified or self.sums)
        if self.kernel == "dkdv" and self.dim == 256 and "dk" in self.results:
            if self.arch == "sm_90a":
                return self.causal and (features.score_mod is not None or "bias" in features.operands)
            dropping = features.drops and features.block_size is not None and self.causal
            return self.arch == "sm_80" and (self.packed or dropping)
        if self.kernel == "dkdv":
            varying = self.packed or not _LENGTHS.isdisjoint(features.operands)
            # at D=64 these targets have the same tiles; at D=128 only sm_80 has room for those that spill
            alike = _BEFORE_HOPPER if self.dim == 64 else ("sm_80",)
            return self.arch in alike and self.dim in (64, TOGETHER) and self.causal and varying
        if self.arch not in _BEFORE_HOPPER or self.dim != TOGETHER:
            return False
        if self.packed or (self.causal and features.block_size is not None):
            return True
        if self.arch == "sm_80" and features.score_mod is not None and self.loads:
            return True
        return self.arch == "sm_80" and ("window_left" if self.causal else "alibi_slopes") in features.operands

    @property
    def power_of_two(self) -> bool:
        """Whether it spills unless tiles have a power of two of columns: so it may where no load transposes them.

        Threads turn single elements of 32 x 224 then, and LLVM has registers of all that the loop carries twice.
        """
        features = self.features
        listed = features.block_size is not None
        small = features.block_size is not None and min(features.block_size) < 128
        if self.arch != "gfx942" or self.dim != 224 or features.masks_every_tile or small:
            return False
        masked = self.causal or features.windowed or features.ends_early
        if self.kernel == "dq" or "dk" in self.results:
            return self.kernel == "dq" or masked or features.modifies or listed
        modified = features.modifies and features.operands != ("alibi_slopes",)
        return not (features.drops or listed) and (masked or modified)

    @property
    def masks_in_parts(self) -> bool:
        """Whether AMD's scalar registers are too few for the comparisons of a masked tile of 64 rows at once."""
        features = self.features
        listed, of_keys = features.block_size is not None, self.kernel == "dkdv"
        if self.dim == 64:
            named = self.causal and "window_left" in features.operands
            named = named if of_keys else "alibi_slopes" in features.operands
            return self.arch == "gfx942" and listed and named and not features.drops
        if features.block_size is not None and (self.causal or not of_keys):
            # alone of these it does not: causal `dq` of small blocks at D=32
            has_room = self.arch == "gfx942" and self.dim == 32 and self.causal and min(features.block_size) < 128
            return of_keys or not has_room
        if self.arch == "gfx950":
            dropping = listed and features.drops and self.dim == 32
            return dropping or (of_keys and self.causal and features.mask_mod is not None and "dk" in self.results)
        if listed or not of_keys or not self.causal:
            return False
        plain = not (features.per_score or features.elementwise or features.windowed)
        return features.mask_mod is not None or (self.dim == 32 and (plain or self.loads))

    @property
    def counts_lanes(self) -> bool:
        """Whether it spills a vector register or two unless lanes are counted again (`fly.reread_ids`)."""
        features, operands = self.features, self.features.operands
        changed = features.weighs_whole or features.masks_every_tile
        windows = features.windowed and not changed and features.block_size is None
        if self.arch == "gfx950":
            if self.kernel == "dkdv":
                return self.dim == 96 and windows
            if self.dim == 160:
                return windows and "window_left" in operands
            small = features.block_size is not None and min(features.block_size) < 128 and not changed
            return self.dim == 96 and (small or (self.causal and self.narrow_bias and features.only_bias))
        if self.arch != "gfx942" or self.kernel == "dq":
            return False
        if self.dim == TOGETHER:
            return windows and "window_left" in operands
        others = {"softcap"} if self.dim == 224 else set()
        sloped = {*operands} - _LENGTHS - others == {"alibi_slopes"} and features.score_mod is None
        alone = not (self.causal or self.packed or features.mask_mod)
        return self.dim in (224, 256) and "dk" in self.results and sloped and alone

    @property
    def scarce(self) -> bool:
        """Whether it spills scalar registers unless dropout's numbers are made again."""
        features, of_keys = self.features, self.kernel == "dkdv"
        biased = features.drops and "bias" in features.operands
        return self.arch == "gfx942" and of_keys and self.dim == TOGETHER and biased


def options_for(
    target: Target,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    features: Features = NO_FEATURES,
    of_operands: bool = False,
    packed: bool = False,
    loads: bool = False,
    by_key: bool = False,
    narrow_bias: bool = False,
) -> tuple[tuple[BackwardOptions, ...], BackwardOptions]:
    """(the builds of `dkdv`, one after the other, the build of `dq`) for a target.

    `features`: of the call; `of_operands`: whether `dq` has gradients of operands as well;
    `packed`: whether sequences are; `loads`: whether functions of scores load elements of tensors; `by_key`: whether
    a bias' gradient is summed over queries; `narrow_bias`: whether there is a bias of 16 bits.

    Raises:
        UnsupportedError: blocks of a block mask that tiles do not divide.
    """
    dim = max(padded(head_dim), padded(head_dim_v))
    narrowest = min(padded(head_dim), padded(head_dim_v))
    nvidia = target.backend == "nvvm"
    bare = not (features.per_score or features.elementwise) and features.block_size is None
    plain = bare and not (features.windowed or features.ends_early)
    listed = features.block_size is not None
    narrow = (features.modifies and features.windowed) or (listed and features.drops)
    first = (
        (of_operands, _NVIDIA_OF_OPERANDS),
        (plain, _NVIDIA_PLAIN),
        (bare, _NVIDIA_BARE),
        (features.drops and features.modifies, _NVIDIA_FULL),
        (narrow or (features.block_size is not None and min(features.block_size) < 128), _NVIDIA_NARROW),
        ("bias" in features.operands, _NVIDIA_CUT),
        (features.drops or (listed and causal), _NVIDIA_DROPPING),
        (features.drops or listed, _NVIDIA_CROWDED),
    )

    def made(rows: _Rows, kernel: str, results: tuple[str, ...]) -> BackwardOptions:
        tiles = rows.tiles(kernel, results)
        given, by_keys = features, kernel == "dkdv"
        sums = (of_operands and loads) or by_key
        of = target.arch, kernel, results, dim, causal, packed, loads, sums, narrow_bias, features
        built, vector = _Build(*of), rows.vector
        if built.power_of_two:
            vector = 8
        if tiles[1] > NARROWEST and built.needs_half:
            tiles = (tiles[0], tiles[1] // 2, tiles[2])
            if not nvidia:
                vector //= 2  # threads have a piece of the columns that are copied together
        if features.block_size is not None:
            queries, keys = features.block_size
            blocks = (keys, queries) if by_keys else (queries, keys)
            while blocks[1] % tiles[1] and tiles[2] > 1:
                # all at once: threads still have a piece each of what passes by
                tiles = (tiles[0] // 2, tiles[1] // 2, tiles[2] // 2)
            tiles = tiles_within(blocks, tiles, f"flash_attn_generic_{kernel}")
            given = replace(features, block_size=blocks)
        block_m, block_n, waves = tiles
        # every thread has a piece of the narrower tiles too
        vector = min(vector, block_n * narrowest // (waves * target.wave_size))
        # modified scores are kept for their derivatives, beside dQ's sums
        crowded = (of_operands or features.modifies) and not by_keys and dim == TOGETHER
        in_parts = not nvidia and (block_n == 64 or dim == 64) and built.masks_in_parts
        # if it may have all vector registers, LLVM spills scalar ones with a block mask and dropout at D=64, or here
        sparing = (dim == 64 and listed and features.drops) or (dim == 32 and in_parts)
        alone = ("dv" in results and not sparing) or dim > TOGETHER or crowded
        return BackwardOptions(
            head_dim,
            head_dim_v,
            causal,
            block_m,
            block_n,
            waves,
            stages=2 if nvidia else 1,
            vector=vector,
            resident="shared" if nvidia else "registers",
            results=results,
            features=given,
            rereads=nvidia and built.rereads,
            power_of_two=built.power_of_two,
            masks_in_parts=in_parts,
            counts_lanes=built.counts_lanes,
            scarce=built.scarce,
            waves_per_eu=None if nvidia else 1 if alone else 2,
        )

    def build(kernel: str, results: tuple[str, ...]) -> BackwardOptions:
        if not nvidia:
            return made(_AMD[dim], kernel, results)
        apart = next((rows[dim] for holds, rows in first if holds and dim in rows), None)
        for rows in (*([apart] if apart else []), *_NVIDIA[dim]):
            options = made(rows, kernel, results)
            if options.block_bytes(kernel, target.wave_size) <= target.shared_bytes:
                break
        return options

    launches: tuple[tuple[str, ...], ...] = (("dk", "dv"),) if dim <= TOGETHER else (("dk",), ("dv",))
    return tuple(build("dkdv", results) for results in launches), build("dq", ("dk",))
