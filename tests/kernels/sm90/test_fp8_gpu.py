"""Attention on 8-bit floats on a Hopper GPU, against float32 on the values that the inputs stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fly import config
from fly.errors import UnsupportedError
from kernels import flash_attn_interface, flash_attn_sm90_fp8
from kernels.flash_attn_api import flash_attn_func, flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.problem.catalogue import DESCALES, FP8_SUMS
from kernels.sm90 import values_ahead
from kernels.sm90.builds import options_of
from kernels.sm90.fp8_builds import TILES, transposing
from tests.kernels.fp8_reference import reference
from tests.kernels.reference import check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
E4M3 = torch.float8_e4m3fn
SHAPES = [(128, 128), (1, 5), (333, 333), (200, 1000), (513, 77), (64, 4096), (2048, 2048)]


def inputs(generator, queries, keys, dim, batch=2, heads=4, kv_heads=2, row=None):
    """q, k and v; rows are `row` elements apart if that is more than `dim`."""
    sizes = ((batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads))
    return [torch.randn(*size, row or dim, device="cuda", generator=generator).to(E4M3)[..., :dim] for size in sizes]


def wrong(generator, q, k, v, causal, **options) -> str | None:
    """What is wrong with a call's results; what is not written stays NaN."""
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    _, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, **options)
    scales = {name: value for name, value in options.items() if name.endswith("descale")}
    report = check(out, reference(q, k, v, causal=causal, **scales), lse)
    return None if report.ok else f"seed {generator.initial_seed()}: {report}"


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lengths(dim, causal, shape, generator):
    assert wrong(generator, *inputs(generator, *shape, dim), causal) is None


@pytest.mark.parametrize("how", FP8_SUMS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads"), [(40, 300, 300, 8), (8, 2000, 2000, 8), (16, 700, 50, 16)]
)
def test_blocks_that_transpose_values_for_each_other(batch, queries, keys, heads, causal, dim, how, generator):
    """Time after time: counters are as they were."""
    q, k, v = inputs(generator, queries, keys, dim, batch, heads, heads)
    first = flydsl_flash_attn_func(q, k, v, causal, fp8_accumulate=how)
    for _ in range(20):
        assert torch.equal(flydsl_flash_attn_func(q, k, v, causal, fp8_accumulate=how), first)
    report = check(first, reference(q, k, v, causal=causal, fp8_accumulate=how))
    assert report.ok, f"seed {generator.initial_seed()}: {report}"
    with config.KERNEL.set_to("sm90_fp8"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(values_ahead, "is_ahead", lambda *given: False)
        patch.setattr(flash_attn_sm90_fp8, "is_ahead", lambda *given: False)
        patch.setattr(flash_attn_interface, "_plans", {})
        assert torch.equal(flydsl_flash_attn_func(q, k, v, causal, fp8_accumulate=how), first)


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("row", TILES, ids=str)
def test_every_build(row, transposes, generator, monkeypatch):
    """Whatever the shape, also with values that add up, scales, heads in a tile and split keys."""

    def build(request, units, typical, table, kind):
        pack = 2 if request.num_heads > request.num_kv_heads else 1
        options = replace(options_of(row, table[row], kind), pack_gqa=pack, features=request.static_features)
        return transposing(options) if transposes else options, request.num_kv_splits

    monkeypatch.setattr(flash_attn_sm90_fp8, "build_for", build)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    dim, _, causal, _, _ = row
    scale = torch.rand(2, 2, device="cuda", generator=generator) + 0.5
    for queries, keys in ((333, 333), (1, 5), (513, 77), (700, 1000)):
        tensors = inputs(generator, queries, keys, dim)
        assert wrong(generator, *tensors, causal) is None
        assert wrong(generator, *tensors, causal, num_kv_splits=3, v_descale=scale, k_descale=scale) is None
    for heads in (2, 4):
        q, k, v = inputs(generator, 256, 8192, dim, heads=heads)
        assert wrong(generator, q, k, v.float().abs().to(E4M3), causal) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("splits", [1, 3, 0])
def test_groups_and_splits(dim, heads, splits, generator):
    for queries in (1, 17, 300):
        tensors = inputs(generator, queries, 900, dim, heads=heads[0], kv_heads=heads[1])
        assert wrong(generator, *tensors, True, num_kv_splits=splits) is None


def before_nan(tensor, keys):
    """(B, S, H, D) with only so many of its tokens, in memory where NaN follows."""
    whole = torch.full((len(tensor), keys + 150, *tensor.shape[2:]), torch.nan, device="cuda").to(E4M3)
    whole[:, :keys] = tensor[:, :keys]
    return whole[:, :keys]


# heads, key heads, queries: rows of a tile that come from heads, or not
DECODING = [(8, 1, 1), (16, 2, 3), (6, 2, 7), (4, 4, 40)]


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("keys", [1, 5, 16, 100, 128, 129, 900, 4000])
@pytest.mark.parametrize("splits", [1, 3, 0])
def test_decoding(dim, keys, splits, generator):
    """V is turned in the kernel; what lies behind the last key does not matter."""
    for heads, kv_heads, queries in DECODING:
        q, *cache = inputs(generator, queries, keys, dim, heads=heads, kv_heads=kv_heads)
        k, v = (before_nan(tensor, keys) for tensor in cache)
        assert wrong(generator, q, k, v, True, num_kv_splits=splits) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("splits", [1, 2, 0])
def test_decoding_of_many_tiles_a_block(dim, splits, generator):
    """More tiles than multiprocessors; split, more than combine themselves."""
    tensors = inputs(generator, 1, 700, dim, batch=40, heads=64, kv_heads=8)
    assert wrong(generator, *tensors, True, num_kv_splits=splits) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_each_key_has_its_own_values(dim, generator):
    """Scores so far apart that a query takes one key's values, exactly: where each byte of V goes."""
    keys = 200
    bits = (torch.arange(keys, device="cuda")[:, None] >> torch.arange(8, device="cuda") & 1) * 16.0 - 8
    q, k = torch.zeros(2, keys, dim, device="cuda").to(E4M3)
    q[:, :8] = k[:, :8] = bits.to(E4M3)
    _, _, v = inputs(generator, 1, keys, dim, batch=1, kv_heads=1)
    k, v = (tensor.reshape(1, keys, 1, dim).repeat(keys, 1, 1, 1) for tensor in (k, v))
    out = flydsl_flash_attn_func(q[:, None, None], k, v, softmax_scale=1.0)
    assert torch.equal(out[:, 0, 0].float(), v[0, :, 0].float())


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_scales(shape, splits, generator):
    def scale():
        return torch.rand(shape, device="cuda", generator=generator) + 0.25

    scales = {"q_descale": scale(), "k_descale": scale(), "v_descale": scale()}
    for queries in (2, 200):
        tensors = inputs(generator, queries, 400, 128)
        assert wrong(generator, *tensors, True, num_kv_splits=splits, **scales) is None
        assert wrong(generator, *tensors, False, v_descale=scales["v_descale"]) is None


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_flash_attentions_functions_take_scales(dim, generator):
    q, k, v = inputs(generator, 200, 400, dim)
    scales = {name: torch.rand(2, 2, device="cuda", generator=generator) + 0.25 for name in DESCALES}
    wanted = reference(q, k, v, causal=True, **scales)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **scales)
    for result in ((out, lse), flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True, **scales)):
        report = check(result[0], wanted, result[1])
        assert report.ok, f"seed {generator.initial_seed()}: {report}"


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_values_of_one_sign(dim, generator):
    """Which add up: what products cut off does as well."""
    for queries, keys in ((4, 8192), (64, 8192), (4096, 4096)):
        q, k, v = inputs(generator, queries, keys, dim)
        assert wrong(generator, q, k, v.float().abs().to(E4M3), True) is None


