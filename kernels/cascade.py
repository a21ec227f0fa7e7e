"""Attention of many sequences that begin with the same keys, such as a system prompt's: `cascade_attention`.

All queries see the prefix, so that it is one sequence's keys to all of them together, which a kernel reads once and
not once a sequence. Their own keys are the sequences' own. Both kernels leave results of parts of the keys in f32, as
calls with split keys do, and one combination makes the result of all of them: nothing is rounded between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fly import config
from fly.errors import FlyError, UnsupportedError
from fly.runtime.device import device_of

from . import dispatch
from .arguments.callers import CASCADE, PREFIX
from .arguments.checks import ALIGNMENT, Checks, check_no_overlap, has_memory
from .call import device_values
from .call.checks import Call
from .call.plan import Plans
from .flash_attn_interface import checked
from .problem.contract import Launch
from .problem.features import NO_FEATURES, Features
from .work import split_combine
from .work.split_combine import Partials
from .work.steps import Steps, aligned, bind_kernel
from .work.tile_scheduler import fold_grid, grid

CHECKS = Checks(CASCADE.function)
_environment = config.raw_value
_VARIABLES = tuple(
    variable.raw_name for variable in (config.KERNEL, config.DISABLE_DUALWAVE_SWP, config.ARCH, config.CHECK_INPUTS)
)
_TENSORS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv", "block_table", "kv_batch_idx", "cache_leftpad")

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Level:
    """Attention to some of the keys: its launch, where its workspace begins, and how its parts look to the result."""

    launch: Launch
    start: int
    partials: Partials
    of_prefix: bool

    def parts(self, workspace: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(outs (S, ...), lses) in a call's workspace; `shape`: of the call's queries."""
        first = self.start + self.launch.partials_at
        outs, lses = self.partials.views(workspace[first:])
        if not self.of_prefix:
            return outs, lses
        outs, lses = outs.squeeze(1), lses.squeeze(1)  # the one sequence of the prefix
        if len(shape) == 3:
            return outs, lses
        batch, tokens = shape[:2]
        return outs.view(-1, *shape[:3], outs.shape[-1]), lses.view(-1, shape[2], batch, tokens).transpose(1, 2)


@dataclass(frozen=True)
class _Plan:
    """A kind of call, prepared: its levels, the combination, and the size of the workspace.

    `reads_device`: whether there are lengths, pages and the like of the prefix, and of the sequences' own keys.
    """

    levels: tuple[_Level, ...]
    combination: Launch | None
    nbytes: int
    reads_device: tuple[bool, bool]


_plans: Plans[Any, _Plan] = Plans()


