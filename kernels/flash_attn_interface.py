"""Flash attention for callers: `flydsl_flash_attn_func` on torch tensors.

The first call of a kind checks its arguments, chooses and compiles a kernel, and keeps a *plan*. A later call
with the same shapes, strides, dtypes, alignments, device and options finds that plan by its key, and only
addresses are patched. No call synchronises the device.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fly import config
from fly.errors import ArgumentTypeError, UnsupportedError

from . import dispatch
from .arguments.callers import OWN
from .arguments.checks import ATTENTION, check_gradients, fail
from .call import input_checks
from .call.attention_checks import (
    ALIGNMENT,
    OUT_DTYPES,
    Call,
    check_call,
    check_no_overlap,
    check_workspace,
    extent_bytes,
    settled,
)
from .problem import contract
from .problem.block_mask import BlockMask, for_tiles
from .problem.catalogue import NO_WINDOW
from .problem.contract import Launch, Tensors
from .problem.features import Features
from .problem.mods import Mod

MAX_PLANS = 1024

# the variables that a plan depends on
_environment = config.raw_value
_KERNEL, _DISABLED, _ARCH = (v.raw_name for v in (config.KERNEL, config.DISABLE_DUALWAVE_SWP, config.ARCH))
_CHECK_INPUTS = config.CHECK_INPUTS.raw_name


@dataclass(frozen=True, slots=True)
class Plan:
    """A prepared kind of call, without any of the caller's tensors.

    `extents` are the bytes that q, k, v and out span in memory. `out` and `lse` are what a call allocates.
    `checked`: what is on the device may have to be checked in every call.
    """

    launch: Launch
    extents: tuple[int, ...]
    out: _Result
    lse: _Result
    checked: bool


# (shape, dtype) of a tensor, or None for one like q, which is contiguous then: a plain tuple is read in less than
# half the time of a torch.Size
_Result = tuple[tuple[int, ...], torch.dtype] | None


def _allocate(q: torch.Tensor, result: _Result) -> torch.Tensor:
    """A contiguous tensor on q's device; nothing is kept for it, so that no memory of a graph is."""
    if result is None:
        return torch.empty_like(q)
    shape, dtype = result
    return q.new_empty(shape, dtype=dtype)


_named = tuple.__new__  # makes `Tensors` of a tuple in half the time that the class itself takes

_plans: dict[tuple[Any, ...], Plan] = {}
_plans_lock = threading.Lock()


