"""Element types: signless integers, IEEE and brain floats, and the 8-bit floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fly.errors import DTypeError
from fly.ir.context import context
from fly.ir.mlir import ir

if TYPE_CHECKING:
    from fly.ir.value import Value  # it needs this module


@dataclass(frozen=True)
class DType:
    """An element type. Calling it converts a Python number or a traced value: `fly.f32(x)`."""

    name: str
    bits: int
    kind: str  # "int" | "float" | "float8"
    _make: Callable[[], ir.Type] = field(repr=False, compare=False, hash=False)

    @property
    def bytes(self) -> int:
        """Size in memory; i1 occupies one byte."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind == "int"

    @functools.cached_property
    def mlir(self) -> ir.Type:
        """The MLIR type, in the process-wide context."""
        with context():
            return self._make()

    def vector(self, length: int) -> ir.Type:
        """The MLIR type of a vector of `length` elements."""
        return _vector_type(self, length)

    def __call__(self, value: Any) -> Value:
        from fly.ir.value import convert

        return convert(value, self)

    def __str__(self) -> str:
        return self.name


@functools.cache
def _vector_type(dtype: DType, length: int) -> ir.Type:
    with context(), ir.Location.unknown():
        return ir.VectorType.get([length], dtype.mlir)


def _int(bits: int) -> DType:
    return DType(f"i{bits}", bits, "int", lambda: ir.IntegerType.get_signless(bits))


i1, i8, i16, i32, i64 = (_int(bits) for bits in (1, 8, 16, 32, 64))
f16 = DType("f16", 16, "float", lambda: ir.F16Type.get())
bf16 = DType("bf16", 16, "float", lambda: ir.BF16Type.get())
f32 = DType("f32", 32, "float", lambda: ir.F32Type.get())
f64 = DType("f64", 64, "float", lambda: ir.F64Type.get())
# Storage types without arithmetic, which LLVM knows as bytes. f8e4m3fnuz is gfx942's: a bias one larger than
# f8e4m3's, no -0, no infinity, and 0x80 as the only NaN, so that its largest number is 240.
f8e4m3, f8e5m2, f8e4m3fnuz = (DType(name, 8, "float8", i8._make) for name in ("f8e4m3", "f8e5m2", "f8e4m3fnuz"))

_NUMBERS = (i1, i8, i16, i32, i64, f16, bf16, f32, f64)
DTYPES: dict[str, DType] = {t.name: t for t in (*_NUMBERS, f8e4m3, f8e5m2, f8e4m3fnuz)}


def dtype(name: str | DType) -> DType:
    """Look an element type up by name.

    Raises:
        DTypeError: no such type.
    """
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise DTypeError(f"unknown dtype {name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
