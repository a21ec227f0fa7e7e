"""Attention on 8-bit floats for Hopper without a GPU: builds as ptxas sees them, turned values, arguments, wiring."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fly.backends.nvvm.wgmma import PAIRS
from fly.backends.target import target
from fly.errors import ArgumentError, ArgumentTypeError, ShapeError, UnsupportedError
from fly.lang.signature import ScalarSpec, TensorMapSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels import dispatch, flash_attn_sm90_fp8
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.catalogue import DESCALES
from kernels.problem.contract import Request
from kernels.problem.features import NO_FEATURES, Features
from kernels.problem.mods import Mod
from kernels.sm90.builds import Sm90Options, build_for, decode_options, elementwise_keys, options_of
from kernels.sm90.fp8_builds import DECODING, FAST_TILES, ONES, TILES, UNIT, Fp8Options, has_first_rows, transposing
from kernels.sm90.transpose_values import TRANSPOSE_THREADS, keys_of_block, transpose_values
from kernels.sm90.transposer import Transposer
from tests.backends.builds import needs_ptxas, run_ptxas
from tests.kernels.feature_cases import by_head
from tests.kernels.fp8_reference import plain, reference, rounded
from tests.kernels.sm90 import hopper_stub
from tests.simulated import Machine, Program, flat
from tests.tracing import trace

E4M3 = torch.float8_e4m3fn
# rows of TILES, and behind "fast" those of FAST_TILES
ROWS = [*TILES, *(("fast", *row) for row in FAST_TILES)]
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
DECODE = [(64, False, 8), (128, False, 8), (128, True, 4), (256, False, 1)]
DESCALED = Features(DESCALES)
OPERANDS = dict.fromkeys(DESCALES, TensorSpec("f32", 2, 4, False)) | {"block_table": TensorSpec("i32", 2, 4, True)}


@functools.cache
def build(options: Fp8Options, split: bool = False, form: str = "dense", lse: bool = True):
    """One build, as `prepare` has it compiled; `form`: dense or packed queries, or packed ones of a dense cache."""
    packed = form != "dense"
    rank = 4 - packed + split
    maps = [TensorMapSpec("f8e4m3", box, t.swizzle) for box, t in zip(options.boxes, options.copied, strict=True)]
    results = (
        TensorSpec("f32" if split else "bf16", rank, 16, True),
        TensorSpec("f32", rank - 1, 4, True) if lse else None,
    )
    offsets = TensorSpec("i32", 1, 16, True) if packed else None
    scalars = [ScalarSpec("i32")] * 3 + [ScalarSpec("f32")]
    operands = [OPERANDS.get(name, TensorSpec("i32", 1, 4, True)) for name in options.features.operands]
    whole = (None, None)
    if options.combines:
        whole = (TensorSpec("bf16", rank - 1, 16, True), TensorSpec("f32", rank - 2, 4, True))
    of_keys = None if options.page_size or form == "packed of a cache" else offsets
    raw = options.ahead_tiles[0]
    lying = TensorMapSpec("f8e4m3", (1, raw.rows, 1, raw.panel_columns), raw.swizzle) if options.ahead else None
    specs = (*maps, lying, *results, offsets, of_keys, TensorSpec("i32", 1, 16, True), *whole, *scalars, *operands)
    kernel = flash_attn_sm90_fp8.flash_attn_sm90_fp8
    return compile_kernel(kernel, specs, {"options": options}, "sm_90a", (options.threads, 1, 1))


def row_options(row, features=NO_FEATURES) -> Fp8Options:
    fast = row[0] == "fast"
    key = row[fast:]
    return replace(options_of(key, (FAST_TILES if fast else TILES)[key], Fp8Options), features=features)


def accept(artefact, options, directory, spilled: int = 160) -> str:
    """No note of ptxas, and at most a few words spilled: a tile's own O takes what registers are left."""
    report = run_ptxas(artefact.isa, "sm_90a", directory)
    assert sum(map(int, re.findall(r"(\d+) bytes spill", report))) <= spilled, report
    assert not re.search(r"\(C\d+\)|warning|Potential", report), report
    tiles = options.tile_bytes + sum(tile.bytes for tile in options.ahead_tiles if options.ahead)
    assert tiles < artefact.dynamic_shared <= min(tiles + 2048, 227 << 10)
    return report


