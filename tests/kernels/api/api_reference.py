"""What FlashAttention's functions must give, written down densely for one sequence after the other."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.kernels.reference import Reference


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (Sq, H, Dv), lse (H, Sq)) of q (Sq, H, D), k (Skv, Hkv, D), v (Skv, Hkv, Dv), every step in `dtype`."""
    group = q.shape[1] // k.shape[1]
    query, key, value = (t.transpose(0, 1).to(dtype) for t in (q, k, v))
    key, value = (t.repeat_interleave(group, 0) for t in (key, value))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (query.float() @ key.float().transpose(1, 2)).to(dtype) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    distance = torch.arange(k.shape[0])[None, :] - position
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * distance.abs()
    if bias is not None:
        scores = scores + bias.to(dtype)
    left, right = window_size[0], 0 if causal else window_size[1]
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(distance > right, -math.inf)
    if attention_chunk:
        chunk = torch.div(position, attention_chunk, rounding_mode="floor")
        scores = scores.masked_fill(torch.arange(k.shape[0])[None, :] // attention_chunk != chunk, -math.inf)
    if sink is not None:
        column = sink.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores, value = torch.cat([scores, column], -1), torch.nn.functional.pad(value, (0, 0, 0, 1))
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:2], -math.inf, dtype=dtype)
    probabilities = torch.softmax(scores, -1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return (probabilities.float() @ value.float()).to(dtype).transpose(0, 1), lse


def _all(sequences: list[tuple], dtype: torch.dtype, options: list[dict[str, Any]]) -> list[torch.Tensor]:
    results = [_one(*tensors, dtype, **given) for tensors, given in zip(sequences, options)]
    return [list(part) for part in zip(*results)]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keys: list[tuple[int, int]] | None = None,
    entries: list[int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> Reference:
    """Of q (B, Sq, H, D) and k, v (B, S, Hkv, D); b has k[entries[b], first:last], (first, last) = keys[b]."""
    batch = len(q)
    entries = list(range(batch)) if entries is None else entries
    keys = [(0, k.shape[1])] * batch if keys is None else keys
    sequences = [(q[b], k[e, slice(*span)], v[e, slice(*span)]) for b, (e, span) in enumerate(zip(entries, keys))]
    each: list[dict[str, Any]] = [dict(options) for _ in range(batch)]
    for b, given in enumerate(each):
        if alibi_slopes is not None:
            given["alibi_slopes"] = alibi_slopes.expand(batch, -1)[b]
        if bias is not None:
            given["bias"] = bias.expand(batch, *bias.shape[1:])[b]
    outs, lses = _all(sequences, torch.float32, each)
    plain, _ = _all(sequences, q.dtype, each)
    out = torch.stack(outs)
    return Reference(out, torch.stack(lses), (torch.stack(plain) - out).abs().max().item())


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: list[int], keys: list[int], **options: Any
) -> Reference:
    """Of packed tensors (total, H, D) whose sequences have so many queries and keys."""
    sequences = list(zip(q.split(queries), k.split(keys), v.split(keys)))
    outs, lses = _all(sequences, torch.float32, [options] * len(queries))
    plain, _ = _all(sequences, q.dtype, [options] * len(queries))
    out = torch.cat(outs)
    return Reference(out, torch.cat(lses, -1), (torch.cat(plain) - out).abs().max().item())
