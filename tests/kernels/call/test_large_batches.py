"""More sequences or heads than a grid has places along y or z: folded grids, on every kernel that has one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from fly.errors import LaunchError, UnsupportedError
from fly.runtime.emulated import EmulatedKernel
from kernels import flash_attn_interface
from kernels.cache import kv_cache
from kernels.flash_attn_api import flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.sm90.transpose_values import TRANSPOSE_THREADS, keys_of_block, transpose_values
from kernels.work import tile_scheduler
from kernels.work.split_combine import split_combine
from kernels.work.tile_scheduler import block_work, fold_grid
from tests.kernels import fp8_reference
from tests.kernels.cache.kv_cache_cases import Case, Problem, failures
from tests.kernels.reference import check, reference
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

MANY = 65_600  # sequences: more than a grid has along z
FEW = 5  # places along y and z in most tests here: the arithmetic is the same
E4M3 = torch.float8_e4m3fn
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.fixture
def narrow(monkeypatch):
    """Grids fold when they have more than `FEW` along y or z; nothing that was planned before is used."""
    monkeypatch.setattr(tile_scheduler, "MAX_GRID_YZ", FEW)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(kv_cache, "_plans", {})


@pytest.fixture
def launched(monkeypatch):
    """The grids that the emulated GPU was given, by kernel."""
    grids: list[tuple[str, tuple[int, int, int]]] = []
    run = EmulatedKernel.launch

    def launch(self, grid, *rest):
        grids.append((self.artefact.kernel, grid))
        return run(self, grid, *rest)

    monkeypatch.setattr(EmulatedKernel, "launch", launch)
    return grids


sizes = st.integers(1, 300_000)


@given(st.integers(1, 40), sizes, sizes)
def test_a_grid_is_folded_where_a_device_has_no_such_grid(blocks, heads, sequences):
    limit = tile_scheduler.MAX_GRID_YZ
    slices = heads * sequences
    if max(heads, sequences) <= limit:
        assert fold_grid((blocks, heads, sequences)) == ((blocks, heads, sequences), {})
    elif blocks * slices >= 2**31:
        with pytest.raises(UnsupportedError, match=f"{heads} heads of {sequences} sequences.* at most 2147483647"):
            fold_grid((blocks, heads, sequences))
    else:
        (x, y, z), statics = fold_grid((blocks, heads, sequences))
        assert x == blocks and y <= limit and z <= limit and statics == {"folded": True}
        assert slices <= y * z < slices + z


def place(q: fly.Tensor, k: fly.Tensor, out: fly.Tensor, found: fly.Tensor, *, xcds: int):
    """found[number of the block] = sequence, head, first row, whether the block has rows."""
    work = block_work(
        (q, k, k, out, None, None, None),
        head_dim=16,
        causal=False,
        block_m=32,
        block_n=16,
        xcds=xcds,
        folded=True,
    )
    number = fly.block_id.x + fly.grid_dim.x * (fly.block_id.y + fly.grid_dim.y * fly.block_id.z)
    for i, value in enumerate((work.batch, work.head, work.first_row)):
        found.store(value, number, i)
    found.store(fly.i32(0), number, 3)
    with work.if_any_row():
        found.store(fly.i32(1), number, 3)


@pytest.mark.parametrize("xcds", [1, 8])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 2), st.integers(1, 80), st.integers(1, 5))
def test_every_block_of_a_folded_grid_has_its_place_or_none(xcds, batch, key_heads, group, queries, most):
    heads = key_heads * group
    q, k = np.zeros((batch, queries, heads, 16), np.int16), np.zeros((batch, 9, key_heads, 16), np.int16)
    slices, blocks = batch * heads, -(-queries // 32)
    z = -(-slices // most)
    y = -(-slices // z)
    found = np.full((blocks * y * z, 4), -1, np.int32)
    specs = (matrix("bf16", 4),) * 3 + (matrix("i32", 2),)
    program = Program.of(trace(place, *specs, arch="sm_80", xcds=xcds), target("sm_80"))
    Machine(program)(flat(q, k, q, found), (blocks, y, z))
    working = [tuple(row[:3]) for row in found.tolist() if row[3]]
    assert sorted(working) == sorted(itertools.product(range(batch), range(heads), range(0, 32 * blocks, 32)))


@pytest.mark.parametrize(("arch", "kernel", "splits"), [("gfx942", "generic", 3), ("gfx950", "gfx950", 1)])
def test_dense_and_packed_sequences_of_folded_grids(arch, kernel, splits, emulate, narrow, launched, seed):
    emulate(arch, kernel)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(7, 3, 1, 64, dtype=torch.bfloat16, generator=generator)
    k, v = (torch.randn(7, 70, 1, 64, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    out, lse = flydsl_flash_attn_func(q, k, v, causal=True, return_lse=True, num_kv_splits=splits)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"

    queries, keys = torch.tensor([0, 2, 2, 5, 9, 10, 10]), torch.tensor([0, 66, 70, 71, 80, 80, 100])
    offsets = {"cu_seqlens_q": queries.to(torch.int32), "cu_seqlens_kv": keys.to(torch.int32)}
    q, k, v = q.flatten(0, 1)[:10], k.flatten(0, 1)[:100], v.flatten(0, 1)[:100]
    longest = {"max_seqlen_q": 4, "max_seqlen_kv": 66}
    out, lse = flydsl_flash_attn_func(
        q, k, v, causal=True, return_lse=True, num_kv_splits=splits, **offsets, **longest
    )
    for i in range(6):
        own, seen = slice(*queries[i : i + 2].tolist()), slice(*keys[i : i + 2].tolist())
        if own.start < own.stop:
            report = check(out[None, own], reference(q[None, own], k[None, seen], v[None, seen], causal=True))
            assert report.ok, f"seed {seed}, sequence {i}: {report}"
    assert all(max(grid[1:]) <= FEW and grid[1] > 1 and grid[2] > 1 for _, grid in launched)
    # 7 slices are 4 * 2 and one spare block, 21 are 5 * 5 and four
    assert [grid for name, grid in launched if name == "split_combine"][:1] == [(1, 4, 2)] * (splits > 1)
    assert {name for name, _ in launched} == {f"flash_attn_{kernel}", *([split_combine.name] * (splits > 1))}


@pytest.mark.parametrize(
    ("arch", "dtype", "tiles"), [("gfx942", torch.float8_e4m3fnuz, 1), ("gfx950", E4M3, 2)], ids=["gfx942", "gfx950"]
)
def test_8_bit_inputs_of_a_folded_grid(arch, dtype, tiles, emulate, narrow, launched, seed):
    emulate(arch, f"{arch}_fp8")
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(7, 40, 1, 128, generator=generator).to(dtype) for _ in range(3))
    counts = torch.zeros(2)
    out, lse = flydsl_flash_attn_func(q, k, v, causal=True, return_lse=True, debug_counts=counts)
    report = check(out, fp8_reference.reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"
    assert launched == [(f"flash_attn_{arch}_fp8", (1, 4, 2))]
    # on gfx950 two tiles, an even number, for every wave of a sequence's block: spare blocks count nothing
    assert counts.sum() == 7 * 8 * tiles


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_appending_to_more_entries_than_a_grid_has(arch, emulate, narrow, launched, seed):
    emulate(arch, "generic")
    for case in (Case(batch=7, rotary_dim=16, new=3), Case(batch=11, page=16, queries=0)):
        assert failures(Problem(case, seed)) == [], f"seed {seed}"
    assert [grid[1:] for _, grid in launched] == [(4, 2), (4, 3)]


def test_values_of_a_folded_grid_are_turned(seed):
    dim, batch, heads, keys = 128, 4, 3, 37
    specs = (fly.TensorSpec("f8e4m3", 4, 16, True),) * 2
    threads = TRANSPOSE_THREADS
    values = np.random.default_rng(seed).integers(-128, 128, (batch, keys, heads, dim), np.int8)
    results = []
    for grid, statics in (((heads, batch), {}), ((5, 3), {"folded": True})):
        module = trace(transpose_values.function, *specs, arch="sm_90a", block=threads, head_dim=dim, **statics)
        turned = np.full((batch, heads, dim, keys + -keys % 16), 77, np.int8)
        blocks = -(-keys // keys_of_block(dim))
        Machine(Program.of(module, target("sm_90a")))(flat(values, turned), (blocks, *grid))
        results.append(turned)
    np.testing.assert_array_equal(*results, err_msg=f"seed {seed}")


def lengths_of(batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths that are 0 but at a few places on both sides of a grid's limit, and their offsets."""
    lengths = torch.zeros(batch, dtype=torch.int32)
    lengths[[0, 40_000, 65_534, 65_535, 65_536, batch - 1]] = torch.tensor([3, 1, 2, 4, 1, 5], dtype=torch.int32)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return lengths, offsets.to(device)


