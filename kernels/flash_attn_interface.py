"""Flash attention for callers: `flydsl_flash_attn_func` on torch tensors.

The first call of a kind checks its arguments, chooses and compiles a kernel, and keeps a *plan*. A later call
with the same shapes, strides, dtypes, alignments, device and options finds that plan by its key, and only
addresses are patched. No call synchronises the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import torch

from fly import config
from fly.errors import UnsupportedError

from .arguments.checks import (
    ALIGNMENT,
    ATTENTION,
    check_gradients,
    check_no_overlap,
    check_workspace,
    fail,
    has_memory,
    stream_of,
)
from .arguments.flydsl_names import FlyDslNames, translated
from .arguments.stacked import is_stacked, leaves_of, unstacked
from .cache.layouts import in_pages, is_linear
from .call import device_values
from .call.checks import Call, check_call
from .call.memory import active_modes
from .call.plan import Plan, Plans, plan_of
from .problem.block_mask import BlockMask, for_tiles
from .problem.catalogue import BLOCKS, DIFFERENTIABLE, NO_WINDOW
from .problem.contract import aux_name
from .problem.dropout_mask import random_state
from .problem.mods import Mod

# the variables that a plan depends on
_environment = config.raw_value
_KERNEL, _DISABLED, _ARCH = (v.raw_name for v in (config.KERNEL, config.DISABLE_DUALWAVE_SWP, config.ARCH))
_CHECK_INPUTS = config.CHECK_INPUTS.raw_name

F = TypeVar("F", bound=Callable[..., Any])
_OF_REPEATED = {"softmax_scale", "num_kv_splits", "return_lse"}
_NO_OPERANDS: dict[str, Any] = {}
_Tensor, _address = torch.Tensor, torch.Tensor.data_ptr
_grad_enabled = torch.is_grad_enabled
_plans: dict[tuple[Any, ...], Plan] = Plans()
_gradients: Any = None  # `call.gradients`: an import statement in every call would take 2 µs


def _repeated_first(function: F) -> F:
    """`flydsl_flash_attn_func`, looking for the short way before most of its arguments are even read."""

    @functools.wraps(function)
    def attend(q: Any, k: Any, v: Any, causal: bool = True, **options: Any) -> Any:
        if not options or options.keys() <= _OF_REPEATED:
            known = repeated(q, k, v, causal, **options)
            if known is not None:
                return known
        return function(q, k, v, causal, **options)

    return cast("F", attend)


@_repeated_first
def flydsl_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool = True,
    *,
    softmax_scale: float | None = None,
    num_kv_heads: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    cross_seqlen: bool | None = None,
    num_kv_splits: int = 1,
    split_keys: int = 0,
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
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    dq_accumulate: str = "float32",
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    fp8_accumulate: str = "float32",
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    aux_tensors: Sequence[torch.Tensor] = (),
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_cache_layout: str = "linear",
    waves_per_eu: int | None = None,
    daz: bool | None = None,
    dualwave_swp_lazy_rescale: bool | None = None,
    dualwave_swp_setprio: bool | None = None,
    dualwave_swp_enable_stagger: bool | None = None,
    debug_counts: torch.Tensor | None = None,
    stream: Any = None,
    **names: Unpack[FlyDslNames],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q·kᵀ) · v for every query head; several query heads may share a key head (GQA, MQA).

    Args:
        q: (B, Sq, H, D), bfloat16 or float16, D 8 to 256 in steps of 8; on Hopper also float8_e4m3fn, D 64, 96,
            128, 192 or 256, and on gfx950 D 64, 128 or 256; on gfx942 float8_e4m3fnuz, D 64 or 128. The last
            dimension is contiguous, other strides are free; on a CUDA or ROCm device, or on the CPU, where the kernel
            runs in the emulator. Packed sequences: (total_q, H, D).
        k, v: (B, Skv, Hkv, D), same device; H is a multiple of Hkv, and head h reads head h·Hkv//H. Of q's dtype, or
            both float8_e4m3fn beside q of 16 bits, on every target. Packed sequences: (total_kv, Hkv, D). v may have
            another head dimension Dv, which out has too.
            v None: k and v are stacked in k, (B, Skv, 2, Hkv, D) or (total_kv, 2, Hkv, D). k None too: all three in
            q, (B, S, 3, H, D) or (total, 3, H, D). What is stacked has one gradient, which is made without copies.
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
        split_keys: batch-invariant results: keys are split behind every so many of a sequence, a multiple of 128, at
            most 64 parts, and nothing else decides about the order of a row's sums. So out and lse of a query have
            the same bits in every batch, and whichever other queries of its sequence are in the call. 0: off.
        workspace: memory for split keys instead of an allocation in the call, contiguous, 16-byte aligned, of at
            least `flydsl_flash_attn_workspace` bytes and any dtype; overwritten. Unused without these.
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
        dropout_p: probability, 0 or from 1/512 up to 511/512 and rounded to 256ths, with which each weight is dropped
            after the softmax; others are scaled by 1 / (1 − dropout_p). lse does not change.
        rng_state: (2,) int64 on q's device, a seed and an offset, which decide what dropout keeps, the same in every
            kernel (see `fly_attention.dropout_mask`). By default drawn from torch's generator of the device, so that
            torch.manual_seed repeats it.
        deterministic: gradients are the same bits in every run, which takes longer where blocks add to sums in turn
            for it; torch.use_deterministic_algorithms asks for it too. out and lse always are.
        dq_accumulate: how blocks of keys add parts of q's gradient up: "float32", or "16bit", in q's dtype and in the
            gradient's own memory: half as many bytes, and an error that grows with the keys (docs/training.md). On
            gfx942 and gfx950, by the kernels that add atomically there; others refuse "16bit" where a gradient is
            needed, and so does deterministic. out and lse do not depend on it.
        q_descale, k_descale, v_descale: what values of 8 bits are multiplied by, float32 of shape (), (1,),
            (Hkv,) or (B, Hkv): one a tensor, a key head, or a sequence and key head; none below zero. Of 8-bit q,
            out is bfloat16. Beside q of 16 bits k_descale and v_descale may also be by key, of k's shape without its
            last dimension, (B, Skv, Hkv), (pages, page_size, Hkv) or (total_kv, Hkv).
        fp8_accumulate: how products of weights and values of 8 bits add up: "float32", each tile of keys in
            float32, or "fast", all keys in the tensor core's accumulators, which cut low bits off: an error that
            grows with the keys where values share a sign (docs/fp8.md). On gfx942 and gfx950 both are float32.
        score_mod: function (score, batch, head, query, key, *aux) of traced scalars that gives the score to take
            instead, after softcap, ALiBi and bias. `aux[i, j]` loads from one of the `aux_tensors`.
        score_mod_bwd: function (gradient, score, batch, head, query, key, *aux) that gives the gradient of the score
            that `score_mod` gets, from that of the score that it gives: a multiple of it. By default `score_mod` is
            differentiated as it was traced, which has no rule for branches and loops at run time.
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
        kv_cache_layout: what pages look like: "linear", as above; "linear3d", (pages, Hkv, D) of one key each; and on
            AMD's targets, x being the elements of 16 bytes, "vectorized", k (pages, Hkv, D/x, page_size, x) and v
            (pages, Hkv, page_size/x, D, x), which AITER and vLLM call SHUFFLE, or "paged_attention", the same k with
            v (pages, Hkv, D, page_size). Pages of the last two are contiguous, of a multiple of x keys.
        waves_per_eu: occupancy to compile for, waves per SIMD (AMD). daz: flush denormals to zero.
        dualwave_swp_lazy_rescale, dualwave_swp_setprio, dualwave_swp_enable_stagger: switches of the gfx950 kernel,
            all on by default; another kernel refuses them.
        debug_counts: (2,) float32 on q's device, to which the gfx950 and gfx942 kernels add how often they kept and
            took a rescale; another kernel refuses it.
        stream: what the work is queued on, a `torch.cuda.Stream` or a raw handle; torch's current stream of
            q's device by default.
        names: `seqlen_k` and `dualwave_swp_xcd_swizzle` of later versions of FlyDSL: see
            docs/compatibility.md.

    Returns:
        out, of q's shape (with v's head dimension), or (out, lse) with `return_lse`.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too). Offsets,
            lengths, entries, pages and block lists are looked at in the emulator alone, and on a GPU with
            FLY_CHECK_INPUTS=1, which synchronises; what leaves the tensors is cut otherwise.
        UnsupportedError: what this target or kernel cannot do (a NotImplementedError); a graph capture with
            FLY_CHECK_INPUTS=1.
    """
    if names:
        return flydsl_flash_attn_func(**_translated(locals()))
    try:
        alone = (
            alibi_slopes is bias is sink is score_mod is score_mod_bwd is mask_mod is block_mask  # type: ignore[comparison-overlap]  # all None or not
            is seqused_q is seqused_kv is cache_leftpad is kv_batch_idx is block_table
            is q_descale is k_descale is v_descale is rng_state is None
            and softcap == 0.0 == dropout_p and window_size == NO_WINDOW
            and fp8_accumulate == "float32"
            and not (attention_chunk or split_keys or aux_tensors)
        )  # fmt: skip
        plain = alone and (
            out is workspace is cu_seqlens_q is cu_seqlens_kv is max_seqlen_q is max_seqlen_kv is num_kv_heads  # type: ignore[comparison-overlap]  # the same
            is cross_seqlen is debug_counts is stream is waves_per_eu is daz
            is dualwave_swp_lazy_rescale is dualwave_swp_setprio is dualwave_swp_enable_stagger is None
            and deterministic is False and dq_accumulate == "float32" and kv_cache_layout == "linear"
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError, ValueError):
        alone = plain = False  # something here is no number: the checks below say what
    if plain:
        known = repeated(q, k, v, causal, softmax_scale, num_kv_splits, return_lse)
        if known is not None:
            return known
    key: tuple[Any, ...] | None
    operands: dict[str, Any] = _NO_OPERANDS
    functions: tuple[Callable[..., Any] | None, ...]
    leaves: tuple[torch.Tensor, ...] | None = None
    needs_gradient, wants_lse = False, return_lse
    if v is None and is_stacked(q, k):
        leaves = leaves_of(q, k, v)
        q, k, v = unstacked(leaves)
    if not is_linear(kv_cache_layout):
        k, v = in_pages(ATTENTION, kv_cache_layout, {"k": k, "v": v}, block_table)
    if TYPE_CHECKING:
        assert k is not None and v is not None
    try:
        if _grad_enabled() and (
            (q.requires_grad or k.requires_grad or v.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad)
            or (aux_tensors and any(x.requires_grad for x in aux_tensors))
        ):
            needs_gradient = True
            if return_lse is False:
                return_lse = True  # the backward pass makes the weights from it
        type_q, type_k, type_v = type(q), type(k), type(v)
        if not (type_q is type_k is type_v is _Tensor):
            _check_memory(q, k, v)
            plain = False
        # fmt: off
        key = _key_of(q, k, v, causal, softmax_scale, num_kv_splits, return_lse) if plain else (
            type_q, q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT,
            type_k, k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT,
            type_v, v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT,
            None if out is None else _geometry(out),
            causal, softmax_scale, num_kv_heads, return_lse, cross_seqlen, num_kv_splits, waves_per_eu, daz,
            dualwave_swp_lazy_rescale, dualwave_swp_setprio, dualwave_swp_enable_stagger, max_seqlen_q, max_seqlen_kv,
            deterministic, dq_accumulate,
            None if cu_seqlens_q is None else _geometry(cu_seqlens_q),
            cu_seqlens_q is not None and _environment(_CHECK_INPUTS),
            None if cu_seqlens_kv is None else cu_seqlens_kv is cu_seqlens_q or _geometry(cu_seqlens_kv),
            None if debug_counts is None else _geometry(debug_counts),
            _environment(_KERNEL), _environment(_DISABLED), _environment(_ARCH),
        )
        # fmt: on
        if not alone:
            if rng_state is None and dropout_p:
                rng_state = random_state(q.device)
            # fmt: off
            operands = {
                "seqused_q": seqused_q, "seqused_kv": seqused_kv, "cache_leftpad": cache_leftpad,
                "kv_batch_idx": kv_batch_idx, "block_table": block_table, "alibi_slopes": alibi_slopes, "bias": bias,
                "sink": sink, "rng_state": rng_state, "q_descale": q_descale, "k_descale": k_descale,
                "v_descale": v_descale,
            }
            # fmt: on
            functions = (score_mod, score_mod_bwd, mask_mod)
            if block_mask is not None:
                tiled = for_tiles(block_mask, score_mod, score_mod_bwd, aux_tensors, q)
                block_mask, score_mod, score_mod_bwd, aux_tensors = tiled
                operands |= zip(BLOCKS, block_mask.tensors)
                functions = (score_mod, score_mod_bwd, mask_mod, block_mask.mask_mod)
                key = (*key, block_mask.BLOCK_SIZE, block_mask.seq_lengths, len(operands))
            if aux_tensors:
                operands |= {aux_name(i): tensor for i, tensor in enumerate(aux_tensors)}
            key = (
                *key,
                _environment(_CHECK_INPUTS),
                tuple(window_size),
                attention_chunk,
                split_keys,
                softcap,
                dropout_p,
                fp8_accumulate,
                kv_cache_layout,
                *[None if mod is None else Mod.of(mod) for mod in functions],
                *[None if tensor is None else _geometry(tensor) for tensor in operands.values()],
            )
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        # something here is no tensor, or one without strides or memory, or an array: the checks below say what
        key = plan = None

    if plan is None:
        local = locals()
        call = check_call(q, k, v, causal, out, {name: local[name] for name in _OPTIONS})
        extents, reads_device = call.extents, call.reads_device
    else:
        extents, reads_device = plan.extents, plan.reads_device

    # what the key does not hold is checked every time
    if _grad_enabled():
        if out is not None:
            check_gradients({"out": out})
        if operands:
            ATTENTION.have_gradients(operands, (*DIFFERENTIABLE, *map(aux_name, range(len(aux_tensors)))))
            if score_mod_bwd is not None:  # it is for the score; what functions load has gradients by a trace alone
                ATTENTION.have_gradients({f"aux_tensors[{i}]": x for i, x in enumerate(aux_tensors)}, ())
        if needs_gradient:
            gradients = _gradients or _load_gradients()
            if plan is None or not (out is workspace is debug_counts is stream is None and plan.kind.backward):
                request = call.request if plan is None else plan.kind.request
                taken = {"out": out, "workspace": workspace, "debug_counts": debug_counts, "stream": stream}
                gradients.check_differentiable(request, q, **taken)
    if out is not None:
        check_no_overlap(out, {"q": q, "k": k, "v": v}, extents)
    if workspace is not None:
        check_workspace(workspace, {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out}))
    handle, scope = (None, None) if stream is None else stream_of(stream, q.device)

    # torch's allocator has to know which stream results belong to; a scope that does nothing is 0.1 µs in every call
    if scope is not None:
        scope.__enter__()
    try:
        if reads_device and device_values.on(q.device):
            offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
            longest = (max_seqlen_q, max_seqlen_kv)
            device_values.check_attention(ATTENTION, q, k, offsets | operands, block_mask, longest, handle)
        if plan is None:
            plan = plan_of(call)
            if key is not None:
                _plans[key] = plan
        # contiguous, and nothing is kept for them, so that no memory of a graph is
        if out is None:
            out = torch.empty_like(q) if plan.out is None else q.new_empty(plan.out[0], dtype=plan.out[1])
        lse = torch.empty_strided(*plan.lse, dtype=torch.float32, device=q.device) if return_lse else None
        launch = plan.launch
        if size := launch.workspace_bytes:
            if workspace is None:
                workspace = q.new_empty(size, dtype=torch.uint8)
            elif (given := workspace.nbytes) < size:
                fail(f"workspace has {given} bytes, this call needs {size} (flydsl_flash_attn_workspace tells)")
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out}
        if not (lse is cu_seqlens_q is cu_seqlens_kv is debug_counts is workspace is None):
            offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
            tensors |= {"lse": lse, "debug_counts": debug_counts, "workspace": workspace, **offsets}
        if operands:
            tensors |= operands
        launch.run(tensors, handle)
    finally:
        if scope is not None:
            scope.__exit__(None, None, None)
    if needs_gradient:
        recorded: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        recorded = gradients.recorded(plan.kind, leaves or (q, k, v), tensors, block_mask, wants_lse)
        return recorded
    return out if lse is None else (out, lse)