def accept_decoding(artefact, options, directory) -> None:
    """The same, and that what the block is launched with covers what its warpgroups take in the end."""
    report = accept(artefact, options, directory, 100)
    launched = int(re.search(r"Used (\d+) registers", report).group(1)) * options.threads
    assert 128 * (sum(options.registers) + Transposer.registers) <= launched <= 65536


@pytest.mark.sample(2)
@needs_ptxas
@every_row
@pytest.mark.parametrize("features", [NO_FEATURES, DESCALED], ids=["plain", "descaled"])
def test_every_build_is_accepted_as_it_is_meant(row, features, tmp_path):
    accept(build(row_options(row, features)), row_options(row), tmp_path)


@needs_ptxas
def test_parts_are_accepted_too(tmp_path):
    row = (128, 128, True, 2, None)
    accept(build(row_options(row, DESCALED), split=True), row_options(row), tmp_path)


@needs_ptxas
@pytest.mark.parametrize(("head_dim", "causal", "pack"), DECODE)
def test_decode_builds_are_accepted_too(head_dim, causal, pack, tmp_path):
    options = replace(decode_options(head_dim, head_dim, causal, pack, Fp8Options), combines=True)
    for options_ in (options, *([replace(options, first_rows=True)] if len(options.products) == 1 else [])):
        accept_decoding(build(replace(options_, features=DESCALED), split=True), options, tmp_path)


CACHES = [
    (("seqused_kv", "block_table", "k_descale"), 16, "dense", True),
    (("seqused_kv", "block_table", "v_descale"), 128, "packed", True),
    (("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", *DESCALES), None, "dense", True),
    ((), None, "packed", False),
    (("seqused_kv", "cache_leftpad", "kv_batch_idx"), None, "packed of a cache", True),
    (("seqused_kv",), None, "dense", False),
]


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(("names", "page_size", "form", "split"), CACHES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_builds_for_caches_are_accepted_too(head_dim, names, page_size, form, split, tmp_path):
    options = decode_options(head_dim, head_dim, form == "packed", 8, Fp8Options)
    options = replace(options, features=Features(names), page_size=page_size, combines=split)
    options = replace(options, first_rows=len(options.products) == 1)
    artefact = build(options, split, form)
    accept_decoding(artefact, options, tmp_path)
    # rows of V that are not the sequence's are cleared before the tile is turned
    before = artefact.isa.split("ldmatrix.sync")[0]
    assert before.count("fence.proxy.async") == 1


@pytest.mark.parametrize(("head_dim", "causal", "pack"), DECODE)
def test_decode_builds_turn_each_tile_once(head_dim, causal, pack):
    """V comes by the same boxes as K; matrices of a tile are loaded and stored by one loop of the last warpgroup."""
    options = decode_options(head_dim, head_dim, causal, pack, Fp8Options)
    assert options.threads == 384 and options.boxes[1] == options.boxes[2]
    isa = build(options).isa
    each = options.block_n * head_dim // 512 // 4  # four matrices at a time, a quarter by each warp
    assert isa.count("ldmatrix.sync") == isa.count("stmatrix.sync") == each
    assert isa.count("prmt.b32") == 4 * each and isa.count("bar.warp.sync") == 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_are_not_there_have_no_softmax(head_dim):
    options = decode_options(head_dim, head_dim, False, 8, Fp8Options)
    whole, half = (build(replace(options, first_rows=first_rows)).isa for first_rows in (False, True))
    for instruction, rest in (("ex2.approx", 0), ("cvt.rn.satfinite.e4m3x2", 0), ("fma.rn.f32", 10)):
        counts = [isa.count(instruction) for isa in (whole, half)]
        assert counts[0] > 90 and counts[1] <= counts[0] // 2 + rest + 9
    # the products are those of the whole tile
    assert whole.count("wgmma.mma_async") == half.count("wgmma.mma_async")


def test_which_builds_have_first_rows_only():
    for queries, heads, wanted in (
        (1, 8, True),
        (2, 8, True),
        (3, 8, False),
        (8, 2, True),
        (9, 2, False),
        (1, 18, True),
    ):
        request = replace(REQUEST, seq_len=queries, num_heads=heads)
        options, _ = build_for(request, 132, table=TILES, kind=Fp8Options)
        assert has_first_rows(request, options) is wanted
    wide = replace(REQUEST, head_dim=256, seq_len=1)
    assert not has_first_rows(wide, build_for(wide, 132, table=TILES, kind=Fp8Options)[0])
    with pytest.raises(ShapeError, match="first_rows is True; expected False with head_dim_v 256"):
        replace(decode_options(256, 256, False, 4, Fp8Options), first_rows=True)
    with pytest.raises(ShapeError, match="consumers is 2; expected 1 with first_rows"):
        replace(row_options((128, 128, True, 2, None)), first_rows=True)


ALONE = {"bias": Features(("bias",)), "function": Features(score_mod=Mod.of(by_head))}


@every_row
@pytest.mark.parametrize("asked", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("keys", [512, 1500, 1 << 20])
def test_tiles_with_code_for_every_score_are_whole_operands(row, asked, keys):
    """Of 32 keys each, where those of 16 bits are of 16."""
    assert elementwise_keys(row_options(row), asked, keys) % UNIT == 0


@every_row
def test_products_and_conversions_are_what_the_mathematics_needs(row):
    options, isa = row_options(row), build(row_options(row)).isa
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3", isa)
    assert {int(n) for n in found} == {options.block_n, *options.products}
    loops = 2 if options.causal else 1
    # scores: first tile, main loops, next tile; output: main loops, next tile, last tile
    assert len(found) == (loops + 2) * (options.head_dim + options.block_n * len(options.products)) // 32
    # P of each tile of scores: 64 rows of block_n, in 128 threads, two at a time
    assert isa.count("cvt.rn.satfinite.e4m3x2.f32") == (loops + 2) * options.block_n // 4


def test_which_sums_are_columns_of_ones():
    """Eight columns in the same product as V's, where a product has so many, and a build says so."""
    for row in ((96, 96, False, 2, None), ("fast", 64, 64, True, 3, None), ("fast", 128, 128, False, 2, None)):
        options = row_options(row)
        assert options.products == (options.head_dim + ONES,) and options.tiles[2].rows == options.head_dim + ONES
    wide = row_options(("fast", 256, 256, False, 2, None))
    assert (wide.products, wide.ones) == ((256,), 0)
    pieces = replace(row_options((192, 192, False, 2, None)), sums=True)
    assert pieces.products == (32, 32, 32, 32, 32, 32 + ONES)
    assert replace(pieces, sums=False).products == (32,) * 6
    assert decode_options(128, 128, False, kind=Fp8Options).ones == 0


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != 128], ids=str)
def test_the_output_comes_first_where_it_is_several_products(row):
    options, isa = row_options(row), build(row_options(row)).isa
    found = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32", isa)]
    scores = len(list(itertools.takewhile(lambda n: n == options.block_n, found)))
    # before the first product with V are the first tile's scores, and in the other order the next tile's too
    assert scores == (1 if options.output_first else 2) * options.head_dim // 32