def check_packed(device: str, seed: int, heads: int = 1) -> None:
    """Packed sequences, most of them empty, and bounds far above their lengths."""
    lengths, offsets = lengths_of(MANY, device)
    generator = torch.Generator().manual_seed(seed)
    total = int(lengths.sum())
    q, k, v = (torch.randn(total, heads, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    bounds = {"max_seqlen_q": 2**31 - 1, "max_seqlen_kv": 2**31 - 1}
    out, lse = flydsl_flash_attn_func(
        q, k, v, causal=True, return_lse=True, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, **bounds
    )
    first = 0
    for length in lengths[lengths > 0].tolist():
        own = slice(first, first + length)
        wanted = reference(*(t[None, own] for t in (q, k, v)), causal=True)
        report = check(out[None, own], wanted, lse[None, :, own])
        assert report.ok, f"seed {seed}, {length} tokens from {first}: {report}"
        first += length


def test_more_packed_sequences_than_a_grid_has_along_z(emulate, monkeypatch, seed):
    """The limit as it is, on the emulated GPU without its checks, which are on in the tests above."""
    emulate("gfx950", "generic")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    check_packed("cpu", seed)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_bounds_on_lengths_may_be_any(arch, emulate, seed):
    """Grids follow the tokens that there are."""
    emulate(arch, "")
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(10, 2, 64, generator=generator).to(torch.float16) for _ in range(3))
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    wanted = flydsl_flash_attn_func(q, k, v, max_seqlen_q=7, max_seqlen_kv=7, **packed)
    for bound in (2**20, 2**31 - 1):
        out = flydsl_flash_attn_func(q, k, v, max_seqlen_q=bound, max_seqlen_kv=bound, **packed)
        assert torch.equal(out, wanted), f"seed {seed}"


@fly.kernel
def nothing(x: fly.Tensor):
    """Writes one element."""
    x.store(fly.f32(0.0), 0)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (2**24, "grid times block along x is 4294967296; the emulated GPU .* takes at most 4294967295"),
        (2**40, "grid x is 1099511627776; the emulated GPU .* takes at most 2147483647"),
        ((1, 65537), "grid y is 65537; the emulated GPU .* takes at most 65536"),
        ((1, 1, 2**31), "grid z is 2147483648; the emulated GPU .* takes at most 65536"),
    ],
)
def test_grids_that_no_amd_gpu_takes_are_named(grid, message):
    with pytest.raises(LaunchError, match=f"nothing: {message}"):
        nothing[grid, 256](torch.zeros(4))