def flydsl_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    *,
    softmax_scale: float | None = None,
    num_kv_heads: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    cross_seqlen: bool | None = None,
    num_kv_splits: int = 1,
    workspace: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    aux_tensors: Sequence[torch.Tensor] = (),
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    waves_per_eu: int | None = None,
    daz: bool | None = None,
    dualwave_swp_lazy_rescale: bool | None = None,
    dualwave_swp_setprio: bool | None = None,
    dualwave_swp_enable_stagger: bool | None = None,
    debug_counts: torch.Tensor | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ) · v for every query head; several query heads may share a key head (GQA, MQA).

    Args:
        q: (B, Sq, H, D), bfloat16 or float16, D 32 to 256 in steps of 8; on Hopper also float8_e4m3fn, D 64, 128 or
            256, and on gfx950 D 128. The last dimension is contiguous, other strides are free; on a CUDA or ROCm
            device, or on the CPU, where the kernel runs in the emulator. Packed sequences: (total_q, H, D).
        k, v: (B, Skv, Hkv, D), same dtype and device; H is a multiple of Hkv, and head h reads head h·Hkv//H.
            Packed sequences: (total_kv, Hkv, D). v may have another head dimension Dv, which out has too.
        causal: query i sees the keys j ≤ i + Skv − Sq (bottom-right). A query that sees none gives zeros.
        softmax_scale: positive factor of the scores; D**-0.5 by default.
        num_kv_heads: Hkv, if the caller wants it checked.
        return_lse: also return the natural log of the sum of exponentials of the scaled scores, float32
            (B, H, Sq), packed (H, total_q), −inf where a query sees no key.
        out: written and returned instead of a new tensor; q's shape with v's head dimension, q's dtype and device,
            sharing no memory with q, k or v.
        cross_seqlen: whether queries and keys of a sequence may differ in number. Detected by default: from the
            shapes, and packed, from `cu_seqlens_q is cu_seqlens_kv`. False for packed sequences is a promise.
        num_kv_splits: parts that the keys are split into, each computed by blocks of its own and then
            combined: for few queries and heads and many keys. From 1 to 64; 0 takes what suits the device.
        workspace: memory for split keys and values of 8 bits that are turned beforehand instead of an allocation in
            the call, contiguous, 16-byte aligned, of at least `flydsl_flash_attn_workspace` bytes and any dtype;
            overwritten. Unused without these.
        cu_seqlens_q, cu_seqlens_kv: packed sequences: (B + 1,) int32 on q's device, from 0 and never decreasing;
            sequence b has the tokens from cu_seqlens[b] to cu_seqlens[b + 1], which may be none. Their content is not
            read on the host, so that it may change between replays of a captured graph. Queries outside of all
            sequences are not written. With cu_seqlens_q alone, k and v are (B, Skv, Hkv, D) or pages: packed queries
            of a cache.
        max_seqlen_q, max_seqlen_kv: packed sequences: at least the longest sequence's length. Queries of a
            sequence past max_seqlen_q may not be written.
        window_size: (left, right): query i, which stands at key position p = i + Skv − Sq, sees the keys from
            p − left to p + right; −1 leaves a side open. causal closes the right side.
        attention_chunk: query i at key position p sees only keys of the chunk of so many that p is in, p − p mod
            attention_chunk and on, of those that causal and window_size leave; 0 for none. Chunks count from the
            sequence's first key, behind cache_leftpad. A query at a negative position sees none.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        alibi_slopes: (H,) or (B, H) float32: scores are lowered by slope · |key − p|.
        bias: added to the scaled scores, floats that broadcast to (B, H, Sq, Skv); dense tensors only.
        sink: (H,) floats: every row's softmax has this score too, whose value is zero. lse contains it.
        q_descale, k_descale, v_descale: what float8_e4m3fn values are multiplied by, float32 of shape (), (1,) or
            (B, Hkv): one a tensor, or one a sequence and key head; none below zero. out is bfloat16.
        score_mod: function (score, batch, head, query, key, *aux) of traced scalars that gives the score to take
            instead, after softcap, ALiBi and bias. `aux[i, j]` loads from one of the `aux_tensors`.
        mask_mod: function (batch, head, query, key, *aux) that tells whether a query sees a key; further masks apply
            as well. Two functions with the same code and captured values count as one.
        block_mask: a block-sparse mask of `BlockMask`, with a mask_mod of its own; blocks of keys that it
            does not list cost nothing. Dense tensors only.
        aux_tensors: what `score_mod` and `mask_mod` may load from, of any shape.
        seqused_q, seqused_kv: (B,) int32, how many of each sequence's tokens count; others have no output.
        cache_leftpad: (B,) int32, how many of the tokens that count are left out at the start of k and v.
        kv_batch_idx: (B,) int32, the batch entry of k and v for each sequence; they may have any batch then. With a
            block_table, its row for each sequence.
        block_table: keys and values in pages: (B, pages of a sequence) int32 on q's device, and k and v are (pages,
            page_size, Hkv, D); a page_size that is a power of two from 16 on is fastest. The keys of sequence b are
            rows 0 to seqused_kv[b] of the pages block_table[b], in order. Needs seqused_kv, or with packed queries
            cu_seqlens_kv, whose differences are lengths then. Table entries behind a length's pages are not
            used. max_seqlen_kv may be given, for the choice of splits.
        waves_per_eu: occupancy to compile for, waves per SIMD (AMD). daz: flush denormals to zero.
        dualwave_swp_lazy_rescale, dualwave_swp_setprio, dualwave_swp_enable_stagger: switches of the gfx950 kernel,
            all on by default; another kernel refuses them.
        debug_counts: (2,) float32 on q's device, to which the gfx950 kernel adds how often it kept and took a
            rescale; another kernel refuses it.
        stream: what the work is queued on, a `torch.cuda.Stream` or a raw handle; torch's current stream of
            q's device by default.

    Returns:
        out, of q's shape (with v's head dimension), or (out, lse) with `return_lse`.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too). Offsets,
            lengths, entries, pages and block lists are looked at in the emulator alone, and on a GPU with
            FLY_CHECK_INPUTS=1, which synchronises; what leaves the tensors is cut otherwise.
        UnsupportedError: what this target or kernel cannot do (a NotImplementedError); a graph capture with
            FLY_CHECK_INPUTS=1.
    """
    key: tuple[Any, ...] | None
    placed: tuple[torch.Tensor | BlockMask | None, ...]
    blocks: tuple[torch.Tensor, ...]
    functions: tuple[Callable[..., Any] | None, ...]
    try:
        # fmt: off
        key = (
            type(q), q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT,
            type(k), k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT,
            type(v), v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT,
            None if out is None else _geometry(out),
            causal, softmax_scale, num_kv_heads, return_lse, cross_seqlen, num_kv_splits, waves_per_eu, daz,
            dualwave_swp_lazy_rescale, dualwave_swp_setprio, dualwave_swp_enable_stagger, max_seqlen_q, max_seqlen_kv,
            None if cu_seqlens_q is None else _geometry(cu_seqlens_q),
            cu_seqlens_q is not None and _environment(_CHECK_INPUTS),
            None if cu_seqlens_kv is None else cu_seqlens_kv is cu_seqlens_q or _geometry(cu_seqlens_kv),
            None if debug_counts is None else _geometry(debug_counts),
            _environment(_KERNEL), _environment(_DISABLED), _environment(_ARCH),
        )
        # fmt: on
        operands: tuple[Any, ...] = ()
        if not (
            alibi_slopes is bias is sink is score_mod is mask_mod is block_mask is seqused_q is seqused_kv  # type: ignore[comparison-overlap]  # all None or not
            is cache_leftpad is kv_batch_idx is block_table is q_descale is k_descale is v_descale is None
            and softcap == 0.0 and window_size == NO_WINDOW and not (attention_chunk or aux_tensors)
        ):  # fmt: skip
            blocks, functions = (), (score_mod, mask_mod)
            if block_mask is not None:
                tiled = for_tiles(block_mask, score_mod, aux_tensors, q)
                block_mask, score_mod, aux_tensors = tiled
                blocks, functions = block_mask.tensors, (score_mod, mask_mod, block_mask.mask_mod)
                key = (*key, block_mask.BLOCK_SIZE, block_mask.seq_lengths, len(blocks))
            placed = (seqused_q, seqused_kv, cache_leftpad, kv_batch_idx, block_table)
            of_scores = (alibi_slopes, bias, sink, *blocks, q_descale, k_descale, v_descale)
            operands = (*placed, *of_scores, *aux_tensors)
            mods = tuple(None if mod is None else Mod.of(mod) for mod in functions)
            geometry = [None if tensor is None else _geometry(tensor) for tensor in operands]
            key = (
                *key,
                _environment(_CHECK_INPUTS),
                tuple(window_size),
                attention_chunk,
                softcap,
                *mods,
                *geometry,
            )
            operands = tuple(operand for operand in operands if operand is not None)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        # something here is no tensor, or one without strides or memory, or an array: the checks below say what
        key = plan = None

    if plan is None:
        given = locals()
        options = {name: given[name] for name in _OPTIONS}
        call = check_call(q, k, v, causal, out, options)
        kernel = _kernel_for(call)
        extents = tuple(extent_bytes(t) for t in (q, k, v, q if out is None else out))
        out_result, lse_result = _results(q, v)
        placed = (cu_seqlens_q, seqused_q, seqused_kv, cache_leftpad, kv_batch_idx, block_table, block_mask)
        checked = any(x is not None for x in placed) and (q.device.type == "cpu" or input_checks.on(q.device))
    else:
        extents, out_result, lse_result, checked = plan.extents, plan.out, plan.lse, plan.checked

    # what the key does not hold is checked every time
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or out is not None):
        check_gradients({"q": q, "k": k, "v": v, "out": out})
    if out is not None:
        _check_aliasing(q, k, v, out, extents)
    handle, scope = (None, _NO_SCOPE) if stream is None else _resolve_stream(stream, q.device)

    with scope:  # so that torch's allocator knows which stream the results belong to
        if checked and input_checks.on(q.device):
            on_device = {
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_kv": cu_seqlens_kv,
                "seqused_q": seqused_q,
                "seqused_kv": seqused_kv,
                "cache_leftpad": cache_leftpad,
                "kv_batch_idx": kv_batch_idx,
                "block_table": block_table,
            }
            longest = (max_seqlen_q, max_seqlen_kv)
            input_checks.check_attention(ATTENTION, q, k, on_device, block_mask, longest, handle)
        if out is None:
            out = _allocate(q, out_result)
        lse = _allocate(q, lse_result) if return_lse else None
        if plan is None:
            if workspace is not None:
                check_workspace(workspace, 0, {"q": q, "k": k, "v": v, "out": out})
            operands = call.operands
            tensors = Tensors(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, debug_counts, workspace, operands)
            plan = Plan(_prepare(kernel, call, tensors), extents, out_result, lse_result, checked)
            _remember(key, plan)
        launch = plan.launch
        if workspace is not None:
            check_workspace(workspace, launch.workspace_bytes, {"q": q, "k": k, "v": v, "out": out})
        elif launch.workspace_bytes:
            workspace = _allocate(q, ((launch.workspace_bytes,), torch.uint8))
        fields = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, debug_counts, workspace, operands)
        launch.run(_named(Tensors, fields), handle)
    return out if lse is None else (out, lse)


def flydsl_flash_attn_workspace(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> int:
    """Bytes of `workspace` that `flydsl_flash_attn_func` needs with these arguments, or 0.

    The kernel is compiled, if it is not yet; nothing is computed. Raises as `flydsl_flash_attn_func` does.
    """
    given = inspect.signature(flydsl_flash_attn_func).bind(q, k, v, *args, **options)
    given.apply_defaults()
    options = dict(given.arguments)
    q, k, v, causal, out = (options.pop(name) for name in ("q", "k", "v", "causal", "out"))
    if isinstance(options["block_mask"], BlockMask) and isinstance(q, torch.Tensor):
        names = ("block_mask", "score_mod", "aux_tensors")
        options |= dict(zip(names, for_tiles(options["block_mask"], options["score_mod"], options["aux_tensors"], q)))
    call = check_call(q, k, v, causal, out, options)
    kernel = _kernel_for(call)
    out_result, lse_result = _results(q, v)
    out = _allocate(q, out_result) if out is None else out
    lse = _allocate(q, lse_result) if call.request.return_lse else None
    offsets = (options["cu_seqlens_q"], options["cu_seqlens_kv"])
    tensors = Tensors(q, k, v, out, lse, *offsets, options["debug_counts"], operands=call.operands)
    return _prepare(kernel, call, tensors).workspace_bytes


_NO_SCOPE: AbstractContextManager[None] = nullcontext()


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[_Result, _Result]:
    """out and lse."""
    *batch, seq_len, heads, _ = q.shape
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=OUT_DTYPES.get(q.dtype, q.dtype), device="meta")
    like_q = (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    return None if like_q else (tuple(out.shape), out.dtype), ((*batch, heads, seq_len), torch.float32)


# keyword arguments, as checks get them
_OPTIONS = tuple(inspect.signature(flydsl_flash_attn_func).parameters)[4:]


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT


def _check_aliasing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, extents: tuple[int, ...]
) -> None:
    start = out.data_ptr()
    end = start + extents[3]
    for tensor, size in zip((q, k, v), extents):
        address = tensor.data_ptr()
        if address < end and start < address + size:
            check_no_overlap(out, {"q": q, "k": k, "v": v})
            return


def _resolve_stream(stream: Any, device: torch.device) -> tuple[int, AbstractContextManager[Any]]:
    """A stream argument's raw handle, and the scope in which torch allocates for it."""
    if device.type != "cuda":
        fail(f"stream is for GPU tensors, but q is on '{device}': leave it out")
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            fail(f"stream belongs to {stream.device}, but q is on {device}")
    elif isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        # the legacy default stream has handle 0, which torch does not take as an external one
        stream = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]  # torch's
    else:
        fail(
            f"stream must be a torch.cuda.Stream or an int handle, got {stream!r} ({type(stream).__name__})",
            ArgumentTypeError,
        )
    return stream.cuda_stream, torch.cuda.stream(stream)


