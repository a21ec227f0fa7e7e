"""Reference attention and the tolerance rule that every kernel is held to.

The rule is FlashAttention's: a kernel may be at most twice as far from exact attention as plain attention in
the input dtype is. Both are computed once per configuration and shared by everything that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

MAX_SCORES = 1 << 28  # scores held at a time; 1 GiB of float32
MAX_ELEMENTS = 1 << 26  # of a result compared at a time
SLACK = 1e-5
LSE_TOLERANCE = 1e-3


def blocks(heads: int, seq_len: int, seq_len_kv: int, max_scores: int) -> Iterator[tuple[slice, slice]]:
    """Slices of (heads, rows) whose scores number at most `max_scores` (at least one row of one head)."""
    rows = max(1, min(seq_len, max_scores // max(1, seq_len_kv)))
    together = max(1, max_scores // max(1, rows * seq_len_kv))
    for head in range(0, heads, together):
        for row in range(0, seq_len, rows):
            yield slice(head, min(head + together, heads)), slice(row, min(row + rows, seq_len))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, added up in float32 and rounded once if they have 16 bits, as GPUs do it; a CPU is 5 times faster so."""
    if a.device.type == "cpu" and a.element_size() == 2:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def _scores(q: torch.Tensor, k: torch.Tensor, first_row: int, seq_len: int, causal: bool) -> torch.Tensor:
    scores = product(q, k.transpose(-1, -2))
    if causal:
        row = torch.arange(first_row, first_row + q.shape[-2], device=q.device)[:, None]
        key = torch.arange(k.shape[-2], device=q.device)[None, :]
        scores.masked_fill_(key > row + (k.shape[-2] - seq_len), -math.inf)
    return scores


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    max_scores: int = MAX_SCORES,
    lengths: Sequence[tuple[int, int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written down directly, every step in `dtype`, a block of heads and rows at a time.

    Args:
        q: (B, Sq, H, D). k, v: (B, Skv, Hkv, D) with H a multiple of Hkv; all on one device.
        causal: query i sees the keys j ≤ i + Skv − Sq. A query that sees none gets out 0 and lse −inf.
        softmax_scale: factor of the scores; D**-0.5 by default.
        dtype: float32 or float64 for a reference, the input dtype for plain attention as a user writes it.
        max_scores: bound on the scores held in memory at a time.
        lengths: (queries, keys) of the sequences packed in q (total queries, H, D), k and v (total keys, Hkv, D).

    Returns:
        out (B, Sq, H, Dv) and lse (B, H, Sq), the natural log of the sum of exponentials, both of `dtype`; packed,
        (total queries, H, D) and (H, total queries).
    """
    if lengths:
        queries, keys = (list(side) for side in zip(*lengths))
        parts = q.split(queries), k.split(keys), v.split(keys)
        options = {"causal": causal, "softmax_scale": softmax_scale, "dtype": dtype, "max_scores": max_scores}
        results = [attention(*(part[None] for part in sequence), **options) for sequence in zip(*parts)]
        outs, lses = zip(*results)
        return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], -1)
    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, group = k.shape[1], heads // k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seq_len), -math.inf, dtype=dtype, device=q.device)
    if seq_len_kv == 0:
        return out, lse
    for b in range(batch):
        for head, row in blocks(heads, seq_len, seq_len_kv, max_scores):
            kv_heads = torch.arange(head.start, head.stop, device=q.device) // group
            query = q[b, row, head].transpose(0, 1).to(dtype) * scale
            key, value = (t[b].transpose(0, 1)[kv_heads].to(dtype) for t in (k, v))
            scores = _scores(query, key, row.start, seq_len, causal)
            block_lse = torch.logsumexp(scores, -1)
            probabilities = torch.softmax(scores, -1)
            probabilities.masked_fill_((block_lse == -math.inf)[..., None], 0.0)
            out[b, row, head] = product(probabilities, value).transpose(0, 1)
            lse[b, head, row] = block_lse
    return out, lse


@dataclass(frozen=True)
class Reference:
    """What exact attention gives, and how far plain attention in the input dtype is from it.

    out: (B, Sq, H, D), lse: (B, H, Sq), or packed, float32 or float64; `plain_error` is max|pt − out|; `lse_bound`:
    see `Report`.
    """

    out: torch.Tensor
    lse: torch.Tensor
    plain_error: float
    lse_bound: float = field(default=LSE_TOLERANCE, kw_only=True)

    @property
    def bound(self) -> float:
        """The largest |kernel − out| that passes."""
        return 2 * self.plain_error + SLACK


@dataclass(frozen=True)
class Report:
    """How far a result is from the reference.

    `cosine` is the smallest cosine between a row of the result and the reference's (1 where both are zero);
    `lse_error` is max |lse − ref| / max(1, |ref|), None when no LSE was given, inf where only one is −inf;
    `lse_bound`: the largest that passes.
    """

    error: float
    bound: float
    cosine: float
    lse_error: float | None
    lse_bound: float = LSE_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the result passes; NaN anywhere fails."""
        return self.error <= self.bound and (self.lse_error is None or self.lse_error <= self.lse_bound)

    def __str__(self) -> str:
        lse = "" if self.lse_error is None else f", lse error {self.lse_error:.1e} (bound {self.lse_bound:.0e})"
        verdict = "ok" if self.ok else "WRONG"
        return f"{verdict}: max error {self.error:.2e} (bound {self.bound:.2e}), cosine {self.cosine:.6f}{lse}"


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Matching parts of both, `a` in b's dtype, small enough for temporaries."""
    rows = max(1, MAX_ELEMENTS // max(1, b[:1].numel()))
    for x, y in zip(a.split(rows), b.split(rows)):
        if y.numel():
            yield x.to(y.dtype), y


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a − b| in b's dtype; NaN when either has one."""
    differences = [(x - y).abs().max() for x, y in _pieces(a, b)]
    return torch.stack(differences).max().item() if differences else 0.0


def _min_cosine(out: torch.Tensor, ref: torch.Tensor) -> float:
    lowest = []
    for x, y in _pieces(out, ref):
        both_zero = (x == 0).all(-1) & (y == 0).all(-1)
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1, eps=1e-30)
        lowest.append(torch.where(both_zero, 1.0, cosine).min())
    return torch.stack(lowest).min().item() if lowest else 1.0


def lse_error(lse: torch.Tensor, ref: torch.Tensor) -> float:
    """`Report.lse_error`."""
    if not ref.numel():
        return 0.0
    same = lse.to(ref.dtype) == ref  # −inf on both sides included
    relative = (lse.to(ref.dtype) - ref).abs() / ref.abs().clamp(min=1.0)
    relative = torch.where(ref.isinf(), torch.inf, relative)
    return torch.where(same, 0.0, relative).max().item()


@contextmanager
def exact_products() -> Iterator[None]:
    if not torch.backends.cuda.matmul.allow_tf32:
        yield
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    max_scores: int = MAX_SCORES,
    lengths: Sequence[tuple[int, int]] = (),
) -> Reference:
    """Exact attention (see `attention`) in `dtype` (float32 or float64) and plain attention's distance from it.

    TensorFloat-32 is kept out of the float32 products.
    """
    options = {"causal": causal, "softmax_scale": softmax_scale, "max_scores": max_scores, "lengths": lengths}
    with exact_products():
        out, lse = attention(q, k, v, dtype=dtype, **options)
    plain, _ = attention(q, k, v, dtype=q.dtype, **options)
    return Reference(out, lse, max_difference(plain, out))


def check(out: torch.Tensor, ref: Reference, lse: torch.Tensor | None = None) -> Report:
    """Hold a result (and its LSE, when given) against the reference.

    Raises:
        ValueError: a shape that is not the reference's.
    """
    if out.shape != ref.out.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the reference {tuple(ref.out.shape)}")
    if lse is not None and lse.shape != ref.lse.shape:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, the reference {tuple(ref.lse.shape)}")
    error = None if lse is None else lse_error(lse, ref.lse)
    return Report(max_difference(out, ref.out), ref.bound, _min_cosine(out, ref.out), error, ref.lse_bound)
