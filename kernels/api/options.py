"""From the arguments of FlashAttention's functions to the keywords of `flydsl_flash_attn_func`.

What FlashAttention-3 and -4 take beyond FlashAttention-2 are keywords here (`Extras`): one table says what each
becomes, another which of them are hints, that is, change no result, and a third what is not available and what to do
instead. Nothing else is ignored.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, UnsupportedError

from ..arguments.callers import Caller
from ..arguments.checks import ATTENTION, Checks, check_gradients, is_dense
from ..call.checks import check_out
from ..problem.catalogue import DESCALES, FEATURES, NO_WINDOW, probability_of
from ..problem.contract import HEAD_DIMS
from .conversions import HINTS, check_dense, splits_of, window_of
from .rows import padded_dim, ready
from .torch_ops import attention


class Extras(TypedDict, total=False):
    """Keywords of FlashAttention-3 and -4 that FlashAttention-2 does not have.

    Available: `num_splits` (parts that keys are split into, 0 takes what suits the device, the default), `split_keys`
    (fly's own: batch-invariant results, see `flydsl_flash_attn_func`, 0 for off),
    `seqused_q`, `seqused_k` ((B,) int32: tokens of each sequence that count), `page_table` ((B, max pages) int32,
    packed queries and caches), `attention_chunk` (a query sees only keys of its position's chunk of so many, 0 for
    all), `learnable_sink` ((H,): one more term exp(sink) in the denominator), `q_descale`,
    `k_descale`, `v_descale` ((B, Hkv) or (Hkv,) float32, or one number as () or (1,), beside 16-bit q also by key:
    what values of 8 bits are multiplied by, 1 by default), `fp8_accumulate` (fly's own: "float32", the default,
    or "fast", FlashAttention-3's sums of 8-bit products, see `flydsl_flash_attn_func`), `dq_accumulate` (fly's own:
    "float32", the default, or "16bit", sums of q's gradient on AMD's GPUs, see there; not for caches).
    Hints, which are checked and change nothing: `pack_gqa` (the kernel decides which query heads share a block),
    `sm_margin` (kernels use the whole device), `scheduler_metadata` (blocks are scheduled on the device).
    The others raise `UnsupportedError` when they are not at FlashAttention's default.
    """

    num_splits: int
    split_keys: int
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    page_table: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    fp8_accumulate: str
    dq_accumulate: str
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
    "dq_accumulate": "dq_accumulate",
    "cu_seqlens_q": "cu_seqlens_q",
    "max_seqlen_q": "max_seqlen_q",
    "cu_seqlens_k_new": "cu_seqlens_k_new",
    **{theirs: ours for feature in FEATURES for theirs, ours in feature.flash_attention.items()},
}
OF_FP8 = (*DESCALES, "fp8_accumulate")
DENSE = (
    *("num_splits", "split_keys", "seqused_q", "seqused_k", "learnable_sink", "attention_chunk", "dq_accumulate"),
    *OF_FP8,
)
PACKED = (*DENSE, "page_table")
OF_PACKED_CACHE = ("cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k_new")
CACHE = ("split_keys", "page_table", "learnable_sink", "attention_chunk", *OF_PACKED_CACHE, *OF_FP8)

WHOLE = ("attention_chunk", "split_keys", "max_seqlen_q")  # those that are integers, besides num_splits
OFF_AT_0 = ("attention_chunk", "split_keys")

_MOD = "flydsl_flash_attn_func takes one (with fly's own signature)"
# (its default, what to do instead)
UNAVAILABLE: Mapping[str, tuple[Any, str]] = {
    "qv": (None, "pass torch.cat([q, qv], -1) and torch.cat([k, v], -1) as q and k, and softmax_scale"),
    "cu_seqlens_q": (None, "it is for packed queries of flash_attn_with_kvcache"),
    "max_seqlen_q": (None, "it is for packed queries of flash_attn_with_kvcache"),
    "cu_seqlens_k_new": (None, "it is for packed new keys of flash_attn_with_kvcache"),
    "rotary_seqlens": (None, "positions are cache_seqlens: rotate q and k before the call"),
    "score_mod": (None, _MOD),
    "mask_mod": (None, _MOD),
    "block_sparse_tensors": (None, "pass a mask_mod to flydsl_flash_attn_func"),
    "aux_tensors": (None, _MOD),
}


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, int) and not isinstance(value, bool) and value == default)


def refuse(function: str, keyword: str, value: Any, name: str = "") -> None:
    """Raise `UnsupportedError` unless a `keyword` of `UNAVAILABLE`, `name` in the message, is at its default."""
    default, instead = UNAVAILABLE[keyword]
    if not _is(value, default):
        name = name or keyword
        raise UnsupportedError(f"{function}: {name} is not available: {instead}; or leave {name} out")


def options_of(
    caller: Caller,
    accepted: tuple[str, ...],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    extras: Mapping[str, Any],
    num_splits: Any = 0,
) -> dict[str, Any]:
    """Keywords for `flydsl_flash_attn_func`, those that are not at its defaults.

    `accepted` are the keys of `AVAILABLE` that `caller` takes.

    Raises:
        UnsupportedError: something that is not available.
        ArgumentTypeError, ArgumentError: a keyword that no FlashAttention has, or a value that is none.
    """
    options: dict[str, Any] = {"num_kv_splits": num_splits}
    if causal is not True and causal is not False:
        Checks(caller.function).flag("causal", causal)
    if deterministic is not False:
        Checks(caller.function).flag("deterministic", deterministic)
        options["deterministic"] = True
    if not isinstance(dropout_p, float) or dropout_p:
        options["dropout_p"] = probability_of(Checks(caller.function), dropout_p)
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    # torch.compile up to 2.11 cannot ask whether a tuple is another
    if torch.compiler.is_compiling() or window_size is not NO_WINDOW:
        window = window_of(caller.function, window_size, causal)
        if window != NO_WINDOW:
            options["window_size"] = window
    if not isinstance(softcap, float) or softcap:
        # FlashAttention takes 0 and less for none
        number = isinstance(softcap, numbers.Real) and not isinstance(softcap, bool)
        if softcap is not None and not (number and softcap <= 0):
            options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    for name, value in extras.items():
        if name in accepted:
            if name in WHOLE and value is not None:
                value = Checks(caller.function).integer(name, value)
            if value is not None and not (name in OFF_AT_0 and value == 0):
                options[AVAILABLE[name]] = value
        elif name in HINTS:
            HINTS[name](Checks(caller.function), name, value)
        elif name in UNAVAILABLE:
            refuse(caller.function, name, value)
        else:
            raise ArgumentTypeError(
                f"{caller.function}: unexpected keyword argument {name!r}; beyond FlashAttention-2's, "
                f"{', '.join(accepted)} are accepted"
            )
    splits = options["num_kv_splits"]
    if not isinstance(splits, int) or splits:
        options["num_kv_splits"] = splits_of(caller.function, splits)
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
    caller: Caller,
    options: dict[str, Any],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> None:
    """Add to `options` what says where sequences are: packed keys, or pages with lengths of their own.

    Raises:
        ArgumentError, ArgumentTypeError: two tables of pages, no offsets, a length that is no integer.
        UnsupportedError: a length in a device's memory.
    """
    pages = one_of(caller.function, "block_table", block_table, options)
    if cu_seqlens_q is None:
        Checks(caller.function).plain(caller.name("cu_seqlens_q"), cu_seqlens_q)
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
    for name, length in lengths.items():
        if length is not None and not isinstance(length, int):
            lengths[name] = Checks(caller.function).integer(caller.name(name), length)
    options |= {"cu_seqlens_q": cu_seqlens_q, **lengths}
    if pages is not None:
        options["block_table"] = pages
        if "seqused_kv" in options:
            if cu_seqlens_k is not None:
                name = caller.name("cu_seqlens_kv")
                Checks(caller.function).tensor(name, cu_seqlens_k, (torch.int32,), 1, "(B + 1,)")
            return  # pages are not one behind the other: offsets of keys say no more than lengths do
    options["cu_seqlens_kv"] = cu_seqlens_k


def check_stacked(function: str, name: str, tensor: Any, count: int, dim: int, layout: str) -> None:
    """`count` tensors are stacked in dimension `dim` of this one.

    Raises:
        ArgumentTypeError, ArgumentError: it is no tensor of this `layout`.
    """
    check_dense(function, name, tensor)
    if tensor.dim() != dim + 3 or tensor.shape[dim] != count:
        raise ArgumentError(f"{function}: {name} must have shape {layout}, got {tuple(tensor.shape)}")


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """q, k or v as `attend` hands it on."""
    return ready(tensor, padded_dim(tensor.shape[-1]))


def needs_copies(q: Any, k: Any, v: Any) -> bool:
    """Whether kernels do not take these tensors as they are; not of what no copy makes better."""
    if v is None:  # stacked: one head dimension
        v = q if k is None else k
        k = v
    try:
        # a whole shape is read in the time of half a size
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        if head_dim % HEAD_DIMS.step == 0 == value_dim % HEAD_DIMS.step:
            if q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1:
                return False
        elif not 0 < head_dim == k.size(-1) or not value_dim:
            return False
        return all(map(is_dense, (q, k, v)))
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return False  # what has no such sizes and strides is refused by name later


def attend(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool,
    options: dict[str, Any],
    *,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of tensors as FlashAttention takes them: any last stride, head dimensions from 1.

    Without v, k is k and v, and without k, q is all three (`arguments.stacked`).

    Head dimensions that the kernels do not have are padded with zeros in copies, and out is a view of a wider
    tensor then, both as in FlashAttention-2. Returns (out, lse or None); errors name the `caller`.
    """
    if not needs_copies(q, k, v):
        return attention(caller, q, k, v, causal, options, out, return_lse)
    head_dim = q.shape[-1]
    value_dim = head_dim if v is None else v.shape[-1]
    width, value_width = padded_dim(head_dim), padded_dim(value_dim)
    if width != head_dim:
        options.setdefault("softmax_scale", head_dim**-0.5)
    given = v
    q = ready(q, width)
    k, v = (None if k is None else ready(k, width)), (None if v is None else ready(v, value_width))
    if value_width == value_dim:
        return attention(caller, q, k, v, causal, options, out, return_lse)
    if out is None or given is None:
        wide, lse = attention(caller, q, k, v, causal, options, return_lse=return_lse)
        return wide[..., :value_dim], lse
    try:
        check_out(out, q, given)
        if torch.is_grad_enabled():
            check_gradients({"out": out})
        wide, lse = attention(caller, q, k, v, causal, options, return_lse=return_lse)
        if wide.requires_grad:
            ATTENTION.leave_out("out")
    except FlyError as error:
        caller.tell(error)
        raise
    return out.copy_(wide[..., :value_dim]), lse
