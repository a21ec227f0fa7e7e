"""The backward pass by itself: into the caller's gradients and workspace, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from fly_attention import flydsl_flash_attn_backward, flydsl_flash_attn_func, flydsl_flash_attn_workspace
from tests.kernels.feature_cases import FEATURES, Inputs


@pytest.fixture(autouse=True)
def emulated(emulate):
    emulate("gfx950", "generic")


def call(seed: int, packed: bool = False, **sizes: Any) -> tuple[Inputs, list[torch.Tensor], torch.Tensor]:
    """(inputs, q, k and v, dout)."""
    lengths = {"queries": [20, 9], "keys": [12, 20]} if packed else {"queries": [20], "keys": [30]}
    inputs = Inputs(**lengths, heads=2, kv_heads=1, head_dim=64, packed=packed, seed=seed, **sizes)
    q, k, v = inputs.tensors()
    return inputs, [q, k, v], inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


def autograds(
    inputs: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """out, lse and the gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = flydsl_flash_attn_func(*leaves, return_lse=True, **options)
    return out.detach(), lse.detach(), torch.autograd.grad((out, lse), leaves, (dout, dlse))


def options_of(name: str, inputs: Inputs) -> dict[str, Any]:
    if name == "packed":
        return {**inputs.form(), "max_seqlen_q": 20, "max_seqlen_kv": 20}
    if name == "dropout":
        return {"dropout_p": 0.3, "rng_state": torch.tensor([inputs.seed, 4])}
    return FEATURES[name](inputs) if name else {}


@pytest.mark.parametrize("name", ["", "packed", "dropout", "sink", "score_mod aux"])
def test_gradients_are_autograds_in_memory_of_the_callers(name, monkeypatch, seed):
    """Whatever the workspace holds, and nothing behind its bytes is written."""
    inputs, tensors, dout = call(seed, packed=name == "packed")
    options = options_of(name, inputs)
    q, k, v = tensors
    dlse = inputs.floats(*q.shape[:-3], q.shape[-2], q.shape[-3])
    out, lse, expected = autograds(tensors, dout, dlse, **options)
    size = flydsl_flash_attn_workspace(q, k, v, backward=True, **options)
    assert size >= 2 * 4 * lse.numel()  # the statistics of rows
    memory = torch.full((size + 64,), 255, dtype=torch.uint8)  # as floats, NaN
    results = [torch.full_like(x, torch.nan) for x in tensors]
    monkeypatch.setattr(torch.Tensor, "new_empty", None)  # nothing is allocated
    given = dict(zip(("dq", "dk", "dv"), results), dlse=dlse, workspace=memory[:size])
    found = flydsl_flash_attn_backward(dout, q, k, v, out, lse, **given, **options)
    assert all(x is y for x, y in zip(found, results, strict=True))
    assert all(map(torch.equal, found, expected)), f"seed {seed}"
    assert (memory[size:] == 255).all() and not (memory[:size] == 255).all()


def test_without_memory_it_allocates(seed):
    _, tensors, dout = call(seed)
    out, lse, expected = autograds(tensors, dout, torch.zeros(1, 2, 20))
    found = flydsl_flash_attn_backward(dout, *tensors, out, lse)
    assert all(map(torch.equal, found, expected)), f"seed {seed}"


@pytest.mark.parametrize(
    ("arch", "kernel", "options"),
    [
        ("gfx950", "gfx950", {}),
        ("gfx942", "gfx942", {}),
        ("sm_90a", "sm90", {}),
        ("sm_90a", "sm90", {"deterministic": True, "window_size": (9, 2)}),
    ],
    ids=str,
)
def test_fused_kernels_take_a_workspace_with_anything_in_it(arch, kernel, options, emulate, monkeypatch, seed):
    """Their sums of dq, and the counters of turns, begin at zero in it."""
    emulate(arch, "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", kernel)
    _, (q, k, v), dout = call(seed)
    out, lse, expected = autograds([q, k, v], dout, torch.zeros(1, 2, 20), **options)
    size = flydsl_flash_attn_workspace(q, k, v, backward=True, **options)
    assert size >= 4 * q.numel()
    memory = torch.full((size,), 255, dtype=torch.uint8)
    found = flydsl_flash_attn_backward(dout, q, k, v, out, lse, workspace=memory, **options)
    assert all(map(torch.equal, found, expected)), f"seed {seed}"  # a block of keys: additions have one order


