"""Attention on 8-bit floats for gfx950: results on the emulated GPU with all checks, instructions, banks, arguments.

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
from fly.backends.target import target
from fly.emulator.banks import MODELS, BankCounter
from fly.errors import DTypeError, LayoutError, ShapeError, UnsupportedError
from fly.runtime.device import device_for
from kernels import dispatch
from kernels.flash_attn_gfx950_fp8 import Fp8Options, flash_attn_gfx950_fp8
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.byte_tiles import HEAD_DIMS, k_tile, v_tile
from kernels.gfx950.options import WAVES
from kernels.problem.catalogue import DESCALES
from kernels.problem.contract import Request
from kernels.problem.features import NO_FEATURES, Features
from tests.kernels.fp8_reference import E4M3, distances, reference, uniform
from tests.kernels.gfx950.wait_states import too_early
from tests.kernels.reference import check

DIM = 128
WAVES_OF = {64: WAVES // 2, 128: WAVES, 256: WAVES // 2}


@pytest.fixture
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950_fp8")


@pytest.fixture
def unchecked(monkeypatch):
    """The emulated gfx950 without checks."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    return device_for(("cpu", 0))


inputs = partial(uniform, E4M3, dim=DIM)


def compare(q, k, v, causal, seed, **options):
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)
    scales = {name: options[name] for name in DESCALES if name in options}
    report = check(out, reference(q, k, v, causal=causal, **scales), lse)
    assert out.dtype is torch.bfloat16
    assert report.ok, f"seed {seed}: {report}"


# results


@pytest.mark.sample(2)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "largest"),
    [(200, 256, True, 1.0), (300, 333, False, 2.0), (129, 31, True, 2.0), (65, 127, True, 4.0)],
)
def test_lengths(queries, keys, causal, largest, dim, seed, emulated):
    compare(*inputs(seed, queries, keys, largest=largest, dim=dim), causal, seed)


def test_heads_share_keys_and_have_scales(seed, emulated):
    g = torch.Generator().manual_seed(seed)
    per_head = {name: torch.rand(2, 2, generator=g) + 0.5 for name in DESCALES}
    compare(*inputs(seed, 40, 150, 6, 2, batch=2, largest=1.0), True, seed, **per_head)


@pytest.mark.parametrize("scales", [("q_descale",), ("k_descale",), ("v_descale",)])
def test_each_scale_alone(scales, seed, emulated):
    compare(*inputs(seed, 33, 70), False, seed, **dict.fromkeys(scales, torch.tensor([0.5])))


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


def test_strided_inputs(seed, emulated):
    """Rows that lie head by head, or with other tensors' between them; the emulator faults outside of them."""
    wide = inputs(seed, 90, 200, heads=4, kv_heads=4, largest=1.0)
    q = wide[0].transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2]
    k, v = torch.stack([x.view(torch.uint8) for x in wide[1:]], dim=2).view(E4M3).unbind(2)
    compare(q, k[:, :, 1:3], v[:, :, 1:3], True, seed)


