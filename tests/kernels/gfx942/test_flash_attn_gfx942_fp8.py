"""Attention on e4m3fnuz for gfx942: results on the emulated GPU with all checks, instructions, banks, arguments.

A finding of the checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import fly
from fly.backends.rocdl.intrinsics import cvt_pk_fp8
from fly.emulator.banks import BankCounter
from fly.errors import DTypeError, ShapeError, UnsupportedError
from fly.runtime.device import device_for
from kernels import dispatch
from kernels.flash_attn_api import flash_attn_func
from kernels.flash_attn_gfx942_fp8 import HEAD_DIMS, FnuzOptions, flash_attn_gfx942_fp8, waves_of
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx942.byte_copies import k_tile, v_tile
from kernels.gfx950.options import WAVES
from kernels.problem.catalogue import DESCALES
from kernels.problem.contract import Request
from kernels.problem.features import NO_FEATURES, Features
from tests.kernels.fp8_reference import FNUZ, distances, reference, uniform
from tests.kernels.reference import check

DIM = 128


@pytest.fixture
def emulated(emulate):
    """The emulated gfx942 with checks, and no other kernel."""
    emulate("gfx942", "gfx942_fp8")


@pytest.fixture
def unchecked(monkeypatch):
    """The emulated gfx942 without checks."""
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    return device_for(("cpu", 0))


inputs = partial(uniform, FNUZ, dim=DIM)


def compare(q, k, v, causal, seed, **options):
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)
    scales = {name: options[name] for name in DESCALES if name in options}
    report = check(out, reference(q, k, v, causal=causal, **scales), lse)
    assert out.dtype is torch.bfloat16
    assert report.ok, f"seed {seed}: {report}"
    # without log-sum-exps another build, with the same out
    assert torch.equal(flydsl_flash_attn_func(q, k, v, causal, **options), out), f"seed {seed}"


# results


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "largest"),
    [(200, 256, True, 1.0), (300, 333, False, 2.0), (129, 31, True, 2.0), (65, 127, True, 4.0)],
)
def test_lengths(queries, keys, causal, largest, dim, seed, emulated):
    """In the third, rows see no key: their out is 0 and their log-sum-exp -inf."""
    compare(*inputs(seed, queries, keys, largest=largest, dim=dim), causal, seed)


def test_heads_share_keys_and_have_scales(seed, emulated):
    g = torch.Generator().manual_seed(seed)
    per_head = {name: torch.rand(2, 2, generator=g) + 0.5 for name in DESCALES}
    compare(*inputs(seed, 40, 150, 6, 2, batch=2, largest=1.0), True, seed, **per_head)


@pytest.mark.parametrize("scales", [("q_descale",), ("k_descale",), ("v_descale",)])
def test_each_scale_alone(scales, seed, emulated):
    compare(*inputs(seed, 33, 70, dim=64), False, seed, **dict.fromkeys(scales, torch.tensor([0.5])))


def test_scales_of_zero_see_every_key_alike(seed, emulated):
    q, k, v = inputs(seed, 33, 70)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, q_descale=torch.tensor(0.0))
    wanted = v.float().mean(1, keepdim=True).expand(1, 33, 2, DIM)
    torch.testing.assert_close(out.float(), wanted, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(70)), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "splits"), [(100, 500, True, 4), (1, 450, True, 0), (31, 65, False, 2)]
)
def test_split_keys(queries, keys, causal, splits, seed, emulated):
    """The second with query heads as rows."""
    scales = {name: torch.tensor([[0.5, 2.0]]) for name in DESCALES}
    compare(*inputs(seed, queries, keys, 4, 2, largest=1.0), causal, seed, num_kv_splits=splits, **scales)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_strided_inputs(dim, seed, emulated):
    """Rows that lie head by head, or with other tensors' between them, 4 bytes into an allocation."""
    wide = inputs(seed, 90, 200, heads=4, kv_heads=4, largest=1.0, dim=dim)
    q = wide[0].transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2]
    both = torch.stack([x.view(torch.uint8) for x in wide[1:]], dim=2)
    shifted = torch.empty(both.numel() + 4, dtype=torch.uint8)[4:].view(both.shape).copy_(both)
    k, v = shifted.view(FNUZ).unbind(2)
    compare(q, k[:, :, 1:3], v[:, :, 1:3], True, seed)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_number_is_read_as_what_it_is(dim, emulated):
    """Each byte but NaN's in K, with which one value of q is multiplied, and in V, of which a row is the output."""
    numbers = torch.tensor([n for n in range(256) if n != 0x80], dtype=torch.uint8)
    values = numbers.view(FNUZ)
    assert values.float().abs().max() == 240
    k = torch.zeros(1, 255, 1, dim, dtype=torch.uint8)
    k[0, :, 0, 7] = numbers
    q = torch.zeros(1, 1, 1, dim).to(FNUZ)
    q[..., 7] = torch.tensor(1.0).to(FNUZ)
    _, lse = flydsl_flash_attn_func(q, k.view(FNUZ), k.view(FNUZ), False, return_lse=True, softmax_scale=1 / 64)
    torch.testing.assert_close(lse.flatten()[0], torch.logsumexp(values.float() / 64, 0), atol=1e-5, rtol=1e-5)
    # one key has all weight; sixteen rows of dimensions have all numbers
    v = torch.zeros(1, 64, 1, dim, dtype=torch.uint8)
    rows = torch.cat([numbers, numbers[: 4 * dim - 255] if dim == 64 else numbers[:1]])[: 256 // dim * dim]
    v[0, : 256 // dim, 0] = rows.view(-1, dim)
    k = torch.full((1, 64, 1, dim), 0).to(torch.uint8).view(FNUZ).float()
    for row in range(256 // dim):
        k[0, :, 0, 7] = -240.0
        k[0, row, 0, 7] = 240.0
        out = flydsl_flash_attn_func(q, k.to(FNUZ), v.view(FNUZ), False, softmax_scale=1.0)
        assert torch.equal(out.flatten().float(), v[0, row, 0].view(FNUZ).float())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_what_it_is_part_of_and_nothing_else(name, seed, emulated):
    """Byte 0x80, which would be -0 in other formats."""
    tensors = dict(zip("qkv", inputs(seed, 40, 70, largest=1.0)))
    clean = flydsl_flash_attn_func(*tensors.values(), True)
    tensors[name].view(torch.uint8)[0, 20, 0, 9] = 0x80
    out = flydsl_flash_attn_func(*tensors.values(), True)
    wanted = torch.zeros_like(out, dtype=torch.bool)
    if name == "q":
        wanted[0, 20, 0] = True
    elif name == "k":
        wanted[:] = True  # every row sees key 20
    else:
        wanted[..., 9] = True
    assert torch.equal(out.isnan(), wanted), f"seed {seed}"
    assert torch.equal(out[~wanted], clean[~wanted]), f"seed {seed}"


@pytest.mark.parametrize(("growth", "rescales"), [(3.5, 6), (0.75, 2)])
def test_maxima_that_grow(growth, rescales, seed, emulated):
    """By so much from tile to tile, in log2 units: below 1.75 in all, weights are still e4m3fnuz numbers."""
    q, k, v = inputs(seed, 64, 64 * 6, heads=1, largest=0.25)
    q[..., 0] = torch.tensor(2.0).to(FNUZ)
    step = growth / 2 * math.sqrt(DIM) / math.log2(math.e)
    k[0, :, 0, 0] = (torch.arange(6).repeat_interleave(64) * step).to(FNUZ)
    counts = torch.zeros(2)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, debug_counts=counts)
    report = check(out, reference(q, k, v, causal=False), lse)
    assert report.ok, f"seed {seed}: {report}"
    # two waves have rows; the others have their last one, whose maximum grows as often
    assert counts[1].item() == rescales * WAVES, f"seed {seed}"


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_weight_that_is_no_8_bit_number_still_is_all_of_a_row(dim, emulated):
    """A key's score 1.1 (log2) above the first tile's: its weight is rounded, and so is what divides it."""
    q, k, v = inputs(0, 32, 128, heads=1, largest=0.0, dim=dim)
    v = torch.linspace(-3, 3, 128)[None, :, None, None].expand(1, 128, 1, dim).to(FNUZ).clone()
    v[0, 3] = v[0, 100]
    q[..., 0] = torch.tensor(1.0).to(FNUZ)
    k[0, :, 0, 0] = torch.tensor(-224.0).to(FNUZ)
    k[0, [3, 100], 0, 0] = torch.tensor([208.0, 224.0]).to(FNUZ)
    out = flydsl_flash_attn_func(q, k, v, False, softmax_scale=1.1 / 16 * math.log(2))
    assert torch.equal(out.float(), v[:, 100:101].float().expand(1, 32, 1, dim))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_weights_are_rounded_from_maxima_that_may_be_old(dim, seed, emulated):
    """Results are plain attention's with such weights, to the rounding of bf16; with others they are not."""
    q, k, v = inputs(seed, 33, 300, heads=4, kv_heads=4, largest=2.0, dim=dim)
    apart = distances(flydsl_flash_attn_func(q, k, v, True), q, k, v, True)
    assert apart[0] < 2.0**-8 and apart[0] < apart[1] / 4, f"seed {seed}: {apart}"


def test_flash_attentions_functions_take_8_bits(seed, monkeypatch, emulated):
    """And a program that names no kernel."""
    monkeypatch.delenv("FLY_KERNEL")
    q, k, v = inputs(seed, 40, 70, largest=1.0)
    scales = {name: torch.full((1, 1), 1.5) for name in DESCALES}
    wanted = flydsl_flash_attn_func(q, k, v, True, **scales)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, **scales), wanted), f"seed {seed}"
    compiled_function = torch.compile(
        functools.partial(flash_attn_func, causal=True), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled_function(q, k, v, **scales), wanted), f"seed {seed}"


