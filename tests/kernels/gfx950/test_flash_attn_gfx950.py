"""The gfx950 dual-wave kernel's results on the emulated GPU, with all checks on.

A finding of the checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fly.errors import ShapeError, UnsupportedError
from kernels.dispatch import choose
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.options import BLOCK_M, BLOCK_N, WAVES, DualWaveOptions
from kernels.problem.contract import Request
from tests.kernels.packed import offsets, packed_attention, sequences
from tests.kernels.reference import check, reference

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950")


def inputs(seed, dtype, queries, keys, heads=2, kv_heads=1, head_dim=64, largest=4.0):
    """q, k and v, uniform in [-largest, largest]: large scores make maxima grow, so that rescales are taken."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((*queries, heads), (*keys, kv_heads), (*keys, kv_heads))
    values = (torch.rand(*s, head_dim, generator=generator) * 2 * largest - largest for s in sizes)
    return [x.to(DTYPES[dtype]) for x in values]


@pytest.mark.parametrize(
    "queries, keys, head_dim, dtype, causal",
    [
        (200, 256, 128, "bf16", True),
        (300, 333, 64, "f16", False),
        (129, 31, 128, "f16", True),
        (1, 450, 64, "bf16", True),
        (65, 127, 128, "bf16", False),
    ],
)
def test_lengths(queries, keys, head_dim, dtype, causal, seed):
    q, k, v = inputs(seed, dtype, (1, queries), (1, keys), head_dim=head_dim)
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(8, 1, 2), (7, 1, 1), (6, 3, 2)])
def test_heads_share_keys(heads, kv_heads, batch, seed):
    """More blocks than dies, in numbers that divide and that do not: each is computed once."""
    q, k, v = inputs(seed, "bf16", (batch, 40), (batch, 150), heads, kv_heads)
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


# a long one, small tails, no query, no key, neither
QUERIES = [300, 3, 0, 31, 65, 5, 0]
KEYS = [330, 127, 40, 31, 3, 0, 0]


@pytest.mark.parametrize(("dtype", "causal", "splits"), [("bf16", True, 1), ("f16", False, 3), ("f16", True, 0)])
def test_packed_sequences(dtype, causal, splits, seed):
    q, k, v = inputs(seed, dtype, (sum(QUERIES),), (sum(KEYS),))
    at_q, at_kv = offsets(QUERIES), offsets(KEYS)
    options = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": 300, "max_seqlen_kv": 330}
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits, **options)
    parts = zip(*(sequences(x, at_q) for x in (q, out)), *(sequences(x, at_kv) for x in (k, v)))
    for b, (query, result, key, value) in enumerate(parts):
        if query.shape[1]:
            result_lse = lse[None, :, at_q[b] : at_q[b + 1]]
            report = check(result, reference(query, key, value, causal=causal), result_lse)
            assert report.ok, f"seed {seed}, sequence {b}: {report}"
    assert (out[at_q[5] : at_q[6]] == 0).all() and (lse[:, at_q[5] : at_q[6]] == -math.inf).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.usefixtures("unchecked")
