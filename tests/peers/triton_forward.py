"""A flash-attention forward in Triton, in the form of its tutorial, and its ahead-of-time compilation for AMD.

Importing this needs triton; compiling needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LOG2_E = 1.4426950408889634
POINTERS = {"q": "bf16", "k": "bf16", "v": "bf16", "out": "bf16", "lse": "fp32"}
STRIDES = tuple(f"{tensor}_{axis}" for tensor in ("q", "k", "v", "out") for axis in ("batch", "row", "head"))


@triton.jit
def _sweep(
    acc, total, top, query, k_tile, v_tile, k_row, v_row, rows, scale, first, last,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    k_tile += first * k_row
    v_tile += first * v_row
    for start in tl.range(first, last, BLOCK_N):
        scores = tl.dot(query, tl.load(k_tile))
        if MASKED:
            seen = rows[:, None] >= start + columns[None, :]
            scores = scores * scale + tl.where(seen, 0, -1.0e6)
            new_top = tl.maximum(top, tl.max(scores, 1))
            scores -= new_top[:, None]
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            scores = scores * scale - new_top[:, None]
        weights = tl.math.exp2(scores)
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), tl.load(v_tile), acc * shrink[:, None])
        top = new_top
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    return acc, total, top


@triton.jit
def attention_forward(
    q, k, v, out, lse, scale, heads, seq_len,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """softmax(q·kᵀ·scale)·v with the scale in the log2 domain; one program a block of query rows of one head.

    `seq_len` is a multiple of both block sizes; `lse` is in the log2 domain, (batch·heads, seq_len).
    """
    block, batch, head = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    out += batch.to(tl.int64) * out_batch + head.to(tl.int64) * out_head
    rows, columns, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    k_tile = k + columns[None, :] * k_row + d[:, None]
    v_tile = v + columns[:, None] * v_row + d[None, :]
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    query = tl.load(q + rows[:, None] * q_row + d[None, :])
    whole = block * BLOCK_M if CAUSAL else seq_len
    acc, total, top = _sweep(
        acc, total, top, query, k_tile, v_tile, k_row, v_row, rows, scale, 0, whole, False, BLOCK_N
    )
    if CAUSAL:
        acc, total, top = _sweep(
            acc, total, top, query, k_tile, v_tile, k_row, v_row, rows, scale, whole, whole + BLOCK_M, True, BLOCK_N
        )
    tl.store(lse + tl.program_id(1) * seq_len + rows, top + tl.math.log2(total))
    tl.store(out + rows[:, None] * out_row + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty))


@dataclass(frozen=True)
class Compiled:
    """A code object of Triton's: the kernel's symbol, its LDS in bytes, work-items a workgroup, assembly listing."""

    code: bytes
    symbol: str
    shared: int
    threads: int
    listing: str


def compile_forward(
    arch: str, causal: bool, head_dim: int, block_m: int = 128, block_n: int = 64, warps: int = 4, stages: int = 2
) -> Compiled:
    """Compile `attention_forward` for an AMD architecture."""
    constants = {"CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n}
    signature = {name: f"*{kind}" for name, kind in POINTERS.items()}
    signature |= {"scale": "fp32", "heads": "i32", "seq_len": "i32"} | dict.fromkeys(STRIDES, "i32")
    aligned = [*POINTERS, "seq_len", *STRIDES]
    names = attention_forward.arg_names
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(attention_forward, signature | dict.fromkeys(constants, "constexpr"), constants, hints)
    target = GPUTarget("hip", arch, 64)
    built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    meta = built.metadata
    return Compiled(built.asm["hsaco"], meta.name, meta.shared, 64 * meta.num_warps, built.asm["amdgcn"])
