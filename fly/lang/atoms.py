"""Instructions as data: what a matrix instruction computes and which lane holds what.

A backend lists the atoms its targets offer in its `atoms.py`; `fly.lang` and the kernels work from these records
alone. Layouts follow CuTe's thread-value convention: (lane, value) -> linear index of the tile's element, first
coordinate fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fly.errors import AtomError
from fly.layout import Layout

if TYPE_CHECKING:
    from fly.int_tuple import Shape


@dataclass(frozen=True)
class MmaAtom:
    """C (m x n) += A (m x k) * B (k x n), on one wave's registers.

    `a`: (lane, value) -> row + m * column of A; `b`: (lane, value) -> column + n * row of B;
    `c`: (lane, value) -> row + m * column of C. `dtype` is A's and B's element type, `accumulator` C's.
    `intrinsic` is issued `issues` times, each taking an equal part of the A and B values in order; `register`
    is the LLVM type of the A and B registers that it takes ("i32" and so on, or the vector itself if empty).
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str
    accumulator: str
    a: Layout
    b: Layout
    c: Layout
    intrinsic: str = field(repr=False)
    issues: int = 1
    register: str = ""

    @property
    def lanes(self) -> int:
        """Threads in the wave that executes the atom."""
        return Layout(cast("tuple[Shape, ...]", self.c.shape)[0]).size

    def values(self, operand: str) -> int:
        """Elements of operand "a", "b" or "c" that one lane holds."""
        return Layout(getattr(self, operand).shape[1]).size

    def __post_init__(self) -> None:
        extents = {"a": self.m * self.k, "b": self.n * self.k, "c": self.m * self.n}
        for operand, size in extents.items():
            layout = getattr(self, operand)
            if layout.size != size or layout.cosize != size:
                raise AtomError(f"{self.name}: layout {layout} of operand {operand} does not cover {size} elements")


@dataclass(frozen=True)
class MatrixLoad:
    """A wave-wide load from shared memory that may move data between lanes.

    Every lane gives the address of a run of `run` contiguous elements of `bits` bits and receives `values` of them:
    value v of lane l is element `column(l, v)` of the run of lane `source(l, v)`, with `table[(l, v)]` =
    source * run + column as a (lane, value) layout. `granule` is the number of contiguous elements that must
    stay together in a swizzled tile. An empty `intrinsic` is a plain vector load.
    """

    name: str
    run: int
    values: int
    table: Layout
    granule: int = 8
    intrinsic: str = field(default="", repr=False)
    bits: int = 16

    @property
    def lanes(self) -> int:
        return Layout(cast("tuple[Shape, ...]", self.table.shape)[0]).size


def plain_load(lanes: int, values: int, bits: int = 16) -> MatrixLoad:
    """A vector load of `values` contiguous elements of `bits` bits per lane."""
    name = f"load{values * bits}" + ("" if bits == 16 else f"_b{bits}")
    return MatrixLoad(name, values, values, Layout((lanes, values), (values, 1)), bits=bits)
