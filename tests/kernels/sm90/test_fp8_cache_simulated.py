"""The Hopper kernel for 8-bit caches on the simulated GPU: builds, forms, scales, and what its converter does."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import LayoutError, ShapeError
from kernels import flash_attn_sm90_fp8_cache as module
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.flash_attn_sm90_fp8_cache import DECODING, HEAD_DIMS, TILES, CacheOptions
from kernels.sm90.builds import Sm90Options, decode_options, options_of
from kernels.sm90.converter import TileConversion
from tests.kernels.cache.fp8_caches import KINDS, Cache, flattened, numbers, queries, wrong
from tests.kernels.simulated import in_every_schedule, simulated  # noqa: F401

KERNEL = "sm90_fp8_cache"
LIMIT = 232448 - 6144  # bytes of shared memory for tiles; others, where parts are combined, have the rest
KEYS = [200, 0, 1, 129]
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def drawn(seed):
    random.seed(seed)


def outcome(q, k, v, causal, **options):
    """Results of a call, the same in every schedule; what is not written stays NaN."""

    def call():
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
        return flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, **options)

    return flattened(*in_every_schedule(call))


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [None, 16, 64, 256])
@pytest.mark.parametrize(("dims", "group", "rows"), [((64, 64), 8, 1), ((128, 128), 2, 40), ((80, 48), 1, 70)])
@pytest.mark.parametrize("splits", [1, 2])
def test_caches(size, dims, group, rows, splits, seed):
    kind, dtype = (random.choice(KINDS), random.choice(KINDS)), random.choice((BF16, F16))
    cache = Cache.of(KEYS, 1, dims, kind, size)
    q = queries(len(KEYS), rows, group, dims[0], dtype=dtype)
    results = outcome(q, cache.k, cache.v, True, num_kv_splits=splits, **cache.options)
    assert wrong(*results, cache.parts(q), True) is None, f"seed {seed}: {kind}, {dtype}"


@pytest.mark.parametrize(("dim", "consumers"), [(row[0], row[3]) for row in TILES if row[2]])
def test_every_build(dim, consumers, monkeypatch, seed):
    """Whatever the shape: more rows than a tile, more keys than two tiles."""
    kind, causal = random.choice(["sequence", "key"]), random.choice([False, True])
    row = (dim, dim, causal, consumers, None)

    def build(request, units, typical, table, kind):
        return replace(options_of(row, table[row], kind), features=request.static_features), request.num_kv_splits

    monkeypatch.setattr(module, "build_for", build)
    cache = Cache.of([261], 1, (dim, dim), (kind, kind))
    options = dict(cache.options)
    entry = int(options.pop("kv_batch_idx"))
    for name in ("k_descale", "v_descale"):
        options[name] = options[name][entry : entry + 1, :261] if kind == "key" else options[name]
    q = queries(1, 64 * consumers + 9, 2, dim, dtype=BF16)
    k, v = (x[entry : entry + 1, :261] for x in (cache.k, cache.v))
    del options["seqused_kv"]
    assert wrong(*outcome(q, k, v, causal, **options), cache.parts(q), causal) is None, f"seed {seed}"


def test_every_head_dimension_fits_shared_memory():
    for dim, causal in itertools.product(HEAD_DIMS, (False, True)):
        decoding = decode_options(dim, dim, causal, 1, CacheOptions)
        rows = [options_of(row, TILES[row], CacheOptions) for row in TILES if row[0] >= dim]
        assert decoding.tile_bytes <= LIMIT and dim in DECODING
        assert all(options.tile_bytes <= LIMIT + 3072 for options in rows)  # no parts are combined there


def test_memory_has_half_of_the_bytes():
    wide, narrow = (decode_options(128, 128, False, 8, kind) for kind in (Sm90Options, CacheOptions))
    assert 2 * narrow.loaded_bytes // narrow.block_n == wide.loaded_bytes // wide.block_n
    assert narrow.raw_key_tile.bytes * 2 == narrow.tiles[1].bytes


def test_registers_of_all_warpgroups_are_there():
    for row in TILES:
        options = options_of(row, TILES[row], CacheOptions)
        producer, consumer = options.registers
        assert producer + options.consumers * consumer + options.converter_registers <= 512


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"consumers": 3}, "consumers is 3; expected 1 or 2 beside a converter"),
        ({"block_n": 96}, "block_n is 96; expected one of 16, 32, 64, 128, 256"),
    ],
)
def test_builds_that_there_are_not(fields, text):
    options = {"consumers": 2, "block_n": 128, "stages": 2, "q_stages": 1} | fields
    with pytest.raises(ShapeError, match=text):
        CacheOptions(128, 128, False, **options)


@pytest.mark.parametrize(
    ("raw", "made", "columns", "text"),
    [
        (PanelTile(64, 64, 64, 1), PanelTile(128, 64), 64, "8-bit and 16-bit elements of as many rows"),
        (PanelTile(48, 64, 64, 1), PanelTile(48, 64), 64, "48 rows to convert; expected one of 16, 32, 64, 128, 256"),
        (
            PanelTile(64, 64, 64, 1),
            PanelTile(64, 64),
            72,
            "72 columns to convert; expected a multiple of 16 up to 64",
        ),
    ],
)
def test_conversions_that_there_are_not(raw, made, columns, text):
    with pytest.raises(LayoutError, match=text):
        TileConversion(raw, made, columns)


def test_a_scale_of_nothing_is_not_read(seed):
    """Scales of keys that there are not are NaN."""
    cache = Cache.of([70], 1, (64, 64), ("key", "key"), 64)
    options, q = dict(cache.options), queries(1, 3, 8, 64, dtype=BF16)
    last = int(options["block_table"][0, 1])
    for name in ("k_descale", "v_descale"):
        scales = options[name]
        scales[last, 6:] = torch.nan
    assert wrong(*outcome(q, cache.k, cache.v, True, **options), cache.parts(q), True) is None, f"seed {seed}"


def test_features_of_scores(seed):
    """Next to 16 bits; scales are powers of two, so that the converted cache is the same."""
    q, (k, v) = queries(1, 20, 4, 64, dtype=BF16), (numbers(1, 170, 2, 64) for _ in range(2))
    scales = [2.0 ** torch.randint(-2, 2, shape).float() for shape in ((2,), (1, 170, 2))]
    wide = [(x.float() * s[..., None]).to(BF16) for x, s in zip((k, v), scales)]
    options = {"softcap": 5.0, "window_size": (77, 0), "sink": torch.randn(4), "alibi_slopes": torch.rand(4)}
    mine, _ = outcome(q, k, v, True, k_descale=scales[0], v_descale=scales[1], **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLY_KERNEL", "sm90")
        other, _ = outcome(q, *wide, True, **options)
    near = 2.0**-8 * wide[1].abs().max().item()
    assert torch.allclose(mine.float(), other.float(), atol=near, rtol=0.0), f"seed {seed}"
