"""The simulator against a Hopper GPU: the same calls on both, bit for bit where the order of additions is defined."""

from __future__ import annotations

import pytest
import torch

from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
LSE_ROUNDING = 2.0**-20  # relative: exponentials and sums in float32
OUT_ROUNDING = 2.0**-7  # of the largest value: where a probability or a result is rounded to 16 bits another way
SAME = 0.95  # of the results are the same 16 bits

SHAPES = [(64, 64), (100, 300), (1, 500), (200, 200)]
FORMS = ["dense", "packed", "paged", "split", "lengths"]


def both(monkeypatch, q, k, v, causal, **options):
    """(out, lse) of the simulator and of the GPU, of tensors in host memory."""
    monkeypatch.setenv(config.ARCH.name, "sm_90a")
    results = []
    for device in ("cpu", "cuda"):
        given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        results.append(flydsl_flash_attn_func(*(x.to(device) for x in (q, k, v)), causal, return_lse=True, **given))
    return results[0], tuple(x.cpu() for x in results[1])


def inputs(form, queries, keys, dim, seed):
    """q, k, v and options of two sequences."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    if form == "paged":
        pages = Paged.of((keys, keys // 3), 64, 1, (dim, dim), torch.bfloat16, seed)
        return random(2, queries, 2, dim), pages.k, pages.v, pages.options
    if form == "packed":
        lengths = {"cu_seqlens_q": offsets([queries, 0, 5]), "cu_seqlens_kv": offsets([keys, 7, 33])}
        lengths |= {"max_seqlen_q": max(queries, 5), "max_seqlen_kv": max(keys, 33)}
        return random(queries + 5, 2, dim), random(keys + 40, 1, dim), random(keys + 40, 1, dim), lengths
    options = {"split": {"num_kv_splits": 3}, "lengths": {"seqused_kv": torch.tensor([keys, 5], dtype=torch.int32)}}
    return random(2, queries, 2, dim), random(2, keys, 1, dim), random(2, keys, 1, dim), options.get(form, {})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_calls_differ_by_rounding(form, shape, seed, monkeypatch):
    number = FORMS.index(form) + SHAPES.index(shape)
    q, k, v, options = inputs(form, *shape, (64, 128)[number % 2], seed)
    (out, lse), (gpu_out, gpu_lse) = both(monkeypatch, q, k, v, number % 3 > 0, **options)
    finite = gpu_lse.isfinite()
    assert torch.equal(lse[~finite], gpu_lse[~finite]), f"seed {seed}"
    assert ((lse - gpu_lse).abs()[finite] <= LSE_ROUNDING * gpu_lse.abs()[finite].clamp(min=1.0)).all(), (
        f"seed {seed}"
    )
    out, gpu_out = out.float(), gpu_out.float()
    assert (out - gpu_out).abs().max() <= OUT_ROUNDING * gpu_out.abs().max(), f"seed {seed}"
    assert (out == gpu_out).float().mean() >= SAME, f"seed {seed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("keys", [16, 130, 250])
@pytest.mark.parametrize("queries", [1, 40, 250])
def test_one_key_a_query_is_the_same_bit_for_bit(dtype, keys, queries, seed, monkeypatch):
    """Scores so far apart that every sum has one term: where each byte goes, and no order to add in."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8) & 1) * 16.0 - 8
    q, k = torch.zeros(1, queries, 2, 64), torch.zeros(1, keys, 1, 64)
    q[..., :8], k[..., :8] = bits[:queries, None], bits[:keys, None]
    v = torch.randn(1, keys, 1, 64, generator=torch.Generator().manual_seed(seed))
    tensors = [x.to(dtype) for x in (q, k, v)]
    (out, _), (gpu_out, _) = both(monkeypatch, *tensors, False, softmax_scale=1.0)
    rows = min(queries, keys)  # further ones see no key of their own
    assert torch.equal(out[:, :rows], gpu_out[:, :rows]), f"seed {seed}"
    assert torch.equal(out[0, :rows, 0].float(), tensors[2][0, :rows, 0].float())
