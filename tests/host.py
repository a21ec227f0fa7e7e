"""Traced functions as x86 machine code: the semantics of the lowered IR, checked against Python.

A function of traced values becomes a kernel that reads its inputs from arrays and writes its results to others,
with the upstream pipeline that every backend ends with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlir import ir
from mlir.passmanager import PassManager

import fly
from fly.backends.lowering import to_llvm
from fly.emulator.host import compiled
from fly.ir.context import LOCK, context
from fly.simulator.program import DTYPES as NUMPY
from tests.host_level import host_level
from tests.tracing import matrix, trace


def llvm_ir(module: ir.Module) -> str:
    """Lower a module without `fly` operations to LLVM IR text."""
    from mlir.dialects import llvm as dialect

    with LOCK, context(), ir.Location.unknown():
        PassManager.parse(f"builtin.module({to_llvm()})").run(module.operation)
        return dialect.translate_module_to_llvmir(module.operation)


class HostFunction:
    """A compiled kernel all of whose arguments are vectors with unit stride: call it with numpy arrays."""

    def __init__(self, module: ir.Module, name: str):
        self._engine = compiled(llvm_ir(module), host_level(), opt=2)
        self.address = self._engine.get_function_address(name)

    def __call__(self, *arrays: np.ndarray) -> None:
        """Run once; a vector is passed as its address and its length."""
        types: list[Any] = []
        values: list[Any] = []
        for array in arrays:
            types += [ctypes.c_void_p, ctypes.c_int32]
            values += [array.ctypes.data, array.size]
        ctypes.CFUNCTYPE(None, *types)(self.address)(*values)


class Evaluator:
    """`Evaluator(f, ("i32", "i32"))(7, 2)`: f traced on scalars, run on the CPU; gives a tuple of numbers.

    With `length`, inputs and results are vectors of that many elements.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[str], length: int | None = None):
        self.inputs = [NUMPY[name] for name in inputs]
        self.count = length or 1
        self.outputs: list[np.dtype] = []
        # the results' dtypes and lengths, from tracing once without storing them
        results = self._results(function, inputs, length)
        self.outputs = [(NUMPY[r.dtype.name], r.length or 1) for r in results]

        def body(arguments: list[fly.Tensor]) -> None:
            values = [a.load(0, length=length) for a in arguments[: len(inputs)]]
            for value, place in zip(_tuple(function(*values)), arguments[len(inputs) :], strict=True):
                place.store(value, 0)

        names = [*inputs, *(r.dtype.name for r in results)]
        self._run = HostFunction(trace(_kernel(len(names), body), *map(matrix, names)), "evaluated")

    @staticmethod
    def _results(function: Callable[..., Any], inputs: Sequence[str], length: int | None) -> tuple[fly.Value, ...]:
        found: list[tuple[fly.Value, ...]] = []

        def body(arguments: list[fly.Tensor]) -> None:
            found.append(_tuple(function(*(a.load(0, length=length) for a in arguments))))

        trace(_kernel(len(inputs), body), *map(matrix, inputs))
        return found[0]

    def __call__(self, *values: Any) -> Any:
        """The results: numbers, or arrays of several elements; a single one is not in a tuple."""
        given = [np.array(np.broadcast_to(v, self.count), dtype=d) for v, d in zip(values, self.inputs, strict=True)]
        results = [np.zeros(count, dtype) for dtype, count in self.outputs]
        self._run(*given, *results)
        plain = [r[0] if r.size == 1 else r for r in results]
        return plain[0] if len(plain) == 1 else tuple(plain)


def _tuple(value: Any) -> tuple[fly.Value, ...]:
    return value if isinstance(value, tuple) else (value,)


def _kernel(count: int, body: Callable[[list[fly.Tensor]], None]) -> fly.Kernel:
    """A kernel with `count` tensor parameters that hands them to `body` as a list."""
    names = [f"t{i}" for i in range(count)]
    scope: dict[str, Any] = {"body": body, "fly": fly}
    source = f"def evaluated({', '.join(n + ': fly.Tensor' for n in names)}):\n    body([{', '.join(names)}])\n"
    exec(source, scope)
    return fly.kernel(scope["evaluated"])
