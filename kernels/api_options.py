"""From the arguments of FlashAttention's functions to the keywords of `flydsl_flash_attn_func`.

What FlashAttention-3 and -4 take beyond FlashAttention-2 are keywords here (`Extras`): one table says what each
becomes, another what is not available and what to do instead. Nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.feature_checks import DESCALES
from kernels.torch_ops import attention


class Extras(TypedDict, total=False):
    """Keywords of FlashAttention-3 and -4 that FlashAttention-2 does not have.

    Available: `num_splits` (parts that keys are split into, 0 takes what suits the device, the default),
    `seqused_q`, `seqused_k` ((B,) int32: tokens of each sequence that count), `page_table` ((B, max pages) int32,
    packed queries and caches), `learnable_sink` ((H,): one more term exp(sink) in the denominator), `q_descale`,
    `k_descale`, `v_descale` ((B, Hkv) float32, or one number as () or (1,): what float8_e4m3fn values are multiplied
    by, 1 by default).
    The others raise `UnsupportedError` when they are not at FlashAttention's default.
    """

    num_splits: int
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    page_table: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    qv: torch.Tensor | None
    attention_chunk: int
    pack_gqa: bool | None
    sm_margin: int
    scheduler_metadata: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    cu_seqlens_k_new: torch.Tensor | None
    rotary_seqlens: torch.Tensor | None
    score_mod: Any
    mask_mod: Any
    block_sparse_tensors: Any
    aux_tensors: Any


# what an available keyword is called by `flydsl_flash_attn_func`
AVAILABLE: Mapping[str, str] = {
    "num_splits": "num_kv_splits",
    "seqused_q": "seqused_q",
    "seqused_k": "seqused_kv",
    "page_table": "block_table",
    "learnable_sink": "sink",
    **{name: name for name in DESCALES},
}
DENSE = ("num_splits", "seqused_q", "seqused_k", "learnable_sink", *DESCALES)
PACKED = (*DENSE, "page_table")
CACHE = ("page_table", "learnable_sink", *DESCALES)

_MOD = "flydsl_flash_attn_func takes one (with fly's own signature)"
# (its default, what to do instead)
UNAVAILABLE: Mapping[str, tuple[Any, str]] = {
    "qv": (None, "pass torch.cat([q, qv], -1) and torch.cat([k, v], -1) as q and k, and softmax_scale"),
    "attention_chunk": (0, "pass a mask_mod to flydsl_flash_attn_func"),
    "pack_gqa": (None, "the kernel decides which query heads share a block"),
    "sm_margin": (0, "kernels use the whole device"),
    "scheduler_metadata": (None, "blocks are scheduled on the device, there is nothing to prepare"),
    "cu_seqlens_q": (None, "pass packed queries and page_table to flash_attn_varlen_func"),
    "max_seqlen_q": (None, "pass packed queries and page_table to flash_attn_varlen_func"),
    "cu_seqlens_k_new": (None, "pass k and v of shape (B, S_new, Hkv, D)"),
    "rotary_seqlens": (None, "positions are cache_seqlens: rotate q and k before the call"),
    "score_mod": (None, _MOD),
    "mask_mod": (None, _MOD),
    "block_sparse_tensors": (None, "pass a mask_mod to flydsl_flash_attn_func"),
    "aux_tensors": (None, _MOD),
}


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, int) and not isinstance(value, bool) and value == default)


def refuse(function: str, given: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for the first of the `UNAVAILABLE` keywords that is not at its default."""
    for name, value in given.items():
        default, instead = UNAVAILABLE[name]
        if not _is(value, default):
            raise UnsupportedError(f"{function}: {name} is not available: {instead}; or leave {name} out")


