"""Reference attention on inputs of e4m3fn or e4m3fnuz, and the tolerance that an 8-bit kernel is held to.

The rule is that of `tests.kernels.reference`, where plain attention is what such a kernel computes at best: exact
scores of the values that the inputs stand for, probabilities rounded to 8 bits, the output rounded to bf16. The
numbers of e4m3fnuz are half of e4m3fn's, so that either's rounding of probabilities is the other's.

AMD's kernels, and Hopper's for fast sums, take a maximum in only once it has grown by more than 2^LAZY
(docs/fp8.md), so that the largest weight of a row need not be a number of 8 bits, as it is where weights are
measured from the last maximum. Plain attention is computed both ways there, and the bound is that of the larger
error: of a few hundred random calls one has a row where the second is more than twice the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.fp8_accuracy import chained
from fly.runtime.device import device_of
from tests.kernels.reference import (
    MAX_SCORES,
    Reference,
    attention,
    blocks,
    exact_products,
    max_difference,
    product,
)

OFFSET = 2.0**8  # probabilities are rounded as multiples of 1 / 256
LAZY = 1.75  # log2 of the growth of a maximum that is not taken in
LAZY_ROWS, LAZY_KEYS = 32, 64  # those of a wave's tile on AMD, whose maxima are taken in together
Rounding = Callable[[torch.Tensor], torch.Tensor]
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def uniform(
    dtype: torch.dtype,
    seed: int,
    queries: int,
    keys: int,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    largest: float = 4.0,
    *,
    dim: int,
) -> list[torch.Tensor]:
    """q, k and v, uniform in [-largest, largest]: large scores make maxima grow, so that rescales are taken."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads))
    values = (torch.rand(*s, dim, generator=generator) * 2 * largest - largest for s in sizes)
    return [x.to(dtype) for x in values]


