"""Attention on 8-bit floats for Hopper without a GPU: builds as ptxas sees them, turned values, arguments, wiring."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fly.backends.nvvm.wgmma import PAIRS
from fly.backends.target import target
from fly.errors import ArgumentError, ArgumentTypeError, ShapeError, UnsupportedError
from fly.lang.signature import ScalarSpec, TensorMapSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels import dispatch, flash_attn_sm90_fp8
from kernels.dispatch import Request, Tensors
from kernels.feature_checks import DESCALES
from kernels.features import NO_FEATURES, Features
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.flash_attn_sm90_fp8 import TILES, Fp8Options, keys_of_block, turn_values
from kernels.sm90_builds import Sm90Options, decode_options, options_of
from tests.backends.builds import needs_ptxas, run_ptxas
from tests.kernels import hopper_stub
from tests.kernels.fp8_reference import plain, reference, rounded
from tests.simulator import Machine, Program, flat
from tests.tracing import trace

E4M3 = torch.float8_e4m3fn
every_row = pytest.mark.parametrize("row", TILES, ids=str)
DECODE = [(64, False, 8), (128, False, 8), (128, True, 4), (256, False, 1)]
DESCALED = Features(DESCALES)


@functools.cache
def build(options: Fp8Options, split: bool = False):
    """One build, as `prepare` has it compiled."""
    rank = 4 + split
    maps = [TensorMapSpec("f8e4m3", box, t.swizzle) for box, t in zip(options.boxes, options.tiles, strict=True)]
    results = (TensorSpec("f32" if split else "bf16", rank, 16, True), TensorSpec("f32", rank - 1, 4, True))
    scalars = [ScalarSpec("i32")] * 3 + [ScalarSpec("f32")]
    operands = [TensorSpec("f32", 2, 4, False)] * len(options.features.operands)
    whole = (TensorSpec("bf16", 4, 16, True), TensorSpec("f32", 3, 4, True)) if options.combines else (None, None)
    specs = (*maps, *results, None, None, TensorSpec("i32", 1, 16, True), *whole, *scalars, *operands)
    kernel = flash_attn_sm90_fp8.flash_attn_sm90_fp8
    return compile_kernel(kernel, specs, {"options": options}, "sm_90a", (options.threads, 1, 1))


def row_options(row, features=NO_FEATURES) -> Fp8Options:
    return replace(options_of(row, TILES[row], Fp8Options), features=features)


def accept(artefact, options, directory) -> None:
    """No note of ptxas, and at most a few words spilled: a tile's own O takes what registers are left."""
    report = run_ptxas(artefact.isa, "sm_90a", directory)
    assert sum(map(int, re.findall(r"(\d+) bytes spill", report))) <= 160, report
    assert not re.search(r"\(C\d+\)|warning|Potential", report), report
    assert options.tile_bytes < artefact.dynamic_shared <= min(options.tile_bytes + 2048, 227 << 10)


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
    accept(build(replace(options, features=DESCALED), split=True), options, tmp_path)


@every_row
def test_products_and_conversions_are_what_the_mathematics_needs(row):
    options, isa = row_options(row), build(row_options(row)).isa
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3", isa)
    assert {int(n) for n in found} == {options.block_n, options.piece}
    loops = 2 if options.causal else 1
    # scores: first tile, main loops, next tile; output: main loops, next tile, last tile
    assert len(found) == (loops + 2) * (options.head_dim + options.block_n * options.products) // 32
    # P of each tile of scores: 64 rows of block_n, in 128 threads, two at a time
    assert isa.count("cvt.rn.satfinite.e4m3x2.f32") == (loops + 2) * options.block_n // 4


@pytest.mark.parametrize("row", [row for row in TILES if row[0] != 128], ids=str)
def test_the_output_comes_first_where_a_build_says_so(row):
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


def test_sums_in_accumulators_are_of_128_keys():
    decoding = [decode_options(dim, dim, False, kind=kind) for kind in (Sm90Options, Fp8Options) for dim in (64, 128)]
    assert [options.block_n for options in decoding] == [160, 80, 128, 128]
    with pytest.raises(ShapeError, match="block_n is 160; expected at most 128"):
        replace(row_options((64, 64, False, 3, None)), block_n=160)


def test_an_output_that_comes_first_waits_for_no_exponentials():
    with pytest.raises(ShapeError, match="hold is True; expected False with output_first"):
        replace(row_options((256, 256, False, 2, None)), hold=True)


@every_row
def test_boxes_are_the_tiles(row):
    options = row_options(row)
    for tile, box in zip(options.tiles, options.boxes, strict=True):
        assert (tile.element_bytes, box[-1]) == (1, tile.swizzle)
    _, k, v = options.tiles
    assert (v.rows, v.columns) == (options.head_dim_v, options.block_n)
    assert options.boxes[1][1] == k.rows == options.block_n and options.boxes[2][2] == v.rows


