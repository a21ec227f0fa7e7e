"""Features on 8-bit inputs on a Hopper GPU: every form that 16 bits have, with many queries and in decoding."""

from __future__ import annotations

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, compare
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.paged import Paged

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
E4M3 = torch.float8_e4m3fn
HEAD_DIMS = [64, 96, 128, 192, 256]
NAMES = [name for name in FEATURES if name != "dropout"]
how = pytest.mark.parametrize("how", ["float32", "fast"])


@how
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_feature(name, packed, head_dim, how, seed):
    """More rows than a tile of queries, and more keys than two tiles; then few queries."""
    if packed and name in DENSE_ONLY:
        pytest.skip("packed sequences do not have it")
    for queries, keys in ((300, 600), (2, 600)):
        lengths = ([queries, 1, queries], [keys, 5, 77]) if packed else ([queries] * 2, [keys] * 2)
        inputs = Inputs(*lengths, 4, 2, head_dim, "e4m3", packed, seed=seed, device="cuda")
        options = inputs.form() | FEATURES[name](inputs)
        tensors = inputs.tensors(3 if name == "kv_batch_idx" else None)
        for causal in (False, True):
            report = compare(*tensors, causal, **options, fp8_accumulate=how)
            assert report.ok, f"seed {seed}, {queries} queries, causal {causal}: {report}"


@how
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("size", [16, 64, 256])
def test_pages(size, head_dim, how, seed):
    """Of prompts and of decoding."""
    keys = [700, 0, 333, 1]
    wide = Paged.of(keys, size, 2, (head_dim, head_dim), torch.float32, seed, device="cuda")
    k, v = wide.k.to(E4M3), wide.v.to(E4M3)
    for queries in (3, 200):
        q = torch.randn(len(keys), queries, 8, head_dim, device="cuda").to(E4M3)
        options = dict(wide.options)
        out, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True, fp8_accumulate=how, **options)
        options.pop("max_seqlen_kv", None)
        report = check_used(out, feature_reference(q, k, v, True, how, **options), lse)
        assert report.ok, f"seed {seed}, {queries} queries: {report}"
