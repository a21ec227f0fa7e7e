"""The Hopper backward kernel on a GPU, at lengths that the simulator has no time for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fly import config
from kernels import flash_attn_sm90_bwd
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from kernels.sm90 import ahead
from tests.kernels.backward.test_block_mask_gradients import uneven
from tests.kernels.backward.test_block_mask_gradients import wrong as wrong_with_mask
from tests.kernels.backward.test_generic_bwd_gpu import wrong
from tests.kernels.backward.test_thrift import CASES as THRIFTY
from tests.kernels.backward.test_thrift import wrong_of_case
from tests.kernels.feature_cases import FEATURES, Inputs, stripes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "sm90")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1234), (1300, 700), (64, 4096), (4096, 64)])
def test_every_head_dimension(queries, keys, head_dim, dtype, causal, seed):
    inputs = Inputs([queries] * 2, [keys] * 2, 4, 2, head_dim, dtype, seed=seed, device="cuda")
    assert not wrong(inputs, causal), f"seed {seed}"


DIMS = {
    "sm90": [(8, 8), (24, 128), (32, 16), (40, 40), (72, 96), (96, 72), (128, 64)],
    "sm90_wide": [(256, 256), (192, 192), (192, 128), (136, 40), (160, 224)],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dims"), [(kernel, dims) for kernel, all_dims in DIMS.items() for dims in all_dims]
)
def test_head_dimensions_are_filled_up(kernel, dims, packed, causal, monkeypatch, seed):
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, kernel)
    queries, keys = ([0, 1, 777, 64], [5, 1, 1300, 300]) if packed else ([500] * 2, [700] * 2)
    inputs = Inputs(queries, keys, 4, 2, dims[0], packed=packed, head_dim_v=dims[1], seed=seed, device="cuda")
    assert not wrong(inputs, causal), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["softcap", "window", "chunk", "slopes", "sink", "function", "bias", "score"])
def test_features(name, head_dim, seed):
    inputs = Inputs([700] * 2, [900] * 2, 4, 2, head_dim, seed=seed, device="cuda")
    options = {
        "softcap": lambda: {"softcap": 5.0},
        "window": lambda: {"window_size": (200, 30)},
        "chunk": lambda: {"attention_chunk": 300},
        "slopes": lambda: {"alibi_slopes": inputs.floats(2, 4).abs()},
        "sink": lambda: {"sink": inputs.floats(4)},
        "function": lambda: {"mask_mod": stripes},
        "bias": lambda: {"bias": inputs.floats(2, 4, 700, 900)},
        "score": lambda: FEATURES["score_mod aux"](inputs),
    }[name]()
    assert not wrong(inputs, False, **options), f"seed {seed}"


@pytest.mark.parametrize("block", [128, (64, 128), (50, 40)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_block_masks(head_dim, block, seed):
    inputs = Inputs([700], [900], 4, 2, head_dim, seed=seed, device="cuda")
    mask = create_block_mask(uneven, None, 4, 700, 900, "cuda", block)
    assert not wrong_with_mask(inputs, False, mask), f"seed {seed}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim, causal, seed):
    lengths = [0, 1, 777, 64, 2000, 129]
    inputs = Inputs(lengths, [5, 1, 777, 300, 1500, 0], 4, 1, head_dim, packed=True, seed=seed, device="cuda")
    assert not wrong(inputs, causal), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [104, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1700, 1999, False), (4500, 4300, True), (2048, 2048, False)]
)
def test_tiles_in_pairs(queries, keys, causal, packed, head_dim, monkeypatch, seed):
    """Of even and odd numbers of tiles."""
    found, pays = [], flash_attn_sm90_bwd.pays
    monkeypatch.setattr(flash_attn_sm90_bwd, "pays", lambda *given: found.append(pays(*given)) or found[-1])
    lengths = [[n, n + 65 * packed] for n in (queries, keys)]
    inputs = Inputs(*lengths, 2, 1, head_dim, packed=packed, seed=seed, device="cuda")
    for _ in range(3):
        assert not wrong(inputs, causal), f"seed {seed}"
    assert found and all(found)


@pytest.mark.parametrize("name", THRIFTY)
def test_builds_that_find_things_out_again(name, monkeypatch, seed):
    assert not wrong_of_case(name, 7, monkeypatch, seed, "cuda"), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_heads_share_keys(head_dim, seed):
    inputs = Inputs([600], [600], 16, 1, head_dim, seed=seed, device="cuda")
    assert not wrong(inputs, True), f"seed {seed}"


def test_launches_one_after_the_other_do_not_meet(seed):
    """Each begins with sums of zero, whatever the last one left."""
    inputs = Inputs([1024], [1024], 4, 4, 128, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    out = flydsl_flash_attn_func(*leaves)
    dout = inputs.floats(*out.shape, dtype=out.dtype)
    step = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    first = step()
    for again in [step() for _ in range(30)]:
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        # no sum of theirs is shared
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "head_dim"), [("sm90", 64), ("sm90", 128), ("sm90_wide", 192), ("sm90_wide", 256)]
)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_deterministic_gradients_are_the_same_bits_every_time(kv_heads, kernel, head_dim, causal, monkeypatch, seed):
    """More blocks than there are multiprocessors wait for one another."""
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, kernel)
    inputs = Inputs([1900] * 3, [2100] * 3, 8, kv_heads, head_dim, seed=seed, device="cuda")
    assert not wrong(inputs, causal, deterministic=True), f"seed {seed}"
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    out = flydsl_flash_attn_func(*leaves, causal, deterministic=True)
    dout = inputs.floats(*out.shape, dtype=out.dtype)
    step = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    first = step()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.parametrize(("kernel", "head_dim"), [("sm90", 128), ("sm90_wide", 192)])
def test_a_thousand_deterministic_gradients_are_the_same_bits(kernel, head_dim, monkeypatch, seed):
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, kernel)
    inputs = Inputs([1000], [1000], 8, 2, head_dim, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    out = flydsl_flash_attn_func(*leaves, deterministic=True)
    dout = inputs.floats(*out.shape, dtype=out.dtype)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for i in range(1000):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(map(torch.equal, first, again)), f"seed {seed}, call {i}"


@pytest.mark.parametrize("name", ["packed", "window", "queries without keys"])
def test_deterministic_gradients_of_other_forms(name, seed):
    sizes, causal, options = {
        "packed": ({"queries": [0, 1, 777, 129], "keys": [5, 1, 1500, 0], "packed": True}, True, {}),
        "window": ({"queries": [2000], "keys": [2000]}, False, {"window_size": (300, 20)}),
        "queries without keys": ({"queries": [1300], "keys": [700]}, True, {}),
    }[name]
    inputs = Inputs(**sizes, heads=4, kv_heads=2, head_dim=128, seed=seed, device="cuda")
    assert not wrong(inputs, causal, deterministic=True, **options), f"seed {seed}"


def test_a_captured_graph_may_be_replayed(seed):
    inputs = Inputs([500], [500], 4, 2, 64, seed=seed, device="cuda")
    leaves = [x.requires_grad_() for x in inputs.tensors()]
    dout = inputs.floats(*leaves[0].shape, dtype=leaves[0].dtype)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flydsl_flash_attn_func(*leaves), leaves, dout)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "head_dim"), [("sm90", 64), ("sm90", 128), ("sm90_wide", 192), ("sm90_wide", 256)]
)
def test_query_heads_in_parts(kernel, head_dim, packed, causal, monkeypatch, seed):
    found, parts_of = [], flash_attn_sm90_bwd.parts_of
    monkeypatch.setattr(flash_attn_sm90_bwd, "parts_of", lambda *given: found.append(parts_of(*given)) or found[-1])
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, kernel)
    lengths = [400, 0, 113] if packed else [513]
    inputs = Inputs(lengths, lengths, 16, 2, head_dim, packed=packed, seed=seed, device="cuda")
    assert not wrong(inputs, causal), f"seed {seed}"
    assert found and all(parts > 1 for parts in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(30, 4, 2), (8, 8, 8)])
@pytest.mark.parametrize("head_dim", [104, 128, 192, 256])
def test_sums_are_cleared_ahead(head_dim, batch, heads, kv_heads, causal, monkeypatch, seed):
    """Enough heads for it; what was in the memory before is no number."""
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "sm90_wide" if head_dim > 128 else "sm90")
    monkeypatch.setattr(ahead, "SHORT", 0)
    inputs = Inputs([700] * batch, [600] * batch, heads, kv_heads, head_dim, seed=seed, device="cuda")
    for _ in range(2):
        memory = torch.full((2**26,), torch.nan, device="cuda")
        del memory
        assert not wrong(inputs, causal), f"seed {seed}"
