"""An attention forward kernel for Triton, compiled without a GPU: a source of code that is not ours."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROWS = 128


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, scale, s_head, s_row, n, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """One block of BM query rows of one head; `scale` includes log2(e); n is a multiple of BM and BN."""
    block = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * s_head
    rows, columns, d = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * s_row + d[None, :])
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    end = n
    if CAUSAL:
        end = (block + 1) * BM
    for start in range(0, end, BN):
        keys = start + columns
        k = tl.load(k_ptr + base + keys[None, :] * s_row + d[:, None])
        scores = tl.dot(q, k) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - raised)
        p = tl.exp2(scores - raised[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + base + keys[:, None] * s_row + d[None, :])
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None])
        highest = raised
    tl.store(o_ptr + base + rows[:, None] * s_row + d[None, :], (acc / total[:, None]).to(o_ptr.dtype.element_ty))


def compile_attention(arch: str, d: int, causal: bool):
    """Triton's compiled kernel: `.asm["hsaco"]`, `.metadata.shared`, `.metadata.name`."""
    constants = {"D": d, "BM": ROWS, "BN": 64, "CAUSAL": causal}
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16")
    signature |= {"scale": "fp32", "s_head": "i32", "s_row": "i32", "n": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    names = attention.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in signature if n not in constants and n != "scale"}
    source = ASTSource(attention, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("hip", arch, 64), options={"num_warps": 4, "num_stages": 2})
