"""The configurations that are checked and timed by name: each set a function of what every set is crossed with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.workload import DTYPES, Workload

# (num_heads, num_kv_heads): (batch, seq_len)s.
DEFAULT_SHAPES: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (64, 64): (
        *((8, s) for s in (128, 256, 512)),
        *((1, s) for s in (128, 256, 384, 512, 1024, 2048, 4096, 8192)),
        *((2, 1024), (4, 8192), (16, 8192)),
    ),
    (64, 8): ((16, 8192),),
    (32, 32): ((1, 2048), (1, 4096), (1, 8192), (8, 8192)),
    (16, 16): ((1, 2048), (1, 4096), (1, 8192), (16, 8192)),
    (8, 8): ((1, 2048), (1, 4096), (1, 8192), (32, 8192)),
}
CROSS_LENGTHS = ((31, 65), (63, 33), (129, 255), (257, 127), (1024, 8192), (8192, 1024))
SMALL_LENGTHS = (1, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513)
PACKED_LENGTHS = (1024, 8192, 3, 31, 65, 127)
# the same lengths against those of other sequences, and sequences without queries, without keys, without either
PACKED_CROSS = tuple(zip(PACKED_LENGTHS, (3, 1024, 65, 127, 31, 8192)))
PACKED_EMPTY = ((0, 64), (100, 100), (64, 0), (0, 0), (1, 300), (0, 7))
# (num_heads, seq_len, num_kv_splits)
SPLIT_SHAPES = ((2, 2048, 2), (3, 2048, 3), (4, 4096, 4), (2, 8192, 4), (3, 8192, 2), (2, 4097, 5), (4, 8192, 0))
LONG_SHAPES = ((3, 98304, 5), (3, 196608, 5), (3, 294912, 5), (24, 12288, 1), (24, 24576, 1), (24, 36864, 1))


@dataclass(frozen=True)
class Kind:
    """What every shape is crossed with."""

    head_dim: int
    dtype: str
    causal: bool

    def dense(self, batch: int, seq_len: int, heads: int, kv_heads: int = 0, seq_len_kv: int = 0, splits: int = 1):
        """A workload of this kind; as many key heads and keys as query heads and queries by default."""
        sizes = batch, seq_len, seq_len_kv or seq_len, heads, kv_heads or heads
        return Workload(*sizes, self.head_dim, self.dtype, self.causal, splits)

    def packed(self, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int = 0, splits: int = 1):
        """A packed workload of this kind."""
        return Workload.packed(lengths, heads, kv_heads or heads, self.head_dim, self.dtype, self.causal, splits)


def kinds(
    dtypes: Sequence[str] = tuple(DTYPES), causal: Sequence[bool] = (True, False), head_dims: Sequence[int] = (128,)
) -> list[Kind]:
    """Every combination, in that order."""
    return [Kind(head_dim, dtype, mask) for dtype, mask, head_dim in itertools.product(dtypes, causal, head_dims)]


def _default(kind: Kind) -> Iterator[Workload]:
    for heads, sizes in DEFAULT_SHAPES.items():
        for batch, seq_len in sizes:
            yield kind.dense(batch, seq_len, *heads)


def _cross(kind: Kind) -> Iterator[Workload]:
    for queries, keys in CROSS_LENGTHS:
        yield kind.dense(2, queries, 4, 2, keys)


def _square(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


def _varlen(kind: Kind) -> Iterator[Workload]:
    yield kind.packed(_square(PACKED_LENGTHS), 8)
    yield kind.packed(PACKED_CROSS, 8, 1)
    yield kind.packed(PACKED_EMPTY, 4)
    yield kind.packed(_square(PACKED_LENGTHS), 7, 1, splits=3)
    yield kind.packed(PACKED_EMPTY, 4, 2, splits=2)


def _split(kind: Kind) -> Iterator[Workload]:
    for heads, seq_len, splits in SPLIT_SHAPES:
        yield kind.dense(1, seq_len, heads, splits=splits)
    yield kind.dense(2, 1, 16, 2, 8192, splits=5)
    yield kind.dense(1, 129, 7, 1, 4097, splits=3)


def _small(kind: Kind) -> Iterator[Workload]:
    for length in SMALL_LENGTHS:
        yield kind.dense(2, length, 4)


def _shared(kind: Kind) -> Iterator[Workload]:
    for heads, kv_heads in ((8, 1), (7, 1), (64, 8), (28, 4)):
        yield kind.dense(2, 512, heads, kv_heads)
        yield kind.dense(1, 130, heads, kv_heads, 700)


def _long(kind: Kind) -> Iterator[Workload]:
    for heads, seq_len, splits in LONG_SHAPES:
        yield kind.dense(1, seq_len, heads, splits=splits)


# name: (what it is, its workloads of one kind)
SETS: Mapping[str, tuple[str, Callable[[Kind], Iterator[Workload]]]] = {
    "default": ("the 27 default shapes", _default),
    "cross": ("queries and keys of different lengths", _cross),
    "varlen": ("packed sequences, some of them empty, some with split keys", _varlen),
    "split": ("split keys", _split),
    "small": ("lengths around tile sizes", _small),
    "shared": ("several query heads to a key head", _shared),
    "long": ("12 thousand tokens and more", _long),
}


def workloads_of_sets(names: Sequence[str], of: Sequence[Kind]) -> list[Workload]:
    """The workloads of the sets called `names`: each shape with every kind before the next shape.

    Raises:
        ValueError: a name that no set has.
    """
    for name in names:
        if name not in SETS:
            raise ValueError(f"no set is called {name!r}; sets: {', '.join(SETS)}")
    return [
        workload
        for name in names
        for shape in zip(*(SETS[name][1](kind) for kind in of), strict=True)
        for workload in shape
    ]


TOKENS, CHANNELS = 16384, 2048
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)


def sweep(
    dtype: str,
    causal: Sequence[bool] = (True, False),
    seq_lens: Sequence[int] = SEQ_LENS,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> list[Workload]:
    """Lengths of the same number of tokens (at least one sequence) and channels."""
    return [
        Kind(dim, dtype, mask).dense(max(1, TOKENS // seq_len), seq_len, CHANNELS // dim)
        for dim in head_dims
        for mask in causal
        for seq_len in seq_lens
    ]


def short(
    dtype: str,
    causal: Sequence[bool] = (True, False),
    seq_lens: Sequence[int] = (64, 128, 256, 512, 1024),
    head_dims: Sequence[int] = (64, 128),
) -> list[Workload]:
    """What fills a GPU badly: one short sequence, packed mixtures of lengths, few key heads."""
    mixtures = (
        (512,) * 8 + (64,) * 32,
        (4096, 17, 250, 1024, 33, 512, 2, 129),
        tuple(range(16, 1025, 48)),
    )
    cells = []
    for kind in kinds((dtype,), causal, head_dims):
        cells += [kind.dense(1, length, 16) for length in seq_lens]
        cells += [kind.dense(1, 1024, 64, 8), kind.dense(8, 1024, 64, 8), kind.dense(1, 4096, 64, 8)]
        cells += [kind.packed(_square(lengths), 16) for lengths in mixtures]
        cells += [kind.packed(_square(mixtures[1]), 64, 8)]
    return cells


def chunked(
    dtype: str,
    causal: Sequence[bool] = (True, False),
    seq_lens: Sequence[int] = (128, 512, 2048),
    head_dims: Sequence[int] = (128,),
) -> list[Workload]:
    """A prompt in chunks: `seq_lens` queries at the end of many more keys, as one tensor and in pages.

    Parts of the keys are left to the callee.
    """
    return [
        replace(kind.dense(1, queries, *heads, keys, splits=0), page_size=page_size)
        for page_size in (0, 64, 16)
        for kind in kinds((dtype,), causal, head_dims)
        for heads in ((32, 4), (32, 8))
        for queries in seq_lens
        for keys in (4096, 8192, 32768)
    ]


def grouped(
    dtype: str,
    causal: Sequence[bool] = (True, False),
    seq_lens: Sequence[int] = (4096, 8192, 32768),
    head_dims: Sequence[int] = (128,),
) -> list[Workload]:
    """Training with four query heads to a key head: one length, and packed mixtures of `TOKENS` tokens."""
    mixtures = (
        (8192, 4096, 2048, 1024, 512, 256, 128, 64, 64),
        (1024,) * 12 + (256,) * 16,
        tuple(range(16, 1009, 32)),
    )
    cells = []
    for kind in kinds((dtype,), causal, head_dims):
        cells += [kind.dense(max(1, TOKENS // length), length, 32, 8) for length in seq_lens]
        cells += [kind.packed(_square(lengths), 32, 8) for lengths in mixtures]
    return cells


@dataclass(frozen=True)
class Preset:
    """What one benchmark run times.

    `workloads(dtype, causal, seq_lens, head_dims)` gives the cells, the last two by default; `providers` are names.
    `dtype`: if no other is asked for.
    """

    meaning: str
    workloads: Callable[..., list[Workload]]
    providers: tuple[str, ...]
    dtype: str = "bf16"


# widths that shared memory has no whole lines for, or products no whole steps
ODD_HEAD_DIMS = (24, 40, 48, 56, 72, 80, 88, 104, 112, 136, 160, 224)
_EVERY = ("fly", "SDPA cuDNN", "SDPA flash", "FA3", "FA4", "Triton")
PRESETS: Mapping[str, Preset] = {
    "h200": Preset("head dim 64, 128, 256; 512 to 16384 tokens; 16384 of them in all", sweep, _EVERY),
    "short": Preset(
        "one short sequence, packed mixtures, 8 query heads to a key head", short, (*_EVERY, "torch varlen")
    ),
    "chunked": Preset(
        "128, 512 and 2048 queries on 4096, 8192 and 32768 keys; 4 and 8 query heads to a key head; also in pages",
        chunked,
        (*_EVERY, "torch varlen"),
    ),
    "head_dims": Preset(
        "12 head dimensions from 24 to 224; 1024, 4096 and 16384 tokens; 16384 of them in all",
        partial(sweep, seq_lens=(1024, 4096, 16384), head_dims=ODD_HEAD_DIMS),
        ("fly", "fly generic", "SDPA cuDNN", "SDPA flash", "FA3"),
    ),
    "fp8": Preset(
        "8 bits (e4m3): head dim 64, 128, 256; 2048, 4096 and 16384 tokens; 16384 of them in all",
        partial(sweep, seq_lens=(2048, 4096, 16384)),
        ("fly", "fly fast", "FA3"),
        "f8e4m3",
    ),
    "generic": Preset(
        "the cells of h200, the generic kernel against FlashAttention-2", sweep, ("fly generic", "SDPA flash")
    ),
}
BACKWARD_PRESETS: Mapping[str, Preset] = {
    "backward": Preset(
        "head dim 64, 128, 256; 1024 to 16384 tokens; 16384 of them in all",
        partial(sweep, seq_lens=(1024, 2048, 4096, 8192, 16384)),
        ("fly", "SDPA cuDNN", "SDPA flash", "FA4"),
    ),
    "backward_gqa": Preset(
        "4 query heads to a key head: 4096, 8192 and 32768 tokens, and packed mixtures",
        grouped,
        ("fly", "SDPA cuDNN", "SDPA flash", "torch varlen", "FA4"),
    ),
}
PRESETS_OF: Mapping[str, Mapping[str, Preset]] = {"forward": PRESETS, "backward": BACKWARD_PRESETS}  # a pass's
