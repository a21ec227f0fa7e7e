"""Matrix instructions against float64 products; layouts as formulas of AMD's matrix instruction calculator."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from fly.emulator import Program, Region
from fly.emulator.native import MatrixShape, fp8_table, matrix_product
from tests.emulator.kernels import Patch
from tests.emulator.toolchain import build

TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "i8": np.int8,
         "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2,
         "fp8z": ml_dtypes.float8_e4m3fnuz, "bf8z": ml_dtypes.float8_e5m2fnuz}  # fmt: skip
SHAPES = [
    *(MatrixShape(32, 32, k, 1, t, t) for t, k in (("f32", 2), ("f16", 8), ("bf16", 8), ("f16", 16), ("bf16", 16))),
    *(MatrixShape(16, 16, k, 1, t, t) for t, k in (("f32", 4), ("f16", 16), ("bf16", 16), ("f16", 32), ("bf16", 32))),
    MatrixShape(32, 32, 16, 1, "i8", "i8"), MatrixShape(16, 16, 32, 1, "i8", "i8"),
    MatrixShape(32, 32, 32, 1, "i8", "i8"), MatrixShape(16, 16, 64, 1, "i8", "i8"),
    MatrixShape(32, 32, 16, 1, "fp8", "bf8"), MatrixShape(16, 16, 32, 1, "bf8z", "fp8z"),
    MatrixShape(32, 32, 1, 2, "f32", "f32"), MatrixShape(16, 16, 1, 4, "f32", "f32"),
    MatrixShape(4, 4, 1, 16, "f32", "f32"), MatrixShape(32, 32, 4, 2, "f16", "f16"),
    MatrixShape(16, 16, 4, 4, "bf16", "bf16"), MatrixShape(4, 4, 4, 16, "f16", "f16"),
]  # fmt: skip


def operand_place(shape: MatrixShape, lanes: int, block: int, i: int, k: int) -> tuple[int, int]:
    """(lane, element in the lane) of A[i, k] (or B[k, i]) of a block: k runs within a lane, then over lane groups."""
    groups = 64 // lanes // shape.blocks
    each = shape.k // groups
    return i + lanes * (block + shape.blocks * (k // each)), k % each


def result_place(shape: MatrixShape, block: int, i: int, j: int) -> tuple[int, int]:
    """(lane, register) of D[i, j]; in a 32x32 block, register r holds row 8·(r/4) + 4·(lane/32) + r%4."""
    if shape.m == 32:
        return j + 32 * (i // 4 % 2), 16 * block + 4 * (i // 8) + i % 4
    if shape.m == 16:
        return j + 16 * (i // 4), 4 * block + i % 4
    return j + 4 * block, i


def random_values(rng: np.random.Generator, kind: str, size: tuple[int, ...]) -> np.ndarray:
    if kind == "i8":
        return rng.integers(-128, 128, size).astype(np.int8)
    return rng.standard_normal(size).astype(np.float32).astype(TYPES[kind])


def pack(shape: MatrixShape, values: np.ndarray, kind: str, lanes: int) -> np.ndarray:
    """Registers uint32 (registers, 64) of an operand given as (blocks, lanes, k)."""
    groups = 64 // lanes // shape.blocks
    packed = np.zeros((64, shape.k // groups), TYPES[kind])
    for block in range(shape.blocks):
        for i in range(lanes):
            for k in range(shape.k):
                lane, element = operand_place(shape, lanes, block, i, k)
                packed[lane, element] = values[block, i, k]
    raw = packed.view(np.uint8).reshape(64, -1)
    raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
    return np.ascontiguousarray(raw.view(np.uint32).T)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_layout(shape: MatrixShape) -> None:
    rng = np.random.default_rng(abs(hash((shape.m, shape.k, shape.blocks, shape.a))) % 2**32)
    waves, count = 3, shape.m * shape.n * shape.blocks // 64
    product = matrix_product(shape)
    accumulator = np.int32 if shape.integer else np.float32
    a = [random_values(rng, shape.a, (shape.blocks, shape.m, shape.k)) for _ in range(waves)]
    b = [random_values(rng, shape.b, (shape.blocks, shape.n, shape.k)) for _ in range(waves)]
    ra = np.ascontiguousarray(np.stack([pack(shape, x, shape.a, shape.m) for x in a], 1))
    rb = np.ascontiguousarray(np.stack([pack(shape, x, shape.b, shape.n) for x in b], 1))
    c = rng.integers(-1000, 1000, (count, waves, 64)).astype(accumulator)
    d = np.zeros_like(c)
    product(ra.ctypes.data, rb.ctypes.data, c.ctypes.data, d.ctypes.data, waves * 256, waves)
    for wave in range(waves):
        exact = np.einsum("bik,bjk->bij", a[wave].astype(np.float64), b[wave].astype(np.float64))
        for block in range(shape.blocks):
            for i in range(shape.m):
                for j in range(shape.n):
                    lane, register = result_place(shape, block, i, j)
                    want = exact[block, i, j] + c[register, wave, lane]
                    bound = 0 if shape.integer else 2e-6 * (np.abs(want) + shape.k * 8 + 1000)
                    assert abs(float(d[register, wave, lane]) - want) <= bound


@pytest.mark.parametrize("kind", ["fp8", "bf8", "fp8z", "bf8z"])
def test_eight_bit_tables_are_the_published_formats(kind: str) -> None:
    expected = np.arange(256, dtype=np.uint8).view(TYPES[kind]).astype(np.float32)
    assert np.array_equal(fp8_table(kind), expected, equal_nan=True)


MFMA = """
define amdgpu_kernel void @mfma(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %out)
    "amdgpu-flat-work-group-size"="64,64" {{
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %pa = getelementptr {v}, ptr addrspace(1) %a, i64 %t64
  %pb = getelementptr {v}, ptr addrspace(1) %b, i64 %t64
  %x = load {v}, ptr addrspace(1) %pa
  %y = load {v}, ptr addrspace(1) %pb
  %d = call <16 x float> @{name}({v} %x, {v} %y, <16 x float> zeroinitializer, i32 0, i32 0, i32 0)
  %po = getelementptr <16 x float>, ptr addrspace(1) %out, i64 %t64
  store <16 x float> %d, ptr addrspace(1) %po
  ret void
}}
declare <16 x float> @{name}({v}, {v}, <16 x float>, i32, i32, i32)
declare i32 @llvm.amdgcn.workitem.id.x()
"""


def with_a_in_accumulation_registers(code: bytes) -> bytes:
    """The kernel with its first load and A of the matrix instruction moved to the same-numbered AGPRs."""
    patch = Patch(code, "mfma")
    load = next(i for i in patch.instructions if i.name.startswith("global_load"))
    matrix = next(i for i in patch.instructions if i.name.startswith("v_mfma"))
    assert matrix.get("src0") - 256 == load.get("vdst")
    patch.put(load, struct.pack("<Q", load.raw | 1 << 55)).put(matrix, struct.pack("<Q", matrix.raw | 1 << 59))
    descriptor = Program(code).code.sections[".rodata"][0]
    patch.code[descriptor + 48] |= 63  # allocate the whole register file
    return bytes(patch.code)


@pytest.mark.parametrize(
    ("arch", "name", "vector", "each"),
    [
        ("gfx942", "llvm.amdgcn.mfma.f32.32x32x8f16", "<4 x half>", 4),
        ("gfx950", "llvm.amdgcn.mfma.f32.32x32x16.f16", "<8 x half>", 8),
    ],
)
@pytest.mark.parametrize("accumulation_registers", [False, True])
def test_special_values_through_the_instruction(
    arch: str, name: str, vector: str, each: int, accumulation_registers: bool
) -> None:
    """Infinities, NaN and subnormals of float16, with A in architectural or accumulation registers (acc bits)."""
    code = build(MFMA.format(v=vector, name=name), arch)
    if accumulation_registers:
        code = with_a_in_accumulation_registers(code)
    k = 2 * each
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((32, k)).astype(np.float16) for _ in range(2))
    a[3, 1], a[5, 2], b[7, 1] = np.inf, np.nan, -np.inf
    a[9], b[9] = np.float16(6e-8), np.float16(6e-8)
    out = np.zeros((64, 16), np.float32)
    pa, pb = (np.ascontiguousarray(x.reshape(32, 2, each).transpose(1, 0, 2)) for x in (a, b))
    packed = struct.pack("<QQQ", pa.ctypes.data, pb.ctypes.data, out.ctypes.data)
    regions = [Region(x.ctypes.data, x.nbytes, n) for x, n in ((pa, "a"), (pb, "b"), (out, "out"))]
    program = Program(code)
    program.launch("mfma", (1,), (64,), packed, regions)
    names = {i.get("acc") & 1 for i in program.machine("mfma").instructions if i.name.startswith("v_mfma")}
    assert names == {int(accumulation_registers)}
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) @ b.astype(np.float64).T
    for r in range(16):
        for lane in range(64):
            row, column = 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32
            want = exact[row, column]
            if np.isfinite(want):
                assert abs(out[lane, r] - want) <= 1e-5 * max(1e-9, abs(want), float(np.abs(a[row]).max()))
            else:
                assert str(out[lane, r]) == str(np.float32(want)) or (np.isnan(want) and np.isnan(out[lane, r]))
    assert out[32 * (9 // 4 % 2) + 9, 4 * (9 // 8) + 9 % 4] == np.float32(exact[9, 9]) != 0