def refuse_dropout(function: str, dropout_p: float) -> None:
    """Raise `UnsupportedError` for dropout."""
    if dropout_p:
        raise UnsupportedError(
            f"{function}: dropout is not available, got dropout_p={dropout_p!r}: pass 0.0, as inference does, or use "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def window_of(function: str, window_size: Any, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for no limit; FlashAttention also takes None and any negative number for that.

    A causal call has no limit on the right besides its own.
    """
    if isinstance(window_size, tuple | list) and len(window_size) == 2:
        left, right = (-1 if side is None else side for side in window_size)
        if isinstance(left, int) and isinstance(right, int):
            return max(left, -1), -1 if causal else max(right, -1)
    raise ArgumentTypeError(f"{function}: window_size must be two ints (left, right), got {window_size!r}")


def options_of(
    function: str,
    accepted: tuple[str, ...],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    extras: Mapping[str, Any],
) -> dict[str, Any]:
    """Keywords for `flydsl_flash_attn_func`, those that are not at its defaults.

    `accepted` are the keys of `AVAILABLE` that `function` takes.

    Raises:
        UnsupportedError: something that is not available.
        ArgumentTypeError: a keyword that no FlashAttention has, or a window that is none.
    """
    options: dict[str, Any] = {"num_kv_splits": 0}
    if dropout_p:
        refuse_dropout(function, dropout_p)
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    if window_size != (-1, -1):
        window = window_of(function, window_size, causal)
        if window != (-1, -1):
            options["window_size"] = window
    if softcap and not (isinstance(softcap, int | float) and softcap < 0):  # FlashAttention takes these for none
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    for name, value in extras.items():
        if name in accepted:
            if value is not None:
                options[AVAILABLE[name]] = value
        elif name in UNAVAILABLE:
            refuse(function, {name: value})
        else:
            raise ArgumentTypeError(
                f"{function}: unexpected keyword argument {name!r}; beyond FlashAttention-2's, "
                f"{', '.join(accepted)} are accepted"
            )
    return options


def one_of(function: str, name: str, value: Any, options: dict[str, Any]) -> Any:
    """An argument of FlashAttention-2 that may also have come under another name, taken out of `options`.

    Raises:
        ArgumentError: it came twice.
    """
    other = options.pop(name, None)
    if value is not None and other is not None:
        raise ArgumentError(f"{function}: {name} and page_table are two names of one argument: pass one of them")
    return other if value is None else value


def add_packing(
    function: str,
    options: dict[str, Any],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> None:
    """Add to `options` what says where sequences are: packed keys, or pages with lengths of their own.

    Raises:
        ArgumentError: two tables of pages.
    """
    pages = one_of(function, "block_table", block_table, options)
    options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
    if pages is not None:
        options["block_table"] = pages
        if "seqused_kv" in options:
            return  # pages are not one behind the other: offsets of keys say no more than lengths do
    options["cu_seqlens_kv"] = cu_seqlens_k


def check_cache(function: str, **tensors: Any) -> None:
    """q, k_cache and v_cache are tensors of four dimensions, and the caches can be used without a copy.

    Raises:
        ArgumentTypeError, ArgumentError: one is not.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"{function}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ArgumentError(f"{function}: {name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
        if name != "q" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ArgumentError(
                f"{function}: {name}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}"
            )


def with_rows(tensor: Any) -> Any:
    """A tensor whose last stride is 1, copied where it is not; anything else as it is."""
    return tensor.contiguous() if isinstance(tensor, torch.Tensor) and tensor.stride(-1) != 1 else tensor


def parts_of(function: str, name: str, packed: Any, count: int, dim: int, layout: str) -> tuple[torch.Tensor, ...]:
    """The `count` tensors stacked in dimension `dim` of `packed`, as views.

    Raises:
        ArgumentTypeError, ArgumentError: it is no tensor of this `layout`.
    """
    if not isinstance(packed, torch.Tensor):
        raise ArgumentTypeError(f"{function}: {name} must be a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != dim + 3 or packed.shape[dim] != count:
        raise ArgumentError(f"{function}: {name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(dim)


SMALLEST_HEAD_DIM = 32


def _padded_dim(head_dim: int) -> int:
    return SMALLEST_HEAD_DIM if head_dim < SMALLEST_HEAD_DIM else (head_dim + 7) // 8 * 8


def _ready(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """With elements of a row side by side and `head_dim` of them, zeros last: copied where it is not so."""
    missing = head_dim - tensor.size(-1)
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return with_rows(tensor)


def _needs_copies(q: Any, k: Any, v: Any) -> bool:
    """Whether kernels do not take these tensors as they are; not of what no copy makes better."""
    try:
        head_dim, value_dim = q.size(-1), v.size(-1)
        if head_dim % 8 == value_dim % 8 == 0 and head_dim >= SMALLEST_HEAD_DIM <= value_dim:
            return not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return 0 < head_dim == k.size(-1) and value_dim > 0
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return False  # what has no such sizes and strides is refused by name later


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of tensors as FlashAttention takes them: any last stride, head dimensions from 1.

    Head dimensions that the kernels do not have are padded with zeros in copies, and out is a view of a wider
    tensor then, both as in FlashAttention-2. Returns out, or (out, lse) with `return_lse`.
    """
    if not _needs_copies(q, k, v):
        return attention(q, k, v, causal, out=out, return_lse=return_lse, **options)
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    width, value_width = _padded_dim(head_dim), _padded_dim(value_dim)
    if width != head_dim:
        options.setdefault("softmax_scale", head_dim**-0.5)
    q, k, v = _ready(q, width), _ready(k, width), _ready(v, value_width)
    if value_width == value_dim:
        return attention(q, k, v, causal, out=out, return_lse=return_lse, **options)
    result = attention(q, k, v, causal, return_lse=return_lse, **options)
    wide, *lse = result if return_lse else (result,)
    narrow = wide[..., :value_dim]
    if out is not None:
        narrow = out.copy_(narrow)
    return (narrow, *lse) if return_lse else narrow
