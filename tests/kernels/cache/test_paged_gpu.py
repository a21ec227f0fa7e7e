"""Keys in pages on a GPU: the Hopper and the generic kernel against exact attention, graphs, and much memory."""

from __future__ import annotations

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICE = "cuda"
KEYS = [700, 0, 2049, 1, 129, 64]
kernels = pytest.mark.parametrize("kernel", ["sm90", "generic"])


@pytest.fixture(autouse=True)
def forced(kernel, monkeypatch):
    """A test's `kernel`."""
    if kernel == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is no Hopper")
    monkeypatch.setenv("FLY_KERNEL", kernel)


def queries_of(shape, dtype, seed):
    """Queries, uniform in [-1, 1]."""
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    return torch.empty(shape, dtype=dtype, device=DEVICE).uniform_(-1, 1, generator=generator)


def failure(q, paged, queries, out, lse, causal) -> str | None:
    """What is wrong with results for packed queries."""
    lengths = list(zip(queries, paged.lengths.tolist()))
    report = check(out, reference(q, paged.packed_k, paged.packed_v, causal=causal, lengths=lengths), lse)
    return None if report.ok else str(report)


@kernels
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 1024])
@pytest.mark.parametrize(("group", "seq_len", "causal"), [(8, 1, True), (2, 70, True), (1, 200, False)])
@pytest.mark.parametrize("splits", [1, 3])
def test_dense_queries(kernel, page_size, group, seq_len, causal, splits, seed):
    paged = Paged.of(KEYS, page_size, 2, (128, 128), torch.bfloat16, seed, device=DEVICE)
    q = queries_of((len(KEYS), seq_len, 2 * group, 128), torch.bfloat16, seed)
    options = paged.options | {"return_lse": True, "num_kv_splits": splits}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, causal, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), paged, [seq_len] * len(KEYS), out, lse, causal) is None, f"seed {seed}"


@kernels
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("told_by", ["seqused_kv", "cu_seqlens_kv"])
def test_packed_queries(kernel, head_dims, page_size, told_by, seed):
    queries = [1, 5, 130, 0, 17, 64]
    paged = Paged.of(KEYS, page_size, 2, head_dims, torch.float16, seed, device=DEVICE)
    q = queries_of((sum(queries), 8, head_dims[0]), torch.float16, seed)
    lengths = {"seqused_kv": paged.lengths, "cu_seqlens_kv": offsets(KEYS, DEVICE)}
    options = {"block_table": paged.table, told_by: lengths[told_by], "num_kv_splits": 0, "return_lse": True}
    options |= {"cu_seqlens_q": offsets(queries, DEVICE), "max_seqlen_q": max(queries)}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, **options)
    assert failure(q, paged, queries, out, lse, True) is None, f"seed {seed}"


@pytest.mark.parametrize("kernel", ["generic"])
@pytest.mark.parametrize("page_size", [1, 24, 100, 768])
@pytest.mark.parametrize(
    ("head_dims", "seq_len", "splits"), [((128, 128), 1, 3), ((64, 64), 70, 1), ((192, 128), 9, 1)]
)
def test_pages_of_any_number_of_keys(kernel, page_size, head_dims, seq_len, splits, seed):
    paged = Paged.of(KEYS, page_size, 2, head_dims, torch.bfloat16, seed, device=DEVICE)
    q = queries_of((len(KEYS), seq_len, 8, head_dims[0]), torch.bfloat16, seed)
    options = paged.options | {"return_lse": True, "num_kv_splits": splits}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), paged, [seq_len] * len(KEYS), out, lse, True) is None, f"seed {seed}"


@kernels
@pytest.mark.parametrize("seq_len", [1, 200])
def test_rows_of_a_table(kernel, seq_len, seed):
    paged = Paged.of(KEYS, 64, 2, (128, 128), torch.bfloat16, seed, device=DEVICE)
    order = torch.randperm(9, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))[: len(KEYS)]
    table = torch.full((9, paged.table.shape[1]), 2**30, dtype=torch.int32, device=DEVICE)
    table[order] = paged.table
    q = queries_of((len(KEYS), seq_len, 8, 128), torch.bfloat16, seed)
    options = {"block_table": table, "kv_batch_idx": order.to(torch.int32), "seqused_kv": paged.lengths}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), paged, [seq_len] * len(KEYS), out, lse, True) is None, f"seed {seed}"


@pytest.mark.parametrize("kernel", ["generic"])
@pytest.mark.parametrize("page_size", [16, 40])
def test_padding_at_the_left_of_pages(kernel, page_size, seed):
    """What contiguous keys give, bit by bit."""
    paged = Paged.of(KEYS, page_size, 2, (128, 128), torch.bfloat16, seed, device=DEVICE)
    q = queries_of((len(KEYS), 3, 8, 128), torch.bfloat16, seed)
    options = {"cache_leftpad": torch.tensor([5, 0, 700, 3, 128, 63], dtype=torch.int32, device=DEVICE)}
    found = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **paged.options, **options)
    options["seqused_kv"] = paged.lengths
    wanted = flydsl_flash_attn_func(q, *paged.padded(), True, return_lse=True, **options)
    assert all(map(torch.equal, found, wanted)), f"seed {seed}"


@kernels
def test_a_captured_graph_follows_lengths_and_tables(kernel, seed):
    first, second = (
        Paged.of(keys, 16, 2, (128, 128), torch.bfloat16, seed + i, device=DEVICE, spare_entries=spare)
        for i, (keys, spare) in enumerate([([300, 1000], 7), ([1100, 200], 1)])
    )
    assert first.table.shape == second.table.shape
    q = queries_of((2, 1, 16, 128), torch.bfloat16, seed)
    pages = max(len(first.k), len(second.k))
    k, v = (torch.nn.functional.pad(x, (0,) * 7 + (pages - len(x),)) for x in (first.k, first.v))
    table, lengths = first.table.clone(), first.lengths.clone()
    options = {"block_table": table, "seqused_kv": lengths, "num_kv_splits": 4}
    flydsl_flash_attn_func(q, k, v, True, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flydsl_flash_attn_func(q, k, v, True, **options)
    for paged in (first, second):
        k[: len(paged.k)], v[: len(paged.v)] = paged.k, paged.v
        table.copy_(paged.table), lengths.copy_(paged.lengths)
        graph.replay()
        assert failure(q.flatten(0, 1), paged, [1, 1], out.flatten(0, 1), None, True) is None, f"seed {seed}"


@kernels
def test_pages_past_2_to_the_31_elements(kernel, seed):
    torch.cuda.empty_cache()
    pages, size, dim = 140_000, 128, 128
    pools = [torch.empty(pages, size, 1, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    table = torch.tensor([[pages - 1, 0, pages // 2, pages - 3]], dtype=torch.int32, device=DEVICE)
    for i, pool in enumerate(pools):
        pool[table[0].long()] = queries_of((4, size, 1, dim), torch.bfloat16, seed + i)
    q = queries_of((1, 3, 4, dim), torch.bfloat16, seed + 2)
    lengths = torch.tensor([450], dtype=torch.int32, device=DEVICE)
    out, lse = flydsl_flash_attn_func(q, *pools, True, block_table=table, seqused_kv=lengths, return_lse=True)
    k, v = (pool[table[0].long()].flatten(0, 1)[None, :450] for pool in pools)
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"