def test_the_operation_takes_a_workspace(seed):
    _, (q, k, v), dout = call(seed)
    out, lse, expected = autograds([q, k, v], dout, torch.zeros(1, 2, 20))
    memory = torch.full((flydsl_flash_attn_workspace(q, k, v, backward=True),), 255, dtype=torch.uint8)
    results = {f"d{name}": torch.full_like(x, torch.nan) for name, x in zip("qkv", (q, k, v))}
    operation = torch.ops.fly.flash_attn_backward_out
    operation(dout, out, lse, q, k, v, True, **results, workspace=memory)
    assert all(map(torch.equal, results.values(), expected)), f"seed {seed}"
    with pytest.raises(ArgumentError, match="workspace has 16 bytes, these gradients need"):
        operation(dout, out, lse, q, k, v, True, **results, workspace=memory[:16])
    checks = ["test_schema", "test_faketensor"]  # of which arguments are written, too
    given = (dout, out, lse, q, k, v, True)
    torch.library.opcheck(operation.default, given, results | {"workspace": memory}, test_utils=checks)


def test_calls_without_keys_need_no_workspace(seed):
    q, k = torch.randn(1, 4, 2, 64).bfloat16(), torch.zeros(1, 0, 2, 64).bfloat16()
    assert flydsl_flash_attn_workspace(q, k, k, backward=True) == 0
    out, lse = flydsl_flash_attn_func(q, k, k, return_lse=True)
    dq, dk, dv = flydsl_flash_attn_backward(torch.ones_like(q), q, k, k, out, lse)
    assert not dq.any() and dk.shape == dv.shape == k.shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: {"workspace": x["memory"][:32]}, ArgumentError, "workspace has 32 bytes, these gradients need"),
        (lambda x: {"workspace": x["memory"][1:]}, ArgumentError, "workspace must be contiguous and 16-byte aligned"),
        (lambda x: {"workspace": 5}, ArgumentTypeError, "workspace must be a torch.Tensor, got int"),
        (lambda x: {"workspace": x["q"]}, ArgumentError, "workspace must not share memory with q"),
        (lambda x: {"dq": x["dq"]}, ArgumentError, "dk, dv missing: pass dq, dk and dv, or none of them"),
        (lambda x: x["results"] | {"dv": x["results"]["dk"]}, ArgumentError, "dk must not share memory with dv"),
        (lambda x: x["results"] | {"dq": x["q"]}, ArgumentError, "dq must not share memory with q"),
        (
            lambda x: x["results"] | {"dk": torch.empty(1, 30, 1, 65, dtype=torch.bfloat16)[..., 1:]},
            ArgumentError,
            "dk has strides .* accepted: a last stride of 1",
        ),
        (lambda x: x["results"] | {"dk": torch.empty_like(x["q"])}, ArgumentError, "dk must have shape"),
        (lambda x: {"dlse": torch.zeros(1, 2, 19)}, ArgumentError, "dlse must have shape"),
        (lambda x: {"block_mask": object()}, UnsupportedError, "block_mask is not taken here"),
        (lambda x: {"stream": 3}, UnsupportedError, "stream is not taken here: call under torch.cuda.stream"),
        (lambda x: {"dropout_p": 0.5}, ArgumentError, "rng_state is None with dropout"),
        (lambda x: {"sofcap": 1.0}, ArgumentError, "has no keyword sofcap; accepted: softmax_scale"),
        (lambda x: {"cache_leftpad": torch.zeros(1, dtype=torch.int32)}, UnsupportedError, "cache_leftpad"),
    ],
)
def test_what_is_wrong_is_named(change, error, message, seed):
    _, (q, k, v), dout = call(seed)
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    memory = torch.empty(flydsl_flash_attn_workspace(q, k, v, backward=True) + 32, dtype=torch.uint8)
    results = {f"d{name}": torch.empty_like(x) for name, x in zip("qkv", (q, k, v))}
    given = change({"q": q, "dq": results["dq"], "results": results, "memory": memory})
    with pytest.raises(error, match=f"^flydsl_flash_attn_backward: .*{message}"):
        flydsl_flash_attn_backward(dout, q, k, v, out, lse, **given)


def test_the_size_of_what_has_no_gradients_is_refused(seed):
    _, (q, k, v), _ = call(seed)
    with pytest.raises(UnsupportedError, match="block_mask is not taken with backward=True"):
        flydsl_flash_attn_workspace(q, k, v, backward=True, block_mask=object())
    byte = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match="has none: use bfloat16"):
        flydsl_flash_attn_workspace(*byte, backward=True)