def cascade_attention(
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    *,
    prefix_block_table: torch.Tensor | None = None,
    prefix_seqlen: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_kv: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences whose keys are a prefix that all of them share, and then their own.

    Args:
        q: (B, Sq, H, D), or packed (total_q, H, D) with cu_seqlens_q, bfloat16 or float16.
        prefix_k, prefix_v: (P, Hkv, D) and (P, Hkv, Dv); or pages (pages, page_size, Hkv, D) with prefix_block_table
            (pages of the prefix,) int32 and prefix_seqlen (1,) int32, how many keys it has, both on q's device.
        k, v: the sequences' own keys, dense, packed or in pages, with cu_seqlens_kv, seqused_kv, kv_batch_idx,
            cache_leftpad, block_table and longest lengths as `flydsl_flash_attn_func` has them. There may be none.
        causal: of a sequence's Skv own keys, query i sees those up to i + Skv - Sq. All see the prefix.
        sink: (H,): one more score of every row, as in `flydsl_flash_attn_func`; softmax_scale and softcap too.
        out: written and returned instead of a new tensor. return_lse: also return the log-sum-exp of all keys.

    Returns:
        out, of q's shape with v's head dimension, or (out, lse), float32 (B, H, Sq) or (H, total_q).

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: what no kernel of the target does; a tensor that requires a gradient; a call while torch
            compiles.
    """
    if torch.compiler.is_compiling():
        CHECKS.fail("it is not for torch.compile: call it under torch.compiler.disable", UnsupportedError)
    given = dict(zip(_TENSORS, (cu_seqlens_q, cu_seqlens_kv, seqused_kv, block_table, kv_batch_idx, cache_leftpad)))
    tensors = {"q": q, "prefix_k": prefix_k, "prefix_v": prefix_v, "k": k, "v": v, "sink": sink, "out": out}
    tensors |= {"prefix_block_table": prefix_block_table, "prefix_seqlen": prefix_seqlen, **given}
    scores = {"softmax_scale": softmax_scale, "softcap": softcap}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    for name, tensor in tensors.items():
        if tensor is not None or name in ("q", "prefix_k", "prefix_v", "k", "v"):
            CHECKS.plain(name, tensor)
    if torch.is_grad_enabled():
        CHECKS.no_gradients(tensors)
    CHECKS.flag("return_lse", return_lse)
    CHECKS.dtype("q", q, (torch.bfloat16, torch.float16))
    of_prefix = _prefix(q, prefix_k, prefix_v, prefix_block_table, prefix_seqlen)
    key = (
        *(None if x is None else _geometry(x) for x in tensors.values()),
        *(causal, return_lse, *scores.values(), *longest.values(), *map(_environment, _VARIABLES)),
    )
    try:
        plan = _plans.get(key)
    except TypeError:  # a value that has no hash is no number either
        plan = None
    if plan is None:
        options = {**given, **longest, **scores, "sink": sink, "num_kv_splits": 0, "return_lse": return_lse}
        plan = _planned(of_prefix, (q, k, v), causal, options, scores, out)
        _plans[key] = plan
    if any(plan.reads_device) and device_values.on(q.device):
        _check_values(plan.reads_device, of_prefix, (q, k), given, longest)
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    else:
        inputs = {name: x for name, x in tensors.items() if name in ("q", "prefix_k", "prefix_v", "k", "v")}
        check_no_overlap(out, {name: x for name, x in inputs.items() if x is not None})
    lse = None
    if return_lse:
        lse = torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32, device=q.device)
    if plan.combination is None:
        _fill(out, lse, sink)
        return out if lse is None else (out, lse)
    workspace = torch.empty(plan.nbytes, dtype=torch.uint8, device=q.device)
    for level in plan.levels:
        of_level = of_prefix if level.of_prefix else {"q": q, "k": k, "v": v, **given}
        level.launch.run({**of_level, "workspace": workspace[level.start :]}, None)
    plan.combination.run(_combined(plan.levels, workspace, q, out, lse, cu_seqlens_q, sink), None)
    return out if lse is None else (out, lse)


def _geometry(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT if has_memory(type(x)) else None


def _prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor | None,
    length: torch.Tensor | None,
) -> dict[str, Any]:
    """The tensors of attention to the prefix, whose queries are those of all sequences."""
    if q.dim() not in (3, 4):
        CHECKS.fail(f"q must have shape (B, Sq, H, D), or packed (total_q, H, D), got {tuple(q.shape)}")
    paged = table is not None
    if paged != (length is not None):
        CHECKS.fail("prefix_block_table and prefix_seqlen go together, for a prefix in pages")
    rank, layout = (4, "(pages, page_size, Hkv, D)") if paged else (3, "(P, Hkv, D)")
    for name, tensor in (("prefix_k", k), ("prefix_v", v)):
        if tensor.dim() != rank:
            CHECKS.fail(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    one = q.reshape(1, -1, *q.shape[-2:])
    if table is None or length is None:
        return {"q": one, "k": k[None], "v": v[None]}
    if table.dim() != 1:
        CHECKS.fail(f"prefix_block_table must be (pages of the prefix,) int32, got shape {tuple(table.shape)}")
    return {"q": one, "k": k, "v": v, "block_table": table[None], "seqused_kv": length}


def _planned(
    of_prefix: Mapping[str, Any],
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    causal: bool,
    options: dict[str, Any],
    scores: Mapping[str, Any],
    out: torch.Tensor | None,
) -> _Plan:
    """Check a call and prepare it."""
    q = own[0]
    of_one = {name: x for name, x in of_prefix.items() if name not in "qkv"}
    calls = []
    for caller, inputs, hides, more in (
        (PREFIX, [of_prefix[x] for x in "qkv"], False, {**of_one, **scores, "num_kv_splits": 0}),
        (CASCADE, own, causal, options),
    ):
        try:
            calls.append(checked(*inputs, hides, out=out if caller is CASCADE else None, **more))
        except FlyError as error:
            caller.tell(error)
            raise
    prefix, suffix = calls
    if prefix.request.value_dim != suffix.request.value_dim:
        dims = prefix.request.value_dim, suffix.request.value_dim
        CHECKS.fail(f"prefix_v and v must have one head dimension, got {dims[0]} and {dims[1]}")
    levels: list[_Level] = []
    start = 0
    for call in calls:
        if call.empty:
            continue
        tensors = dict(call.tensors)
        sink = tensors.pop("sink", None)
        request = _without_sink(call.request) if sink is not None else call.request
        request = replace(request, partial=True)
        tensors["out"] = tensors["q"].new_empty((*tensors["q"].shape[:-1], request.value_dim))
        try:
            launch = dispatch.serve(device_of(q.device).target, request)(tensors, request)
        except FlyError as error:
            (PREFIX if call is prefix else CASCADE).tell(error)
            raise
        levels.append(_Level(launch, start, Partials.of(tensors["out"], launch.splits), call is prefix))
        start += aligned(launch.workspace_bytes)
    combination = _combination(levels, start, suffix, q) if levels else None
    return _Plan(tuple(levels), combination, start, (prefix.reads_device, suffix.reads_device))


def _without_sink(request: Any) -> Any:
    """The same without its sink, which the combination takes in."""
    features = request.static_features
    operands = tuple(name for name in features.operands if name != "sink")
    return replace(
        request,
        features=tuple(name for name in request.features if name != "sink"),
        static_features=replace(features, operands=operands),
    )


def _combination(levels: list[_Level], nbytes: int, call: Call, q: torch.Tensor) -> Launch:
    """What puts the parts of all levels together, prepared with memory like a call's."""
    request = call.request
    memory = torch.empty(nbytes, dtype=torch.uint8, device=q.device)
    out = q.new_empty(*q.shape[:-1], request.value_dim)
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if request.return_lse else None
    given = call.tensors.get("cu_seqlens_q"), call.tensors.get("sink")
    tensors = _combined(tuple(levels), memory, q, out, lse, *given)
    features = NO_FEATURES if given[1] is None else Features(("sink",))
    parts = [f"{kind}{i}" for i in range(len(levels)) for kind in ("out", "lse")]
    rows = split_combine.rows_of_block(request.value_dim)
    blocks, fold = fold_grid(grid(request.batch, request.num_heads, request.seq_len, rows))
    kernel = bind_kernel(
        split_combine.split_combine,
        blocks,
        split_combine.THREADS,
        tensors,
        {"head_dim": request.value_dim, "features": features, **fold},
        operands=(*features.operands, *parts),
    )
    return Steps((kernel,)).launch()


def _combined(
    levels: tuple[_Level, ...],
    workspace: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> dict[str, Any]:
    """The tensors of the combination."""
    tensors: dict[str, Any] = {"out": out, "lse": lse, "cu_seqlens_q": cu_seqlens_q, "sink": sink}
    for i, level in enumerate(levels):
        tensors[f"out{i}"], tensors[f"lse{i}"] = level.parts(workspace, tuple(q.shape))
    return tensors


def _check_values(
    reads_device: tuple[bool, bool],
    of_prefix: Mapping[str, Any],
    own: tuple[torch.Tensor, torch.Tensor],
    given: Mapping[str, Any],
    longest: Mapping[str, Any],
) -> None:
    """Check lengths, offsets, entries and pages, where that is wanted."""
    bounds = longest["max_seqlen_q"], longest["max_seqlen_kv"]
    for caller, reads, (q, k), tensors, most in (
        (PREFIX, reads_device[0], (of_prefix["q"], of_prefix["k"]), of_prefix, (None, None)),
        (CASCADE, reads_device[1], own, given, bounds),
    ):
        if reads:
            try:
                device_values.check_attention(CHECKS, q, k, tensors, None, most, None)
            except FlyError as error:
                caller.tell(error)
                raise


def _fill(out: torch.Tensor, lse: torch.Tensor | None, sink: torch.Tensor | None) -> None:
    """The result where no query sees a key."""
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
        if sink is not None:
            lse.copy_(sink.unsqueeze(-1))
