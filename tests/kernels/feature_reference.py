"""Reference attention with every feature of the interface, written down directly, and the tolerance rule for it.

The keyword arguments are the interface's (see `kernels.flash_attn_interface.flydsl_flash_attn_func`) and mean what
they mean there. Functions are torch functions here: `score_mod(scores, batch, head, query, key, *aux)` gets scores
(H, Sq, Skv) of one sequence, its number, and integers (H, 1, 1), (1, Sq, 1), (1, 1, Skv); `mask_mod` the same without
scores. A function made of operators and of `aux[head, query, key]` serves kernels and the reference alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fly_attention.problem.dropout import scale as scale_of_kept
from fly_attention.problem.dropout import threshold
from fly_attention.problem.dropout_mask import dropout_mask
from tests.kernels.fp8_reference import E4M3, FNUZ, cut_product, cuts, roundings
from tests.kernels.reference import (
    LSE_TOLERANCE,
    MAX_SCORES,
    Reference,
    Report,
    blocks,
    check,
    exact_products,
    lse_error,
    max_difference,
    product,
)


@dataclass(frozen=True)
class Span:
    """One sequence: its number, where its queries lie, and its own keys and values (n, Hkv, D)."""

    batch: int
    queries: tuple[Any, ...]
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """What changes scores, in the units of softmax_scale * q k^T, and what hides keys.

    `products`: of (h, r, D) and (h, D, keys), if others than exact ones are wanted.
    """

    causal: bool
    softmax_scale: float
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Sequence[torch.Tensor] = ()
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def of(self, whole: torch.Tensor, span: Span, heads: slice, rows: slice) -> torch.Tensor:
        """(h, r, keys) of some heads and rows of a sequence with the queries `whole`, (H, rows, D).

        -inf where a key is not seen.
        """
        query_heads, queries = whole.shape[:2]
        query = whole[heads, rows]
        keys, device, dtype = span.key.shape[0], query.device, query.dtype
        key = key_heads(span.key, query_heads, heads).to(dtype)
        keys_across = key.transpose(-1, -2)
        if self.products is None:
            scores = product(query * self.softmax_scale, keys_across)
        else:
            scores = self.products(query, keys_across) * self.softmax_scale
        h = torch.arange(heads.start, heads.stop, device=device)[:, None, None]
        i = torch.arange(rows.start, rows.stop, device=device)[None, :, None]
        j = torch.arange(keys, device=device)[None, None, :]
        position = i + (keys - queries)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.dim() == 1 else self.alibi_slopes[span.batch]
            scores = scores - slopes[heads].to(dtype)[:, None, None] * (j - position).abs()
        if self.bias is not None:
            bias = self.bias[span.batch if self.bias.shape[0] > 1 else 0]
            places = (slice(heads.start, heads.stop), rows, slice(0, keys))
            part = bias[tuple(place if n > 1 else slice(None) for place, n in zip(places, bias.shape))]
            scores = scores + part.to(dtype)
        if self.score_mod is not None:
            scores = self.score_mod(scores, span.batch, h, i, j, *self.aux_tensors)
        hidden = torch.zeros(scores.shape, dtype=torch.bool, device=device)
        if self.attention_chunk:
            hidden |= torch.div(position, self.attention_chunk, rounding_mode="floor") != j // self.attention_chunk
        left, right = self.window_size
        if self.causal or right >= 0:
            hidden |= j > position + (0 if self.causal else right)
        if left >= 0:
            hidden |= j < position - left
        if self.mask_mod is not None:
            hidden |= ~torch.as_tensor(self.mask_mod(span.batch, h, i, j, *self.aux_tensors), device=device)
        return scores.to(dtype).masked_fill(hidden, -math.inf)


def key_heads(tensor: torch.Tensor, query_heads: int, heads: slice) -> torch.Tensor:
    """(h, n, D): what the query heads `heads`, of `query_heads`, see of keys or values (n, Hkv, D)."""
    group = query_heads // tensor.shape[1]
    return tensor[:, torch.arange(heads.start, heads.stop, device=tensor.device) // group].transpose(0, 1)


def spans(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> Iterator[Span]:
    """The sequences of a call, those without queries or keys too."""
    at_q, at_kv = (None if x is None else x.tolist() for x in (cu_seqlens_q, cu_seqlens_kv))
    batch = q.shape[0] if at_q is None else len(at_q) - 1

    def number(counts: torch.Tensor | None, b: int, most: int) -> int:
        return most if counts is None else min(max(int(counts[b]), 0), most)

    for b in range(batch):
        if at_q is None:
            rows = (b, slice(0, number(seqused_q, b, q.shape[1])))
        else:
            rows = (slice(at_q[b], at_q[b] + number(seqused_q, b, at_q[b + 1] - at_q[b])),)
        entry = b if kv_batch_idx is None else int(kv_batch_idx[b])
        if at_kv is not None:
            key, value = (x[at_kv[b] : at_kv[b + 1]] for x in (k, v))
        elif block_table is not None:
            used = -(-number(seqused_kv, b, block_table.shape[1] * k.shape[1]) // k.shape[1])
            pages = block_table[entry, :used].long()  # what the table says past the keys in use does not matter
            key, value = (x[pages].flatten(0, 1) for x in (k, v))
        else:
            key, value = k[entry], v[entry]
        end = number(seqused_kv, b, key.shape[0])
        first = 0 if cache_leftpad is None else number(cache_leftpad, b, end)
        yield Span(b, rows, key[first:end], value[first:end])


def feature_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    *,
    dtype: torch.dtype = torch.float32,
    softmax_scale: float | None = None,
    sink: torch.Tensor | None = None,
    max_scores: int = MAX_SCORES,
    weights: Callable[[torch.Tensor], torch.Tensor] | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[torch.Tensor] = (),
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    products: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    **lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, used): attention with every step in `dtype`.

    Args:
        q: (B, Sq, H, D), or with `cu_seqlens_q` (total queries, H, D).
        k, v: (B, Skv, Hkv, D), with `cu_seqlens_kv` (total keys, Hkv, D), or with `block_table`, (B, pages of a
            sequence) i32, pages (N, page size, Hkv, D).
        weights: what becomes of exp(score - highest score) before they are multiplied with values.
        bias: what broadcasts to (B, H, Sq, Skv); its first key is the first one that counts.
        products: see `Scores`.
        dropout_p, rng_state: weights after the softmax are times `dropout_mask`, and its scale.
        lengths: `cu_seqlens_q`, `cu_seqlens_kv`, `seqused_q`, `seqused_kv`, `cache_leftpad`, `kv_batch_idx` and
            `block_table`.

    Returns:
        out (B, Sq, H, Dv) and lse (B, H, Sq), packed (total, H, Dv) and (H, total), of `dtype`; `used` (B, Sq) or
        (total,), False at queries that are not in use, whose out is 0 and lse -inf here.
    """
    heads = q.shape[-2]
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((*q.shape[:-3], heads, q.shape[-3]), -math.inf, dtype=dtype, device=q.device)
    used = torch.zeros(q.shape[:-2], dtype=torch.bool, device=q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scoring = Scores(
        causal,
        scale,
        window_size=tuple(window_size),
        attention_chunk=attention_chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        products=products,
    )
    for span in spans(q, k, v, **lengths):
        used[span.queries] = True
        *entry, rows_used = span.queries
        query = q[span.queries].transpose(0, 1).to(dtype)
        queries, keys = query.shape[1], span.key.shape[0]
        for some, rows in blocks(heads, queries, keys, max_scores):
            scores = scoring.of(query, span, some, rows)
            if sink is not None:
                extra = sink[some].to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, extra], -1)
            # -inf alone would be NaN in gradients, also in those of other rows
            empty = (scores == -math.inf).all(-1)
            scores = scores.masked_fill(empty[..., None], 0.0)
            total = torch.logsumexp(scores, -1).masked_fill(empty, -math.inf)
            if weights is None:
                probabilities = torch.softmax(scores, -1)
            else:
                highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(1)
                probabilities = weights(torch.exp(scores - highest)) * torch.exp(highest - total[..., None])
            probabilities = probabilities.masked_fill(empty[..., None], 0.0)[..., :keys]
            if dropout_p:
                shape = (span.batch + 1, heads, rows.stop, keys)
                kept = dropout_mask(rng_state, shape, dropout_p)[span.batch, some, rows]
                probabilities = probabilities * kept * scale_of_kept(threshold(dropout_p))
            values = product(probabilities, key_heads(span.value, heads, some).to(dtype))
            place = slice(rows_used.start + rows.start, rows_used.start + rows.stop)
            out[(*entry, place, some)] = values.transpose(0, 1)
            lse[(*entry, some, place)] = total
    return out, lse, used


