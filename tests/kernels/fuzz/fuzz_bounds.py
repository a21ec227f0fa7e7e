"""What a call must give in float64, and how far any kernel with float32 scores may be from it, element by element.

For random calls of any magnitude. The rule of `tests.kernels.reference` compares with plain attention in the input
dtype, which overflows, underflows or is right by luck where numbers are extreme or few. What is added here:

- weights and the result are rounded to the input dtype: an error of at most a few units of that dtype's rounding of
  Σ p·|v|, whatever plain attention does;
- scores are rounded to float32: an uncertainty of each score, and with it of the weights, which matters where scores
  are so large that keys cannot be told apart in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.feature_reference import Scores, Span, feature_attention, key_heads, spans
from tests.kernels.reference import LSE_TOLERANCE, SLACK, exact_products, max_difference

F32 = 2.0**-21  # rounding of a score: a sum of products, and a few operations
WEIGHTS = 4.0  # roundings of 16 bits: weights, the result, and truncation instead of rounding
NEGLIGIBLE = 40.0  # exp(-NEGLIGIBLE) is none of a row's weight
LENGTHS = (
    *("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"),
    *("cache_leftpad", "kv_batch_idx", "block_table"),
)


@dataclass(frozen=True)
class Exact:
    """out and lse in float64, the error that each element may have, and which queries have a result at all."""

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor
    used: torch.Tensor

    def excess(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[float, float]:
        """The largest error of out, and of lse, in units of what is allowed; more than 1, or NaN, is wrong."""
        errors = (out.double() - self.out).abs() / self.out_bound
        of_out = torch.where(self.used[..., None, None], errors, 0.0)
        of_lse = torch.zeros(1)
        if lse is not None:
            lse = lse.double()
            errors = torch.where(self.lse.isinf(), math.inf, (lse - self.lse).abs()) / self.lse_bound
            errors = torch.where(lse == self.lse, 0.0, errors)
            of_lse = torch.where(self.used.unsqueeze(-2), errors, 0.0)
        return tuple(x.max().item() if x.numel() else 0.0 for x in (of_out, of_lse))


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: Mapping[str, Any], ordinary: bool
) -> Exact:
    """The reference of a call, `options` being those of `feature_attention`.

    `ordinary`: numbers are such that plain attention in the input dtype tells how far a kernel may be, too.
    """
    with exact_products():
        out, lse, used = feature_attention(q, k, v, causal, **options, dtype=torch.float64)
    out_bound, lse_bound = torch.zeros_like(out), LSE_TOLERANCE * lse.abs().clamp(min=1.0)
    lse_bound[lse.isinf()] = LSE_TOLERANCE
    if ordinary:
        plain, *_ = feature_attention(q, k, v, causal, **options, dtype=q.dtype)
        error = max_difference(plain, out)
        out_bound += 2 * error if math.isfinite(error) else 0.0
    lengths = {name: options[name] for name in LENGTHS if name in options}
    of_scores = {name: x for name, x in options.items() if name not in (*LENGTHS, "sink")}
    of_scores["softmax_scale"] = of_scores.get("softmax_scale") or q.shape[-1] ** -0.5
    if (bias := of_scores.get("bias")) is not None:
        of_scores["bias"] = bias[(None,) * (4 - bias.dim())]
    for span in spans(q, k, v, **lengths):
        if not span.key.shape[0] or not q[span.queries].numel():
            continue
        query = q[span.queries].transpose(0, 1).double()
        rounding, doubt = _of_sequence(query, span, causal, of_scores, options.get("sink"), q.dtype)
        *entry, rows = span.queries
        place = out_bound[span.queries]
        out_bound[span.queries] = torch.maximum(place, rounding.transpose(0, 1))
        lse_bound[(*entry, slice(None), rows)] += doubt
    return Exact(out, lse, out_bound + SLACK * min(1.0, _largest(v)) + torch.finfo(q.dtype).tiny, lse_bound, used)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return finite.max().item() if finite.numel() else 0.0


def _of_sequence(
    query: torch.Tensor,
    span: Span,
    causal: bool,
    of_scores: Mapping[str, Any],
    sink: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bound on the error of out (H, Sq, Dv), uncertainty of lse (H, Sq)) of one sequence; query (H, Sq, D)."""
    heads, rows = (slice(0, n) for n in query.shape[:2])
    scores = Scores(causal, **of_scores).of(query, span, heads, rows)
    doubt = uncertainty(query, span, scores, of_scores)
    value = key_heads(span.value, heads.stop, heads).double()
    if sink is not None:
        extra = sink.double()[:, None, None].expand(-1, rows.stop, 1)
        scores, doubt = torch.cat([scores, extra], -1), torch.cat([doubt, extra.abs() * F32], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.where(lse == -math.inf, 0.0, torch.exp(scores - lse))
    unit, smallest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = WEIGHTS * unit * (weights @ value.abs())
    bound += smallest * (1 + value.shape[1] * value.abs().amax((1, 2), keepdim=True))

    least = (scores - doubt).amax(-1, keepdim=True)
    matters = (scores + doubt >= least - NEGLIGIBLE) & (scores > -math.inf)
    spread = torch.where(matters, doubt, 0.0).amax(-1)
    change = torch.expm1(2 * spread).clamp(max=1.0)
    if change.max() < 1e-4:
        return bound + (change * 2)[..., None] * value.abs().amax((1, 2), keepdim=True), spread
    out = weights @ value
    for h, i in (change >= 1e-6).nonzero().tolist():
        chosen = value[h, matters[h, i]]
        bound[h, i] += change[h, i] * (chosen - out[h, i]).abs().amax(0)
    return bound, spread


def uncertainty(query: torch.Tensor, span: Span, scores: torch.Tensor, of_scores: Mapping[str, Any]) -> torch.Tensor:
    """By how much float32 arithmetic may move each of the `scores` (H, Sq, keys)."""
    heads, rows = (slice(0, n) for n in query.shape[:2])
    scale, cap = of_scores["softmax_scale"], of_scores.get("softcap", 0.0)
    size = Scores(False, scale).of(
        query.abs(), Span(span.batch, span.queries, span.key.abs(), span.value), heads, rows
    )
    doubt = size * F32
    if cap:
        plain = Scores(False, scale).of(query, span, heads, rows)
        low, middle, high = (cap * torch.tanh((plain + sign * doubt) / cap) for sign in (-1, 0, 1))
        doubt = torch.maximum(high - middle, middle - low) + middle.abs() * F32
    added = {name: of_scores[name] for name in ("alibi_slopes", "bias") if name in of_scores}
    if added:
        doubt = doubt + Scores(False, 0.0, **added).of(query, span, heads, rows).abs().nan_to_num(posinf=0.0) * F32
    return torch.where(scores > -math.inf, doubt + scores.abs() * F32, 0.0)
