"""Kernels of any target on numpy arrays: in every schedule, and with a mistake that is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mlir import ir

import fly
from fly import config
from fly.backends.target import target
from fly.ir.dialect import token_type
from fly.ir.memory import i64_attribute
from tests.simulated import Machine, Program, flat
from tests.simulating.mistakes import Given, Mistake, Mistakes
from tests.simulating.schedules import SEEDS
from tests.tracing import matrix, trace

DTYPES = {np.dtype(np.int8): "i8", np.dtype(np.int32): "i32", np.dtype(np.int64): "i64", np.dtype(np.float32): "f32"}


def program(kernel: Callable, *arrays: np.ndarray, arch: str, block: int | None = None, **statics) -> Program:
    """A kernel for arguments such as these."""
    specs = [matrix(DTYPES[array.dtype], array.ndim, array.itemsize) for array in arrays]
    return Program.of(trace(kernel, *specs, arch=arch, block=block, **statics), target(arch))


def in_every_schedule(
    kernel: Callable, *arrays: np.ndarray, arch: str, block: int | None = None, grid: int = 1
) -> None:
    """Run a kernel in each schedule from the same arrays: it leaves the same bits in them."""
    read, first = program(kernel, *arrays, arch=arch, block=block), None
    given = [array.copy() for array in arrays]
    for seed in SEEDS:
        for array, before in zip(arrays, given, strict=True):
            array[...] = before
        Machine(read, seed=seed)(flat(*arrays), (grid, 1, 1))
        found = [array.tobytes() for array in arrays]
        first = first or found
        assert found == first, f"schedule {seed} differs from schedule {SEEDS[0]}"


@dataclass(frozen=True)
class PortableMistake(Mistake):
    """One for `arch`, of 512 i32 in `x` and in `out`; nothing else is given."""

    arch: str

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.arch}"

    def launch(self, right: bool) -> np.ndarray:
        x, out = np.arange(512, dtype=np.int32), np.zeros(512, np.int32)
        read = program(self.kernel, x, out, arch=self.arch, block=self.block, right=right)
        Machine(read, seed=config.SIMULATOR_SEED.get())(flat(x, out), (self.grid, 1, 1))
        return out


class PortableMistakes(Mistakes):
    """The same for kernels of one or several architectures."""

    def __call__(
        self,
        kind: str,
        text: str,
        *,
        arch: str | tuple[str, ...],
        block: int = 128,
        grid: int = 1,
        schedules: tuple[int, ...] = tuple(SEEDS),
    ) -> Callable[[Callable[[Given, bool], None]], None]:
        def add(body: Callable[[Given, bool], None]) -> None:
            def kernel(x: fly.Tensor, out: fly.Tensor, *, right: bool):
                body(Given(None, None, x, out), right)

            kernel.__name__ = body.__name__
            for name in (arch,) if isinstance(arch, str) else arch:
                self.append(PortableMistake(body, fly.kernel(kernel), {kind: text}, block, grid, schedules, name))

        return add


def copy(to: fly.Pointer, source: fly.Pointer, inside: fly.Value | None = None) -> tuple:
    """For `token(emit(*...))`: each thread copies 4 bytes of its own (`cp.async`), zeros where it is not `inside`."""
    operands = [to.ir, source.ir, (fly.i1(True) if inside is None else inside).ir]
    return "fly.copy_async", operands, [token_type()], {"bytes": i64_attribute(4)}


def copy_direct(to: fly.Pointer, base: fly.Pointer, offset: fly.Value, bound: int, shift: int = 0) -> tuple:
    """The same: every wave copies 4 bytes a lane to one run of shared memory (`global_load_lds`)."""
    operands = [to.ir, base.ir, offset.ir, fly.i32(bound).ir]
    return "fly.copy_direct", operands, [token_type()], {"bytes": i64_attribute(4), "shift": i64_attribute(shift)}


def token(operation: ir.OpView) -> fly.Token:
    """What `emit` made of a copy. It is called where the copy is, whose line reports name."""
    return fly.Token(operation.results[0])