@pytest.mark.parametrize(
    ("growth", "rescales", "tuning"),
    [(3.5, 6, {}), (0.75, 2, {}), (0.75, 6, {"dualwave_swp_lazy_rescale": False})],
)
def test_maxima_that_grow(growth, rescales, tuning, seed, emulated):
    """By so much from tile to tile, in log2 units: below 1.75 in all, weights are still e4m3 numbers."""
    q, k, v = inputs(seed, 64, 64 * 6, heads=1, largest=0.25)
    q[..., 0] = torch.tensor(2.0).to(E4M3)
    step = growth / 2 * math.sqrt(DIM) / math.log2(math.e)
    k[0, :, 0, 0] = (torch.arange(6).repeat_interleave(64) * step).to(E4M3)
    counts = torch.zeros(2)
    compare(q, k, v, False, seed, debug_counts=counts, **tuning)
    # two waves have rows; the others have zeros, whose maximum grows once
    assert counts[1].item() == rescales * 2 + (WAVES - 2), f"seed {seed}"


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_weight_that_is_no_e4m3_number_still_is_all_of_a_row(dim, emulated):
    """A key's score 1.1 (log2) above the first tile's: its weight is rounded, and so is what divides it."""
    q, k, v = inputs(0, 32, 128, heads=1, largest=0.0, dim=dim)
    v = torch.linspace(-3, 3, 128)[None, :, None, None].expand(1, 128, 1, dim).to(E4M3).clone()
    v[0, 3] = v[0, 100]
    q[..., 0] = torch.tensor(1.0).to(E4M3)
    k[0, :, 0, 0] = torch.tensor(-448.0).to(E4M3)
    k[0, [3, 100], 0, 0] = torch.tensor([416.0, 448.0]).to(E4M3)
    out = flydsl_flash_attn_func(q, k, v, False, softmax_scale=1.1 / 32 * math.log(2))
    assert torch.equal(out.float(), v[:, 100:101].float().expand(1, 32, 1, dim))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_weights_are_rounded_from_maxima_that_may_be_old(dim, seed, emulated):
    """Results are plain attention's with such weights, to the rounding of bf16; with others they are not."""
    q, k, v = inputs(seed, 33, 300, heads=4, kv_heads=4, largest=2.0, dim=dim)
    apart = distances(flydsl_flash_attn_func(q, k, v, True), q, k, v, True)
    assert apart[0] < 2.0**-8 and apart[0] < apart[1] / 4, f"seed {seed}: {apart}"


def test_both_ways_to_add_up_are_one(seed, emulated):
    """Products add up in f32 as it is: one build, and the same bits."""
    q, k, v = inputs(seed, 33, 70, largest=1.0)
    found = [flydsl_flash_attn_func(q, k, v, fp8_accumulate=how) for how in ("float32", "fast")]
    assert torch.equal(*found)


# instructions


def options_of(dim: int, causal: bool, **changes) -> Fp8Options:
    """Those of a dense call."""
    waves = WAVES_OF[dim]
    return Fp8Options(dim, causal, waves=waves, stagger=waves == WAVES, **changes)