# turned values


@pytest.mark.parametrize(("dim", "keys"), [(64, 600), (64, 16), (128, 37), (256, 130), (256, 1)])
def test_values_are_turned_in_the_order_of_registers(dim, keys):
    """Every byte pattern; what is past the last key is zero, and nothing past the end of `turned` is written."""
    padded = keys + -keys % 16
    specs = TensorSpec("f8e4m3", 4, 16, True), TensorSpec("f8e4m3", 4, 16, True)
    block = (flash_attn_sm90_fp8.TURN_THREADS, 1, 1)
    module = trace(turn_values.function, *specs, arch="sm_90a", block=block[0], head_dim=dim)
    values = np.random.default_rng(keys).integers(-128, 128, (2, keys, 3, dim), np.int8)
    turned = np.full((2, 3, dim, padded), 77, np.int8)
    grid = (-(-keys // keys_of_block(dim)), 3, 2)
    Machine(Program(module, target("sm_90a")))(flat(values, turned), grid)
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
    asked=DESCALED,
)


def test_the_table_has_a_kernel_for_hopper(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    assert dispatch.choose("sm_90a", REQUEST).name == "sm90_fp8"
    assert dispatch.choose("sm_90a", replace(REQUEST, features=("split_kv",), head_dim=256)).name == "sm90_fp8"
    for change, text in [
        ({"features": ("packed",)}, "the sm90_fp8 kernel does not do packed sequences .*: call it once per sequence"),
        ({"features": ("window",)}, "sm90_fp8 kernel does not do sliding windows"),
        ({"kv_pitch": 4 << 20}, "takes keys less than 4194304 bytes apart, not 4194304: make k and v contiguous"),
        ({"head_dim": 96}, "sm90_fp8 kernel takes head_dim 64, 128, 256, not 96: pad q, k and v with zeros to"),
        ({"dtype": "bf16"}, "the generic kernel does not do scales of 8-bit inputs"),
        ({"dtype": "f8e5m2"}, "takes f8e4m3, not f8e5m2: convert with"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=text):
            dispatch.choose("sm_90a", replace(REQUEST, **change))
    with pytest.raises(UnsupportedError, match="the generic kernel takes bf16, f16, not f8e4m3: convert with"):
        dispatch.choose("sm_80", REQUEST)


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        (1.0, ArgumentTypeError, "k_descale must be a torch.Tensor, got float"),
        (torch.ones(1, dtype=torch.float64), ArgumentTypeError, "k_descale has dtype torch.float64; accepted: "),
        (torch.ones(2), ArgumentError, r"must have shape \(\), \(1,\) or \(B, Hkv\) = \(2, 2\), got \(2,\)"),
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


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_bound_and_where_addresses_go(monkeypatch, splits):
    """The maps, the grid of the turning kernel, and that it runs first, into the workspace that the other reads."""
    made = hopper_stub.record(monkeypatch)
    combined = lambda addresses, stream: made.launched.append(("combine", tuple(addresses), stream))  # noqa: E731
    monkeypatch.setattr("kernels.split_combine.prepare", lambda *_: SimpleNamespace(launch=combined))

    q, k, v = inputs(seq_len=300, keys=300, heads=8, dim=128)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    scales = torch.ones(2, 2)
    request = replace(REQUEST, num_kv_splits=splits)
    launch = flash_attn_sm90_fp8.prepare(Tensors(q, k, v, out, operands=(scales,) * 3), request)

    (turn, grid, threads, arguments, statics, _), (kernel, _, _, _, forward, _) = made.bound
    assert (turn.name, grid, threads, statics) == ("turn_values", (2, 2, 2), 128, {"head_dim": 128})
    assert arguments[1].shape == (2, 2, 128, 304) and arguments[1].dtype == E4M3
    options = forward["options"]
    assert kernel.name == "flash_attn_sm90_fp8" and options.features == DESCALED and isinstance(options, Fp8Options)
    assert made.maps[2] == ((2, 2, 128, 304), (1, 1, 128, 128))

    turned = 2 * 2 * 128 * 304
    workspace = torch.empty(launch.workspace_bytes // 4, dtype=torch.float32)
    launch.run(Tensors(q, k, v, out, None, workspace=workspace, operands=(scales,) * 3), 7)
    at = workspace.data_ptr()
    first, second, *rest = made.launched
    assert first == ("turn_values", (v.data_ptr(), at), 7)
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
        assert rest[0][:2] == ("combine", (*results, out.data_ptr()))