def test_halves_of_e4m3fn_are_e4m3fnuz(seed, monkeypatch, emulated):
    """The same bytes but for -0, and twice the scale: out is that of gfx950's kernel, but for the last bits."""
    wide = [x.float().mul(2).to(torch.float8_e4m3fn) for x in inputs(seed, 40, 70, largest=0.5)]
    bits = [x.view(torch.uint8) for x in wide]
    halves = [x.masked_fill(x == 0x80, 0).view(FNUZ) for x in bits]
    assert all(torch.equal(2 * half.float(), x.float()) for half, x in zip(halves, wide))
    two = torch.tensor(2.0)
    found = flydsl_flash_attn_func(*halves, True, **dict.fromkeys(DESCALES, two))
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_KERNEL", "gfx950_fp8")
    torch.testing.assert_close(found, flydsl_flash_attn_func(*wide, True), atol=2e-3, rtol=2.0**-7)


def test_both_ways_to_add_up_are_one(seed, emulated):
    """Products add up in f32 as it is: one build, and the same bits."""
    q, k, v = inputs(seed, 33, 70, largest=1.0)
    found = [flydsl_flash_attn_func(q, k, v, fp8_accumulate=how) for how in ("float32", "fast")]
    assert torch.equal(*found)


# instructions


def options_of(dim: int, causal: bool, **changes) -> FnuzOptions:
    """Those of a dense call."""
    waves = waves_of(dim)
    return FnuzOptions(dim, causal, waves=waves, stagger=waves == WAVES, **changes)