@functools.cache
def compiled(dim: int, causal: bool, features: Features = NO_FEATURES, split: bool = False) -> fly.Artefact:
    tensor = functools.partial(fly.TensorSpec, alignment=16, unit_stride=True)
    operands = [fly.TensorSpec("f32", 2, 4, False)] * len(features.operands)
    out, lse = tensor("f32" if split else "bf16", 4 + split), tensor("f32", 3 + split)
    specs = (*[tensor("f8e4m3", 4)] * 3, out, lse, fly.ScalarSpec("f32"), None, None, None, *operands)
    options = options_of(dim, causal, features=features)
    return fly.compile(flash_attn_gfx950_fp8, *specs, block=64 * options.waves, target="gfx950", options=options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("features", [NO_FEATURES, Features(DESCALES)], ids=["plain", "descaled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_registers_and_shared_memory(dim, causal, features, split):
    artefact = compiled(dim, causal, features, split)
    resources = artefact.resources
    assert too_early(artefact.isa) == []
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    # of 512 a lane: for three waves a SIMD, two, and one
    assert resources.registers + resources.accum_registers <= {64: 168, 128: 224, 256: 408}[dim]
    assert resources.shared_bytes == {64: 25920, 128: 67456, 256: 99840}[dim]


@pytest.mark.parametrize(("states", "missing"), [(18, True), (19, True), (20, False)])
def test_wait_states_are_counted(states, missing):
    code = [
        "\tv_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], a[0:7], v[0:15]",
        ".LBB0_1:",
        f"\ts_nop {states - 3}",
        "\tv_mov_b32_e32 v40, v16",
        "\ts_barrier",
        "\tv_max_f32_e32 v41, v42, v15",
    ]
    assert bool(too_early("\n".join(code))) is missing


def run(tiles: int, causal: bool, dim: int, lse: bool = True) -> None:
    """One block against so many key tiles; equal scores, so that one rescale is all there is."""
    options = options_of(dim, causal)
    rows = options.block_m
    q, k = (torch.zeros(1, n, 1, dim, dtype=torch.uint8).view(E4M3) for n in (rows, 64 * tiles))
    out = torch.empty(1, rows, 1, dim, dtype=torch.bfloat16)
    arguments = (q, k, k, out, torch.empty(1, 1, rows) if lse else None, 0.1, None, None, None)
    flash_attn_gfx950_fp8[(1, 1, 1), 64 * options.waves](*arguments, options=options)


def executed(device, causal: bool, dim: int, lse: bool) -> Counter[str]:
    """Instructions of a wave for one key tile, by opcode."""
    few, many, mix = 5, 9, Counter()
    for tiles, sign in ((many, 1), (few, -1)):
        run(tiles, causal, dim, lse)
        for opcode, count in device.last.mix.items():
            mix[opcode] += sign * count / ((many - few) * WAVES_OF[dim])
    return mix


@pytest.mark.sample(2)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "wanted", "barriers", "most"),
    [
        (64, [5, 32, 16, 4, 8, 2], 4, 138),
        (128, [9, 32, 16, 8, 16, 2], 4, 154),
        (256, [17, 32, 16, 16, 32, 8], 2, 190.5),
    ],
)
def test_instructions_of_a_tile(dim, wanted, barriers, most, causal, lse, unchecked):
    """Sums of weights as they were before they were rounded are for log-sum-exps alone."""
    mix = executed(unchecked, causal, dim, lse)
    kept = ("v_mfma.*", "v_exp_f32", "v_cvt_pk_fp8_f32", "ds_read_b128", "ds_read_b64_tr_b8", "buffer_load_dwordx4")
    found = [sum(n for opcode, n in mix.items() if re.fullmatch(pattern, opcode)) for pattern in kept]
    assert found == wanted
    assert (mix["s_barrier"], mix["s_waitcnt"] >= 2) == (barriers, True)
    assert sum(n for opcode, n in mix.items() if opcode.startswith("v_pk_")) == 0
    assert sum(mix.values()) <= most + 32 * lse
    assert not any(re.match("scratch|flat|global|v_accvgpr|ds_write", o) for o, count in mix.items() if count)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("model", MODELS)
def test_no_bank_conflicts(model, dim, unchecked):
    """Every LDS access of a launch, with 32 banks and with 64."""
    unchecked.lds_observer = counter = BankCounter(model)
    try:
        run(5, False, dim)
    finally:
        unchecked.lds_observer = None
    assert set(counter.accesses) == {"buffer_load_dwordx4", "ds_read_b128", "ds_read_b64_tr_b8"}
    assert +counter.extra == {}


# pieces


@pytest.mark.parametrize("together", [16, 64])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("of", [k_tile, v_tile])
def test_places_of_8_bit_tiles(of, dim, together):
    """Each element has one, and where keys lie together in runs of 16, so do those of a wave's lines."""
    tile = of(dim, together)
    places = [tile(*at) for at in itertools.product(range(tile.rows), range(tile.columns))]
    assert len(set(places)) == tile.rows * tile.columns == 64 * dim
    assert max(places) < tile.bytes
    each = tile.lines // WAVES_OF[dim]
    for line in range(0, tile.lines, each):
        rows = {tile.coordinate(line * tile.line + i)[0] for i in range(0, each * tile.line, 16)}
        assert together == 64 or len({row // 16 for row in rows}) == 1


def test_padding_keeps_16_bytes_together():
    with pytest.raises(LayoutError, match=r"with 8 of padding, .* padding is a multiple of 16"):
        fly.PaddedTile(fly.Layout((16, 64), (64, 1)), 512, 8, element_bytes=1)


def test_atom_and_loads_of_bytes():
    gfx950 = target("gfx950")
    atom = gfx950.mma("f8e4m3")
    assert gfx950.atom(atom.name) is atom and atom not in gfx950.mma_atoms
    for operand in "ab":
        layout = getattr(atom, operand)
        held = {layout((lane, value)) for lane in range(64) for value in range(32)}
        assert held == set(range(32 * 64))
        assert all(layout((lane, value)) == lane % 32 + 32 * (16 * (lane // 32) + value + value // 16 * 16)
                   for lane in range(64) for value in range(32))  # fmt: skip
    for load in gfx950.byte_loads:
        assert gfx950.matrix_load(load.name) is load and load.bits == 8
        given = [load.table((lane, value)) for lane in range(64) for value in range(load.values)]
        assert sorted(given) == list(range(64 * load.run))
    assert fly.chain(atom).columns[:8] == (0, 1, 2, 3, 8, 9, 10, 11)


@fly.kernel
def narrowed(x: fly.Tensor, out: fly.Tensor):
    """out[lane] = x[lane] as e4m3."""
    lane = fly.lane_id()
    out.store(cvt_pk_fp8(x.load(lane, 0, length=8)), lane, 0)


def test_conversion_is_to_nearest_even(seed, unchecked):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) * 2.0 ** torch.arange(-8, 8)[
        :, None
    ].repeat(4, 1)
    x = x.clamp(-440, 440)
    x[0] = torch.tensor([0.0, 448.0, -448.0, 2.0**-10, 3 * 2.0**-10, 17.0, 19.0, -0.0])
    out = torch.zeros(64, 8, dtype=torch.uint8).view(E4M3)
    narrowed[(1, 1, 1), 64](x, out)
    assert torch.equal(out.view(torch.uint8), x.to(E4M3).view(torch.uint8)), f"seed {seed}"


@fly.kernel
def narrowed_wrongly(x: fly.Tensor):
    """Two values are half a word."""
    cvt_pk_fp8(x.load(0, 0, length=2))


def test_conversion_takes_fours():
    with pytest.raises(DTypeError, match="cvt_pk_fp8 takes a vector of f32 whose length is a multiple of 4"):
        fly.compile(narrowed_wrongly, fly.TensorSpec("f32", 2, 16, True), block=64, target="gfx950")


# arguments and dispatch

REQUEST = Request(
    head_dim=DIM,
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
    static_features=Features(DESCALES),
)


def test_what_is_refused_names_an_alternative(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    assert dispatch.choose("gfx950", REQUEST).name == "gfx950_fp8"
    for change, text in [
        ({"features": ("dropout",)}, "the gfx950_fp8 kernel does not do dropout .*: dropout_p=0.0"),
        ({"head_dim": 96}, "the gfx950_fp8 kernel takes head_dim 64, 128, 256, not 96: pad q, k and v with zeros to"),
        ({"dtype": "f8e5m2"}, "the gfx950_fp8 kernel takes q of f8e4m3, not f8e5m2: convert with"),
        ({"dtype": "bf16"}, "the gfx950 kernel does not do scales of 8-bit inputs"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=text):
            dispatch.choose("gfx950", replace(REQUEST, **change))
    with pytest.raises(UnsupportedError, match="takes q of bf16, f16, not f8e4m3: convert with"):
        dispatch.choose("gfx942", REQUEST)


def test_other_head_dimensions_have_no_build():
    tensor = functools.partial(fly.TensorSpec, alignment=16, unit_stride=True)
    specs = (*[tensor("f8e4m3", 4)] * 3, tensor("bf16", 4), None, fly.ScalarSpec("f32"), None, None, None)
    with pytest.raises(ShapeError, match="head_dim is 96; the gfx950 kernel takes 64, 128 and 256"):
        fly.compile(flash_attn_gfx950_fp8, *specs, block=512, target="gfx950", options=Fp8Options(96, False))
