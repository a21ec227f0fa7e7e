"""Binding a forward kernel, and with split keys the combination after it, so that calls only patch addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fly.errors import UnsupportedError
from fly.runtime.compile import compile_kernel
from fly.runtime.prepared import Prepared, bind

from ..arguments.callers import arg, problem
from ..problem.contract import Launch, Request, Tensors, device_of
from . import split_combine
from .tile_scheduler import automatic_splits, fold_grid, grid


def split_count(request: Request, device: torch.device, block_m: int, block_n: int) -> int:
    """The number of key splits to run `request` with: what the caller asks for, or the best one for the device."""
    if request.num_kv_splits:
        return request.num_kv_splits
    blocks = -(-request.seq_len // block_m) * request.num_heads * request.batch
    return automatic_splits(blocks, -(-request.seq_len_kv // block_n), device_of(device).compute_units)


_OF_ONE_QUERY = ("sink", "window", "attention_chunk")  # where it matters that rows are heads of one query
# What goes by a score's query head stands in the way of heads as rows.
_BY_HEAD = ("packed", "alibi", "bias", "score_mod", "mask_mod")


def heads_as_rows(tensors: Tensors, request: Request) -> tuple[Tensors, Request]:
    """A call with one query a sequence, seen as one whose rows are the query heads of a key head.

    q, out (B, 1, H, D) become (B, H / Hkv, Hkv, D) and lse (B, H, 1) becomes (B, Hkv, H / Hkv), views of the same
    memory, so that a block reads a key head's keys once for all of its query heads, and not once for each. One query
    sees every key, causal or not, or those that its window and chunk leave; sinks (H,) become (Hkv, H / Hkv). Calls
    that this does not suit are returned as they are.
    """
    group = request.num_heads // request.num_kv_heads
    asked = request.asked
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

    q, out = rows(tensors.q), rows(tensors.out)
    lse = None if tensors.lse is None else unflattened(tensors.lse, 1, sets).squeeze(-1)
    operands = tuple(
        unflattened(value, 0, sets) if name == "sink" else value
        for name, value in zip(asked.operands, tensors.operands, strict=True)
    )
    changed = replace(
        request,
        causal=False,
        cross_seqlen=True,
        seq_len=group,
        num_heads=request.num_kv_heads,
        q_pitch=max(t.stride(1) * t.element_size() for t in (q, out)),
        asked=replace(asked, one_query=any(f in request.features for f in _OF_ONE_QUERY)),
    )
    return tensors._replace(q=q, out=out, lse=lse, operands=operands), changed


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
    counts_rescales: bool = False,
) -> Launch:
    """A launch of a forward kernel on the grid of `tile_scheduler`, which tells it if that is `folded`.

    `kernel` takes q, k, v, out, lse, scale_log2, cu_seqlens_q, cu_seqlens_kv, if it `counts_rescales` debug_counts,
    and then the operands of the request's features. `block_m` query rows and `threads` a block, keys in tiles of
    `block_n`.

    Raises:
        UnsupportedError: rows of a tensor are so far apart that 32-bit offsets do not reach over a block's, or there
            are too many blocks.
    """
    _check_pitch(request, max(block_m, block_n), kernel.name)
    blocks, fold = fold_grid(grid(request.batch, request.num_heads, request.seq_len, block_m, splits))
    counts = (tensors.debug_counts,) if counts_rescales else ()

    def bound(out: torch.Tensor, lse: torch.Tensor | None) -> Prepared:
        arguments = (*tensors[:3], out, lse, request.scale_log2, *tensors[5:7], *counts, *tensors.operands)
        return bind(kernel, blocks, threads, arguments, {**statics, **fold}, compile_kernel)

    return launch_of(bound, tensors, request, splits)


def launch_of(
    bound: Callable[[torch.Tensor, torch.Tensor | None], Prepared],
    tensors: Tensors,
    request: Request,
    splits: int,
    last: Callable[[int], int] | None = None,
    combines: bool = False,
) -> Launch:
    """A launch of a forward kernel, and with split keys of the combination after it, unless the kernel `combines`.

    `bound(out, lse)` binds the kernel, whose addresses are q, k, v, out and, when the call has them, lse, the
    offsets, `debug_counts`, what `last(stream)` gives, if it `combines` the whole out and lse, and the operands that
    are tensors.
    """
    if splits == 1:
        forward = bound(tensors.out, tensors.lse)
        current_stream = forward.entry.current_stream
        optional = [i for i, tensor in enumerate(tensors[:8]) if i >= 4 and tensor is not None]

        def run(tensors: Tensors, stream: int | None) -> None:
            if stream is None:
                stream = current_stream()
            q, k, v, out, *_, operands = tensors
            addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
            if optional:
                addresses += [tensors[i].data_ptr() for i in optional]  # type: ignore[union-attr]  # only tensors
            if last is not None:
                addresses.append(last(stream))
            if operands:
                addresses += _addresses(operands)
            forward.launch(addresses, stream)

        return Launch(run)

    partials = split_combine.Partials.of(tensors, splits)
    memory = tensors.workspace
    if memory is None or memory.numel() * memory.element_size() < partials.bytes:
        # only its sizes and strides matter here
        memory = torch.empty(partials.bytes, dtype=torch.uint8, device=tensors.q.device)
    out, lse = partials.views(memory)
    forward = bound(out, lse)
    combine = None if combines else split_combine.prepare(out, lse, tensors, request)
    lse_offset, places = partials.lse_offset, split_combine.operand_places(request)
    current_stream = forward.entry.current_stream

    def run_split(tensors: Tensors, stream: int | None) -> None:
        if stream is None:
            stream = current_stream()
        q, k, v, out, lse, cu_seqlens_q, *rest, workspace, operands = tensors
        given = _addresses(operands)
        partial = workspace.data_ptr()  # type: ignore[union-attr]  # such a call has one
        partials = (partial, partial + lse_offset)
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), *partials, *_addresses((cu_seqlens_q, *rest))]
        if last is not None:
            addresses.append(last(stream))
        if combine is None:
            forward.launch([*addresses, *_addresses((out, lse)), *given], stream)
            return
        forward.launch(addresses + given, stream)
        combine.launch([*partials, *_addresses((out, lse, cu_seqlens_q)), *[given[i] for i in places]], stream)

    return Launch(run_split, partials.bytes)


def _addresses(values: Iterable[Any]) -> list[int]:
    """Of the tensors among them."""
    return [value.data_ptr() for value in values if isinstance(value, torch.Tensor)]


def _check_pitch(request: Request, rows: int, kernel: str) -> None:
    """Offsets within a block's rows are signed 32-bit bytes; rows past a tensor's end have offsets too."""
    pitch = max(request.q_pitch, request.kv_pitch)
    if pitch * rows >= 2**31:
        raise problem(
            UnsupportedError,
            f"rows of {arg('q, k, v')} or out are {pitch} bytes apart; {kernel} takes less than {2**31 // rows}: "
            "make the tensors contiguous",
        )
