"""CDNA3 (gfx942) and CDNA4 (gfx950) matrix instructions and shared-memory loads.

Register layouts: AMD matrix instruction calculator; CDNA3 and CDNA4 ISA manuals, chapter "Matrix Arithmetic
Instructions".
"""

from __future__ import annotations

from fly.lang.atoms import MatrixLoad, MmaAtom, plain_load
from fly.layout import Layout

# C/D of the 32x32 shapes: column = lane % 32, row = 8 * (r / 4) + 4 * (lane / 32) + r % 4
_C32 = Layout(((32, 2), (4, 4)), ((32, 4), (1, 8)))
# C/D of the 16x16 shapes: column = lane % 16, row = 4 * (lane / 16) + r
_C16 = Layout(((16, 4), 4), ((16, 4), 1))
# A and B: outer index = lane % 32 (or 16); each lane holds 8 consecutive k
_AB32 = Layout(((32, 2), 8), ((1, 256), 32))
_AB16 = Layout(((16, 4), 8), ((1, 128), 16))
# the same of half the depth: each lane holds 4 consecutive k
_AB32_HALF = Layout(((32, 2), 4), ((1, 128), 32))
_AB16_HALF = Layout(((16, 4), 4), ((1, 64), 16))
# of bytes: each lane holds two runs of 16 consecutive k, which are 16-byte loads. A and B agree, and without block
# scales that is all that the sum over k asks for.
_AB32_BYTES = Layout(((32, 2), (16, 2)), ((1, 512), (32, 1024)))
# of gfx942's two instructions of bytes at a time: each lane holds 16 consecutive k, which are one 16-byte load
_AB32_PAIR = Layout(((32, 2), 16), ((1, 512), 32))


def _mfma(shape: int, dtype: str, intrinsic: str, register: str, issues: int, half: bool = False) -> MmaAtom:
    operands, c, k = (_AB32, _C32, 16) if shape == 32 else (_AB16, _C16, 32)
    if half:
        operands, k = (_AB32_HALF, 8) if shape == 32 else (_AB16_HALF, 16)
    name = f"mfma_{shape}x{shape}x{k // issues}_{dtype}" + "_alone" * half
    return MmaAtom(
        name,
        shape,
        shape,
        k,
        dtype,
        "f32",
        operands,
        operands,
        c,
        "llvm.amdgcn.mfma.f32." + intrinsic,
        issues,
        register,
    )


# gfx942's instructions take 4 values of k a lane. Two of them make one atom with gfx950's operand layout: the sum
# over k does not care which k a register holds as long as A and B agree, and 8 values are one 16-byte load.
GFX942_MMA = (
    _mfma(32, "bf16", "32x32x8bf16.1k", "vector<4xi16>", 2),
    _mfma(32, "f16", "32x32x8f16", "vector<4xf16>", 2),
    _mfma(16, "bf16", "16x16x16bf16.1k", "vector<4xi16>", 2),
    _mfma(16, "f16", "16x16x16f16", "vector<4xf16>", 2),
    # one instruction alone, for kernels that place something between the two
    _mfma(32, "bf16", "32x32x8bf16.1k", "vector<4xi16>", 1, half=True),
    _mfma(32, "f16", "32x32x8f16", "vector<4xf16>", 1, half=True),
    _mfma(16, "bf16", "16x16x16bf16.1k", "vector<4xi16>", 1, half=True),
    _mfma(16, "f16", "16x16x16f16", "vector<4xf16>", 1, half=True),
)
GFX950_MMA = (
    _mfma(32, "bf16", "32x32x16.bf16", "vector<8xbf16>", 1),
    _mfma(32, "f16", "32x32x16.f16", "vector<8xf16>", 1),
    _mfma(16, "bf16", "16x16x32.bf16", "vector<8xbf16>", 1),
    _mfma(16, "f16", "16x16x32.f16", "vector<8xf16>", 1),
)

# e4m3 (OCP). This form has twice the rate of the 8-bit products with k = 16; with scales of 0 LLVM takes the
# instruction without block scales.
GFX950_BYTE_MMA = (
    MmaAtom(
        "mfma_32x32x64_f8e4m3",
        32,
        32,
        64,
        "f8e4m3",
        "f32",
        _AB32_BYTES,
        _AB32_BYTES,
        _C32,
        "llvm.amdgcn.mfma.scale.f32.32x32x64.f8f6f4",
        1,
        "vector<8xi32>",
    ),
)

# e4m3fnuz (CDNA3 ISA, V_MFMA_F32_32X32X16_FP8_FP8 and V_MFMA_F32_16X16X32_FP8_FP8), at twice the rate of 16 bits: 8
# and 4 passes. Two of the wide ones make one atom, as those of 16 bits do.
GFX942_BYTE_MMA = (
    MmaAtom(
        "mfma_32x32x16_f8e4m3fnuz",
        32,
        32,
        32,
        "f8e4m3fnuz",
        "f32",
        _AB32_PAIR,
        _AB32_PAIR,
        _C32,
        "llvm.amdgcn.mfma.f32.32x32x16.fp8.fp8",
        2,
        "i64",
    ),
    MmaAtom(
        "mfma_16x16x32_f8e4m3fnuz",
        16,
        16,
        32,
        "f8e4m3fnuz",
        "f32",
        _AB16,
        _AB16,
        _C16,
        "llvm.amdgcn.mfma.f32.16x16x32.fp8.fp8",
        1,
        "i64",
    ),
)

# Within 16 lanes, lane l gets element l % 4 of the runs of lanes (l / 4) % 4 + 4 n, n = 0..3.
_TR16 = MatrixLoad(
    "ds_read_b64_tr_b16",
    run=4,
    values=4,
    table=Layout(((4, 4, 4), 4), ((1, 4, 64), 16)),
    granule=16,
    intrinsic="llvm.amdgcn.ds.read.tr16.b64",
)
# Of bytes: lane l gets element l % 8 of the runs of lanes (l / 8) % 2 + 2 n, n = 0..7.
_TR8 = MatrixLoad(
    "ds_read_b64_tr_b8",
    run=8,
    values=8,
    table=Layout(((8, 2, 4), 8), ((1, 8, 128), 16)),
    granule=16,
    intrinsic="llvm.amdgcn.ds.read.tr8.b64",
    bits=8,
)
GFX942_LOADS = (plain_load(64, 8), plain_load(64, 4))
GFX942_BYTE_LOADS = (plain_load(64, 16, bits=8), plain_load(64, 8, bits=8))
GFX950_LOADS = (plain_load(64, 8), _TR16, plain_load(64, 4))
GFX950_BYTE_LOADS = (plain_load(64, 16, bits=8), _TR8)
