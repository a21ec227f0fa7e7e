"""Builds for keys in pages: every way to feed a tile, simulated, and what ptxas says of the Hopper kernel's."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fly.backends.target import target
from fly.errors import ShapeError
from fly.lang.signature import TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.problem.contract import Request
from kernels.problem.features import Features
from kernels.sm90.builds import Sm90Options, build_for, decode_options
from kernels.sm90.tiles import TILES
from tests.backends.builds import needs_ptxas
from tests.kernels.generic.test_generic_simulated import exact
from tests.kernels.paged import Paged
from tests.kernels.sm90.test_flash_attn_sm90_isa import accept, specs
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

FEATURES = Features(("seqused_kv", "block_table"))
OPERANDS = (TensorSpec("i32", 1, 4, True), TensorSpec("i32", 2, 4, True))

# architecture, head dimension, page size, and how the build differs
WAYS = [
    ("gfx942", 64, 16, {"stages": 1, "waves": 4, "block_m": 128}),
    ("gfx950", 64, 16, {"stages": 1}),
    ("sm_80", 64, 16, {}),
    ("sm_80", 64, 64, {"stages": 3, "queries": "shared", "lazy": True}),
    ("sm_80", 32, 16, {"waves": 4, "block_n": 64}),
    ("sm_80", 128, 32, {"stages": 1, "alternate": True}),
    ("sm_80", 64, 16, {"overlap": True}),
    ("sm_80", 64, 128, {"overlap": True, "stages": 3}),
    ("sm_80", 64, 16, {"vector": 4}),
    ("sm_80", 64, 32, {"stages": 1}),
    # every row looked up
    ("gfx942", 64, 24, {"stages": 1, "waves": 4, "block_m": 128}),
    ("gfx950", 64, 5, {"stages": 1}),
    ("sm_80", 64, 24, {}),
    ("sm_80", 64, 1, {"stages": 3, "queries": "shared", "lazy": True}),
    ("sm_80", 40, 3, {"waves": 4, "block_n": 64}),
    ("sm_80", 128, 100, {"stages": 1, "alternate": True}),
    ("sm_80", 64, 7, {"overlap": True}),
    ("sm_80", 64, 12, {"vector": 4}),
    ("sm_80", 64, 24, {"stages": 1}),
    ("sm_80", 40, 9, {"stages": 1}),
]


@functools.cache
def _program(arch: str, options: GenericOptions) -> Program:
    tensor = matrix("f16", 4)
    arguments = (tensor, tensor, tensor, tensor, matrix("f32", 3), "f32", None, None, matrix("i32"), matrix("i32", 2))
    block = options.waves * target(arch).wave_size
    return Program.of(trace(flash_attn_generic, *arguments, arch=arch, block=block, options=options), target(arch))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "dim", "page_size", "build"), WAYS, ids=str)
def test_every_way_to_feed_a_tile(arch, dim, page_size, build):
    tiles = {"block_m": 64, "block_n": 64, "waves": 2, "stages": 2} | build
    options = GenericOptions(dim, True, features=FEATURES, page_size=page_size, **tiles)
    keys = [150, 0, 64, 7]
    paged = Paged.of(keys, page_size, 1, (dim, dim), torch.float16, seed=5)
    k, v, table, lengths = (x.numpy() for x in (paged.k, paged.v, paged.table, paged.lengths))
    q = np.random.default_rng(6).standard_normal((len(keys), 20, 2, dim)).astype(np.float16)
    out, lse = np.full_like(q, np.nan), np.full((len(keys), 2, 20), np.nan, np.float32)
    scale = 1 / math.sqrt(dim)
    arguments = flat(q, k, v, out, lse, scale * math.log2(math.e), None, None, lengths, table)
    Machine(_program(arch, options), options.asynchronous)(arguments, (1, 2, len(keys)))
    first = 0
    for b, count in enumerate(keys):
        own = (x[None, first : first + count].numpy() for x in (paged.packed_k, paged.packed_v))
        wanted, wanted_lse = exact(q[b : b + 1], *own, scale, True)
        assert np.abs(out[b].astype(np.float64) - wanted[0]).max() <= 3e-3
        np.testing.assert_allclose(lse[b], wanted_lse[0], atol=1e-4)
        first += count


def test_a_page_size_comes_with_a_table():
    tiles = {"block_m": 64, "block_n": 64, "waves": 4, "stages": 1}
    with pytest.raises(ShapeError, match="page_size is None; expected one with block_table"):
        GenericOptions(64, True, features=FEATURES, **tiles)
    with pytest.raises(ShapeError, match="page_size is 16; expected one with block_table and only then"):
        GenericOptions(64, True, page_size=16, **tiles)
    with pytest.raises(ShapeError, match="page_size is 16; expected one with block_table and only then"):
        replace(decode_options(64, 64, False), page_size=16)


def request(head_dims: tuple[int, int], queries: int, page_size: int, causal: bool = True) -> Request:
    """Of 8 sequences of 4096 keys, 8 query heads a key head."""
    return Request(
        head_dim=head_dims[0],
        head_dim_v=None if head_dims[0] == head_dims[1] else head_dims[1],
        dtype="bf16",
        causal=causal,
        cross_seqlen=True,
        return_lse=False,
        batch=8,
        seq_len=queries,
        seq_len_kv=4096,
        num_heads=32,
        num_kv_heads=4,
        softmax_scale=1.0,
        features=("paged", "seqused"),
        static_features=FEATURES,
        page_size=page_size,
    )


SHAPES = sorted({(key[0], key[1]) for key in TILES})


@pytest.mark.parametrize("head_dims", SHAPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 512])
def test_tiles_divide_into_pages_or_pages_into_tiles(head_dims, page_size):
    for queries, causal in [(1, False), (3, True), (300, True), (5000, False)]:
        options, _ = build_for(request(head_dims, queries, page_size, causal), 132)
        assert options.page_size == page_size and options.features == FEATURES
        assert options.block_n % options.key_rows == 0 and page_size % options.key_rows == 0
        assert all(box[1] == options.key_rows for box in options.boxes[1:])


def test_waves_that_copy_more_rows_than_a_page_has():
    options = GenericOptions(64, True, 64, 64, 2, 1, features=FEATURES, page_size=16)
    with pytest.raises(ShapeError, match="a wave copies 32 rows at a time, and pages have 16"):
        _program("gfx942", options)


def test_builds_that_pages_do_not_fit():
    options = replace(decode_options(64, 64, False), features=FEATURES, page_size=16)
    with pytest.raises(ShapeError, match="tiles of 160 keys do not divide into pages of 64"):
        replace(options, block_n=160, page_size=64)


def build(options: Sm90Options, form: str):
    """The Hopper kernel's build; packed queries have no offsets of keys."""
    arguments = specs(options, form, "bf16")
    names = [p.name for p in flash_attn_sm90.signature.parameters][: len(arguments)]
    arguments[names.index("cu_seqlens_kv")] = None
    arguments = (*arguments, *OPERANDS)
    return compile_kernel(flash_attn_sm90, arguments, {"options": options}, "sm_90a", (options.threads, 1, 1))


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(
    ("head_dims", "queries", "causal", "page_size", "form"),
    [
        ((128, 128), 1, False, 16, "split"),
        ((128, 128), 1, False, 64, "packed"),
        ((96, 96), 4000, False, 16, "dense"),
        ((64, 64), 4000, True, 16, "packed"),
        ((64, 64), 4000, False, 64, "split"),
        ((64, 64), 4000, True, 256, "dense"),
        ((128, 128), 4000, True, 16, "packed"),
        ((192, 128), 4000, False, 16, "dense"),
        ((256, 256), 4000, True, 256, "dense"),
        ((256, 256), 1, False, 16, "split"),
    ],
)
def test_builds_are_accepted_by_ptxas(head_dims, queries, causal, page_size, form, tmp_path):
    """Beside three consumers the producer has 32 registers and spills pages; nothing else does."""
    options, _ = build_for(request(head_dims, queries, page_size, causal), 132)
    assert options.consumers == (3 if head_dims == (64, 64) else 1 if queries == 1 else 2)
    stack = {16: 512, 64: 96, 256: 64}[page_size] if options.consumers == 3 else 0
    accept(build(options, form), options, tmp_path, stack)


def test_a_tile_is_loaded_page_by_page():
    options = replace(decode_options(128, 128, False, paged=True), features=FEATURES, page_size=16)
    found = {}
    for page_size in (16, 64, 128, 1024):
        isa = build(replace(options, page_size=page_size), "dense").isa
        found[page_size] = len(re.findall(r"cp\.async\.bulk\.tensor\.4d", isa))
    queries = 2 * 2  # a panel of 64 columns each, before the loop over tiles and in it
    # K before the loop over tiles, in the loop over keys and after it, and V in it and after it; two panels each
    places = 5 * 2
    assert found == {size: queries + places * max(1, options.block_n // size) for size in found}