@pytest.mark.parametrize("kernel", [pytest.param(name, marks=on_gpu) for name in ("generic", "")])
def test_more_packed_sequences_than_a_grid_has_on_a_gpu(kernel, monkeypatch, seed):
    monkeypatch.setenv("FLY_KERNEL", kernel)
    check_packed("cuda", seed, heads=2)


@pytest.mark.parametrize("kernel", [pytest.param(name, marks=on_gpu) for name in ("generic", "")])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("batch, heads", [(70_000, 2), (2, 70_000)])
def test_more_dense_sequences_and_heads_than_a_grid_has_on_a_gpu(kernel, splits, batch, heads, monkeypatch, seed):
    monkeypatch.setenv("FLY_KERNEL", kernel)
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(batch, length, heads, 64, dtype=torch.bfloat16, device="cuda", generator=generator)
        for length in (3, 5, 5)
    )
    out, lse = flydsl_flash_attn_func(q, k, v, causal=True, return_lse=True, num_kv_splits=splits)
    # one sequence of many heads is the same attention, and quicker to refer to
    q, k, v, out = (x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (q, k, v, out))
    some = torch.randint(len(q), (500,), device="cuda", generator=generator)
    some[:2] = torch.tensor([0, len(q) - 1])
    report = check(out[some], reference(q[some], k[some], v[some], causal=True), lse.flatten(0, 1)[some, None])
    assert report.ok, f"seed {seed}: {report}"
    assert not out.isnan().any()


@pytest.mark.parametrize("rows", [pytest.param(1, marks=on_gpu)])
def test_a_cache_of_more_entries_than_a_grid_has_on_a_gpu(rows, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    batch = 70_000
    shapes = ((batch, rows, 2, 64), (batch, 8, 1, 64), (batch, 8, 1, 64), (batch, rows, 1, 64), (batch, rows, 1, 64))
    q, k_cache, v_cache, k, v = (
        torch.randn(shape, dtype=torch.float16, device="cuda", generator=generator) for shape in shapes
    )
    lengths = torch.randint(0, 8, (batch,), device="cuda", generator=generator, dtype=torch.int32)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    entry = torch.arange(batch, device="cuda")
    wanted_k[entry, lengths.long()], wanted_v[entry, lengths.long()] = k[:, 0], v[:, 0]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(k_cache, wanted_k) and torch.equal(v_cache, wanted_v), f"seed {seed}"
    for i in (0, 65_534, 65_535, 65_536, batch - 1):
        seen = slice(0, int(lengths[i]) + 1)
        report = check(
            out[i, None], reference(q[i, None], k_cache[i, None, seen], v_cache[i, None, seen], causal=True)
        )
        assert report.ok, f"seed {seed}, sequence {i}: {report}"


@pytest.mark.parametrize("queries", [pytest.param(count, marks=on_gpu) for count in (1, 40)])
def test_8_bit_inputs_of_more_sequences_than_a_grid_has_on_a_gpu(queries, seed):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("8-bit inputs need a Hopper GPU")
    generator = torch.Generator("cuda").manual_seed(seed)
    batch = 70_000
    q, k, v = (
        torch.randn(batch, length, 1, 64, device="cuda", generator=generator).to(E4M3) for length in (queries, 20, 20)
    )
    out = flydsl_flash_attn_func(q, k, v, causal=False)
    some = torch.tensor([0, 1, 40_000, 65_534, 65_535, 65_536, batch - 1], device="cuda")
    report = check(out[some], fp8_reference.reference(q[some], k[some], v[some], causal=False))
    assert report.ok, f"seed {seed}: {report}"