def test_strides(generator):
    assert wrong(generator, *inputs(generator, 150, 270, 64, row=192), True) is None


def test_a_workspace_of_the_callers(generator):
    q, k, v = inputs(generator, 100, 500, 128)
    size = flydsl_flash_attn_workspace(q, k, v)
    assert size == 2 * 2 * 128 * 512
    assert flydsl_flash_attn_workspace(q[:, :1], k, v) == 0  # nothing is turned beforehand
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    assert wrong(generator, q, k, v, True, workspace=workspace) is None


@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (2, 4000)])
def test_a_captured_call_can_be_replayed(queries, keys, generator):
    q, k, v = inputs(generator, queries, keys, 128)
    out = flydsl_flash_attn_func(q, k, v, num_kv_splits=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = flydsl_flash_attn_func(q, k, v, num_kv_splits=0)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape, device="cuda", generator=generator).to(E4M3))
    graph.replay()
    now = flydsl_flash_attn_func(q, k, v, num_kv_splits=0)
    assert torch.equal(replayed, now) and not torch.equal(replayed, out)


def test_what_is_not_done_is_refused(generator):
    q, k, v = inputs(generator, 64, 64, 128)
    with pytest.raises(UnsupportedError, match="sm90_fp8 kernel does not do dropout"):
        flydsl_flash_attn_func(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_errors_of_shifted_values_grow_with_the_keys_of_fast_sums_alone(dim, generator):
    """At 8192 keys: in float32 they stay where rounding has them, centred ones in both."""
    q, k, v = (x[:1, :, :2] for x in inputs(generator, 256, 8192, dim))
    for shift, most in ((0.0, {"float32": 6e-4, "fast": 6e-4}), (1.0, {"float32": 4e-3, "fast": 2e-1})):
        values = (v.float() + shift).to(E4M3)
        wanted = reference(q, k, values, causal=False).out
        for how, limit in most.items():
            out = flydsl_flash_attn_func(q, k, values, False, fp8_accumulate=how)
            error = (out.float() - wanted).square().mean().sqrt().item()
            assert error <= limit, f"seed {generator.initial_seed()}: {how}, shift {shift}: {error}"
    assert error > 2e-2  # of fast sums of shifted values, which is what the default is for
