"""A small flash-attention forward in Triton, to compare with. Importing this needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
CONFIGS = [
    triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
    for block_m, block_n, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
    )
]


@triton.jit
def _step(
    acc, top, total, q, k, v, start, rows, offset, seq_len_kv, k_stride, v_stride, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    inside = keys < seq_len_kv
    if MASKED:
        key = tl.load(k + keys[None, :] * k_stride + d[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(v + keys[:, None] * v_stride + d[None, :], mask=inside[:, None], other=0.0)
    else:
        key = tl.load(k + keys[None, :] * k_stride + d[:, None])
        value = tl.load(v + keys[:, None] * v_stride + d[None, :])
    scores = tl.dot(q, key)
    if MASKED:
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + offset)
        scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a row that has seen no key yet
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.autotune(CONFIGS, key=["HEAD_DIM", "CAUSAL", "seq_len", "seq_len_kv"])
@triton.jit
def _forward(
    q, k, v, out, scale, heads, group, seq_len, seq_len_kv,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, ob, os, oh,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # the longest causal blocks first
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    k += batch * kb + (head // group) * kh
    v += batch * vb + (head // group) * vh
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    inside = (rows < seq_len)[:, None]
    query = tl.load(q + batch * qb + head * qh + rows[:, None] * qs + d[None, :], mask=inside, other=0.0)

    offset = seq_len_kv - seq_len
    end = seq_len_kv
    whole = seq_len_kv  # every row sees the keys below this one
    if CAUSAL:
        end = tl.minimum(end, (block + 1) * BLOCK_M + offset)
        whole = tl.maximum(0, tl.minimum(whole, block * BLOCK_M + offset + 1))
    whole = whole // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, whole, BLOCK_N):
        acc, top, total = _step(
            acc, top, total, query, k, v, start, rows, offset, seq_len_kv, ks, vs, scale,
            MASKED=False, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N, HEAD_DIM=HEAD_DIM,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, top, total = _step(
            acc, top, total, query, k, v, start, rows, offset, seq_len_kv, ks, vs, scale,
            MASKED=True, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N, HEAD_DIM=HEAD_DIM,
        )  # fmt: skip
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + batch * ob + head * oh + rows[:, None] * os + d[None, :], result.to(q.type.element_ty), inside)


def triton_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q (B, Sq, H, D) with k, v (B, Skv, Hkv, D), scaled by D**-0.5; causal is bottom-right."""
    batch, seq_len, heads, head_dim = q.shape
    out = torch.empty_like(q)
    strides = [stride for t in (q, k, v, out) for stride in t.stride()[:3]]
    _forward[lambda meta: (triton.cdiv(seq_len, meta["BLOCK_M"]), batch * heads)](
        q, k, v, out, head_dim**-0.5 * LOG2_E, heads, heads // k.shape[2], seq_len, k.shape[1], *strides,
        CAUSAL=causal, HEAD_DIM=head_dim,
    )  # fmt: skip
    return out
