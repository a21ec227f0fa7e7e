"""What a caller of flash attention can get wrong, and what the message says."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fly.errors import ArgumentError, ArgumentTypeError, ConfigError, FlyError, UnsupportedError
from kernels.arguments import checks as argument_checks
from kernels.arguments.checks import stream_of
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels import stub as stubs

B, SQ, SKV, H, HKV, D = 2, 5, 7, 6, 3, 64


def tensor(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def good():
    return {"q": tensor(B, SQ, H, D), "k": tensor(B, SKV, HKV, D), "v": tensor(B, SKV, HKV, D)}


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(B, SQ, H, D, dtype=torch.bfloat16)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)], layout=layout)


def packed(**changes):
    """A good call on packed sequences, which differs from a good dense one in everything."""
    offsets = torch.tensor([0, 2, SQ], dtype=torch.int32)
    call = {
        "q": tensor(SQ, H, D),
        "k": tensor(SQ, HKV, D),
        "v": tensor(SQ, HKV, D),
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": 3,
        "max_seqlen_kv": 3,
    }
    return call | changes


def qkv(*shape, dtype=torch.bfloat16):
    return {name: tensor(*shape, dtype=dtype) for name in "qkv"}


TYPE, VALUE, UNSUPPORTED = ArgumentTypeError, ArgumentError, UnsupportedError
OFFSETS = torch.tensor([0, 3, SQ], dtype=torch.int32)

# name: (what replaces a good call's arguments, error class, what the message says)
MISTAKES = {
    # types
    "q is a list": ({"q": [[1.0]]}, TYPE, "q must be a torch.Tensor, got list"),
    "k is None": ({"k": None}, TYPE, "k must be a torch.Tensor, got NoneType"),
    "v is numpy": ({"v": np.zeros((B, SKV, HKV, D))}, TYPE, "v must be a torch.Tensor, got ndarray"),
    "q is fake": ({"q": fake_tensor()}, TYPE, "q is a FakeTensor, which has no memory of its own"),
    "q is sparse": ({"q": tensor(B, SQ, H, D).to_sparse()}, TYPE, "q is of layout torch.sparse_coo; a dense"),
    "k is nested": (
        {"k": nested(torch.jagged)},
        TYPE,
        "k is a NestedTensor, which has no memory of its own",
    ),
    "v is nested": (
        {"v": nested(torch.strided)},
        TYPE,
        "v is a nested tensor; a dense strided tensor is accepted",
    ),
    # devices
    "q on meta": (
        {"q": tensor(B, SQ, H, D, device="meta")},
        VALUE,
        "q is on device 'meta'; accepted: cuda, cpu",
    ),
    # ranks
    "q of rank 3": (
        {"q": tensor(SQ, H, D)},
        VALUE,
        "q must have 4 dimensions (B, Sq, H, D), got shape (5, 6, 64); packed sequences also need cu_seqlens",
    ),
    "k of rank 5": (
        {"k": tensor(B, SKV, HKV, D, 1)},
        VALUE,
        "k must have 4 dimensions (B, Skv, Hkv, D), got shape (2, 7, 3, 64, 1)",
    ),
    "v of rank 1": ({"v": tensor(D)}, VALUE, "v must have 4 dimensions (B, Skv, Hkv, D), got shape (64,)"),
    # dtypes
    "q is float32": (
        {"q": tensor(B, SQ, H, D, dtype=torch.float32)},
        TYPE,
        "q has dtype torch.float32; accepted: torch.bfloat16, torch.float16",
    ),
    "v is int": ({"v": tensor(B, SKV, HKV, D, dtype=torch.int8)}, TYPE, "v has dtype torch.int8; accepted:"),
    "k's dtype differs": (
        {"k": tensor(B, SKV, HKV, D, dtype=torch.float16)},
        TYPE,
        "k must have q's dtype torch.bfloat16, got torch.float16",
    ),
    "v's dtype differs": (
        {"v": tensor(B, SKV, HKV, D, dtype=torch.float16)},
        TYPE,
        "v must have q's dtype torch.bfloat16, got torch.float16",
    ),
    "q is FNUZ": (
        qkv(B, SQ, H, D, dtype=torch.float8_e5m2fnuz),
        TYPE,
        "q has dtype torch.float8_e5m2fnuz; accepted: torch.bfloat16, torch.float16, torch.float8_e4m3fn, on gfx942 "
        "torch.float8_e4m3fnuz: convert with .to(torch.bfloat16), which is exact",
    ),
    "v is FNUZ": (
        {"v": tensor(B, SKV, HKV, D, dtype=torch.float8_e5m2fnuz)},
        TYPE,
        "v has dtype torch.float8_e5m2fnuz; accepted: torch.bfloat16, torch.float16, torch.float8_e4m3fn, on gfx942 "
        "torch.float8_e4m3fnuz: convert with .to(torch.bfloat16), which is exact",
    ),
    "k and v are FNUZ beside 16 bits": (
        {name: tensor(B, SKV, HKV, D, dtype=torch.float8_e4m3fnuz) for name in "kv"},
        TYPE,
        "k must have q's dtype torch.bfloat16, or k, v both torch.float8_e4m3fn, got torch.float8_e4m3fnuz",
    ),
    "k and v are e4m3fn beside FNUZ": (
        qkv(B, SQ, H, D, dtype=torch.float8_e4m3fnuz)
        | {name: tensor(B, SKV, HKV, D, dtype=torch.float8_e4m3fn) for name in "kv"},
        TYPE,
        "k must have q's dtype torch.float8_e4m3fnuz, got torch.float8_e4m3fn",
    ),
    "all FNUZ": (
        qkv(B, SQ, H, D, dtype=torch.float8_e4m3fnuz),
        UNSUPPORTED,
        "takes q of bf16, f16, not f8e4m3fnuz: convert with .to(torch.bfloat16), which is exact",
    ),
    "all fp8": (
        qkv(B, SQ, H, D, dtype=torch.float8_e4m3fn),
        UNSUPPORTED,
        "the generic kernel takes q of bf16, f16, not f8e4m3: convert with .to(torch.bfloat16)",
    ),
    # shapes
    "k and v differ": (
        {"v": tensor(B, SKV + 1, HKV, D)},
        VALUE,
        "k and v must have the same shape up to head_dim, got k (2, 7, 3, 64) and v (2, 8, 3, 64)",
    ),
    "batches differ": (
        {"q": tensor(1, SQ, H, D)},
        VALUE,
        "q and k must have the same batch, got q 1 and k 2",
    ),
    "head dims differ": (
        {"q": tensor(B, SQ, H, 128)},
        VALUE,
        "q and k must have the same head_dim, got q 128 and k 64",
    ),
    "no heads": ({"q": tensor(B, SQ, 0, D)}, VALUE, "q and k need at least one head, got q 0 and k 3"),
    "BHSD instead of BSHD": (
        {"q": tensor(B, H, SQ, D)},
        VALUE,
        "q's heads must be a multiple of k's heads, got q 5 and k 3",
    ),
    "head_dim 32": (
        qkv(B, SQ, H, 32),
        UNSUPPORTED,
        "no flash-attention kernel serves this call on target gfx950: the gfx950 kernel is not built yet on "
        "gfx950; the generic kernel takes head_dim 64, 128, not 32: pad q, k and v with zeros to head_dim 64 "
        "and pass softmax_scale=32**-0.5",
    ),
    "head_dim 96": (
        qkv(B, SQ, H, 96),
        UNSUPPORTED,
        "with zeros to head_dim 128 and pass softmax_scale=96**-0.5",
    ),
    "head_dim 256": (
        qkv(B, SQ, H, 256),
        UNSUPPORTED,
        "not 256: torch.nn.functional.scaled_dot_product_attention",
    ),
    "head_dim 0": (qkv(B, SQ, H, 0), UNSUPPORTED, "takes head_dim 64, 128, not 0"),
    # strides
    "q's last dimension is strided": (
        {"q": tensor(B, SQ, H, 2 * D)[..., ::2]},
        VALUE,
        "q's last dimension must be contiguous (stride 1), got strides (3840, 768, 128, 2): pass q.contig",
    ),
    "v's last dimension is transposed": (
        {"v": tensor(B, SKV, D, HKV).transpose(2, 3)},
        VALUE,
        "pass v.contiguous() (the other strides are free)",
    ),
    "k's last dimension is expanded": (
        {"k": tensor(B, SKV, HKV, 1).expand(B, SKV, HKV, D)},
        VALUE,
        "k's last dimension must be contiguous (stride 1), got strides (21, 3, 1, 0)",
    ),
    # out
    "out is no tensor": ({"out": True}, TYPE, "out must be a torch.Tensor, got bool"),
    "out's shape": (
        {"out": tensor(B, H, SQ, D)},
        VALUE,
        "out must have shape (2, 5, 6, 64) (q's, with v's head_dim), got (2, 6, 5, 64)",
    ),
    "out's dtype": (
        {"out": tensor(B, SQ, H, D, dtype=torch.float32)},
        TYPE,
        "out must have q's dtype torch.bfloat16, got torch.float32",
    ),
    "out's last stride": (
        {"out": tensor(B, SQ, H, 2 * D)[..., ::2]},
        VALUE,
        "out's last dimension must be contiguous (stride 1)",
    ),
    "out overlaps itself": (
        {"out": tensor(B, 1, H, D).expand(B, SQ, H, D)},
        VALUE,
        "out must not overlap itself, got shape (2, 5, 6, 64) with strides (384, 0, 64, 1)",
    ),
    "out is a sliding window": (
        {"out": tensor(4096).as_strided((B, SQ, H, D), (1024, 128, 32, 1))},
        VALUE,
        "out must not overlap itself",
    ),
    # options
    "causal is a string": ({"causal": "yes"}, TYPE, "causal must be True or False, got 'yes' (str)"),
    "causal is None": ({"causal": None}, TYPE, "causal must be True or False, got None (NoneType)"),
    "return_lse is a number": ({"return_lse": 2}, TYPE, "return_lse must be True or False, got 2 (int)"),
    "scale is a string": (
        {"softmax_scale": "0.1"},
        TYPE,
        "softmax_scale must be a Python number, got '0.1' (str)",
    ),
    "scale is a bool": (
        {"softmax_scale": True},
        TYPE,
        "softmax_scale must be a Python number, got True (bool)",
    ),
    "scale is a tensor": (
        {"softmax_scale": torch.tensor(0.5)},
        TYPE,
        "softmax_scale must be a Python number, got tensor(0.5000) (Tensor)",
    ),
    "scale is NaN": (
        {"softmax_scale": float("nan")},
        VALUE,
        "softmax_scale must be a finite positive number, got nan",
    ),
    "scale is infinite": (
        {"softmax_scale": float("inf")},
        VALUE,
        "must be a finite positive number, got inf",
    ),
    "scale is zero": ({"softmax_scale": 0.0}, VALUE, "must be a finite positive number, got 0.0"),
    "scale is negative": ({"softmax_scale": -1}, VALUE, "must be a finite positive number, got -1"),
    "num_kv_heads disagrees": ({"num_kv_heads": 6}, VALUE, "num_kv_heads=6, but k and v have 3 heads"),
    "num_kv_heads is a float": ({"num_kv_heads": 2.5}, TYPE, "num_kv_heads must be an int, got 2.5 (float)"),
    "num_kv_heads is zero": ({"num_kv_heads": 0}, VALUE, "num_kv_heads must be at least 1, got 0"),
    "cross_seqlen denied": (
        {"cross_seqlen": False},
        VALUE,
        "cross_seqlen=False, but q has 5 tokens and k 7; leave cross_seqlen out, and it is detected",
    ),
    "cross_seqlen is a string": (
        {"cross_seqlen": "auto"},
        TYPE,
        "cross_seqlen must be True or False, got 'auto'",
    ),
    "num_kv_splits is negative": ({"num_kv_splits": -1}, VALUE, "num_kv_splits must be from 0 to 64, got -1"),
    "num_kv_splits is 65": ({"num_kv_splits": 65}, VALUE, "num_kv_splits must be from 0 to 64, got 65"),
    "num_kv_splits is None": ({"num_kv_splits": None}, TYPE, "num_kv_splits must be an int, got None"),
    "num_kv_splits is a list": ({"num_kv_splits": [2]}, TYPE, "num_kv_splits must be an int, got [2] (list)"),
    "waves_per_eu is a bool": ({"waves_per_eu": True}, TYPE, "waves_per_eu must be an int, got True (bool)"),
    "waves_per_eu is 9": ({"waves_per_eu": 9}, VALUE, "waves_per_eu must be from 1 to 8, got 9"),
    "waves_per_eu is 0": ({"waves_per_eu": 0}, VALUE, "waves_per_eu must be from 1 to 8, got 0"),
    "stagger is a number": (
        {"dualwave_swp_enable_stagger": 1},
        TYPE,
        "dualwave_swp_enable_stagger must be True or False, got 1 (int)",
    ),
    "lazy rescale is a string": (
        {"dualwave_swp_lazy_rescale": "on"},
        TYPE,
        "dualwave_swp_lazy_rescale must be True or False, got 'on' (str)",
    ),
    "setprio for a kernel without": (
        {"dualwave_swp_setprio": True},
        UNSUPPORTED,
        "the generic kernel has no tuning option dualwave_swp_setprio on gfx950: leave it out",
    ),
    "debug_counts for a kernel without": (
        {"debug_counts": torch.zeros(2)},
        UNSUPPORTED,
        "the generic kernel does not do counting of rescales (debug_counts) yet: leave debug_counts out",
    ),
    "debug_counts is a list": ({"debug_counts": [0, 0]}, TYPE, "debug_counts must be a torch.Tensor, got list"),
    "debug_counts of 3": (
        {"debug_counts": torch.zeros(3)},
        VALUE,
        "debug_counts must hold 2 float32 counters on cpu, got shape (3,), strides (1,), dtype torch.float32 on cpu",
    ),
    "debug_counts of ints": (
        {"debug_counts": torch.zeros(2, dtype=torch.int32)},
        VALUE,
        "debug_counts must hold 2 float32 counters on cpu, got shape (2,), strides (1,), dtype torch.int32 on cpu",
    ),
    "daz is a number": ({"daz": 3}, TYPE, "daz must be True or False, got 3 (int)"),
    "stream for the CPU": (
        {"stream": 0},
        VALUE,
        "stream is for GPU tensors, but q is on 'cpu': leave it out",
    ),
    "max_seqlen_q alone": ({"max_seqlen_q": 5}, VALUE, "max_seqlen_q is only for packed sequences"),
    "max_seqlen_kv alone": ({"max_seqlen_kv": 5}, VALUE, "max_seqlen_kv is only for packed sequences"),
    # packed sequences
    "cu_seqlens_q alone": (
        packed(cu_seqlens_kv=None),
        VALUE,
        "cu_seqlens_q and cu_seqlens_kv go together, got only cu_seqlens_q",
    ),
    "packed, but dense q": (
        packed(q=tensor(B, SQ, H, D)),
        VALUE,
        "q must have 3 dimensions (total, H, D), got shape (2, 5, 6, 64)",
    ),
    "packed, but dense k": (
        packed(k=tensor(B, SQ, HKV, D)),
        VALUE,
        "k must have 3 dimensions (total, Hkv, D), got shape (2, 5, 3, 64)",
    ),
    "packed, k and v differ": (
        packed(v=tensor(SQ + 1, HKV, D)),
        VALUE,
        "k and v must have the same shape up to head_dim, got k (5, 3, 64) and v (6, 3, 64)",
    ),
    "packed without max_seqlen_kv": (
        packed(max_seqlen_kv=None),
        VALUE,
        "packed sequences need max_seqlen_kv, the longest sequence's length",
    ),
    "max_seqlen_q is a tensor": (
        packed(max_seqlen_q=torch.tensor(3)),
        TYPE,
        "max_seqlen_q must be an int, got tensor(3) (Tensor)",
    ),
    "max_seqlen_q is negative": (
        packed(max_seqlen_q=-1),
        VALUE,
        "max_seqlen_q must be from 0 to 2147483647, got -1",
    ),
    "packed, cross denied": (
        packed(k=tensor(SQ + 1, HKV, D), v=tensor(SQ + 1, HKV, D), cross_seqlen=False),
        VALUE,
        "cross_seqlen=False, but q has 5 tokens and k 6; leave cross_seqlen out, and it is detected",
    ),
    "packed, cross denied by the longest": (
        packed(max_seqlen_kv=4, cross_seqlen=False),
        VALUE,
        "cross_seqlen=False, but q has 3 tokens at most in a sequence and k 4; leave",
    ),
    "offsets of rank 2": (
        packed(cu_seqlens_q=OFFSETS[None]),
        VALUE,
        "cu_seqlens_q must hold batch + 1 contiguous int32 offsets on cpu, got shape (1, 3)",
    ),
    "strided offsets": (
        packed(cu_seqlens_q=torch.zeros(6, dtype=torch.int32)[::2]),
        VALUE,
        "contiguous int32 offsets on cpu, got shape (3,), strides (2,)",
    ),
    "no offsets": (
        packed(cu_seqlens_q=OFFSETS[:0]),
        VALUE,
        "batch + 1 contiguous int32 offsets on cpu, got shape (0,)",
    ),
    "packed without max_seqlen_q": (
        packed(max_seqlen_q=None),
        VALUE,
        "packed sequences need max_seqlen_q, the longest sequence's length",
    ),
    "offsets in a list": (packed(cu_seqlens_q=[0, 5]), TYPE, "cu_seqlens_q must be a torch.Tensor, got list"),
    "offsets of 64 bits": (
        packed(cu_seqlens_kv=OFFSETS.long()),
        VALUE,
        "cu_seqlens_kv must hold batch + 1 contiguous int32 offsets on cpu, got shape (3,), strides (1,), dtype "
        "torch.int64 on cpu",
    ),
    "offsets of two batches": (
        packed(cu_seqlens_kv=OFFSETS[:2]),
        VALUE,
        "cu_seqlens_q and cu_seqlens_kv must have the same length, got 3 and 2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    stub = stubs.install(monkeypatch)
    replaced, error, message = MISTAKES[name]
    with pytest.raises(error, match=re.escape(message)) as caught:
        flydsl_flash_attn_func(**(good() | replaced))
    assert isinstance(caught.value, FlyError)
    if error is not UNSUPPORTED:
        assert type(caught.value) is error and str(caught.value).startswith("flydsl_flash_attn_func: ")
    assert not stub.prepared


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "bias", "sink", "seqused_kv", "cu_seqlens_q", "workspace"])
def test_what_only_stands_for_a_tensor_is_not_asked_for_its_address(name, monkeypatch):
    stubs.install(monkeypatch)
    flydsl_flash_attn_func(**good())  # a plan for what is right about the call
    asked = []
    monkeypatch.setattr(FakeTensor, "data_ptr", asked.append, raising=False)
    with pytest.raises(ArgumentTypeError, match=f"{name} is a FakeTensor, which has no memory of its own"):
        flydsl_flash_attn_func(**(good() | {name: fake_tensor()}))
    assert not asked


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_every_fnuz_number_is_a_bfloat16(dtype):
    """What the message of a refused FNUZ tensor says: the conversion it names is exact."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.numpy().view(getattr(ml_dtypes, str(dtype).removeprefix("torch."))).astype(np.float32)
    converted = codes.view(dtype).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(converted, numbers)
    assert np.isnan(converted).nonzero()[0].tolist() == [0x80]