def _kernel_for(call: Call) -> dispatch.Kernel:
    try:
        return dispatch.choose(contract.target_of(call.device), call.request)
    except UnsupportedError as error:
        OWN.tell(error)
        raise


def _prepare(kernel: dispatch.Kernel, call: Call, tensors: Tensors) -> Launch:
    """A launch of `call` on `kernel`; it may compile."""
    if call.empty:
        return Launch(functools.partial(_fill, call.request.asked))
    q, k, v, out = map(settled, tensors[:4])
    tensors = tensors._replace(q=q, k=k, v=v, out=out)
    try:
        return dispatch.prepare_function(kernel)(tensors, call.request)
    except UnsupportedError as error:
        OWN.tell(error)
        raise


def _fill(asked: Features, tensors: Tensors, handle: int | None) -> None:
    """The result of a call in which no query sees a key; nothing is queued for an empty one."""
    scope = _NO_SCOPE if handle is None else _resolve_stream(handle, tensors.out.device)[1]
    with scope:
        tensors.out.zero_()
        if tensors.lse is not None:
            tensors.lse.fill_(-torch.inf)
            if "sink" in asked.operands:
                tensors.lse.copy_(asked.tensor(tensors.operands, "sink").unsqueeze(-1))


def _remember(key: tuple[Any, ...] | None, plan: Plan) -> None:
    if key is None:
        return
    with _plans_lock:
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = plan
