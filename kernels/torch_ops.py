"""Flash attention as `torch.library` operations, so that `torch.compile(fullgraph=True)` and export see through it.

`torch.ops.fly.flash_attn` and `torch.ops.fly.flash_attn_out` take what `flydsl_flash_attn_func` takes, by the same
names, as far as an operation can: tensors and numbers, no functions. `attention` is what callers use: the operation
costs microseconds on the host and is gone through only where a compiler traces.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.argument_checks import check_gradients
from kernels.attention_checks import OUT_DTYPES
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.kv_cache import append_to_cache

_INPUTS = "Tensor q, Tensor k, Tensor v, bool causal"
_OPTIONS = (
    "float? softmax_scale=None, bool return_lse=False, SymInt num_kv_splits=1, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None, "
    "SymInt[]? window_size=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? bias=None, "
    "Tensor? sink=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? block_table=None, "
    "Tensor? cache_leftpad=None, Tensor? kv_batch_idx=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
)

torch.library.define("fly::flash_attn", f"({_INPUTS}, *, {_OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define("fly::flash_attn_out", f"({_INPUTS}, *, Tensor(a!) out, {_OPTIONS}) -> Tensor lse")

torch.library.define(
    "fly::append_to_cache",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "bool rotary_interleaved, *, bool rotate_each_query) -> Tensor",
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flydsl_flash_attn_func`, and the same as an operation while torch compiles or exports.

    `options`: its keywords that are tensors or numbers. Returns and raises as it does.
    """
    if not torch.compiler.is_compiling():
        return flydsl_flash_attn_func(q, k, v, causal, out=out, return_lse=return_lse, **options)
    if torch.is_grad_enabled():
        check_gradients({"q": q, "k": k, "v": v, "out": out})
    if out is None:
        out, lse = torch.ops.fly.flash_attn(q, k, v, causal, return_lse=return_lse, **options)
    else:
        lse = torch.ops.fly.flash_attn_out(q, k, v, causal, out=out, return_lse=return_lse, **options)
    return (out, lse) if return_lse else out


def append(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    *places: Any,
    rotate_each_query: bool,
) -> torch.Tensor:
    """`kernels.kv_cache.append_to_cache`, and the same as an operation while torch compiles or exports."""
    arguments = (q, k_cache, v_cache, k, v, rotary_cos, *places)
    if not torch.compiler.is_compiling():
        return append_to_cache(*arguments, rotate_each_query=rotate_each_query)
    rotated = torch.ops.fly.append_to_cache(*arguments, rotate_each_query=rotate_each_query)
    return q if rotary_cos is None else rotated


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]) -> tuple:
    if options.get("window_size") is not None:
        options["window_size"] = tuple(options["window_size"])
    else:
        options.pop("window_size", None)
    if options.get("return_lse"):
        return flydsl_flash_attn_func(q, k, v, causal, **options)
    # an operation has the same number of results in every call
    return flydsl_flash_attn_func(q, k, v, causal, **options), _lse(q, False)


def _lse(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    *batch, seq_len, heads, _ = q.shape
    return q.new_empty((*batch, heads, seq_len) if wanted else (0,), dtype=torch.float32)


@torch.library.impl("fly::flash_attn", "CompositeExplicitAutograd")
def _flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(q, k, v, causal, options)


@torch.library.impl("fly::flash_attn_out", "CompositeExplicitAutograd")
def _flash_attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any) -> torch.Tensor:
    return _run(q, k, v, causal, options)[1]


@torch.library.register_fake("fly::flash_attn")
def _flash_attn_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=OUT_DTYPES.get(q.dtype, q.dtype))
    return out, _lse(q, options.get("return_lse", False))


@torch.library.register_fake("fly::flash_attn_out")
def _flash_attn_out_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> torch.Tensor:
    return _lse(q, options.get("return_lse", False))


@torch.library.impl("fly::append_to_cache", "CompositeExplicitAutograd")
def _append(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    result = append_to_cache(q, *arguments, **options)
    return q.new_empty(0) if result is q else result  # an operation's result is not one of its arguments


@torch.library.register_fake("fly::append_to_cache")
def _append_fake(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    rotary_cos = arguments[4]
    return q.new_empty(0 if rotary_cos is None else q.shape)