def test_registers_go_to_consumers_with_wide_outputs():
    wide, narrow = (row_options((dim, dim, False, 2, None)) for dim in (256, 128))
    assert (wide.registers, narrow.registers) == ((24, 240), (40, 232))
    assert all(producer + 2 * consumer <= 512 for producer, consumer in (wide.registers, narrow.registers))
    assert row_options((64, 64, False, 3, None)).registers == (32, 160)


def test_decoding_has_a_build_for_every_head_dimension():
    (kernel,) = (kernel for kernel in dispatch.KERNELS if kernel.name == "sm90_fp8")
    assert set(DECODING) == set(kernel.head_dims)
    for dim in DECODING:
        options = decode_options(dim, dim, False, kind=Fp8Options)
        assert options.transposed_stages and options.tile_bytes + 2048 <= target("sm_90a").shared_bytes


def test_sums_in_accumulators_are_of_128_keys():
    decoding = [decode_options(dim, dim, False, kind=kind) for kind in (Sm90Options, Fp8Options) for dim in (64, 128)]
    assert [options.block_n for options in decoding] == [160, 80, 128, 128]
    with pytest.raises(ShapeError, match="block_n is 160; expected at most 128 where not chained"):
        replace(row_options((64, 64, False, 3, None)), block_n=160)


