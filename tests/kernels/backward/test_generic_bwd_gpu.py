"""The generic backward kernels on a GPU, at lengths that no emulator has time for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fly import config
from fly.runtime.cuda import LAUNCHES_WITHOUT_GRAPH
from kernels.flash_attn_api import flash_attn_varlen_qkvpacked_func
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import Inputs, by_head, stripes
from tests.kernels.gradient_reference import by_autograd, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(autouse=True)
def generic(monkeypatch):
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "generic")


DIMS = [(32, 32), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256), (192, 128)]


def wrong(inputs: Inputs, causal: bool, deterministic: bool = False, **options) -> list[str]:
    q, k, v = inputs.tensors()
    options |= inputs.form()
    dout = inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3])
    longest = {"max_seqlen_q": max(inputs.queries), "max_seqlen_kv": max(inputs.keys)} if inputs.packed else {}
    found = by_autograd(q, k, v, causal, dout, dlse, deterministic=deterministic, **options, **longest)
    return gradients(q, k, v, causal, dout, dlse, **options).wrong(found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("dims", DIMS)
def test_every_head_dimension(dims, dtype, causal, seed):
    inputs = Inputs([1000] * 2, [1234] * 2, 4, 2, dims[0], dtype, head_dim_v=dims[1], seed=seed, device="cuda")
    assert not wrong(inputs, causal), f"seed {seed}"


@pytest.mark.parametrize("name", ["softcap", "window", "chunk", "slopes", "bias", "sink", "functions"])
def test_features(name, seed):
    inputs = Inputs([700] * 2, [900] * 2, 4, 2, 64, seed=seed, device="cuda")
    options = {
        "softcap": lambda: {"softcap": 5.0},
        "window": lambda: {"window_size": (200, 30)},
        "chunk": lambda: {"attention_chunk": 300},
        "slopes": lambda: {"alibi_slopes": inputs.floats(2, 4).abs()},
        "bias": lambda: {"bias": inputs.floats(2, 4, 700, 900)},
        "sink": lambda: {"sink": inputs.floats(4)},
        "functions": lambda: {"score_mod": by_head, "mask_mod": stripes, "aux_tensors": (inputs.floats(4, 900),)},
    }[name]()
    assert not wrong(inputs, False, **options), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences(head_dim, seed):
    lengths = [0, 1, 777, 64, 2000, 129]
    inputs = Inputs(lengths, [5, 1, 777, 300, 1500, 0], 4, 1, head_dim, packed=True, seed=seed, device="cuda")
    assert not wrong(inputs, True), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences(head_dim, seed):
    inputs = Inputs([8192], [8192], 2, 1, head_dim, seed=seed, device="cuda")
    assert not wrong(inputs, True), f"seed {seed}"


def test_results_are_the_same_bits_every_time(seed):
    inputs = Inputs([1000], [1000], 8, 2, 128, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    out = flydsl_flash_attn_func(*leaves)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def captured(step: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A graph of a step, which was taken once before, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def test_a_captured_step_may_be_replayed(seed):
    inputs = Inputs([500], [500], 4, 4, 64, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flydsl_flash_attn_func(*leaves), leaves, dout)

    graph, results = captured(step)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


def test_a_captured_step_of_stacked_sequences_takes_new_lengths(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    qkv = torch.randn(300, 3, 4, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_attn_varlen_qkvpacked_func(qkv, offsets, 300, causal=True)
        return torch.autograd.grad(out.float().square().sum(), qkv)

    graph, (found,) = captured(step)
    for new in ([0, 300, 300], [0, 17, 250]):  # the last one leaves tokens out, whose gradient is zero
        offsets.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        used = slice(0, new[-1])
        assert torch.equal(found[used], step()[0][used])
    assert not found[250:].any()


def test_a_warm_step_does_not_wait_for_the_gpu(seed):
    inputs = Inputs([500], [500], 4, 4, 64, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    dout = torch.randn_like(leaves[0])

    def step() -> None:
        torch.autograd.grad(flydsl_flash_attn_func(*leaves), leaves, dout)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "batch, tokens, strides",
    [(2, 80, (2**31, 128, 64, 1)), (2, 300, (8192, 2**23 - 64, 64, 1))],
    ids=["between batches", "between rows"],
)
def test_offsets_of_inputs_past_32_bits(batch, tokens, strides, seed):
    inputs = Inputs([tokens] * batch, [tokens] * batch, 2, 2, 64, seed=seed, device="cuda")
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    last = sum(stride * (size - 1) for stride, size in zip(strides, q.shape, strict=True))
    assert last > 2**31
    memory = torch.empty(last + 2**17, dtype=q.dtype, device="cuda")
    far = [memory.as_strided(q.shape, strides, 2**15 * i) for i in range(4)]
    for x, source in zip(far, (q, k, v, dout), strict=True):
        x.copy_(source)
    found = by_autograd(*far[:3], True, far[3], None)
    assert not gradients(q, k, v, True, dout).wrong(found), f"seed {seed}"


def test_offsets_of_results_past_32_bits(seed):
    """2049 sequences of 64 tokens with 128 heads: the last one has gradients of its own, the others none."""
    count, tokens, dim = 2049, 64, 128
    lengths = [tokens] * count
    inputs = Inputs(lengths, lengths, 128, 1, dim, packed=True, seed=seed, device="cuda")
    q = torch.zeros(count * tokens, 128, dim, dtype=torch.bfloat16, device="cuda")
    assert (q.numel() - q[0].numel() * tokens) >= 2**31
    k, v = (torch.zeros(count * tokens, 1, dim, dtype=q.dtype, device="cuda") for _ in range(2))
    dout = torch.zeros_like(q)
    for x in (q, k, v, dout):
        x[-tokens:] = inputs.floats(*x[-tokens:].shape, dtype=x.dtype)
    options = {**inputs.form(), "max_seqlen_q": tokens, "max_seqlen_kv": tokens}
    found = by_autograd(q, k, v, True, dout, None, **options)
    last = [x[None, -tokens:] for x in (q, k, v, dout)]
    expected = gradients(*last[:3], True, last[3])
    assert not expected.wrong([x[None, -tokens:] for x in found]), f"seed {seed}"
    assert not any(x[:-tokens].any() for x in found)


@pytest.mark.parametrize("own_stream", [False, True])
def test_calls_one_after_the_other(own_stream, seed):
    """Statistics of rows, dK and dV, and dQ of many calls are queued at once; memory goes from one to the next."""
    shapes = [(300, 64), (1000, 128), (65, 64), (700, 256)]
    some = []
    for i, (tokens, dim) in enumerate(shapes):
        inputs = Inputs([tokens], [tokens], 4, 2, dim, seed=seed + i, device="cuda")
        q, k, v = inputs.tensors()
        some.append((q, k, v, inputs.floats(*q.shape, dtype=q.dtype)))
    alone = []
    for q, k, v, dout in some:
        alone.append(by_autograd(q, k, v, True, dout, None))
        torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(stream):
        for _ in range(30):
            for q, k, v, dout in some:
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                found.append(torch.autograd.grad(flydsl_flash_attn_func(*leaves), leaves, dout))
    torch.cuda.synchronize()
    for i, of in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(of, alone[i % len(some)], strict=True)), f"seed {seed}, call {i}"


def test_warm_calls_on_other_tensors_and_streams_are_the_first_one(seed):
    """The driver queues a thread's warm launches as a graph; a captured stream gets the kernels themselves."""
    inputs = Inputs([130] * 2, [150] * 2, 4, 2, 64, seed=seed, device="cuda")
    tensors = inputs.tensors()
    dout = inputs.floats(*tensors[0].shape, dtype=tensors[0].dtype)

    def step(leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flydsl_flash_attn_func(*leaves), leaves, dout)

    leaves = [x.clone().requires_grad_() for x in tensors]
    expected, streams = step(leaves), (torch.cuda.current_stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    for i in range(4 * LAUNCHES_WITHOUT_GRAPH):
        with torch.cuda.stream(streams[i % 2]):
            found = step([x.clone().requires_grad_() for x in tensors])
            assert all(map(torch.equal, found, expected)), f"seed {seed}, call {i}"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(leaves)
    graph.replay()
    assert all(map(torch.equal, found, expected)), f"seed {seed}"
