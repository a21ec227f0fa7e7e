"""Checks of what a caller hands to flash attention, made once per kind of call.

Every check names the argument, the value and what is accepted. Mistakes raise `ArgumentError` (a ValueError)
or `ArgumentTypeError` (also a TypeError). What is valid but not available is for `kernels.dispatch` to say.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.dispatch import Request

FUNCTION = "flydsl_flash_attn_func"
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
DEVICE_TYPES = ("cuda", "cpu")
INPUTS = ("q", "k", "v")
MAX_WAVES_PER_EU = 8


@dataclass(frozen=True)
class Call:
    """A checked call: what decides the kernel, and what the kernel takes; `empty` when no query has a key."""

    request: Request
    softmax_scale: float
    empty: bool
    device: torch.device
    tuning: Mapping[str, object]


def fail(message: str, error: type[Exception] = ArgumentError) -> None:
    """Raise `error` with the function's name before `message`."""
    raise error(f"{FUNCTION}: {message}")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        fail(f"{name} must be a torch.Tensor, got {type(value).__name__}", ArgumentTypeError)
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        fail(
            f"{name} is a {type(value).__name__}, which has no memory of its own; pass a plain torch.Tensor "
            "(under torch.compile, wrap the call in torch.compiler.disable)",
            ArgumentTypeError,
        )
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
        fail(f"{name} is {kind}; a dense strided tensor is accepted", ArgumentTypeError)
    if value.device.type not in DEVICE_TYPES:
        fail(f"{name} is on device '{value.device}'; accepted: {', '.join(DEVICE_TYPES)}")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        fail(
            f"{name} is inside a functorch transform (vmap, grad); fold the extra dimension into the batch",
            ArgumentTypeError,
        )


