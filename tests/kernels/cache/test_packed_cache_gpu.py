"""Packed queries of a cache on a GPU: the Hopper and the generic kernel against exact attention."""

from __future__ import annotations

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets
from tests.kernels.reference import check, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICE = "cuda"


@pytest.mark.parametrize("kernel", ["sm90", "generic"])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [130, 0, 1, 700], [7, 300, 20, 0]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("causal", "splits"), [(True, 1), (False, 1), (True, 3)])
def test_packed_queries_of_a_cache(kernel, queries, head_dim, causal, splits, seed, monkeypatch):
    if kernel == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is no Hopper")
    monkeypatch.setenv("FLY_KERNEL", kernel)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).uniform_(-1, 1, generator=generator)

    def int32(*numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    q, k, v = random(sum(queries), 8, head_dim), random(6, 1000, 2, head_dim), random(6, 1000, 2, head_dim)
    entries, lengths, skipped = [5, 0, 3, 1], [900, 1000, 33, 0], [17, 0, 30, 0]
    options = {"cu_seqlens_q": offsets(queries, DEVICE), "max_seqlen_q": max(queries), "num_kv_splits": splits}
    options |= {"seqused_kv": int32(*lengths), "cache_leftpad": int32(*skipped), "kv_batch_idx": int32(*entries)}
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)
    packed = [torch.cat([x[e, a:b] for e, a, b in zip(entries, skipped, lengths)]) for x in (k, v)]
    counts = [(n, b - a) for n, a, b in zip(queries, skipped, lengths)]
    report = check(out, reference(q, *packed, causal=causal, lengths=counts), lse)
    assert report.ok, f"seed {seed}: {report}"