def test_the_good_calls_are_good(monkeypatch):
    """What the mistakes are variations of: nothing else about those calls is wrong."""
    stub = stubs.install(monkeypatch)
    flydsl_flash_attn_func(**good())
    flydsl_flash_attn_func(**good(), softmax_scale=np.float32(0.1), num_kv_heads=3, waves_per_eu=8, daz=False)
    flydsl_flash_attn_func(**packed())
    flydsl_flash_attn_func(**packed(cross_seqlen=False, num_kv_splits=64))
    assert len(stub.launches) == 4


def test_errors_are_the_standard_ones_too():
    assert issubclass(ArgumentTypeError, TypeError) and issubclass(ArgumentError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize("name", ["k", "v"])
def test_devices_that_differ(name, monkeypatch):
    stubs.install(monkeypatch)
    monkeypatch.setattr(argument_checks, "DEVICE_TYPES", ("cuda", "cpu", "meta"))
    call = good()
    call[name] = call[name].to("meta")
    message = f"q, k and v must be on one device, got q on cpu and {name} on meta"
    with pytest.raises(ArgumentError, match=message):
        flydsl_flash_attn_func(**call)


def test_out_on_another_device(monkeypatch):
    stubs.install(monkeypatch)
    monkeypatch.setattr(argument_checks, "DEVICE_TYPES", ("cuda", "cpu", "meta"))
    with pytest.raises(ArgumentError, match="out must be on q's device cpu, got meta"):
        flydsl_flash_attn_func(**good(), out=tensor(B, SQ, H, D, device="meta"))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_shares_memory(name, monkeypatch):
    stubs.install(monkeypatch)
    call = {"q": tensor(B, SQ, H, D), "k": tensor(B, SQ, H, D), "v": tensor(B, SQ, H, D)}
    memory = torch.zeros(B * SQ * H * D + 64, dtype=torch.bfloat16)
    call[name] = memory[:-64].view(B, SQ, H, D)
    with pytest.raises(ArgumentError, match=f"out must not share memory with {name}; pass out=None"):
        flydsl_flash_attn_func(**call, out=memory[64:].view(B, SQ, H, D))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_what_is_written_has_no_gradient(name, monkeypatch):
    stubs.install(monkeypatch)
    call = good() | {"out": tensor(B, SQ, H, D)}
    call[name].requires_grad_()
    message = "out is given where a gradient is needed: leave it out"
    if name == "out":
        message = r"out requires a gradient, but the backward is not available here; call it under torch\.no_grad\(\)"
    with pytest.raises(NotImplementedError, match=message):
        flydsl_flash_attn_func(**call)


def test_vmap(monkeypatch):
    stubs.install(monkeypatch)
    with pytest.raises(ArgumentTypeError, match=r"q is inside a functorch transform \(vmap, grad\)"):
        torch.vmap(flydsl_flash_attn_func)(*(t[None] for t in good().values()))


@pytest.mark.parametrize(
    "stream, message",
    [
        ("default", r"stream must be a torch.cuda.Stream or an int handle, got 'default' \(str\)"),
        (-1, r"stream must be a torch.cuda.Stream or an int handle, got -1 \(int\)"),
        (True, r"stream must be a torch.cuda.Stream or an int handle, got True \(bool\)"),
    ],
)
def test_bad_stream(stream, message):
    with pytest.raises(ArgumentTypeError, match=message):
        stream_of(stream, SimpleNamespace(type="cuda"))


@pytest.mark.parametrize(
    "target, forced, message",
    [
        (
            "gfx950",
            "gfx950",
            "FLY_KERNEL=gfx950: the gfx950 kernel is not built yet on gfx950; unset FLY_KERNEL",
        ),
        ("sm_90a", "sm90", "FLY_KERNEL=sm90: the sm90 kernel is not built yet on sm_90a; unset FLY_KERNEL"),
        ("sm_90a", "gfx950", "FLY_KERNEL=gfx950: the gfx950 kernel runs on gfx950, not on sm_90a"),
        ("gfx942", "gfx950", "FLY_KERNEL=gfx950: the gfx950 kernel runs on gfx950, not on gfx942"),
        ("gfx942", "sm90", "FLY_KERNEL=sm90: the sm90 kernel runs on sm_90a, not on gfx942"),
        ("gfx906", "generic", "FLY_KERNEL=generic: the generic kernel runs on gfx942, gfx950, sm_80"),
        ("sm_75", "", "flash attention has no kernel for target sm_75; targets: gfx942, gfx950, sm_80"),
    ],
)
def test_kernel_that_the_target_cannot_run(target, forced, message, monkeypatch):
    stubs.install(monkeypatch, target)
    monkeypatch.setenv("FLY_KERNEL", forced)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        flydsl_flash_attn_func(**good())


def test_forced_kernel_also_counts_after_a_plan_was_made(monkeypatch):
    stubs.install(monkeypatch)
    flydsl_flash_attn_func(**good())
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    with pytest.raises(NotImplementedError, match="is not built yet"):
        flydsl_flash_attn_func(**good())


def test_kernel_that_does_not_exist(monkeypatch):
    stubs.install(monkeypatch)
    monkeypatch.setenv("FLY_KERNEL", "fastest")
    with pytest.raises(ConfigError, match="FLY_KERNEL='fastest': expected one of '', 'generic'"):
        flydsl_flash_attn_func(**good())


def test_amd_tuning_on_nvidia(monkeypatch):
    stubs.install(monkeypatch, "sm_90a")
    with pytest.raises(NotImplementedError, match="has no tuning option waves_per_eu on sm_90a: leave it out"):
        flydsl_flash_attn_func(**good(), waves_per_eu=2)


def test_too_many_positional_arguments():
    with pytest.raises(TypeError, match="takes from 3 to 4 positional arguments but 5 were given"):
        flydsl_flash_attn_func(*good().values(), True, 0.5)
