"""8-bit caches with 16-bit queries on a GPU: the Hopper kernel's converter, and the generic kernel."""

from __future__ import annotations

import random

import pytest
import torch

from fly import config
from kernels import flash_attn_interface
from kernels.cache.kv_cache import append_to_cache
from kernels.flash_attn_api import flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.integrations import vllm
from tests.kernels.cache.fp8_caches import E4M3, KINDS, Cache, Scales, flattened, numbers, queries, wrong
from tests.kernels.packed import offsets

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
KEYS = [700, 0, 2049, 1, 129, 64]
ROWS = [(8, 1), (2, 9), (1, 40), (4, 200)]  # query heads a key head, queries
BF16, F16 = torch.bfloat16, torch.float16
kernels = pytest.mark.parametrize("kernel", ["sm90_fp8_cache", "generic"])


@pytest.fixture(autouse=True)
def drawn(seed, monkeypatch):
    """Everything is drawn from the test's seed, on a plan of its own."""
    torch.manual_seed(seed)
    random.seed(seed)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})


def force(monkeypatch, kernel: str) -> None:
    monkeypatch.setenv(config.KERNEL.name, kernel)


@kernels
@pytest.mark.parametrize("size", [None, 16, 64, 256])
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 48)], ids=lambda d: "x".join(map(str, d))
)
@pytest.mark.parametrize("splits", [1, 3, 0])
def test_caches(kernel, size, dims, splits, monkeypatch, seed):
    force(monkeypatch, kernel)
    for (group, rows), dtype in zip(ROWS, random.sample((BF16, BF16, F16, F16), 4)):
        kind = random.choice(KINDS), random.choice(KINDS)
        cache = Cache.of(KEYS, 2, dims, kind, size, "cuda")
        q = queries(len(KEYS), rows, 2 * group, dims[0], dtype=dtype, device="cuda")
        options = {"return_lse": True, "num_kv_splits": splits} | cache.options
        out, lse = flydsl_flash_attn_func(q, cache.k, cache.v, True, **options)
        assert wrong(*flattened(out, lse), cache.parts(q), True) is None, f"seed {seed}: {kind} {group} {rows}"


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kernel, kind, causal, monkeypatch, seed):
    force(monkeypatch, kernel)
    lengths, keys = [1, 50, 8, 0, 2, 300], [700, 50, 129, 64, 1, 300]
    q = queries(sum(lengths), 8, 128, dtype=BF16, device="cuda")
    k, v = (numbers(sum(keys), 2, 128, device="cuda") for _ in range(2))
    scales = [Scales.of(kind, len(keys), (sum(keys),), 2, "cuda") for _ in range(2)]
    options = {f"{n}_descale": s.given for n, s in zip("kv", scales) if s.given is not None}
    options |= {"cu_seqlens_q": offsets(lengths, "cuda"), "cu_seqlens_kv": offsets(keys, "cuda")}
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(keys)}
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)

    def meant(tensor, scale):
        own = scale.given.split(keys) if kind == "key" else [None] * len(keys)
        return [scale.times(part, b, own[b]) for b, part in enumerate(tensor.split(keys))]

    parts = zip(q.split(lengths), meant(k, scales[0]), meant(v, scales[1]))
    assert wrong(out, lse, list(parts), causal) is None, f"seed {seed}"


@kernels
def test_chunked_prefill_as_vllm_calls(kernel, monkeypatch, seed):
    """Packed queries, a few in one sequence and many in another."""
    force(monkeypatch, kernel)
    lengths = [min(most, n) for most, n in zip((1, 300, 1, 1, 129, 7), KEYS)]
    cache = Cache.of(KEYS, 2, (128, 128), ("sequence", "sequence"), 64, "cuda")
    q = queries(sum(lengths), 16, 128, dtype=BF16, device="cuda")
    given = dict(cache.options)
    given["seqused_k"] = given.pop("seqused_kv")
    packed = {"cu_seqlens_q": offsets(lengths, "cuda"), "max_seqlen_q": max(lengths), "max_seqlen_k": max(KEYS)}
    out, lse = vllm.flash_attn_varlen_func(
        q,
        cache.k,
        cache.v,
        causal=True,
        return_softmax_lse=True,
        **packed,
        **given,
    )
    assert wrong(out, lse, cache.parts(q.split(lengths)), True) is None, f"seed {seed}"


