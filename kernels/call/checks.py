"""Checks of what a caller hands to flash attention, made once per kind of call.

Every check names the argument, the value and what is accepted. Mistakes raise `ArgumentError` (a ValueError)
or `ArgumentTypeError` (also a TypeError). What is valid but not available is for `dispatch` to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fly import config
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError

from ..arguments.callers import arg, written
from ..arguments.checks import (
    ALIGNMENT,
    ATTENTION,
    check_last_stride,
    check_tensor,
    extent_bytes,
    fail,
    flag,
    overlaps_itself,
    whole,
)
from ..dispatch import DUALWAVE
from ..problem.catalogue import SPLIT_UNIT
from ..problem.contract import DQ_SUMS, Request, Tensors, aux_name
from ..work.tile_scheduler import MAX_SPLITS
from .features import CallArguments, check_features

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2: "f8e5m2",
}
# where it is not q's dtype
OUT_DTYPES = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e4m3fnuz: torch.bfloat16}
INPUTS = ("q", "k", "v")
MAX_WAVES_PER_EU = 8
# what is on the device may be no such thing as the shapes allow
ON_DEVICE = ("cu_seqlens_q", "seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", "block_table", "block_mask")

# (shape, dtype) of a tensor, or None for one like q, which is contiguous then: a plain tuple is read in less than
# half the time of a torch.Size
Result = tuple[tuple[int, ...], torch.dtype] | None


@dataclass(frozen=True)
class Call:
    """A checked call: what decides its kernel, and what a plan keeps of it; `empty` when no query has a key.

    `tensors`: all that it was given for kernels, by name. `extents`: the bytes that q, k, v and out span in memory.
    `out`: what it allocates, and `lse`: the shape of that. `reads_device`: what is on the device may have to be
    checked in every such call.
    """

    request: Request
    tensors: Tensors
    empty: bool
    extents: tuple[int, ...]
    out: Result
    lse: tuple[int, ...]
    reads_device: bool


def _check_ranks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool, paged: bool, packed_keys: bool
) -> None:
    queries = "(total, H, D)" if packed else "(B, Sq, H, D)"
    keys = "(total, Hkv, D)" if packed_keys else "(B, Skv, Hkv, D)"
    keys = "(pages, page_size, Hkv, D)" if paged else keys
    for name, tensor, layout in zip(INPUTS, (q, k, v), (queries, keys, keys)):
        rank = layout.count(",") + 1
        if tensor.dim() != rank:
            wanted = f"{rank} dimensions {layout}"
            hint = "" if packed or tensor.dim() != 3 else "; packed sequences also need cu_seqlens_q"
            fail(f"{arg(name)} must have {wanted}, got shape {tuple(tensor.shape)}{hint}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, same_batch: bool) -> None:
    if k.shape[:-1] != v.shape[:-1]:
        fail(
            f"{arg.k} and {arg.v} must have the same shape up to head_dim, got {arg.k} {tuple(k.shape)} and {arg.v} "
            f"{tuple(v.shape)}"
        )
    if same_batch and q.shape[0] != k.shape[0]:
        fail(f"{arg.q} and {arg.k} must have the same batch, got {arg.q} {q.shape[0]} and {arg.k} {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        fail(f"{arg.q} and {arg.k} must have the same head_dim, got {arg.q} {q.shape[-1]} and {arg.k} {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads == 0 or kv_heads == 0:
        fail(f"{arg.q} and {arg.k} need at least one head, got {arg.q} {heads} and {arg.k} {kv_heads}")
    if heads % kv_heads:
        fail(f"{arg.q}'s heads must be a multiple of {arg.k}'s heads, got {arg.q} {heads} and {arg.k} {kv_heads}")


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in zip(INPUTS, (q, k, v)):
        if tensor.dtype not in DTYPES:
            # gfx942's other 8-bit floats, all of whose numbers bfloat16 holds
            fnuz = tensor.dtype is torch.float8_e5m2fnuz
            exact = ": convert with .to(torch.bfloat16), which is exact" if fnuz else ""
            fail(
                f"{arg(name)} has dtype {tensor.dtype}; accepted: torch.bfloat16, torch.float16, "
                f"torch.float8_e4m3fn, on gfx942 torch.float8_e4m3fnuz{exact}",
                ArgumentTypeError,
            )
    if q.dtype.itemsize == 2 and k.dtype == v.dtype == torch.float8_e4m3fn:
        return
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            cache = q.dtype.itemsize == 2 and tensor.dtype in OUT_DTYPES
            other = f", or {arg('k, v')} both torch.float8_e4m3fn" if cache else ""
            fail(f"{arg(name)} must have {arg.q}'s dtype {q.dtype}{other}, got {tensor.dtype}", ArgumentTypeError)


def check_out(out: Any, q: torch.Tensor, v: torch.Tensor) -> None:
    """Check the result's tensor of a call with these queries and values.

    Raises:
        ArgumentError, ArgumentTypeError: it cannot be written as such.
    """
    check_tensor("out", out)
    shape = (*q.shape[:-1], v.shape[-1])
    if out.shape != shape:
        fail(f"{arg.out} must have shape {shape} ({arg.q}'s, with {arg.v}'s head_dim), got {tuple(out.shape)}")
    dtype = OUT_DTYPES.get(q.dtype, q.dtype)
    if out.dtype != dtype:
        wanted = f"q's dtype {dtype}" if dtype is q.dtype else f"dtype {dtype} for q of {q.dtype}"
        fail(f"{arg.out} must have {wanted}, got {out.dtype}", ArgumentTypeError)
    if out.device != q.device:
        fail(f"{arg.out} must be on {arg.q}'s device {q.device}, got {out.device}")
    check_last_stride("out", out)
    if out.numel() and overlaps_itself(out):
        fail(f"{arg.out} must not overlap itself, got shape {tuple(out.shape)} with strides {out.stride()}")


def _check_scale(softmax_scale: Any, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    return ATTENTION.number("softmax_scale", softmax_scale, "a finite positive number", lambda scale: scale > 0)


def _check_packed(q: torch.Tensor, options: Mapping[str, Any], paged: bool) -> bool:
    """Check what describes packed sequences; whether the call has any.

    Keys that are not packed, in pages or (B, Skv, Hkv, D), need no offsets; `paged` says whether there are such.
    """
    offsets = {name: options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    lengths = {name: options[name] for name in ("max_seqlen_q", "max_seqlen_kv")}
    given = [name for name, value in offsets.items() if value is not None]
    if not given:
        for name, value in lengths.items():
            if value is None:
                continue
            if not paged or name == "max_seqlen_q":
                fail(
                    f"{arg(name)} is only for packed sequences (with {arg.cu_seqlens_q} and {arg.cu_seqlens_kv}): "
                    "leave it out"
                )
            whole(name, value, 0, 2**31 - 1)
        return False
    if len(given) == 1 and not paged:
        fail(f"{arg.cu_seqlens_q} and {arg.cu_seqlens_kv} go together, got only {arg(given[0])}")
    for name in given:
        ATTENTION.vector(name, offsets[name], torch.int32, q.device, "batch + 1 contiguous int32 offsets")
    if len(given) == 2 and len(offsets["cu_seqlens_q"]) != len(offsets["cu_seqlens_kv"]):
        counts = " and ".join(str(len(value)) for value in offsets.values())
        fail(f"{arg.cu_seqlens_q} and {arg.cu_seqlens_kv} must have the same length, got {counts}")
    for name, value in lengths.items():
        if value is None and paged and name == "max_seqlen_kv":
            continue
        if value is None:
            fail(f"packed sequences need {arg(name)}, the longest sequence's length (reading it would synchronise)")
        whole(name, value, 0, 2**31 - 1)
    return "cu_seqlens_q" in given


def _check_cross(cross_seqlen: Any, unknown: bool, lengths: Mapping[str, tuple[int, int]]) -> bool:
    """Whether queries and keys of a sequence may differ in number.

    `lengths`: (of q, of k), by what they count; `unknown`: there may be others, on the device, that are not read.
    """
    differs = {what: pair for what, pair in lengths.items() if pair[0] != pair[1]}
    if cross_seqlen is None:
        return unknown or bool(differs)
    flag("cross_seqlen", cross_seqlen)
    if not cross_seqlen and differs:
        what, (queries, keys) = next(iter(differs.items()))
        fail(
            f"cross_seqlen=False, but q has {queries} {what} and k {keys}; leave cross_seqlen out, and it is detected"
        )
    differ: bool = cross_seqlen
    return differ


def _check_head_options(options: Mapping[str, Any], kv_heads: int) -> None:
    if options["num_kv_heads"] is not None:
        whole("num_kv_heads", options["num_kv_heads"], 1)
        if options["num_kv_heads"] != kv_heads:
            fail(f"num_kv_heads={options['num_kv_heads']}, but k and v have {kv_heads} heads")


def _check_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    tuning = {name: options[name] for name in ("waves_per_eu", "daz", *DUALWAVE) if options[name] is not None}
    for name, value in tuning.items():
        if name == "waves_per_eu":
            whole(name, value, 1, MAX_WAVES_PER_EU)
        else:
            flag(name, value)
    return tuning


def _check_table(table: Any, device: torch.device) -> None:
    """It is a table of pages: (B, pages of a sequence) int32, each row contiguous."""
    check_tensor("block_table", table)
    if table.dim() != 2 or table.dtype != torch.int32 or table.device != device:
        fail(
            f"{arg.block_table} must be (B, pages of a sequence) int32 on {device}, got shape {tuple(table.shape)}, "
            f"dtype {table.dtype} on {table.device}"
        )
    check_last_stride("block_table", table)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, with stride 0 where one of a dimension with a single element would count against a kernel.

    No element is ever that stride away from another, so that any may stand there (as PyTorch's `is_contiguous` sees
    it), and its bytes need not be a multiple of `ALIGNMENT`.
    """
    size = tensor.element_size()
    odd = [n == 1 and s * size % ALIGNMENT != 0 for n, s in zip(tensor.shape[:-1], tensor.stride())]
    if not any(odd):
        return tensor
    strides = [0 if free else stride for free, stride in zip((*odd, False), tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def alignment(*tensors: torch.Tensor) -> int:
    """Bytes, at most `ALIGNMENT`, that divide the addresses and all strides but the last."""
    bits = ALIGNMENT
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * tensor.element_size()
    return bits & -bits


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether kernels can load 16 bytes at once from it.

    Strides of 0 are those of expanded gradients: their rows are alike, and are loaded as they are.
    """
    return tensor.stride(-1) == 1 and alignment(settled(tensor)) >= ALIGNMENT


def loadable(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor `settled`, or a contiguous copy where kernels cannot load 16 bytes at once from it."""
    return settled(tensor) if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _pitch(*tensors: torch.Tensor) -> int:
    """The largest distance between neighbouring tokens, in bytes."""
    return max(tensor.stride(-3) * tensor.element_size() for tensor in tensors)


def check_call(q: Any, k: Any, v: Any, causal: Any, out: Any, options: Mapping[str, Any]) -> Call:
    """Check a call's arguments (`options`: the keyword arguments by name) and sum it up.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    for name, tensor in zip(INPUTS, (q, k, v)):
        check_tensor(name, tensor)
    table = options["block_table"]
    if paged := table is not None:
        _check_table(table, q.device)
    apart = paged or (k.dim() == 4 and options["cu_seqlens_q"] is not None and options["cu_seqlens_kv"] is None)
    packed = _check_packed(q, options, apart)
    packed_keys = packed and not apart
    _check_ranks(q, k, v, packed, paged, packed_keys)
    _check_dtypes(q, k, v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            fail(
                f"{arg.q}, {arg.k} and {arg.v} must be on one device, got {arg.q} on {q.device} and {arg(name)} "
                f"on {tensor.device}"
            )
    _check_shapes(q, k, v, same_batch=not packed and not paged and options["kv_batch_idx"] is None)
    for name, tensor in zip(INPUTS, (q, k, v)):
        check_last_stride(name, tensor)
    if out is not None:
        check_out(out, q, v)
    if (counts := options["debug_counts"]) is not None:
        ATTENTION.vector("debug_counts", counts, torch.float32, q.device, "2 float32 counters", 2)

    flag("causal", causal)
    flag("deterministic", options["deterministic"])
    _check_dq_sums(options["dq_accumulate"], options["deterministic"])
    flag("return_lse", options["return_lse"])
    heads, head_dim = q.shape[-2:]
    _check_head_options(options, k.shape[-2])
    whole("num_kv_splits", options["num_kv_splits"], 0, MAX_SPLITS)
    longest = options["max_seqlen_q"], options["max_seqlen_kv"]
    if packed:
        # a bound may be far above what there is, and grids follow it
        batch, seq_len = len(options["cu_seqlens_q"]) - 1, min(longest[0], q.shape[0])
        seq_len_kv = k.shape[0] if packed_keys else k.shape[1]
        lengths = {"tokens": (q.shape[0], k.shape[0]), "tokens at most in a sequence": longest} if packed_keys else {}
        if apart and not paged and options["kv_batch_idx"] is None and k.shape[0] != batch:
            fail(f"{arg.k} must have a batch entry for each of {batch} sequences, got shape {tuple(k.shape)}")
    else:
        batch, seq_len, seq_len_kv = q.shape[0], q.shape[1], k.shape[1]
        lengths = {} if paged else {"tokens": (seq_len, seq_len_kv)}
    if paged:
        seq_len_kv = table.shape[1] * k.shape[1]
    if (packed or paged) and longest[1] is not None:
        seq_len_kv = min(seq_len_kv, longest[1])
    inputs = [*map(settled, (q, k, v) if out is None else (q, k, v, out))]
    queries, keys = (inputs[0], *inputs[3:]), inputs[1:3]
    alignments, pitches = [alignment(*inputs), alignment(*keys)], [_pitch(*queries), _pitch(*keys)]
    found = CallArguments(q, k, causal, batch, packed, options)
    features, operands, wanted = check_features(found)
    splits = options["num_kv_splits"]
    if "split_keys" in wanted:
        splits = _parts(operands["split_keys"], seq_len_kv, alignments[0])
    aux = found.aux_tensors(used=features.score_mod is not None or features.mask_mod is not None)
    others = {
        "packed": packed,
        "split_kv": splits > 1,
        "debug_counts": options["debug_counts"] is not None,
    }
    unknown = options["cu_seqlens_q"] is not options["cu_seqlens_kv"] or "seqused" in wanted or paged
    request = Request(
        head_dim=head_dim,
        dtype=DTYPES[q.dtype],
        causal=causal,
        cross_seqlen=_check_cross(options["cross_seqlen"], unknown, lengths),
        return_lse=options["return_lse"],
        batch=batch,
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        num_heads=heads,
        num_kv_heads=k.shape[-2],
        softmax_scale=_check_scale(options["softmax_scale"], head_dim),
        num_kv_splits=splits,
        alignment=alignments[0],
        kv_alignment=alignments[1],
        q_pitch=pitches[0],
        kv_pitch=pitches[1],
        page_size=k.shape[1] if paged else None,
        features=(*(name for name, given in others.items() if given), *wanted),
        tuning=_check_tuning(options),
        head_dim_v=None if v.shape[-1] == head_dim else v.shape[-1],
        static_features=features,
        aux_tensors=len(aux),
        deterministic=options["deterministic"],
        dq_accumulate=options["dq_accumulate"],
        bias_by_query="bias" in operands and operands["bias"].dim() == 4,
    )
    tensors = dict(zip((*INPUTS, "out"), inputs)) | operands | {aux_name(i): x for i, x in enumerate(aux)}
    tensors |= {name: options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv", "debug_counts")}
    extents = tuple(map(extent_bytes, (q, k, v, q if out is None else out)))
    empty = 0 in (batch, seq_len, *(x.numel() for x in (q, k, v, *([table] if paged else []))))
    looked_at = any(options[name] is not None for name in ON_DEVICE)
    checked = looked_at and (q.device.type == "cpu" or bool(config.CHECK_INPUTS.get()))
    lse = (*q.shape[:-3], heads, q.shape[-3])
    return Call(request, tensors, empty, extents, _result(q, v), lse, checked)


def _check_dq_sums(how: Any, deterministic: bool) -> None:
    if not isinstance(how, str) or how not in DQ_SUMS:
        accepted = " or ".join(map(repr, DQ_SUMS))
        error = ArgumentError if isinstance(how, str) else ArgumentTypeError
        fail(f"{arg.dq_accumulate} must be {accepted}, got {written(how)}", error)
    if deterministic and how != DQ_SUMS[0]:
        fail(
            f"{arg.dq_accumulate}={how!r} adds parts of {arg.q}'s gradient up in an order that changes from run to "
            f"run, and {arg.deterministic} is True; accepted with it: {DQ_SUMS[0]!r}"
        )


def _parts(split_keys: int, seq_len_kv: int, alignment: int) -> int:
    """Parts of `split_keys` keys that the longest sequence has."""
    parts = max(1, -(-seq_len_kv // split_keys))
    if parts > MAX_SPLITS:
        least = -(-seq_len_kv // (MAX_SPLITS * SPLIT_UNIT)) * SPLIT_UNIT
        fail(
            f"{arg.split_keys} is {split_keys}, and {seq_len_kv} keys are {parts} parts of so many; at most "
            f"{MAX_SPLITS} are available: pass {least} or more"
        )
    if alignment < ALIGNMENT:
        # tiles of what is not aligned are others, and where a caller's tensors lie may depend on the batch
        fail(
            f"{arg.split_keys} takes {arg('q, k')}, {arg.v} and out whose addresses and strides are multiples of "
            f"{ALIGNMENT} bytes, not of {alignment}: make them contiguous, from an allocation of their own",
            UnsupportedError,
        )
    return parts


def _result(q: torch.Tensor, v: torch.Tensor) -> Result:
    """What out is allocated as."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=OUT_DTYPES.get(q.dtype, q.dtype), device="meta")
    like_q = (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    return None if like_q else (tuple(out.shape), out.dtype)
