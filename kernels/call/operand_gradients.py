"""Gradients of what modifies scores: which operands have one, what kernels write it to, and how it becomes torch's.

| of | kernels write | then |
|---|---|---|
| `bias` with an element for every score | it, in the bias' dtype | |
| a `bias` that is broadcast | sums of f32 by atomic additions, or deterministic, every score's in f32 | a sum |
| `sink` | partial sums of f32 | a sum |
| `aux_tensors` | sums of f32 by atomic additions | |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from fly.errors import UnsupportedError

from ..arguments.checks import ATTENTION
from ..flash_attn_generic_bwd import sink_parts
from ..problem.catalogue import DIFFERENTIABLE
from ..problem.contract import Request, aux_name


def differentiable(request: Request) -> tuple[str, ...]:
    """The operands of a call that may have gradients, as kernels call them."""
    return (*DIFFERENTIABLE, *map(aux_name, range(request.aux_tensors)))


def memory_for(of: Mapping[str, torch.Tensor], request: Request, device: torch.device) -> dict[str, torch.Tensor]:
    """What the kernels of `flash_attn_generic_bwd.prepare` write gradients to, by their names there.

    `of`: the operands that need one, by name.

    Raises:
        UnsupportedError: what is only summed by atomic additions, where torch is told to be deterministic.
    """
    return {f"d{name}": _memory(name, tensor, request, device) for name, tensor in of.items()}


def _memory(name: str, of: torch.Tensor, request: Request, device: torch.device) -> torch.Tensor:
    if name == "sink":
        parts = sink_parts(device, request.seq_len), request.batch, request.num_heads
        return torch.empty(parts, dtype=torch.float32, device=device)
    if name == "bias":
        return _of_bias(of, request)
    _check_atomic(name)
    return torch.zeros(of.shape, dtype=torch.float32, device=device)


def _of_bias(bias: torch.Tensor, request: Request) -> torch.Tensor:
    shape = request.batch, request.num_heads, request.seq_len, request.seq_len_kv
    own = (*[1] * (4 - bias.dim()), *bias.shape)
    if own == shape:
        return torch.zeros(shape, dtype=bias.dtype, device=bias.device)
    if torch.are_deterministic_algorithms_enabled():
        return torch.zeros(shape, dtype=torch.float32, device=bias.device)
    sums = torch.zeros(own, dtype=torch.float32, device=bias.device)
    return sums.expand(shape) if own[2] == shape[2] else sums.squeeze(2).expand(shape[0], shape[1], shape[3])


def _check_atomic(name: str) -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    which = f"aux_tensors[{name.removeprefix(aux_name(0)[:-1])}]"
    told = (
        f"{which} requires a gradient, which is a sum of atomic additions, and torch.use_deterministic_algorithms is "
        "on: turn it off, or pass it detached"
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(told, stacklevel=2)
    else:
        ATTENTION.fail(told, UnsupportedError)


def gradient(name: str, written: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Of an operand, like it, from what the kernels have written to its memory of `memory_for`."""
    if name == "sink":
        return written.sum((0, 1)).to(of.dtype)
    if name == "bias" and written.dim() < 4:
        written = written.unsqueeze(2)
    if name == "bias":
        # once each: what is expanded holds sums already
        written = written[tuple(slice(None if stride else 1) for stride in written.stride())]
    return written.sum_to_size(of.shape).to(of.dtype)


def gradient_without_scores(name: str, of: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """The same of a call in which no query sees a key: a sink alone is in lse, (..., H, queries)."""
    if name == "sink" and dlse is not None:
        return dlse.sum((-1, *range(dlse.dim() - 2))).to(of.dtype)
    return torch.zeros_like(of)