@functools.cache
def compiled(
    dim: int, causal: bool, features: Features = NO_FEATURES, split: bool = False, lse: bool = True
) -> fly.Artefact:
    tensor = functools.partial(fly.TensorSpec, alignment=16, unit_stride=True)
    operands = [fly.TensorSpec("f32", 2, 4, False)] * len(features.operands)
    out, sums = tensor("f32" if split else "bf16", 4 + split), tensor("f32", 3 + split) if lse else None
    specs = (*[tensor("f8e4m3fnuz", 4)] * 3, out, sums, fly.ScalarSpec("f32"), None, None, None, *operands)
    options = options_of(dim, causal, features=features)
    return fly.compile(flash_attn_gfx942_fp8, *specs, block=64 * options.waves, target="gfx942", options=options)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("split", "lse"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("features", [NO_FEATURES, Features(DESCALES)], ids=["plain", "descaled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_registers_and_shared_memory(dim, causal, features, split, lse):
    artefact = compiled(dim, causal, features, split, lse)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    # of 512 a lane: for three waves a SIMD, and two
    assert resources.registers + resources.accum_registers <= {64: 168, 128: 256}[dim]
    # two tiles of K and one of V
    assert resources.shared_bytes == 2 * k_tile(dim).bytes + v_tile(dim).bytes
    assert {*re.findall(r"v_mfma_\w+", artefact.isa)} == {"v_mfma_f32_32x32x16_fp8_fp8"}


def run(tiles: int, dim: int, lse: bool = True) -> None:
    """One block against so many key tiles; equal scores, so that one rescale is all there is."""
    options = options_of(dim, False)
    rows = options.block_m
    q, k = (torch.zeros(1, n, 1, dim, dtype=torch.uint8).view(FNUZ) for n in (rows, 64 * tiles))
    out = torch.empty(1, rows, 1, dim, dtype=torch.bfloat16)
    arguments = (q, k, k, out, torch.empty(1, 1, rows) if lse else None, 0.1, None, None, None)
    flash_attn_gfx942_fp8[(1, 1, 1), 64 * options.waves](*arguments, options=options)


def executed(device, dim: int, lse: bool) -> Counter[str]:
    """Instructions of a wave for one key tile, by opcode."""
    few, many, mix = 5, 9, Counter()
    for tiles, sign in ((many, 1), (few, -1)):
        run(tiles, dim, lse)
        for opcode, count in device.last.mix.items():
            mix[opcode] += sign * count / ((many - few) * waves_of(dim))
    return mix


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_instructions_of_a_tile(dim, lse, unchecked):
    """Sums of weights as they were before they were rounded are for log-sum-exps alone; nothing is packed."""
    mix = executed(unchecked, dim, lse)

    def total(pattern: str) -> float:
        return sum(count for opcode, count in mix.items() if re.fullmatch(pattern, opcode))

    assert {
        "products": total("v_mfma_f32_32x32x16_fp8_fp8"),
        "exponentials": total("v_exp_f32"),
        "conversions": total("v_cvt_pk_fp8_f32"),
        "FMAs": total("v_fma_f32"),
        "additions": total("v_add_f32"),
        "packed": total("v_pk_.*"),
        "turning V": total("v_perm_b32"),
        "reads": total("ds_read_b128"),
        "stores of V": total("ds_write_b32"),
        "stores of K": total("ds_write_b128"),
        "copies of V": total("buffer_load_dword"),
        "copies of K": total("buffer_load_dwordx4"),
        "barriers": total("s_barrier"),
        "moves": total("v_mov_b32|v_accvgpr.*|v_.*_sdwa"),
        "memory for spills": total("(scratch|flat|global)_.*"),
    } == {
        "products": dim // 4 + 4,  # and those that make sums
        "exponentials": 32,
        "conversions": 16,
        "FMAs": 32,
        "additions": 32 * lse,
        "packed": 0,
        "turning V": 8,
        "reads": dim // 8,
        "stores of V": 4,
        "stores of K": 1,
        "copies of V": 4,
        "copies of K": 1,
        "barriers": 4,
        "moves": 0,
        "memory for spills": 0,
    }


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_no_bank_conflicts(dim, unchecked):
    """Every LDS access of a launch."""
    unchecked.lds_observer = counter = BankCounter("gfx942")
    try:
        run(3, dim)
    finally:
        unchecked.lds_observer = None
    assert set(counter.accesses) == {"ds_read_b128", "ds_write_b128", "ds_write_b32"}
    assert +counter.extra == {}


# pieces


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("of", [k_tile, v_tile])
def test_places_of_8_bit_tiles(of, dim):
    """Each element has one."""
    tile = of(dim)
    places = {tile(*at) for at in itertools.product(range(tile.rows), range(tile.columns))}
    assert len(places) == tile.rows * tile.columns == 64 * dim
    assert max(places) < tile.bytes


@fly.kernel
def narrowed(x: fly.Tensor, out: fly.Tensor):
    """out[lane] = x[lane] in 8 bits."""
    lane = fly.lane_id()
    out.store(cvt_pk_fp8(x.load(lane, 0, length=8), out.dtype), lane, 0)


def test_conversion_is_to_nearest_even_and_makes_nan_of_what_is_too_large(seed, unchecked):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) * 2.0 ** torch.arange(-8, 8)[
        :, None
    ].repeat(4, 1)
    x[0] = torch.tensor([0.0, 240.0, -240.0, 2.0**-11, 3 * 2.0**-11, 17.0, 19.0, -0.0])
    x[1] = torch.tensor([247.9, 248.0, -248.0, 1e9, torch.inf, torch.nan, -torch.inf, -1e-9])
    out = torch.zeros(64, 8, dtype=torch.uint8).view(FNUZ)
    narrowed[(1, 1, 1), 64](x, out)
    assert torch.equal(out.view(torch.uint8), x.to(FNUZ).view(torch.uint8)), f"seed {seed}"


@pytest.mark.parametrize(
    ("arch", "asked", "made"), [("gfx942", "f8e4m3", "f8e4m3fnuz"), ("gfx950", "f8e4m3fnuz", "f8e4m3")]
)
def test_conversion_to_another_targets_format(arch, asked, made):
    specs = fly.TensorSpec("f32", 2, 16, True), fly.TensorSpec(asked, 2, 16, True)
    with pytest.raises(DTypeError, match=f"cvt_pk_fp8 to {asked}; on {arch} it makes {made}"):
        fly.compile(narrowed, *specs, block=64, target=arch)


# arguments and dispatch

REQUEST = Request(
    head_dim=DIM,
    dtype="f8e4m3fnuz",
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
    static_features=Features(DESCALES),
)


def test_what_is_refused_names_an_alternative(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    assert dispatch.choose("gfx942", REQUEST).name == "gfx942_fp8"
    for change, text in [
        ({"features": ("dropout",)}, "the gfx942_fp8 kernel does not do dropout .*: dropout_p=0.0"),
        ({"features": ("paged",)}, "the gfx942_fp8 kernel does not do .*block_table"),
        ({"features": ("block_mask",)}, r"gfx942_fp8 kernel does not do block-sparse masks \(block_mask\) yet: its"),
        ({"head_dim": 96}, "the gfx942_fp8 kernel takes head_dim 64, 128, not 96: pad q, k and v with zeros to"),
        ({"head_dim_v": 64}, r"takes \(head_dim, head_dim_v\) none that differ, not \(128, 64\): pad v"),
        ({"alignment": 2}, "multiples of 4 bytes, not of 2: make"),
        ({"tuning": {"dualwave_swp_setprio": True}}, "has no tuning option dualwave_swp_setprio on gfx942: leave"),
        ({"dtype": "f8e4m3"}, r"takes q of f8e4m3fnuz \(torch.float8_e4m3fnuz\), not f8e4m3: convert with"),
        ({"dtype": "f8e5m2"}, r"takes q of f8e4m3fnuz \(torch.float8_e4m3fnuz\), not f8e5m2: convert with"),
        ({"dtype": "bf16"}, "the gfx942 kernel does not do scales of 8-bit inputs"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=text):
            dispatch.choose("gfx942", replace(REQUEST, **change))


@pytest.mark.parametrize("arch", [arch for arch in (*dispatch.AMD, *dispatch.NVIDIA) if arch != "gfx942"])
def test_other_targets_refuse_it_with_the_exact_conversion(arch, monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    with pytest.raises(UnsupportedError, match=r"not f8e4m3fnuz: convert with .to\(torch.bfloat16\), which is exact"):
        dispatch.choose(arch, REQUEST)


def test_gradients_have_no_8_bits(emulated):
    q, k, v = (x.float().to(FNUZ) for x in inputs(0, 8, 8))
    with pytest.raises(UnsupportedError, match=r"q requires a gradient, and torch\.float8_e4m3fnuz has none: use b"):
        flydsl_flash_attn_func(q.requires_grad_(), k, v)


@pytest.mark.parametrize(
    ("dim", "waves", "message"),
    [
        (96, 8, "head_dim is 96; the gfx950 kernel takes 64 and 128"),
        (64, 8, "waves is 8; this kernel has 4 in a block at head_dim 64"),
        (128, 4, "waves is 4; this kernel has 8 in a block at head_dim 128"),
    ],
)
def test_other_builds_are_refused(dim, waves, message):
    with pytest.raises(ShapeError, match=message):
        FnuzOptions(dim, False, waves=waves, stagger=waves == WAVES)