def _key_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, splits: int, lse: bool
) -> tuple[Any, ...]:
    """The key of a plan for a call of plain tensors and these numbers alone."""
    return (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT,
        k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT,
        v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT,
        causal, scale, splits, lse, _environment(_KERNEL), _environment(_DISABLED), _environment(_ARCH),
    )  # fmt: skip


def repeated(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None = None,
    num_kv_splits: int = 1,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """`flydsl_flash_attn_func` of these alone, for a call whose like there was; None, and nothing done, if not.

    It takes less of the host's time: whatever is to be checked was checked then.
    """
    if not type(q) is type(k) is type(v) is _Tensor:
        return None
    if TYPE_CHECKING:
        assert k is not None and v is not None
    wants_lse, needs_gradient = return_lse, False
    try:
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            needs_gradient = True
            if return_lse is False:
                return_lse = True  # as there
        plan = _plans.get(_key_of(q, k, v, causal, softmax_scale, num_kv_splits, return_lse))
    except (TypeError, RuntimeError):
        return None  # tensors without strides or memory, numbers that are none: the function says what
    if plan is None or (short := plan.short) is None or active_modes():
        return None
    if needs_gradient and not plan.kind.backward:  # whether there is a backward pass is to be checked
        return None
    made = [*starmap(short.allocate, short.memory)]
    short.queue([*map(_address, (q, k, v, *made))])
    if needs_gradient:
        recorded: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        recorded = _gradients.record(short.recorded, (q, k, v), made[:2], wants_lse)
        return recorded
    return (made[0], made[1]) if return_lse else made[0]


def flydsl_flash_attn_workspace(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, backward: bool = False, **options: Any
) -> int:
    """Bytes of `workspace` that `flydsl_flash_attn_func` needs with these arguments, or 0.

    backward: those that `flydsl_flash_attn_backward` needs instead, which takes no `block_mask`.
    The kernel is compiled, if it is not yet; nothing is computed. Raises as `flydsl_flash_attn_func` does.
    """
    if backward:
        if options.get("block_mask") is not None:
            fail("block_mask is not taken with backward=True: torch.autograd.grad takes it", UnsupportedError)
        needed: int = (_gradients or _load_gradients()).workspace_bytes(checked(q, k, v, *args, **options))
        return needed
    return plan_of(checked(q, k, v, *args, **options)).launch.workspace_bytes


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Call:
    """The call of `flydsl_flash_attn_func` with these arguments, of which nothing is computed."""
    given = inspect.signature(flydsl_flash_attn_func).bind(q, k, v, *args, **options)
    given.apply_defaults()
    options = _translated(given.arguments)
    q, k, v, causal, out = (options.pop(name) for name in ("q", "k", "v", "causal", "out"))
    if not is_linear(options["kv_cache_layout"]):
        k, v = in_pages(ATTENTION, options["kv_cache_layout"], {"k": k, "v": v}, options["block_table"])
    if isinstance(options["block_mask"], BlockMask) and isinstance(q, torch.Tensor):
        names = ("block_mask", "score_mod", "score_mod_bwd", "aux_tensors")
        score_mod, score_mod_bwd, aux = (options[name] for name in names[1:])
        options |= dict(zip(names, for_tiles(options["block_mask"], score_mod, score_mod_bwd, aux, q)))
    return check_call(q, k, v, causal, out, options)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments without FlyDSL's names, which are among them as `names`."""
    names: Mapping[str, Any] = given.get("names", {})
    own = {name: value for name, value in given.items() if name != "names"}
    return translated(own, names) if names else own


def _load_gradients() -> Any:
    """The module of gradients: inference does not wait for the backward kernels to load."""
    global _gradients
    from .call import gradients as _gradients

    return _gradients


# keyword arguments, as checks get them
OPTION_DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(flydsl_flash_attn_func).parameters.items()
    if p.kind is p.KEYWORD_ONLY
}
_OPTIONS = tuple(OPTION_DEFAULTS)


def _check_memory(*tensors: Any) -> None:
    """Raise `TypeError` for what only stands for a tensor, before it is asked for its address."""
    if not all(has_memory(type(tensor)) for tensor in tensors):
        raise TypeError("no memory")


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    if type(t) is not _Tensor:
        _check_memory(t)
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT
