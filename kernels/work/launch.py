"""Binding a forward kernel, and with split keys the combination after it, so that calls only patch addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fly.errors import UnsupportedError
from fly.runtime.device import device_of

from ..arguments.callers import arg, problem
from ..problem.contract import Launch, Request, Tensors
from . import split_combine
from .split_combine import PARTIALS, Partials
from .steps import BoundKernel, Steps, bind_kernel
from .tile_scheduler import FEW_BLOCKS, automatic_splits, fold_grid, grid


def split_count(request: Request, device: torch.device, block_m: int, block_n: int) -> int:
    """The number of key splits to run `request` with: what the caller asks for, or the best one for the device."""
    if request.num_kv_splits:
        return request.num_kv_splits
    blocks = -(-request.seq_len // block_m) * request.num_heads * request.batch
    return automatic_splits(blocks, -(-request.seq_len_kv // block_n), device_of(device).compute_units)


_OF_ONE_QUERY = ("sink", "window", "attention_chunk")  # where it matters that rows are heads of one query
# What goes by a score's query head stands in the way of heads as rows.
_BY_HEAD = ("packed", "alibi", "bias", "dropout", "score_mod", "mask_mod")


def heads_as_rows(tensors: Tensors, request: Request) -> tuple[Tensors, Request]:
    """A call with one query a sequence, seen as one whose rows are the query heads of a key head.

    q, out (B, 1, H, D) become (B, H / Hkv, Hkv, D) and lse (B, H, 1) becomes (B, Hkv, H / Hkv), views of the same
    memory, so that a block reads a key head's keys once for all of its query heads, and not once for each. One query
    sees every key, causal or not, or those that its window and chunk leave; sinks (H,) become (Hkv, H / Hkv). Calls
    that this does not suit are returned as they are.
    """
    group = request.num_heads // request.num_kv_heads
    asked = request.static_features
    if (
        request.seq_len != 1
        or group == 1
        or "seqused_q" in asked.operands
        or any(f in request.features for f in _BY_HEAD)
    ):
        return tensors, request

    sets = (request.num_kv_heads, group)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return unflattened(tensor, 2, sets).select(1, 0).transpose(1, 2)

    seen = {"q": rows(tensors["q"]), "out": rows(tensors["out"])}
    if (lse := tensors.get("lse")) is not None:
        seen["lse"] = unflattened(lse, 1, sets).squeeze(-1)
    if "sink" in asked.operands:
        seen["sink"] = unflattened(tensors["sink"], 0, sets)
    changed = replace(
        request,
        causal=False,
        cross_seqlen=True,
        seq_len=group,
        num_heads=request.num_kv_heads,
        q_pitch=max(seen[name].stride(1) * seen[name].element_size() for name in ("q", "out")),
        static_features=replace(asked, one_query=any(f in request.features for f in _OF_ONE_QUERY)),
    )
    return {**tensors, **seen}, changed


def unflattened(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """With two dimensions in the place of one."""
    view: torch.Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]  # torch has no types for it
    return view


def bind_forward(
    kernel: Any,
    tensors: Tensors,
    request: Request,
    *,
    block_m: int,
    block_n: int,
    threads: int,
    statics: Mapping[str, Any],
    splits: int = 1,
) -> Launch:
    """A launch of a forward kernel on the grid of `tile_scheduler`, which tells it if that is `folded`.

    `kernel` takes what it names of `tensors`, `scale_log2`, and then the operands of the request. `block_m` query
    rows and `threads` a block, keys in tiles of `block_n`.

    Raises:
        UnsupportedError: rows of a tensor are so far apart that 32-bit offsets do not reach over a block's, or there
            are too many blocks.
    """
    _check_pitch(request, max(block_m, block_n), kernel.name)
    places = grid(request.batch, request.num_heads, request.seq_len, block_m, splits)
    blocks, fold = fold_grid(places, FEW_BLOCKS - 1)

    def bound(tensors: Tensors, called: Mapping[str, str]) -> BoundKernel:
        arguments, static = {**tensors, "scale_log2": request.scale_log2}, {**statics, **fold}
        return bind_kernel(kernel, blocks, threads, arguments, static, called=called, operands=request.operands)

    return forward_steps(bound, tensors, request, splits).launch()


def forward_steps(
    bound: Callable[[Tensors, Mapping[str, str]], BoundKernel],
    tensors: Tensors,
    request: Request,
    splits: int,
    combines: bool = False,
) -> Steps:
    """A forward kernel, and with split keys the combination after it, unless the kernel `combines`.

    `bound(tensors, called)` binds the kernel. With split keys its out and lse are partial_out and partial_lse, parts
    of the workspace, and if it `combines`, the call's out and lse are its whole_out and whole_lse. One part of
    `split_keys` has the same bits without a combination, unless that is what takes a sink in. Of a `partial` request
    the parts are what is wanted.
    """
    asked = request.static_features
    if splits == 1 and not (request.partial or (asked.invariant and "sink" in asked.operands)):
        return Steps((bound(tensors, {}),))
    partials = Partials.of(tensors["out"], splits)
    memory = tensors.get("workspace")
    if memory is None or memory.numel() * memory.element_size() < partials.bytes:
        # only its sizes and strides matter here
        memory = torch.empty(partials.bytes, dtype=torch.uint8, device=tensors["q"].device)
    tensors = {**tensors, **dict(zip(PARTIALS, partials.views(memory)))}
    called = dict(zip(("out", "lse"), PARTIALS))
    places = dict(zip(PARTIALS, (0, partials.lse_offset)))
    if request.partial:
        return Steps((bound(tensors, called),), places, partials.bytes, splits=splits)
    kernels = (
        (bound(tensors, called | {"whole_out": "out", "whole_lse": "lse"}),)
        if combines
        else (bound(tensors, called), _combination(tensors, request))
    )
    return Steps(kernels, places, partials.bytes)


def _combination(tensors: Tensors, request: Request) -> BoundKernel:
    """The kernel that puts partial_out and partial_lse together to out and lse."""
    features = request.static_features.only(split_combine.OPERANDS)
    rows = split_combine.rows_of_block(request.value_dim)
    blocks, fold = fold_grid(grid(request.batch, request.num_heads, request.seq_len, rows))
    statics = {"head_dim": request.value_dim, "features": features, **fold}
    kernel, threads = split_combine.split_combine, split_combine.THREADS
    return bind_kernel(kernel, blocks, threads, tensors, statics, operands=features.operands)


def _check_pitch(request: Request, rows: int, kernel: str) -> None:
    """Offsets within a block's rows are signed 32-bit bytes; rows past a tensor's end have offsets too."""
    pitch = max(request.q_pitch, request.kv_pitch)
    if pitch * rows >= 2**31:
        raise problem(
            UnsupportedError,
            f"rows of {arg('q, k, v')} or out are {pitch} bytes apart; {kernel} takes less than {2**31 // rows}: "
            "make the tensors contiguous",
        )
