"""Packed sequences and split keys on a GPU: what an emulator has none of, streams, graphs and much memory."""

from __future__ import annotations

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from tests.kernels.packed import offsets, packed_attention, sequences
from tests.kernels.reference import check, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICE = "cuda"
LENGTHS = [1024, 8192, 3, 31, 65, 127, 0, 513]


def inputs(seed, queries, keys, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16):
    """q, k and v, uniform in [-1, 1]; `queries` and `keys` are their leading sizes."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = ((*queries, heads), (*keys, kv_heads), (*keys, kv_heads))
    return [
        torch.empty(*size, head_dim, dtype=dtype, device=DEVICE).uniform_(-1, 1, generator=generator)
        for size in sizes
    ]


def failures(q, k, v, at_q, at_kv, out, lse, causal) -> list[str]:
    """What is wrong with the results, sequence by sequence."""
    found = []
    parts = zip(*(sequences(x, at_q) for x in (q, out)), *(sequences(x, at_kv) for x in (k, v)))
    for b, (query, result, key, value) in enumerate(parts):
        if query.shape[1]:
            result_lse = lse[None, :, at_q[b] : at_q[b + 1]]
            report = check(result, reference(query, key, value, causal=causal), result_lse)
            if not report.ok:
                found.append(f"sequence {b}: {report}")
    return found


def options(at_q, at_kv, longest):
    return {"cu_seqlens_q": at_q, "cu_seqlens_kv": at_kv, "max_seqlen_q": longest, "max_seqlen_kv": longest}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("splits", [1, 4, 0])
def test_packed_sequences(dtype, causal, head_dim, splits, seed):
    keys = LENGTHS[1:] + LENGTHS[:1]
    total = sum(LENGTHS)
    q, k, v = inputs(seed, (total,), (total,), head_dim=head_dim, dtype=dtype)
    at_q, at_kv = offsets(LENGTHS, DEVICE), offsets(keys, DEVICE)
    out, lse = flydsl_flash_attn_func(
        q, k, v, causal, return_lse=True, num_kv_splits=splits, **options(at_q, at_kv, max(LENGTHS))
    )
    assert failures(q, k, v, at_q, at_kv, out, lse, causal) == [], f"seed {seed}"


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(1, 8192), (1024, 8192), (257, 4096), (2048, 2049), (300, 65)])
def test_split_keys(splits, causal, queries, keys, seed):
    q, k, v = inputs(seed, (1, queries), (1, keys), heads=4)
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_may_change_between_replays_of_a_graph(splits, seed):
    q, k, v = inputs(seed, (300,), (300,))
    at = offsets([100, 150, 50], DEVICE)
    call = {"return_lse": True, "num_kv_splits": splits, **options(at, at, 200)}
    flydsl_flash_attn_func(q, k, v, **call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flydsl_flash_attn_func(q, k, v, **call)
    for lengths in ([100, 150, 50], [0, 120, 180], [200, 0, 100]):
        at.copy_(offsets(lengths))
        out.zero_()
        graph.replay()
        assert failures(q, k, v, at, at, out, lse, True) == [], f"seed {seed}, {lengths}"


def test_split_keys_on_other_streams(seed):
    """Each stream has its own workspace, unless the caller gives one."""
    q, k, v = inputs(seed, (1, 300), (1, 3000), heads=4)
    ref = reference(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    size = flydsl_flash_attn_workspace(q, k, v, num_kv_splits=4)
    own = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    outs = [flydsl_flash_attn_func(q, k, v, num_kv_splits=4, stream=s) for s in streams * 4]
    outs.append(flydsl_flash_attn_func(q, k, v, num_kv_splits=4, workspace=own, stream=streams[0]))
    torch.cuda.synchronize()
    for out in outs:
        report = check(out, ref)
        assert report.ok, f"seed {seed}: {report}"
        assert torch.equal(out, outs[0])


def test_packed_offsets_past_32_bits(seed):
    """Tokens 2**23 elements apart: the last ones are past 2**31 elements and 4 GiB."""
    sizes, strides = (300, 2, 64), (2**23, 64, 1)
    memory = torch.empty(300 * 2**23 + 2**17, dtype=torch.bfloat16, device=DEVICE)
    q, k, v, out = (memory.as_strided(sizes, strides, 2**15 * i) for i in range(4))
    for target, source in zip((q, k, v), inputs(seed, (300,), (300,), heads=2, head_dim=64)):
        target.copy_(source)
    at = offsets([10, 20, 270], DEVICE)
    _, lse = flydsl_flash_attn_func(q, k, v, out=out, return_lse=True, **options(at, at, 270))
    assert failures(q, k, v, at, at, out, lse, True) == [], f"seed {seed}"


def test_a_workspace_past_4_gib(seed):
    q, k, v = inputs(seed, (1, 98304), (1, 8192), heads=24, kv_heads=24)
    assert flydsl_flash_attn_workspace(q, k, v, False, num_kv_splits=4) > 2**32
    whole, whole_lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True)
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True, num_kv_splits=4)
    torch.testing.assert_close(out, whole, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=1e-5)
    rows = torch.tensor([0, 50000, 98303], device=DEVICE)
    report = check(out[:, rows], reference(q[:, rows], k, v, causal=False))
    assert report.ok, f"seed {seed}: {report}"


def test_new_lengths_need_no_new_plan_and_no_synchronisation(seed):
    q, k, v = inputs(seed, (300,), (300,))
    at = [offsets(x, DEVICE) for x in ([100, 150, 50], [0, 120, 180])]
    flydsl_flash_attn_func(q, k, v, **options(at[0], at[0], 200))
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [flydsl_flash_attn_func(q, k, v, num_kv_splits=1, **options(x, x, 200)) for x in at]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, out in zip(at, outs):
        wanted, _ = packed_attention(q, k, v, x, x, causal=True)
        torch.testing.assert_close(out.float(), wanted, atol=1e-2, rtol=0)
