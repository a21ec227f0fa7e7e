"""Loops that numpy cannot express well, compiled for the host with LLVM: fused multiply-add and matrix products.

Everything else of the emulator is numpy. The functions take raw addresses of contiguous arrays, so callers own the
shape checks.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from fly.emulator.host import available, compiled
from fly.locks import lock_of_process

_LOCK = lock_of_process()
_KEEP: list[Any] = []  # execution engines own the machine code


@functools.cache
def _level() -> str:
    """512-bit vectors gain these loops nothing."""
    return "avx2" if "avx2" in available() else "baseline"


def _compile(ir: str, symbol: str, argtypes: list[Any]) -> Any:
    with _LOCK:
        engine = compiled(ir, _level(), opt=3, passes=True)
        _KEEP.append(engine)
        return ctypes.CFUNCTYPE(None, *argtypes)(engine.get_function_address(symbol))


def _fma_ir(t: str, s: str, scalars: tuple[bool, bool, bool]) -> str:
    """One loop; an operand that is a scalar is loaded before it, so that the loop is a plain vector loop."""
    before, inside = [], []
    for name, scalar in zip("abc", scalars):
        if scalar:
            before.append(f"  %v{name} = load {t}, ptr %{name}")
        else:
            inside.append(f"  %p{name} = getelementptr {t}, ptr %{name}, i64 %i\n  %v{name} = load {t}, ptr %p{name}")
    return f"""
