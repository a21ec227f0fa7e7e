"""Tensor maps as kernel parameters: what the bulk copy engine of Hopper knows about a tensor."""

from __future__ import annotations

import functools

from fly.ir.context import context
from fly.ir.mlir import ir
from fly.ir.value import Traced
from fly.lang.signature import TensorMapSpec


@functools.cache
def pointer_type() -> ir.Type:
    """The type of a tensor map's address: it lies in the kernel's parameters."""
    return ir.Type.parse("!llvm.ptr", context())


@functools.cache
def parameter_attributes() -> ir.Attribute:
    """What makes the kernel's argument the 128 bytes themselves, read in place (PTX ISA, "Tensor-map")."""
    return ir.Attribute.parse("{llvm.byval = !llvm.array<128 x i8>, llvm.align = 64 : i64}", context())


class TensorMap(Traced):
    """A kernel parameter made by `fly.tensor_map`: the address of a tensor map, and what is static about it.

    Annotate a parameter with it, and hand the parameter to the copies of `fly.backends.nvvm.tma`.
    """

    __slots__ = ("spec",)

    def __init__(self, value: ir.Value, spec: TensorMapSpec):
        self.ir = value
        self.spec = spec

    def with_ir(self, value: ir.Value) -> TensorMap:
        return TensorMap(value, self.spec)

    @property
    def pointer(self) -> TensorMap:
        """The map's address, as copies take it."""
        return self

    def __repr__(self) -> str:
        box = " x ".join(map(str, self.spec.box))
        return f"<tensor map of {self.spec.dtype}, box {box}, swizzle {self.spec.swizzle}>"