def test_neighbours_do_not_leak(splits, seed):
    """NaN in one sequence, and around all of them, changes no other; and nothing else is written."""
    q, k, v = inputs(seed, "f16", (120,), (260,), largest=1.0)
    at_q, at_kv = (torch.tensor(x, dtype=torch.int32) for x in ([7, 50, 71, 110], [5, 100, 130, 250]))
    for x, at in ((q, at_q), (k, at_kv), (v, at_kv)):
        x[: at[0]] = x[at[1] : at[2]] = x[at[-1] :] = math.nan
    out = torch.full_like(q, 7.0)
    options = {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": 60, "max_seqlen_kv": 120}
    _, lse = flydsl_flash_attn_func(q, k, v, False, out=out, return_lse=True, num_kv_splits=splits, **options)
    wanted, wanted_lse = packed_attention(q, k, v, at_q, at_kv, causal=False)
    for rows, place in ((slice(7, 50), slice(0, 43)), (slice(71, 110), slice(64, 103))):
        torch.testing.assert_close(out[rows].float(), wanted[place], atol=2e-3, rtol=0)
        torch.testing.assert_close(lse[:, rows], wanted_lse[:, place], atol=1e-3, rtol=0)
    assert (out[:7] == 7).all() and (out[110:] == 7).all()


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "causal", "splits"),
    [(31, 65, "bf16", True, 2), (257, 127, "f16", True, 5), (100, 800, "bf16", True, 5), (1, 700, "f16", False, 0)],
)
def test_split_keys(queries, keys, dtype, causal, splits, seed):
    q, k, v = inputs(seed, dtype, (1, queries), (1, keys), head_dim=128)
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_strided_inputs_and_gaps_between_rows(seed):
    """Rows that lie head by head, or with other tensors' between them; the emulator faults outside of them."""
    wide = inputs(seed, "f16", (1, 90), (1, 200), heads=4, kv_heads=4)
    q = wide[0].transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2]
    k, v = torch.stack(wide[1:], dim=2).unbind(2)
    k, v = k[:, :, 1:3], v[:, :, 1:3]
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_keys_expanded_from_one_row(seed):
    """A stride of zero along the keys."""
    q, k, v = inputs(seed, "bf16", (1, 70), (1, 1))
    k, v = k.expand(-1, 150, -1, -1), v.expand(-1, 150, -1, -1)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True)
    report = check(out, reference(q, k, v, causal=False), lse)
    assert report.ok, f"seed {seed}: {report}"


SWITCHES = ("lazy_rescale", "setprio", "enable_stagger")


@pytest.mark.parametrize("off", SWITCHES)
def test_each_device_can_be_switched_off(off, seed):
    q, k, v = inputs(seed, "bf16", (1, 200), (1, 300))
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True, **{f"dualwave_swp_{off}": False})
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_other_builds(seed):
    q, k, v = inputs(seed, "bf16", (1, 40), (1, 80))
    out = flydsl_flash_attn_func(q, k, v, daz=True, waves_per_eu=1)
    report = check(out, reference(q, k, v, causal=True))
    assert report.ok, f"seed {seed}: {report}"
    with pytest.raises(ShapeError, match="head_dim is 100; the gfx950 kernel takes multiples of 8 from 8 to 256"):
        DualWaveOptions(100, True)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_keys_where_denormals_are_zero(splits, seed):
    """Their shift is 0, which is not that of scores measured from their maximum; some parts have no key either."""
    q, k, v = inputs(seed, "f16", (1, 9), (1, 5))
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True, daz=True, num_kv_splits=splits)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


