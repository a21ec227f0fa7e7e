"""Flash attention for torch's own functions: `fly_attention.activate()`, and torch's flash backend is fly's.

    import fly_attention
    fly_attention.activate()      # torch.nn.attention.activate_flash_attention_impl("FLY")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    fly_attention.deactivate()    # torch.nn.attention.restore_flash_attention_impl

What torch calls then, forward and backward, eager and compiled: `F.scaled_dot_product_attention` where it takes its
flash backend, nested tensors too, `torch.nn.attention.varlen`, and the operations of ATen themselves. Implementations
are functions of torch's registry: "FLY" has the kernels of CUDA and ROCm tensors, "FLY_CPU" those of CPU tensors,
which run in the emulator and are for tests.

Arguments of ATen's operations are in aten/src/ATen/native/native_functions.yaml of
https://github.com/pytorch/pytorch; shapes and strides of results are those of torch/_meta_registrations.py, which
compilers count on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fly.errors import ArgumentError, UnsupportedError

from ..api.conversions import check_dense
from ..api.options import add_packing, attend, options_of
from ..api.torch_ops import gradients
from ..arguments.callers import TORCH, arg
from ..arguments.checks import Checks
from ..problem.catalogue import NO_WINDOW
from ..problem.dropout_mask import random_state
from .masks import bias_of, top_left

# torch's names of the implementations, by the device that `activate` takes
NAMES = {"cuda": "FLY", "cpu": "FLY_CPU"}
CHECKS = Checks(TORCH.function)

_Offsets = torch.Tensor | None
_REGISTRY = ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl")


def _options(
    dropout_p: float,
    scale: float | None,
    is_causal: bool,
    window: tuple[int | None, int | None] = NO_WINDOW,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> dict[str, Any]:
    splits = 0 if num_splits is None else num_splits
    return options_of(TORCH, (), dropout_p, scale, is_causal, window, 0.0, alibi_slopes, False, {}, splits)


def _add_sequences(
    options: dict[str, Any],
    cum_seq_q: _Offsets,
    cum_seq_k: _Offsets,
    max_q: int,
    max_k: int,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    if seqused_k is not None:
        options["seqused_kv"] = seqused_k
    if cum_seq_q is not None:
        add_packing(TORCH, options, cum_seq_q, cum_seq_k, max_q, max_k, block_table)
    elif block_table is not None:
        options["block_table"] = block_table


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    options: dict[str, Any],
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, rng_state) of tensors as kernels take them, with rng_state as torch has it."""
    if options.get("dropout_p"):
        options["rng_state"] = random_state(q.device)
    with torch.no_grad():  # autograd is above these operations, and grad mode as the caller has it
        out, lse = attend(TORCH, q, k, v, is_causal, options, out=out, return_lse=True)
    assert lse is not None
    if (drawn := options.get("rng_state")) is None:
        return out, lse, q.new_empty(2, dtype=torch.uint64)
    return out, lse, drawn.view(torch.uint64)


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        CHECKS.fail(
            "return_debug_mask=True is not available: pass False, and take probabilities from "
            "fly_attention.flash_attn_func(..., return_attn_probs=True)",
            UnsupportedError,
        )


