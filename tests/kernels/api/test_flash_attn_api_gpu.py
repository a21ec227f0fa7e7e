"""FlashAttention's functions on a GPU: right, captured into a graph, on other streams and on a second device."""

from __future__ import annotations

import secrets

import pytest
import torch

from kernels import flash_attn_api as api
from tests.kernels.api.api_reference import dense, packed
from tests.kernels.reference import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def inference(record_property):
    seed = secrets.randbits(31)
    record_property("seed", seed)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    with torch.no_grad():
        yield


def random(*shape, device="cuda"):
    return torch.randn(*shape).bfloat16().to(device)


def int32(*numbers, device="cuda"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def right(result, reference):
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out.cpu(), reference, None if lse is None else lse.cpu())
    assert report.ok, str(report)


def cpu(*tensors):
    return [tensor.cpu() for tensor in tensors]


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (100, 20)},
    {"window_size": (64, 0), "causal": True, "softcap": 20.0},
]


@pytest.mark.parametrize("head_dim", [40, 64, 77, 128, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(head_dim, options):
    q, k, v = random(2, 200, 8, head_dim), random(2, 333, 2, head_dim), random(2, 333, 2, head_dim)
    result = api.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    right(result[:2], dense(*cpu(q, k, v), **options))


def test_packed():
    lengths = [130, 0, 1, 257]
    qkv, offsets = random(sum(lengths), 3, 4, 64), int32(0, 130, 130, 131, 388)
    out, lse, _ = api.flash_attn_varlen_qkvpacked_func(qkv, offsets, 257, causal=True, return_attn_probs=True)
    right((out, lse), packed(*cpu(*qkv.unbind(1)), lengths, lengths, causal=True))


@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_a_captured_step_of_decoding_follows_the_lengths(num_splits):
    q, new = random(3, 1, 8, 128), [random(3, 1, 2, 128) for _ in range(2)]
    caches, lengths = [random(3, 1000, 2, 128) for _ in range(2)], int32(900, 10, 0)
    copies = cpu(*caches)

    def step():
        return api.flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=lengths, causal=True, num_splits=num_splits, return_softmax_lse=True
        )

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for each in ((900, 10, 0), (5, 998, 63)):
        lengths.copy_(int32(*each))
        graph.replay()
        torch.cuda.synchronize()
        for copy, tokens in zip(copies, cpu(*new)):
            for b, length in enumerate(each):
                copy[b, length] = tokens[b, 0]
        assert all(torch.equal(cache.cpu(), copy) for cache, copy in zip(caches, copies))
        right(result, dense(q.cpu(), *copies, causal=True, keys=[(0, n + 1) for n in each]))


def test_another_stream():
    q, k, v = (random(2, 300, 4, 64) for _ in range(3))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        doubled = q + q  # there only after the sleep
        out = api.flash_attn_func(doubled, k, v, causal=True)
    stream.synchronize()
    right(out, dense(*cpu(q + q, k, v), causal=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_device():
    q, k, v = (random(2, 300, 4, 64, device="cuda:1") for _ in range(3))
    out = api.flash_attn_func(q, k, v, causal=True)
    assert out.device == q.device
    right(out, dense(*cpu(q, k, v), causal=True))
    new, caches = random(2, 1, 4, 64, device="cuda:1"), cpu(k, v)
    lengths = int32(7, 300 - 1, device="cuda:1")
    out = api.flash_attn_with_kvcache(q[:, :1], k, v, new, new, cache_seqlens=lengths, causal=True)
    for cache in caches:
        cache[0, 7], cache[1, 299] = new[0, 0].cpu(), new[1, 0].cpu()
    right(out, dense(q[:, :1].cpu(), *caches, keys=[(0, 8), (0, 300)]))