def rescales(q, k, v, threshold: float) -> tuple[int, int]:
    """(kept, taken) over the key tiles of one head's rows, wave by wave."""
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) / math.sqrt(q.shape[-1]) * math.log2(math.e)
    kept = taken = 0
    for first in range(0, BLOCK_M, BLOCK_M // WAVES):
        rows = scores[first : first + BLOCK_M // WAVES]
        maximum = torch.full((len(rows),), -math.inf, dtype=torch.float64)
        tiles = rows.split(BLOCK_N, dim=1) if len(rows) else ()
        for tile in tiles:
            top = tile.amax(1)
            if (top > maximum + threshold).any():
                maximum = torch.maximum(maximum, top)
                taken += 1
            else:
                kept += 1
    return kept, taken


@pytest.mark.parametrize("lazy", [True, False])
def test_rescales_are_counted(lazy, seed):
    """Scores that grow by 3 from tile to tile, in log2 units: few steps of more than 8."""
    q, k, v = inputs(seed, "f16", (1, 256), (1, 64 * 8), heads=1, largest=1.0)
    q[..., 0] = 2.0
    k[0, :, 0, 0] = torch.arange(8).repeat_interleave(64) * 3 / 2 * math.sqrt(64) / math.log2(math.e)
    counts = torch.tensor([100.0, 0.0])
    out = flydsl_flash_attn_func(q, k, v, False, debug_counts=counts, dualwave_swp_lazy_rescale=lazy)
    kept, taken = rescales(q, k, v, 8.0 if lazy else 0.0)
    assert counts.tolist() == [100 + kept, taken], f"seed {seed}"
    assert taken < 4 * WAVES if lazy else taken > 6 * WAVES
    report = check(out, reference(q, k, v, causal=False))
    assert report.ok, f"seed {seed}: {report}"


def test_offsets_past_32_bits(seed, tmp_path):
    """A sequence's keys span more than 2 GiB, and the second sequence's begin past 4 GiB of memory."""
    pitch, keys = 7 << 19, 330  # elements, so 7 MiB
    memory = np.memmap(tmp_path / "sparse", np.float16, "w+", shape=2 * keys * pitch)
    k = torch.from_numpy(memory).as_strided((2, keys, 1, 64), (keys * pitch, pitch, 64, 1))
    v = torch.from_numpy(memory).as_strided((2, keys, 1, 64), (keys * pitch, pitch, 64, 1), 64)
    assert 2 * k.stride(1) * keys > 2**31 and 2 * k.stride(0) * 2 > 2**32
    q, *values = inputs(seed, "f16", (2, 40), (2, keys))
    k.copy_(values[0])
    v.copy_(values[1])
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_queries_past_32_bits(seed, tmp_path):
    """All rows of the queries span more than 4 GiB, a block's far less."""
    pitch, queries = 7 << 19, 640  # elements, so 7 MiB
    memory = np.memmap(tmp_path / "sparse", np.float16, "w+", shape=queries * pitch)
    q = torch.from_numpy(memory).as_strided((1, queries, 1, 64), (0, pitch, 64, 1))
    assert q.stride(1) * 2 * queries > 2**32
    values, k, v = inputs(seed, "f16", (1, queries), (1, 70), heads=1)
    q.copy_(values)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True)
    report = check(out, reference(values, k, v, causal=False), lse)
    assert report.ok, f"seed {seed}: {report}"


REQUEST = {
    "head_dim": 64,
    "dtype": "f16",
    "causal": False,
    "cross_seqlen": True,
    "return_lse": False,
    "batch": 1,
    "seq_len": 64,
    "num_heads": 1,
    "num_kv_heads": 1,
    "softmax_scale": 0.125,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_pitch": 1 << 20, "seq_len_kv": 3897}, "reaches 3896 keys whose rows are 1048576 bytes apart, not 3897"),
        ({"seq_len_kv": 64, "alignment": 2}, "takes tensors whose addresses and strides are multiples of 4 bytes"),
        ({"seq_len_kv": 64, "head_dim": 100}, "takes head_dim 8 to 256 in steps of 8, not 100"),
        ({"seq_len_kv": 64, "dtype": "f32"}, "takes q of bf16, f16, not f32"),
    ],
)
def test_what_it_refuses(change, message, monkeypatch):
    """By name when it is forced; otherwise the generic kernel serves what it can."""
    request = Request(**{**REQUEST, **change})
    with pytest.raises(UnsupportedError) as caught:
        choose("gfx950", request)
    assert f"FLY_KERNEL=gfx950: the gfx950 kernel {message}" in str(caught.value)
    monkeypatch.delenv("FLY_KERNEL")
    if request.head_dim == 64 and request.dtype == "f16":
        assert choose("gfx950", request).name == "generic"


def test_the_last_keys_that_it_reaches(monkeypatch):
    request = Request(**REQUEST, kv_pitch=1 << 20, seq_len_kv=3896)
    assert choose("gfx950", request).name == "gfx950"
    monkeypatch.delenv("FLY_KERNEL")
    assert choose("gfx950", request).name == "gfx950"
    monkeypatch.setenv("FLYDSL_DISABLE_DUALWAVE_SWP", "1")
    assert choose("gfx950", request).name == "generic"
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    with pytest.raises(UnsupportedError, match="is switched off by FLYDSL_DISABLE_DUALWAVE_SWP=1"):
        choose("gfx950", request)


def test_rows_too_far_apart_are_refused(tmp_path):
    memory = np.memmap(tmp_path / "sparse", np.float16, "w+", shape=(2 << 22))
    k = torch.from_numpy(memory).as_strided((1, 2, 1, 64), (1 << 23, 1 << 22, 64, 1))
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="8388608 bytes apart; flash_attn_gfx950 takes less than 8388608"):
        flydsl_flash_attn_func(q, k, k)