def test_lazy_maxima_are_for_chains_whose_probabilities_stay_in_the_range_of_8_bits():
    with pytest.raises(ShapeError, match="rescale is 'rows'; expected 'always' where not chained, as O is added in"):
        replace(row_options((128, 128, False, 2, None)), rescale="rows")
    lazy = row_options(("fast", 128, 128, False, 2, None))
    with pytest.raises(ShapeError, match="offset is 8; expected less than 8 where maxima are lazy"):
        replace(lazy, rescale="rows", offset=8)


def test_several_products_wait_for_no_exponentials():
    with pytest.raises(ShapeError, match="hold is True; expected False with several products"):
        replace(row_options((256, 256, False, 2, None)), hold=True)


def test_warps_that_transpose():
    """None where V comes transposed, two of the producer's, or where memory decides a warpgroup of their own."""
    plain = row_options((128, 128, False, 2, None))
    own, decoding = transposing(plain), decode_options(128, 128, False, kind=Fp8Options)
    assert [(x.helpers * x.helper_warps, x.threads) for x in (plain, own, decoding)] == [(0, 384), (2, 384), (4, 384)]
    with pytest.raises(ShapeError, match="transposers is 3; expected 0, 1, 2 or 4"):
        replace(own, transposers=3)
    with pytest.raises(ShapeError, match="transposed_stages is 2; expected 0 without transposers and only so"):
        replace(own, transposers=0)


@every_row
def test_what_transposes_has_room_for_it(row):
    """With tiles of 128 keys at least, and two slots but for the widest heads."""
    options = transposing(row_options(row))
    assert options.tile_bytes + 2048 <= target("sm_90a").shared_bytes
    assert options.block_n >= min(128, row_options(row).block_n)
    assert options.transposed_stages == 2 or options.head_dim == 256


@every_row
def test_boxes_are_the_tiles(row):
    """V's without its columns of ones; what transposes it copies it as K."""
    options = row_options(row)
    for tile, box in zip(options.tiles, options.boxes, strict=True):
        assert (tile.element_bytes, box[-1]) == (1, tile.swizzle)
    _, k, v = options.tiles
    assert (v.rows, v.columns) == (options.head_dim_v + options.ones, options.block_n)
    assert options.boxes[1][1] == k.rows == options.block_n and options.boxes[2][2] == options.head_dim_v
    own = transposing(options)
    assert own.boxes[2] == (1, own.block_n, 1, own.raw_tile.swizzle)


# turned values