def _check_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    rank = 3 if packed else 4
    layouts = ("(total, H, D)", "(total, Hkv, D)") if packed else ("(B, Sq, H, D)", "(B, Skv, Hkv, D)")
    for name, tensor in zip(INPUTS, (q, k, v)):
        if tensor.dim() != rank:
            wanted = f"{rank} dimensions {layouts[name != 'q']}"
            hint = "" if packed or tensor.dim() != 3 else "; packed sequences also need cu_seqlens_q"
            fail(f"{name} must have {wanted}, got shape {tuple(tensor.shape)}{hint}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    if k.shape != v.shape:
        fail(f"k and v must have the same shape, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    if not packed and q.shape[0] != k.shape[0]:
        fail(f"q and k must have the same batch, got q {q.shape[0]} and k {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        fail(f"q and k must have the same head_dim, got q {q.shape[-1]} and k {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads == 0 or kv_heads == 0:
        fail(f"q and k need at least one head, got q {heads} and k {kv_heads}")
    if heads % kv_heads:
        fail(f"q's heads must be a multiple of k's heads, got q {heads} and k {kv_heads}")


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in zip(INPUTS, (q, k, v)):
        if tensor.dtype not in DTYPES:
            fail(f"{name} has dtype {tensor.dtype}; accepted: torch.bfloat16, torch.float16", ArgumentTypeError)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            fail(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}", ArgumentTypeError)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
        fail(
            f"{name}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}: pass "
            f"{name}.contiguous() (the other strides are free)"
        )


def extent_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of memory a tensor spans, from its first to its last element."""
    if not tensor.numel():
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    # sorted by stride, each dimension must step past everything that the smaller ones span
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def _check_out(out: Any, q: torch.Tensor) -> None:
    _check_tensor("out", out)
    if out.shape != q.shape:
        fail(f"out must have q's shape {tuple(q.shape)}, got {tuple(out.shape)}")
    if out.dtype != q.dtype:
        fail(f"out must have q's dtype {q.dtype}, got {out.dtype}", ArgumentTypeError)
    if out.device != q.device:
        fail(f"out must be on q's device {q.device}, got {out.device}")
    _check_last_stride("out", out)
    if out.numel() and _overlaps_itself(out):
        fail(f"out must not overlap itself, got shape {tuple(out.shape)} with strides {out.stride()}")


def check_gradients(named: Mapping[str, torch.Tensor | None]) -> None:
    """Raise `UnsupportedError` when one of the tensors requires a gradient (call it only in grad mode)."""
    for name, tensor in named.items():
        if tensor is not None and tensor.requires_grad:
            raise UnsupportedError(
                f"{FUNCTION}: {name} requires a gradient, but the backward is not available; call it under "
                "torch.no_grad() or pass detached tensors (.detach())"
            )


class _NoTouch:
    """Describes a tensor's memory to numpy, which reads only addresses and strides from it."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
        }


def check_no_overlap(out: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise `ArgumentError` when `out` shares an element with an input; interleaved views are fine."""
    for name, tensor in inputs.items():
        try:
            shared = np.shares_memory(np.asarray(_NoTouch(out)), np.asarray(_NoTouch(tensor)), max_work=100_000)
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            fail(f"out must not share memory with {name}; pass out=None or a separate tensor")


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(f"{name} must be an int, got {value!r} ({type(value).__name__})", ArgumentTypeError)
    if value < low or (high is not None and value > high):
        accepted = f"at least {low}" if high is None else f"from {low} to {high}"
        fail(f"{name} must be {accepted}, got {value}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        fail(f"{name} must be True or False, got {value!r} ({type(value).__name__})", ArgumentTypeError)


def _check_scale(softmax_scale: Any, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        fail(
            f"softmax_scale must be a Python number, got {softmax_scale!r} ({type(softmax_scale).__name__})",
            ArgumentTypeError,
        )
    scale = float(softmax_scale)
    if not math.isfinite(scale) or scale <= 0:
        fail(f"softmax_scale must be a finite positive number, got {softmax_scale!r}")
    return scale


def _check_packed(q: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Check what describes packed sequences; whether the call has any."""
    offsets = {name: options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    lengths = {name: options[name] for name in ("max_seqlen_q", "max_seqlen_kv")}
    given = [name for name, value in offsets.items() if value is not None]
    if not given:
        for name, value in lengths.items():
            if value is not None:
                fail(f"{name} is only for packed sequences (with cu_seqlens_q and cu_seqlens_kv): leave it out")
        return False
    if len(given) == 1:
        fail(f"cu_seqlens_q and cu_seqlens_kv go together, got only {given[0]}")
    for name, value in offsets.items():
        _check_tensor(name, value)
        if value.dim() != 1 or value.dtype != torch.int32 or value.device != q.device or len(value) < 1:
            fail(
                f"{name} must hold batch + 1 int32 offsets on {q.device}, got shape {tuple(value.shape)}, "
                f"dtype {value.dtype} on {value.device}"
            )
    if len(offsets["cu_seqlens_q"]) != len(offsets["cu_seqlens_kv"]):
        counts = " and ".join(str(len(value)) for value in offsets.values())
        fail(f"cu_seqlens_q and cu_seqlens_kv must have the same length, got {counts}")
    for name, value in lengths.items():
        if value is None:
            fail(f"packed sequences need {name}, the longest sequence's length (reading it would synchronise)")
        _whole(name, value, 0)
    return True


def _check_cross(cross_seqlen: Any, seq_len: int, seq_len_kv: int) -> bool:
    if cross_seqlen is None:
        return seq_len != seq_len_kv
    _flag("cross_seqlen", cross_seqlen)
    if not cross_seqlen and seq_len != seq_len_kv:
        fail(
            f"cross_seqlen=False, but q has {seq_len} tokens and k {seq_len_kv}; leave cross_seqlen out, "
            "and it is detected"
        )
    return cross_seqlen


def _check_head_options(options: Mapping[str, Any], kv_heads: int) -> None:
    if options["num_kv_heads"] is not None:
        _whole("num_kv_heads", options["num_kv_heads"], 1)
        if options["num_kv_heads"] != kv_heads:
            fail(f"num_kv_heads={options['num_kv_heads']}, but k and v have {kv_heads} heads")


def _check_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    tuning = {name: options[name] for name in ("waves_per_eu", "daz") if options[name] is not None}
    if "waves_per_eu" in tuning:
        _whole("waves_per_eu", tuning["waves_per_eu"], 1, MAX_WAVES_PER_EU)
    if "daz" in tuning:
        _flag("daz", tuning["daz"])
    return tuning


def check_call(q: Any, k: Any, v: Any, causal: Any, out: Any, options: Mapping[str, Any]) -> Call:
    """Check a call's arguments (`options`: the keyword arguments by name) and sum it up.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    for name, tensor in zip(INPUTS, (q, k, v)):
        _check_tensor(name, tensor)
    packed = _check_packed(q, options)
    _check_ranks(q, k, v, packed)
    _check_dtypes(q, k, v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            fail(f"q, k and v must be on one device, got q on {q.device} and {name} on {tensor.device}")
    _check_shapes(q, k, v, packed)
    for name, tensor in zip(INPUTS, (q, k, v)):
        _check_last_stride(name, tensor)
    if out is not None:
        _check_out(out, q)

    _flag("causal", causal)
    _flag("return_lse", options["return_lse"])
    heads, head_dim = q.shape[-2:]
    _check_head_options(options, k.shape[-2])
    _whole("num_kv_splits", options["num_kv_splits"], 1)
    seq_len, seq_len_kv = (options["max_seqlen_q"], options["max_seqlen_kv"]) if packed else (q.shape[1], k.shape[1])
    features = {"packed": packed, "split_kv": options["num_kv_splits"] > 1}
    tuning = _check_tuning(options)
    return Call(
        request=Request(
            head_dim=head_dim,
            dtype=DTYPES[q.dtype],
            causal=causal,
            cross_seqlen=_check_cross(options["cross_seqlen"], seq_len, seq_len_kv),
            return_lse=options["return_lse"],
            seq_len=seq_len,
            seq_len_kv=seq_len_kv,
            num_heads=heads,
            num_kv_heads=k.shape[-2],
            features=tuple(name for name, wanted in features.items() if wanted),
            tuning=tuple(tuning),
        ),
        softmax_scale=_check_scale(options["softmax_scale"], head_dim),
        empty=q.numel() == 0 or k.numel() == 0,
        device=q.device,
        tuning=tuning,
    )