define void @elementwise(ptr %a, ptr %b, ptr %c, ptr %out, i64 %n) {{
entry:
{chr(10).join(before)}
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{chr(10).join(inside)}
  %po = getelementptr {t}, ptr %out, i64 %i
  %r = call {t} @llvm.fma.{s}({t} %va, {t} %vb, {t} %vc)
  store {t} %r, ptr %po
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
declare {t} @llvm.fma.{s}({t}, {t}, {t})
"""


@functools.cache
def _fma(kind: str, scalars: tuple[bool, bool, bool]) -> Any:
    t, s = ("float", "f32") if kind == "f32" else ("double", "f64")
    p, n = ctypes.c_void_p, ctypes.c_int64
    return _compile(_fma_ir(t, s, scalars), "elementwise", [p, p, p, p, n])


def fma(a: Any, b: Any, c: Any, kind: str = "f32", out: np.ndarray | None = None) -> np.ndarray:
    """a·b + c with one rounding, elementwise with broadcasting; `kind` is f32 or f64.

    `out`, where given, is a contiguous array of the result's shape; it may be one of the operands.
    """
    dtype = np.float32 if kind == "f32" else np.float64
    x, y, z = np.asarray(a, dtype), np.asarray(b, dtype), np.asarray(c, dtype)
    if out is None:
        out = np.empty(np.broadcast_shapes(x.shape, y.shape, z.shape), dtype)
    arrays, addresses, scalars = [], [], []
    for array in (x, y, z):
        scalar = array.size == 1 and out.size != 1
        if not scalar and (array.shape != out.shape or not array.flags.c_contiguous):
            array = np.ascontiguousarray(np.broadcast_to(array, out.shape))
        arrays.append(array)
        scalars.append(scalar)
        addresses.append(array.ctypes.data)
    if out.size:
        _fma(kind, tuple(scalars))(*addresses, out.ctypes.data, out.size)
    return out


@dataclass(frozen=True)
class MatrixShape:
    """A matrix instruction: `blocks` products of (m, k) by (k, n), with the element types of A and B."""

    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str

    @property
    def integer(self) -> bool:
        """Whether the accumulator is int32."""
        return self.a == "i8"

    def d_row(self, block: int, i: int) -> tuple[int, int]:
        """Register and first lane of row i of D (and C); its n columns lie in consecutive lanes.

        AMD matrix instruction calculator: 32x32: row = 8·(r/4) + 4·(lane/32) + r%4; 16x16: row = 4·(lane/16) + r%4;
        4x4: row = r, blocks along the lanes.
        """
        if self.m == 32:
            return 16 * block + 4 * (i // 8) + i % 4, 32 * (i // 4 % 2)
        if self.m == 16:
            return 4 * block + i % 4, 16 * (i // 4)
        return i, 4 * block


ELEMENT_BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "fp8z": 8, "bf8z": 8, "i8": 8}


def fp8_table(kind: str) -> np.ndarray:
    """The 256 values of an 8-bit float format as float32.

    fp8/bf8 are OCP e4m3fn/e5m2 (gfx950); fp8z/bf8z are the FNUZ forms of gfx942: bias one larger, no -0, no
    infinity, 0x80 the only NaN.
    """
    exponent_bits, mantissa_bits = (4, 3) if kind.startswith("fp8") else (5, 2)
    fnuz = kind.endswith("z")
    bias = (1 << exponent_bits - 1) - (0 if fnuz else 1)
    code = np.arange(256)
    sign = np.where(code & 128, -1.0, 1.0)
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    scale = 2.0**-mantissa_bits
    value = np.where(
        exponent == 0, mantissa * scale * 2.0 ** (1 - bias), (1 + mantissa * scale) * 2.0 ** (exponent - bias)
    )
    value = (sign * value).astype(np.float32)
    if fnuz:
        value[128] = np.nan
    elif kind == "fp8":
        value[[127, 255]] = np.nan
    else:
        value[[0x7C, 0xFC]] = [np.inf, -np.inf]
        value[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return value


class _Emitter:
    """Builds the IR of one matrix product, a line at a time."""

    def __init__(self, shape: MatrixShape):
        self.shape, self.count = shape, 0
        self.lines: list[str] = []
        self.scalar = "i32" if shape.integer else "float"

    def op(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %t{self.count} = {text}")
        return f"%t{self.count}"

    def unpack(self, source: str, side: str, kind: str, lanes: int) -> None:
        """Registers of `source` -> scratch %side[k][lanes], one block behind the other."""
        shape, groups, bits = self.shape, 64 // lanes, ELEMENT_BITS[kind]
        per_lane = shape.k * shape.blocks // groups
        each = 32 // bits
        for group in range(groups):
            for register in range((per_lane + each - 1) // each):
                offset = self.op(f"mul i64 %stride, {register}")
                at = self.op(f"add i64 {offset}, %wave.offset")
                at = self.op(f"add i64 {at}, {group * lanes * 4}")
                pointer = self.op(f"getelementptr i8, ptr {source}, i64 {at}")
                words = self.op(f"load <{lanes} x i32>, ptr {pointer}, align 4")
                for e in range(each):
                    element = register * each + e
                    if element >= per_lane:
                        break
                    value = self.convert(words, kind, e, lanes)
                    target = self.op(
                        f"getelementptr {self.scalar}, ptr %{side}, i64 {(group * per_lane + element) * lanes}"
                    )
                    self.lines.append(f"  store <{lanes} x {self.scalar}> {value}, ptr {target}, align 4")

    def splat(self, lanes: int, value: int) -> str:
        return "<" + ", ".join([f"i32 {value}"] * lanes) + ">"

    def convert(self, words: str, kind: str, e: int, n: int) -> str:
        vi, vf = f"<{n} x i32>", f"<{n} x float>"
        if kind == "f32":
            return self.op(f"bitcast {vi} {words} to {vf}")
        if kind == "bf16":
            shifted = (
                self.op(f"shl {vi} {words}, {self.splat(n, 16)}")
                if e == 0
                else self.op(f"and {vi} {words}, {self.splat(n, -65536)}")
            )
            return self.op(f"bitcast {vi} {shifted} to {vf}")
        moved = self.op(f"lshr {vi} {words}, {self.splat(n, e * ELEMENT_BITS[kind])}")
        if kind == "f16":
            half = self.op(f"trunc {vi} {moved} to <{n} x i16>")
            half = self.op(f"bitcast <{n} x i16> {half} to <{n} x half>")
            return self.op(f"fpext <{n} x half> {half} to {vf}")
        byte = self.op(f"trunc {vi} {moved} to <{n} x i8>")
        if kind == "i8":
            return self.op(f"sext <{n} x i8> {byte} to {vi}")
        index = self.op(f"zext <{n} x i8> {byte} to <{n} x i64>")
        value = "poison"
        for lane in range(n):
            i = self.op(f"extractelement <{n} x i64> {index}, i32 {lane}")
            p = self.op(f"getelementptr float, ptr @table.{kind}, i64 {i}")
            x = self.op(f"load float, ptr {p}, align 4")
            value = self.op(f"insertelement {vf} {value}, float {x}, i32 {lane}")
        return value


def _matrix_ir(shape: MatrixShape) -> str:
    emitter = _Emitter(shape)
    emitter.unpack("%a", "A", shape.a, shape.m)
    emitter.unpack("%b", "B", shape.b, shape.n)
    rows = [shape.d_row(block, i) for block in range(shape.blocks) for i in range(shape.m)]
    n, k, scalar = shape.n, shape.k, emitter.scalar
    vec = f"<{n} x {scalar}>"
    tables = "".join(
        f"@table.{kind} = private constant [256 x float] "
        f"[{', '.join('float ' + _hex_float(x) for x in fp8_table(kind))}]\n"
        for kind in {shape.a, shape.b}
        if kind[-3:] in ("fp8", "bf8", "p8z", "f8z")
    )
    names = [f"{r}, {lane}" for r, lane in rows]
    registers = ", ".join(f"i64 {x.split(', ')[0]}" for x in names)
    lanes = ", ".join(f"i64 {4 * int(x.split(', ')[1])}" for x in names)
    step = 2 if shape.m >= 16 else 1
    heads, tails, inits = [], [], []
    for r in range(step):
        heads.append(f"""
  %i{r} = add i64 %i, {r}
  %pr{r} = getelementptr i64, ptr @registers, i64 %i{r}
  %reg{r} = load i64, ptr %pr{r}
  %pl{r} = getelementptr i64, ptr @lanes, i64 %i{r}
  %lane{r} = load i64, ptr %pl{r}
  %ro{r} = mul i64 %reg{r}, %stride
  %wo{r} = add i64 %ro{r}, %wave.offset
  %o{r} = add i64 %wo{r}, %lane{r}
  %pc{r} = getelementptr i8, ptr %c.safe, i64 %o{r}
  %loaded{r} = load {vec}, ptr %pc{r}, align 4
  %init{r} = select i1 %no.c, {vec} zeroinitializer, {vec} %loaded{r}
  %arow{r} = urem i64 %i{r}, {shape.m}""")
        inits.append(f"  %acc{r} = phi {vec} [ %init{r}, %rows ], [ %sum{r}, %inner ]")
        product = (
            f"  %mul{r} = mul {vec} %as{r}, %bvec\n  %sum{r} = add {vec} %acc{r}, %mul{r}"
            if shape.integer
            else f"  %sum{r} = call {vec} @llvm.fma.v{n}f32({vec} %as{r}, {vec} %bvec, {vec} %acc{r})"
        )
        tails.append(f"""
  %ai{r} = add i64 %abase, %arow{r}
  %pa{r} = getelementptr {scalar}, ptr %A, i64 %ai{r}
  %av{r} = load {scalar}, ptr %pa{r}
  %ae{r} = insertelement {vec} poison, {scalar} %av{r}, i32 0
  %as{r} = shufflevector {vec} %ae{r}, {vec} poison, <{n} x i32> zeroinitializer
{product}""")
    stores = "".join(
        f"\n  %pd{r} = getelementptr i8, ptr %d, i64 %o{r}\n  store {vec} %sum{r}, ptr %pd{r}, align 4"
        for r in range(step)
    )
    return f"""
@registers = private constant [{len(rows)} x i64] [{registers}]
@lanes = private constant [{len(rows)} x i64] [{lanes}]
{tables}
declare <{n} x float> @llvm.fma.v{n}f32(<{n} x float>, <{n} x float>, <{n} x float>)
define void @product(ptr %a, ptr %b, ptr %c, ptr %d, i64 %stride, i64 %waves) {{
entry:
  %A = alloca [{shape.blocks * k * shape.m} x {scalar}], align 64
  %B = alloca [{shape.blocks * k * n} x {scalar}], align 64
  %no.c = icmp eq ptr %c, null
  %c.safe = select i1 %no.c, ptr %d, ptr %c
  br label %wave
wave:
  %w = phi i64 [ 0, %entry ], [ %w.next, %wave.end ]
  %wave.offset = mul i64 %w, 256
{chr(10).join(emitter.lines)}
  br label %rows
rows:
  %i = phi i64 [ 0, %wave ], [ %i.next, %rows.end ]
  %block = udiv i64 %i, {shape.m}
  %block.k = mul i64 %block, {k}{"".join(heads)}
  br label %inner
inner:
  %k = phi i64 [ 0, %rows ], [ %k.next, %inner ]
{chr(10).join(inits)}
  %kk = add i64 %block.k, %k
  %abase = mul i64 %kk, {shape.m}
  %bbase = mul i64 %kk, {n}
  %pb = getelementptr {scalar}, ptr %B, i64 %bbase
  %bvec = load {vec}, ptr %pb, align 16{"".join(tails)}
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, {k}
  br i1 %k.more, label %inner, label %rows.end
rows.end:{stores}
  %i.next = add i64 %i, {step}
  %i.more = icmp ult i64 %i.next, {len(rows)}
  br i1 %i.more, label %rows, label %wave.end
wave.end:
  %w.next = add i64 %w, 1
  %w.more = icmp slt i64 %w.next, %waves
  br i1 %w.more, label %wave, label %done
done:
  ret void
}}
"""


def _hex_float(value: np.float32) -> str:
    """LLVM's spelling of a float constant: the bits of the double of the same value."""
    return f"0x{int(np.float64(value).view(np.uint64)):016X}"


@functools.cache
def matrix_product(shape: MatrixShape) -> Any:
    """Compiled D = A·B + C for W waves: `call(a, b, c, d, register stride in bytes, waves)`, addresses as integers.

    A wave's registers lie `stride` bytes apart, its lanes 4 bytes apart, waves 256 bytes apart. `c` 0 means zeros.
    Accumulation is float32 fused multiply-add in ascending k (hardware sums groups of products in an order that AMD
    does not publish), int32 wrapping for integers.
    """
    p, n = ctypes.c_void_p, ctypes.c_int64
    return _compile(_matrix_ir(shape), "product", [p, p, p, p, n, n])


_GATHER = """
define void @gather(ptr %memory, ptr %index, i64 %n, ptr %out, i64 %stride) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %pi = getelementptr i64, ptr %index, i64 %i
  %at = load i64, ptr %pi
  %source = getelementptr i8, ptr %memory, i64 %at
  %lane = shl i64 %i, 2
{body}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


@functools.cache
def gather(words: int) -> Any:
    """Compiled `call(memory, byte indices int64, lanes, out, register stride in bytes)`: `words` dwords a lane into
    as many registers; indices are multiples of 4."""
    body = "\n".join(
        f"""  %s{w} = getelementptr i8, ptr %source, i64 {4 * w}
  %x{w} = load i32, ptr %s{w}, align 4
  %r{w} = mul i64 %stride, {w}
  %o{w} = add i64 %r{w}, %lane
  %p{w} = getelementptr i8, ptr %out, i64 %o{w}
  store i32 %x{w}, ptr %p{w}, align 4"""
        for w in range(words)
    )
    p, n = ctypes.c_void_p, ctypes.c_int64
    return _compile(_GATHER.format(body=body), "gather", [p, p, n, p, n])


@functools.cache
def gather_transposed(bits: int) -> Any:
    """Compiled LDS read with transposition, arguments as `gather`; see `fly.emulator.lds` for the layout."""
    each, size = 64 // bits, bits // 8
    lines = ["  %base = and i64 %i, -16", "  %in = and i64 %i, 15", f"  %first = udiv i64 %in, {each}"]
    lines += [f"  %element = urem i64 %in, {each}", f"  %offset = mul i64 %element, {size}"]
    for n in range(each):
        lines.append(f"""  %l{n} = add i64 %base, {n * (16 // each)}
  %lane{n} = add i64 %l{n}, %first
  %pi{n} = getelementptr i64, ptr %index, i64 %lane{n}
  %at{n} = load i64, ptr %pi{n}
  %from{n} = add i64 %at{n}, %offset
  %ps{n} = getelementptr i8, ptr %memory, i64 %from{n}
  %x{n} = load i{bits}, ptr %ps{n}, align 1
  %r{n} = mul i64 %stride, {n * size // 4}
  %o{n} = add i64 %r{n}, %lane
  %q{n} = add i64 %o{n}, {n * size % 4}
  %po{n} = getelementptr i8, ptr %out, i64 %q{n}
  store i{bits} %x{n}, ptr %po{n}, align 1""")
    p, i64 = ctypes.c_void_p, ctypes.c_int64
    return _compile(_GATHER.format(body="\n".join(lines)), "gather", [p, p, i64, p, i64])