@pytest.mark.parametrize(("dim", "keys"), [(64, 600), (64, 16), (128, 37), (256, 130), (256, 1)])
def test_values_are_turned_in_the_order_of_registers(dim, keys):
    """Every byte pattern; what is past the last key is zero, and nothing past the end of `turned` is written."""
    padded = keys + -keys % 16
    specs = TensorSpec("f8e4m3", 4, 16, True), TensorSpec("f8e4m3", 4, 16, True)
    block = (TRANSPOSE_THREADS, 1, 1)
    module = trace(transpose_values.function, *specs, arch="sm_90a", block=block[0], head_dim=dim)
    values = np.random.default_rng(keys).integers(-128, 128, (2, keys, 3, dim), np.int8)
    turned = np.full((2, 3, dim, padded), 77, np.int8)
    grid = (-(-keys // keys_of_block(dim)), 3, 2)
    Machine(Program.of(module, target("sm_90a")))(flat(values, turned), grid)
    order = [16 * (slot // 16) + PAIRS(slot % 16) for slot in range(padded)]
    wanted = np.pad(values, ((0, 0), (0, padded - keys), (0, 0), (0, 0)))[:, order].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(turned, wanted)


# the reference


def inputs(seed=0, batch=2, seq_len=33, keys=70, heads=4, kv_heads=2, dim=64):
    g = torch.Generator().manual_seed(seed)
    sizes = ((batch, seq_len, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
    return [torch.randn(size, generator=g).to(E4M3) for size in sizes]


def test_probabilities_are_rounded_to_three_bits():
    exact = torch.tensor([0.0, 2.0**-18, 2.0**-17, 1 / 3, 0.9, 1.0])
    # the smallest is half of the smallest number, and goes to even
    assert rounded(exact).tolist() == [0.0, 0.0, 2.0**-17, 0.34375, 0.875, 1.0]


@pytest.mark.parametrize("causal", [True, False])
def test_rounded_probabilities_are_near_and_give_the_bound(causal):
    q, k, v = inputs()
    ref = reference(q, k, v, causal=causal)
    difference = (plain(q.float(), k.float(), v.float(), causal, 0.125).float() - ref.out).abs().max().item()
    assert ref.plain_error == difference
    # an e4m3 probability is at most 1/16 off, and values are at most 5
    assert 1e-4 < difference < 5 / 16


def test_scales_are_those_of_the_values_that_inputs_stand_for():
    q, k, v = inputs()
    one, per_head = torch.tensor(0.5), torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    ref = reference(q, k, v, causal=True, q_descale=one, k_descale=per_head, v_descale=per_head)
    scale = per_head[:, None, :, None]
    wide = [q.float() * 0.5, k.float() * scale, v.float() * scale]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide),
        attn_mask=torch.ones(33, 70, dtype=torch.bool).tril(70 - 33),
        enable_gqa=True,
    )
    assert torch.allclose(ref.out, exact.transpose(1, 2), atol=1e-4)


# arguments and dispatch

REQUEST = Request(
    head_dim=128,
    dtype="f8e4m3",
    causal=True,
    cross_seqlen=False,
    return_lse=False,
    batch=2,
    seq_len=300,
    seq_len_kv=300,
    num_heads=8,
    num_kv_heads=2,
    softmax_scale=0.1,
    features=("descale",),
    static_features=DESCALED,
)


def test_the_table_has_a_kernel_for_hopper(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    assert dispatch.choose("sm_90a", REQUEST).name == "sm90_fp8"
    assert dispatch.choose("sm_90a", replace(REQUEST, features=("split_kv",), head_dim=256)).name == "sm90_fp8"
    for change, text in [
        ({"features": ("dropout",)}, "sm90_fp8 kernel does not do dropout"),
        ({"head_dim": 80}, "sm90_fp8 kernel takes head_dim 64, 96, 128, 192, 256, not 80: pad q, k and v with"),
        ({"dtype": "bf16"}, "the generic kernel does not do scales of 8-bit inputs"),
        ({"dtype": "bf16", "features": ("fp8_accumulate",)}, "does not do sums of 8-bit products with fewer bits"),
        ({"dtype": "f8e5m2"}, "takes q of f8e4m3, not f8e5m2: convert with"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=text):
            dispatch.choose("sm_90a", replace(REQUEST, **change))
    with pytest.raises(UnsupportedError, match="the generic kernel takes q of bf16, f16, not f8e4m3: convert with"):
        dispatch.choose("sm_80", REQUEST)


@pytest.mark.parametrize(
    ("head_dim", "sums", "size", "accepted"),
    [
        (128, None, (32, 64), (64, 64)),
        (128, "fast", (64, 64), (128, 64)),
        (192, None, (64, 128), (128, 64)),
        (256, None, (64, 64), (128, 64)),
    ],
)
def test_blocks_of_a_mask_that_no_build_has(head_dim, sums, size, accepted):
    """Those of 64 queries are for one consumer, which wide heads and `fp8_accumulate="fast"` have no build for."""
    features = replace(DESCALED, fp8_accumulate=sums, block_size=size)
    asked = replace(REQUEST, head_dim=head_dim, features=("descale", "block_mask"), static_features=features)
    text = f"BLOCK_SIZE is a multiple of {accepted}, not {size}: build it with such blocks, or pass its mask_mod"
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        dispatch.choose("sm_90a", asked)
    larger = replace(features, block_size=(128, 64))
    assert dispatch.choose("sm_90a", replace(asked, static_features=larger)).name == "sm90_fp8"


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        (1.0, ArgumentTypeError, "k_descale must be a torch.Tensor, got float"),
        (torch.ones(1, dtype=torch.float64), ArgumentTypeError, "k_descale has dtype torch.float64; accepted: "),
        (torch.ones(3), ArgumentError, r"shape \(\), \(1,\), \(Hkv,\) or \(B, Hkv\) = \(2, 2\), got \(3,\)"),
        (torch.ones(2, 4), ArgumentError, r"k_descale must have shape .* got \(2, 4\)"),
        (torch.ones(1, device="meta"), ArgumentError, "k_descale is on device 'meta'"),
    ],
)  # fmt: skip
def test_scales_that_are_none(scale, error, text):
    with pytest.raises(error, match=text):
        flydsl_flash_attn_func(*inputs(), k_descale=scale)


def test_out_is_bf16():
    q, k, v = inputs()
    with pytest.raises(
        ArgumentTypeError, match=r"out must have dtype torch.bfloat16 for q of torch.float8_e4m3fn, got"
    ):
        flydsl_flash_attn_func(q, k, v, out=torch.empty(q.shape, dtype=E4M3))


@pytest.fixture
def made(monkeypatch):
    """What is made of launches that launch nothing."""
    return hopper_stub.record(monkeypatch)


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_bound_and_where_addresses_go(made, splits):
    """The maps, the grid of the turning kernel, and that it runs first, into the workspace that the other reads."""
    q, k, v = inputs(seq_len=300, keys=300, heads=8, dim=128)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    scales = torch.ones(2, 2)
    request = replace(REQUEST, num_kv_splits=splits)
    tensors = {"q": q, "k": k, "v": v, "out": out, **dict.fromkeys(DESCALES, scales)}
    launch = flash_attn_sm90_fp8.prepare(tensors, request)

    (kernel, _, _, _, forward, _), *_, (turn, grid, threads, arguments, statics, _) = made.bound
    assert (turn.name, grid, threads, statics) == ("transpose_values", (2, 2, 2), 128, {"head_dim": 128})
    assert arguments[1].shape == (2, 2, 128, 304) and arguments[1].dtype == E4M3
    options = forward["options"]
    assert kernel.name == "flash_attn_sm90_fp8" and options.features == DESCALED and isinstance(options, Fp8Options)
    assert made.maps[2] == ((2, 2, 128, 304), (1, 1, 128, 128))

    turned = 2 * 2 * 128 * 304
    workspace = torch.empty(launch.workspace_bytes // 4, dtype=torch.float32)
    launch.run({**tensors, "workspace": workspace}, 7)
    at = workspace.data_ptr()
    first, second, *rest = made.launched
    assert first == ("transpose_values", (v.data_ptr(), at), 7)
    results = (out.data_ptr(),) if splits == 1 else second[1][3:5]
    assert second == (
        "flash_attn_sm90_fp8",
        (q.data_ptr(), k.data_ptr(), at, *results, "counters of 7", *[scales.data_ptr()] * 3),
        7,
    )
    if splits == 1:
        assert launch.workspace_bytes == turned and not rest
    else:
        assert results[0] == at + turned and results[1] < at + launch.workspace_bytes
        assert rest[0][:2] == ("split_combine", (*results, out.data_ptr()))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("queries", "form"), [(1, "dense"), (300, "seqused")])
def test_one_launch_reads_v_as_it_lies(made, queries, form, splits):
    """In decoding, whose workspace is for parts that it puts together itself, and where sequences are parts."""
    q, k, v = inputs(seq_len=queries, keys=300, heads=8, dim=128)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    scales = torch.ones(2, 2)
    features = ("descale",) if form == "dense" else ("descale", form)
    request = replace(REQUEST, seq_len=queries, num_kv_splits=splits, features=features)
    tensors = {"q": q, "k": k, "v": v, "out": out, **dict.fromkeys(DESCALES, scales)}
    launch = flash_attn_sm90_fp8.prepare(tensors, request)
    (kernel, _, threads, _, statics, _), *others = made.bound
    options, decodes = statics["options"], queries == 1
    combines = options.combines
    assert (kernel.name, threads, combines) == ("flash_attn_sm90_fp8", options.threads, decodes and splits > 1)
    assert options.transposers == (4 if decodes else 2)
    assert [other[0].name for other in others] == ["split_combine"] * (splits > 1 and not combines)
    assert made.maps[1] == made.maps[2] and made.maps[1][0] == (2, 300, 2, 128)

    parts = 4 * 2 * 8 * queries * splits * (128 + 1) if splits > 1 else 0
    assert parts <= launch.workspace_bytes < parts + 512
    workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8) if splits > 1 else None
    launch.run({**tensors, "workspace": workspace}, 7)
    (_, addresses, stream), *rest = made.launched
    assert addresses[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and stream == 7
    assert addresses[-4:] == (out.data_ptr() if combines else "counters of 7", *[scales.data_ptr()] * 3)
    assert [name for name, *_ in rest] == ["split_combine"] * len(others)
