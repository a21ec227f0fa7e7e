"""Warp-level matrix instructions and shared-memory loads of sm_80 and later.

Register layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
"""

from __future__ import annotations

from fly.lang.atoms import MatrixLoad, MmaAtom, plain_load
from fly.layout import Layout

_A = Layout(((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128)))
_B = Layout(((4, 8), (2, 2)), ((16, 1), (8, 64)))
_C = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))


def _mma(dtype: str, intrinsic: str, register: str) -> MmaAtom:
    return MmaAtom(
        f"mma_m16n8k16_{dtype}",
        16,
        8,
        16,
        dtype,
        "f32",
        _A,
        _B,
        _C,
        "llvm.nvvm.mma.m16n8k16.row.col." + intrinsic,
        register=register,
    )


MMA = (_mma("bf16", "bf16", "i32"), _mma("f16", "f32.f32", "vector<2xf16>"))

# Four 8x8 matrices; lanes 8i..8i+7 give the rows of matrix i. Lane l gets, of each matrix, elements 2 (l % 4) and
# the next of row l / 4; transposed, elements l / 4 of rows 2 (l % 4) and the next.
_X4 = MatrixLoad(
    "ldmatrix_x4",
    run=8,
    values=8,
    table=Layout(((4, 8), (2, 4)), ((2, 8), (1, 64))),
    intrinsic="llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16",
)
_X4_TRANS = MatrixLoad(
    "ldmatrix_x4_trans",
    run=8,
    values=8,
    table=Layout(((4, 8), (2, 4)), ((16, 1), (8, 64))),
    intrinsic="llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16",
)
LOADS = (_X4, _X4_TRANS, plain_load(32, 2))
