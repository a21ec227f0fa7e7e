"""How a bias is loaded: every score's element, none outside of the tensor, in as few loads as its memory allows.

Run in numpy as traced, where a read past an array's end fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import target
from kernels.problem.mask import KeyRange
from kernels.problem.score_bias import BiasTile, add
from tests.simulated import Machine, Program
from tests.tracing import matrix, trace

COLUMNS, BATCH, HEADS = 64, 2, 4
THREADS = {"sm_90a": 128, "sm_80": 32, "gfx942": 64, "gfx950": 64}


def layout() -> fly.AccumulatorLayout:
    """Of the target's scores."""
    if fly.target().arch == "sm_90a":
        return fly.AccumulatorLayout(WarpgroupAtom(COLUMNS, "bf16"), "m")
    return fly.chain(fly.target().mma("bf16")).layout


def biased(
    out: fly.Tensor,
    bias: fly.Tensor,
    first_row: fly.i32,
    first_key: fly.i32,
    queries: fly.i32,
    keys: fly.i32,
    *,
    ahead: bool,
    pack: int,
):
    """The bias of a tile of scores that are zero, of the last head or, with `pack` rows a query, of as many heads."""
    zeros = fly.Fragment.zeros(layout(), 1, COLUMNS // layout().columns)
    rows = fly.RowVector.full(layout(), 1, 0.0).rows()
    head = fly.i32(HEADS - 1) if pack == 1 else rows.map(lambda row: row % pack)
    place = SimpleNamespace(batch=fly.i32(1), head=head, keys=KeyRange(queries, keys, False), split=False)
    tile = BiasTile(bias, rows.map(lambda row: row // pack + first_row), first_key, COLUMNS, place)
    scores = add(zeros, tile.load()) if ahead else tile.add_to(zeros)
    for row, column, values in scores.runs():
        for i in range(values.length):
            out.store(values[i], row, column + i)


@dataclass(frozen=True)
class Memory:
    """A bias that ends with its last element: (B, H, Sq, Skv), or (B, H, Skv) without `queries`."""

    dtype: str
    queries: int | None
    keys: int
    padding: int  # elements from a row's end to the next
    alignment: int
    unit: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (BATCH, HEADS, *(() if self.queries is None else (self.queries,)), self.keys)

    @property
    def strides(self) -> tuple[int, ...]:
        step = 1 if self.unit else 3
        found = [step]
        for extent in reversed(self.shape[1:]):
            found.append(found[-1] * extent + (self.padding if len(found) == 1 else 0))
        return tuple(reversed(found))

    def run(self, arch: str, ahead: bool, pack: int, first_row: int, first_key: int, queries: int, keys: int) -> None:
        """Compare the scores of keys and queries that exist."""
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        buffer = np.random.default_rng(3).normal(size=size).astype({"f32": np.float32, "f16": np.float16}[self.dtype])
        seen = np.lib.stride_tricks.as_strided(buffer, self.shape, [s * buffer.itemsize for s in self.strides])
        spec = matrix(self.dtype, len(self.shape), self.alignment, self.unit)
        scalars, threads = ["i32"] * 4, THREADS[arch]
        module = trace(biased, matrix("f32", 2), spec, *scalars, arch=arch, block=threads, ahead=ahead, pack=pack)
        out = np.full((64, COLUMNS), 9.0, np.float32)
        strides = self.strides[:-1] if self.unit else self.strides
        arguments: list[Any] = [out, 64, COLUMNS, COLUMNS, buffer, *self.shape, *strides]
        Machine(Program.of(module, target(arch)))([*arguments, first_row, first_key, queries, keys])
        inside = max(min(keys - first_key, COLUMNS), 0)
        rows = int((out[:, 0] != 9.0).sum())
        assert rows >= 16
        for row in range(rows):
            query, head = first_row + row // pack, HEADS - 1 if pack == 1 else row % pack
            if query < queries:
                wanted = seen[1, head] if self.queries is None else seen[1, head, query]
                np.testing.assert_array_equal(out[row, :inside], wanted[first_key : first_key + inside])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_score_gets_its_element_and_nothing_else_is_read(data):
    draw = data.draw
    dtype, unit = draw(st.sampled_from(("f32", "f16"))), draw(st.booleans() | st.just(True))
    keys = draw(st.integers(1, 3 * COLUMNS))
    size = {"f32": 4, "f16": 2}[dtype]
    # a pitch of whole vectors, or any
    alignment = draw(st.sampled_from([a for a in (2, 4, 8, 16) if a >= size]))
    each = max(1, alignment // size)
    padding = -keys % each + each * draw(st.integers(0, 2)) if unit else 0
    memory = Memory(dtype, draw(st.none() | st.integers(1, 40)), keys, padding, alignment if unit else size, unit)
    used_queries = draw(st.integers(0, memory.queries or 40))
    memory.run(
        draw(st.sampled_from(tuple(THREADS))),
        draw(st.booleans()),
        draw(st.sampled_from((1, 1, 4))),
        draw(st.integers(0, 40)),
        COLUMNS * draw(st.integers(0, 3)),
        used_queries,
        draw(st.integers(0, keys)),
    )


@pytest.mark.parametrize("arch", THREADS)
@pytest.mark.parametrize(("queries", "alignment"), [(5, 2), (None, 16)])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_tile_that_ends_with_the_tensor_or_one_key_past_it(arch, queries, alignment, missing):
    """Its last key is the tensor's last element, or the first that is none."""
    keys = 2 * COLUMNS - missing
    padding = -keys % (alignment // 2)
    for ahead in (False, True):
        Memory("f16", queries, keys, padding, alignment).run(arch, ahead, 1, 0, COLUMNS, queries or 40, keys)