def factors(scale: torch.Tensor | None, batch: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """A scale of shape (), (1,), (B, Hkv), or None for one, as (B, 1, Hkv, 1)."""
    scale = torch.ones((), device=device) if scale is None else scale
    return scale.expand(batch, kv_heads)[:, None, :, None]


def rounded(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities from 0 to 1 as an 8-bit kernel multiplies them."""
    return (probabilities * OFFSET).to(E4M3).to(probabilities.dtype) / OFFSET


def rounded_lazily(
    probabilities: torch.Tensor, summed: bool = True, rows: int = LAZY_ROWS, keys: int = LAZY_KEYS
) -> torch.Tensor:
    """The same of (..., rows, keys), where they are measured from maxima that may have grown by 2^LAZY since then.

    `summed`: what divides them are their own sums, as in most kernels, and not those of `probabilities`; `rows`,
    `keys`: those of a tile, whose maxima are taken in together.
    """
    if not probabilities.numel():
        return probabilities
    origin = probabilities.new_zeros((*probabilities.shape[:-1], 1))
    parts = []
    for part in probabilities.split(keys, -1):
        highest = torch.maximum(part.amax(-1, keepdim=True), origin)
        waves = zip(*(x.split(rows, -2) for x in (highest, origin)))
        grown = [(new > old * 2.0**LAZY).any(-2, keepdim=True).expand_as(new) for new, old in waves]
        origin = torch.where(torch.cat(grown, -2), highest, origin)
        unit = origin.masked_fill(origin == 0, 1.0) / (OFFSET / 2)  # 2^LAZY * OFFSET would be too large a number
        parts.append((part / unit).to(E4M3).to(part.dtype) * unit)
    found = torch.cat(parts, -1)
    if not summed:
        return found
    total = found.sum(-1, keepdim=True)
    return found * (probabilities.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0))


def roundings(device: torch.device, fp8_accumulate: str | None = None) -> Sequence[Rounding]:
    """Those of the kernels of what runs calls on `device`."""
    if device_of(device).target.startswith("gfx"):
        return rounded, rounded_lazily
    # at 256 columns there is no room for those that make sums of rounded weights (docs/decisions.md)
    lazily = (partial(from_the_end, summed=summed) for summed in (True, False))
    return (rounded, *lazily) if fp8_accumulate == "fast" else (rounded,)


def from_the_end(probabilities: torch.Tensor, summed: bool) -> torch.Tensor:
    """`rounded_lazily` of Hopper's tiles, from the last keys on."""
    return rounded_lazily(probabilities.flip(-1), summed, 16, 128).flip(-1)


def cuts(device: torch.device) -> bool:
    """Whether 8-bit products of what runs calls on `device` are cut: Hopper's are, and not in the simulator."""
    return device.type == "cuda" and device_of(device).target == "sm_90a"


def cut_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (h, m, k) times b (h, k, n), float32, as Hopper's tensor cores add e4m3 products up.

    Each of an instruction's 32 products, and the sum so far, is cut at 2^-13 of the largest one's power of two.
    """
    return torch.stack([chained(x, y, x.shape[1]) for x, y in zip(a, b, strict=True)])


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    rounding: Rounding = rounded,
) -> torch.Tensor:
    """Attention on float32 (B, S, H, D) values with probabilities rounded before the product, in bf16."""
    seq_len, seq_len_kv, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16, device=q.device)
    for b in range(len(q) if seq_len_kv else 0):
        for head, row in blocks(q.shape[2], seq_len, seq_len_kv, MAX_SCORES):
            kv_heads = torch.arange(head.start, head.stop, device=q.device) // group
            key, value = (t[b].transpose(0, 1)[kv_heads] for t in (k, v))
            scores = product(q[b, row, head].transpose(0, 1) * softmax_scale, key.transpose(-1, -2))
            if causal:
                query = torch.arange(row.start, row.start + scores.shape[-2], device=q.device)[:, None]
                seen = torch.arange(seq_len_kv, device=q.device) <= query + (seq_len_kv - seq_len)
                scores.masked_fill_(~seen, -torch.inf)
            highest = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - highest.masked_fill(highest == -torch.inf, 0.0))
            total = weights.sum(-1, keepdim=True)
            result = product(rounding(weights), value) / total.masked_fill(total == 0, 1.0)
            out[b, row, head] = result.transpose(0, 1).to(out.dtype)
    return out


def distances(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> list[float]:
    """Root mean square of out minus plain attention's, to that of out: with `rounded_lazily`, and with `rounded`."""
    exact, scale = out.double(), q.shape[-1] ** -0.5
    found = [plain(q.float(), k.float(), v.float(), causal, scale, how).double() for how in (rounded_lazily, rounded)]
    size = exact.square().mean().sqrt()
    return [((x - exact).square().mean().sqrt() / size).item() for x in found]


def references(parts: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], **options: Any) -> Reference:
    """`reference` of sequences (1, S, H, D), packed: out (total, H, D), lse (H, total).

    Scales of `options` are by sequence and key head.
    """
    found = []
    for b, part in enumerate(parts):
        mine = {name: x[b : b + 1] if name.endswith("descale") else x for name, x in options.items()}
        found.append(reference(*part, **mine))
    outs, lses = torch.cat([x.out[0] for x in found]), torch.cat([x.lse[0] for x in found], -1)
    return Reference(outs, lses, max(x.plain_error for x in found))


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    fp8_accumulate: str | None = None,
) -> Reference:
    """Float32 attention on what e4m3 q, k, v stand for, and how far `plain` is from it."""
    sizes = (len(q), k.shape[2], q.device)
    group = q.shape[2] // k.shape[2]
    q = q.float() * factors(q_descale, *sizes).repeat_interleave(group, 2)
    k, v = k.float() * factors(k_descale, *sizes), v.float() * factors(v_descale, *sizes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with exact_products():
        out, lse = attention(q, k, v, causal=causal, softmax_scale=scale)
        plains = [plain(q, k, v, causal, scale, rounding) for rounding in roundings(q.device, fp8_accumulate)]
        error = max(max_difference(found, out) for found in plains)
    return Reference(out, lse, error)