@dataclass(frozen=True)
class FeatureReference(Reference):
    """`Reference` of a call with features; `used` tells the queries that have a result."""

    used: torch.Tensor


def feature_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    fp8_accumulate: str | None = None,
    **options: Any,
) -> FeatureReference:
    """Exact attention in float32 (see `feature_attention`) and the same in the input dtype's distance from it.

    Of 8-bit inputs, the same with weights in e4m3 and out in bf16, see `fp8_reference`; where products of scores are
    cut, log-sum-exps may be twice as far off as those of such scores are.
    """
    lse_bound = LSE_TOLERANCE
    with exact_products():
        out, lse, used = feature_attention(q, k, v, causal, **options)
        if q.dtype in (E4M3, FNUZ):
            ways = roundings(q.device, fp8_accumulate)
            by_weights = [feature_attention(q, k, v, causal, weights=way, **options)[0] for way in ways]
            plains = [plain.to(torch.bfloat16) for plain in by_weights]
            if cuts(q.device):
                _, of_cut, _ = feature_attention(q, k, v, causal, products=cut_product, **options)
                lse_bound = max(lse_bound, 2 * lse_error(of_cut, lse))
    if q.dtype not in (E4M3, FNUZ):
        plains = [feature_attention(q, k, v, causal, **options | {"dtype": q.dtype})[0]]
    error = max(max_difference(plain, out) for plain in plains)
    return FeatureReference(out, lse, error, used, lse_bound=lse_bound)


def check_used(out: torch.Tensor, ref: FeatureReference, lse: torch.Tensor | None = None) -> Report:
    """`check` of the queries in use alone; what others hold has no meaning."""
    known = torch.where(ref.used[..., None, None], out.to(ref.out.dtype), ref.out)
    if lse is not None:
        lse = torch.where(ref.used.unsqueeze(-2), lse, ref.lse)
    return check(known, ref, lse)