def _forward_out(
    out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: _Offsets,
    cum_seq_k: _Offsets,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query (B, Sq, H, D), or packed (total_q, H, D) with cum_seq_q; lse (B, H, Sq) or (H, total_q)."""
    _refuse_debug_mask(return_debug_mask)
    window = window_size_left, window_size_right
    options = _options(dropout_p, scale, is_causal, window, alibi_slopes, num_splits)
    _add_sequences(options, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table)
    return _run(query, key, value, is_causal, options, out)


def _forward(query: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    out, lse, rng_state = _forward_out(None, query, *arguments, **options)
    return out, lse, rng_state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _forward_inplace(*arguments: Any, **options: Any) -> torch.Tensor:
    return _forward_out(*arguments, **options)[1]


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: _Offsets,
    cum_seq_k: _Offsets,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    options = _options(dropout_p, scale, is_causal, (window_size_left, window_size_right))
    _add_sequences(options, cum_seq_q, cum_seq_k, max_q, max_k)
    # tokens outside of all sequences are not written
    make = torch.empty_like if cum_seq_q is None else torch.zeros_like
    results = tuple(make(x) for x in (query, key, value))
    _differentiate((grad_out, out, query, key, value), logsumexp, results, is_causal, options, rng_state)
    return results


def _differentiate(
    given: tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    is_causal: bool,
    options: dict[str, Any],
    rng_state: torch.Tensor | None = None,
) -> None:
    """Write gradients of q, k and v to `results`; `given`: grad_out, out, q, k and v, all as kernels take them."""
    if options.get("dropout_p"):
        assert rng_state is not None
        options["rng_state"] = rng_state.view(torch.int64)
    named = dict(zip(("dout", "out", "q", "k", "v"), given, strict=True)) | {"lse": lse}
    with torch.no_grad():
        gradients(TORCH, named, dict(zip(("dq", "dk", "dv"), results, strict=True)), is_causal, options)


def _transposed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(B, H, S, D) as (B, S, H, D), and back."""
    for name, x in zip(("query", "key", "value"), tensors):
        if x.dim() != 4:
            raise ArgumentError(f"{TORCH.function}: {name} must have 4 dimensions, got shape {tuple(x.shape)}")
    return tuple(x.transpose(1, 2) for x in tensors)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """query (B, H, Sq, D); causal is bottom-right, as torch's own kernel has it for `causal_lower_right`."""
    _refuse_debug_mask(return_debug_mask)
    q, k, v = _transposed(query, key, value)
    out = torch.empty_like(query)
    _, lse, rng_state = _run(q, k, v, is_causal, _options(dropout_p, scale, is_causal), out.transpose(1, 2))
    offset, mask = query.new_empty((), dtype=torch.uint64), query.new_empty(0)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, offset, mask


def _sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: _Offsets,
    cum_seq_k: _Offsets,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    results = tuple(torch.empty_like(x) for x in (query, key, value))
    given, options = _transposed(grad_out, out, query, key, value), _options(dropout_p, scale, is_causal)
    _differentiate(given, logsumexp, _transposed(*results), is_causal, options, philox_seed)
    return results


def _cpu_options(
    query: torch.Tensor,
    keys: int,
    dropout_p: float,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[int, dict[str, Any]]:
    """How many keys count, and options, of the operation for CPU tensors, whose causal is top-left."""
    if dropout_p:
        CHECKS.fail(
            f"{arg.dropout_p}={dropout_p} is not available: the operation for CPU tensors keeps no random state; use "
            "fly_attention.flash_attn_func",
            UnsupportedError,
        )
    options = _options(0.0, scale, False)
    if attn_mask is not None:
        check_dense(TORCH.function, "attn_mask", attn_mask)
        options["bias"] = bias_of(attn_mask, query)
    if is_causal:
        keys, window = top_left(query.shape[2], keys)
        options["window_size"] = window
    return keys, options


def _sdpa_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _transposed(query, key, value)
    keys, options = _cpu_options(query, k.shape[1], dropout_p, is_causal, attn_mask, scale)
    out = torch.empty_like(query)
    _, lse, _ = _run(q, k[:, :keys], v[:, :keys], False, options, out.transpose(1, 2))
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa_cpu_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    dout, o, q, k, v = _transposed(grad_out, out, query, key, value)
    keys, options = _cpu_options(query, k.shape[1], dropout_p, is_causal, attn_mask, scale)
    results = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dq, dk, dv = results
    parts = dq, dk[:, :keys], dv[:, :keys]
    _differentiate((dout, o, q, k[:, :keys], v[:, :keys]), logsumexp, parts, False, options)
    return _transposed(*results)


# what a device's tensors run; an operation that this torch does not have is left out
_FLASH = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
_KERNELS = {
    "cuda": _FLASH,
    "cpu": _FLASH
    | {
        "_scaled_dot_product_flash_attention_for_cpu": _sdpa_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_cpu_backward,
    },
}


@dataclass(frozen=True)
class _Handle:
    """What torch keeps of an active implementation, and gives back when another one takes its place."""

    library: torch.library.Library

    def remove(self) -> None:
        self.library._destroy()  # type: ignore[no-untyped-call]  # torch has no types for it


def _install(device: str) -> _Handle:
    library = torch.library.Library("aten", "IMPL", device.upper())  # type: ignore[no-untyped-call]  # the same
    for name, kernel in _KERNELS[device].items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, kernel)  # type: ignore[no-untyped-call]  # the same
    return _Handle(library)


def register() -> None:
    """Make "FLY" and "FLY_CPU" known to `torch.nn.attention.activate_flash_attention_impl`; activates neither.

    Raises:
        UnsupportedError: this torch has no registry of flash-attention implementations.
    """
    if missing := [name for name in _REGISTRY if not hasattr(torch.nn.attention, name)]:
        raise UnsupportedError(
            f"fly_attention.activate needs torch.nn.attention.{missing[0]}, which torch {torch.__version__} does not "
            "have: use torch 2.11 or newer, or call fly_attention.flash_attn_func"
        )
    for device, name in NAMES.items():
        torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda device=device: _install(device))


def activate(device: str = "cuda") -> None:
    """Run torch's flash attention on fly: `F.scaled_dot_product_attention`'s flash backend, and `varlen_attn`.

    Takes the place of another active implementation ("FA3", "FA4"), as activating one of those takes this one's.

    Args:
        device: whose tensors: "cuda", ROCm's too, or "cpu", where the kernels run in the emulator, slowly: for tests.

    Raises:
        ArgumentError: another device.
        UnsupportedError: this torch has no registry of flash-attention implementations.
    """
    if device not in NAMES:
        raise ArgumentError(f"activate: device must be one of {', '.join(map(repr, NAMES))}, got {device!r}")
    register()
    torch.nn.attention.activate_flash_attention_impl(NAMES[device])


def deactivate() -> None:
    """Give torch its own flash attention back; nothing where fly's is not active."""
    if getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() in NAMES.values():
        torch.nn.attention.restore_flash_attention_impl()