@kernels
def test_padding_at_the_left_and_entries(kernel, monkeypatch, seed):
    force(monkeypatch, kernel)
    cache = Cache.of([700, 5, 129, 900], 2, (128, 128), ("key", "key"), None, "cuda", leftpad=[0, 2, 100, 513])
    q = queries(4, 3, 16, 128, dtype=F16, device="cuda")
    renamed = {"seqused_kv": "cache_seqlens", "kv_batch_idx": "cache_batch_idx"}
    options = {renamed.get(name, name): value for name, value in cache.options.items()}
    out, lse = flash_attn_with_kvcache(q, cache.k, cache.v, causal=True, return_softmax_lse=True, **options)
    assert wrong(*flattened(out, lse), cache.parts(q), True) is None, f"seed {seed}"


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("kind", ["head", "key"])
def test_features_are_those_of_the_converted_cache(rows, kind, seed):
    """Windows, softcap, slopes and sinks next to the same call on 16 bits."""
    batch, keys, heads, kv_heads, dim = 2, 900, 8, 2, 128
    q = queries(batch, rows, heads, dim, dtype=BF16, device="cuda")
    k, v = (numbers(batch, keys, kv_heads, dim, device="cuda") for _ in range(2))
    # powers of two: the converted cache is the same
    shape = (kv_heads,) if kind == "head" else (batch, keys, kv_heads)
    scales = [2.0 ** torch.randint(-2, 2, shape, device="cuda").float() for _ in range(2)]
    wide = [(x.float() * s[..., None]).to(BF16) for x, s in zip((k, v), scales)]
    for options in (
        {"window_size": (130, 0)},
        {"softcap": 5.0},
        {"alibi_slopes": torch.rand(heads, device="cuda")},
        {"sink": torch.randn(heads, device="cuda")},
        {"attention_chunk": 256, "softcap": 3.0, "sink": torch.randn(heads, device="cuda")},
        {"split_keys": 256},
    ):
        options |= {"return_lse": True}
        near = 2.0**-8 * wide[1].abs().max().item()
        mine = flydsl_flash_attn_func(q, k, v, True, k_descale=scales[0], v_descale=scales[1], **options)
        other = flydsl_flash_attn_func(q, *wide, True, **options)
        for a, b in zip(mine, other):
            assert torch.allclose(a.float(), b.float(), atol=near, rtol=0.0), f"seed {seed}: {options}"


def test_a_captured_graph_follows_scales_and_lengths(seed):
    cache = Cache.of([300, 1000], 2, (128, 128), ("key", "sequence"), 64, "cuda")
    q = queries(2, 1, 16, 128, dtype=BF16, device="cuda")
    options = {"return_lse": True, "num_kv_splits": 0} | cache.options
    flydsl_flash_attn_func(q, cache.k, cache.v, True, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flydsl_flash_attn_func(q, cache.k, cache.v, True, **options)
    graph.replay()
    assert wrong(*flattened(out, lse), cache.parts(q), True) is None, f"seed {seed}"
    cache.options["v_descale"].mul_(2.0)
    graph.replay()
    parts = [(query, key, value * 2) for query, key, value in cache.parts(q)]
    assert wrong(*flattened(out, lse), parts, True) is None, f"seed {seed}"


def test_every_byte_is_converted(seed):
    """One key a sequence: out is its value, exactly, also a NaN and subnormal ones."""
    k = torch.zeros(256, 1, 1, 64, device="cuda").to(E4M3)
    v = torch.arange(256, dtype=torch.uint8, device="cuda").view(256, 1, 1, 1).expand(256, 1, 1, 64).contiguous()
    v = v.view(E4M3)
    for dtype in (BF16, F16):
        q = torch.zeros(256, 1, 1, 64, device="cuda", dtype=dtype)
        out = flydsl_flash_attn_func(q, k, v)
        assert torch.equal(out.nan_to_num(1e4), v.to(dtype).nan_to_num(1e4)), dtype


@pytest.mark.parametrize("kind", ["none", "head", "sequence", "key"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rows_are_quantised_as_torch_does(kind, dtype, seed):
    batch, new, heads, rows = 3, 300, 8, (3, 700)
    q, k, v = (queries(batch, new, heads, 128, dtype=dtype, device="cuda") for _ in range(3))
    caches = [torch.zeros(*rows, heads, 128, device="cuda").to(E4M3) for _ in range(2)]
    scales = [Scales.of(kind, batch, rows, heads, "cuda").given for _ in range(2)]
    lengths = torch.tensor([0, 200, 400], dtype=torch.int32, device="cuda")
    options = {} if kind == "none" else dict(zip(("k_descale", "v_descale"), scales))
    append_to_cache(q, *caches, k, v, cache_seqlens=lengths, **options)
    for cache, fresh, scale in zip(caches, (k, v), scales):
        for b, first in enumerate(lengths.tolist()):
            values = fresh[b].float()
            mine = {"none": 1.0, "head": scale, "sequence": scale[b] if kind == "sequence" else None}.get(kind)
            if kind == "key":
                mine = (values.abs().amax(-1) * (1 / 448)).clamp(min=2.0**-126)
                assert torch.equal(scale[b, first : first + new], mine), f"seed {seed}"
            factor = mine if kind == "none" else mine[..., None]
            wanted = (values / factor).clamp(-448, 448).to(E4M3)
            got = cache[b, first : first + new]
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), f"seed {seed}"
