"""Kernels with a mistake that `right=True` mends, what the checks say about each, and what such kernels share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import fly
from fly import config
from fly.backends.nvvm import tma
from fly.backends.nvvm.mbarrier import Mbarriers, init_all
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from tests.simulating.schedules import SEEDS, reported

TILE = PanelTile(64, 64)
"""Of bf16: the box of the tensor maps that all these kernels have."""
ATOM = WarpgroupAtom(64, "bf16")


@dataclass(frozen=True)
class Given:
    """What the kernels have: tensor maps of (128, 64) bf16 in boxes of `TILE`, and tensors of 256 i32."""

    source: fly.TensorMap
    result: fly.TensorMap
    x: fly.Tensor
    out: fly.Tensor


@dataclass(frozen=True)
class Mistake:
    """A kernel, what it does as a function of what it is given and whether it is `right`, and what is said about it.

    `said`: the kinds of its reports and what they say (regular expressions); their line ends with `#!`. `schedules`:
    the seeds that show it.
    """

    body: Callable[[Given, bool], None]
    kernel: fly.Kernel
    said: dict[str, str]
    block: int
    grid: int
    schedules: tuple[int, ...]

    def __str__(self) -> str:
        return self.kernel.name

    def launch(self, right: bool) -> torch.Tensor:
        source, result = (torch.full((128, 64), value, dtype=torch.bfloat16) for value in (1.0, 7.0))
        maps = [fly.tensor_map(t, (TILE.rows, TILE.panel_columns), swizzle=TILE.swizzle) for t in (source, result)]
        x, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        self.kernel[self.grid, self.block](*maps, x, out, right=right)
        return out

    @property
    def locations(self) -> set[str]:
        """The places that a report may name."""
        lines, first = inspect.getsourcelines(self.body)
        file = inspect.getsourcefile(self.body)
        return {f"{file}:{first + i}" for i, line in enumerate(lines) if line.rstrip().endswith("#!")}

    def check_reported(self) -> None:
        """Each of its schedules shows the mistake, and nothing but that."""
        for seed in self.schedules:
            report = reported(lambda: self.launch(right=False), seed)
            assert report.kind in self.said, report
            assert re.search(self.said[report.kind], report.text), report
            assert report.location in self.locations, report
            assert report.kernel == self.kernel.name

    def check_mended(self) -> None:
        """Without the mistake there is no report, in any schedule."""
        for seed in SEEDS:
            with config.SIMULATOR_SEED.set_to(str(seed)):
                self.launch(right=True)


class Mistakes(list[Mistake]):
    """A collection that a decorator adds kernels to, and its tests."""

    def __call__(
        self,
        kind: str | dict[str, str],
        text: str = "",
        *,
        block: int = 128,
        grid: int = 1,
        schedules: tuple[int, ...] = tuple(SEEDS),
    ) -> Callable[[Callable[[Given, bool], None]], None]:
        """A kernel whose mistake is reported by one kind and text, or by one of several."""
        said = {kind: text} if isinstance(kind, str) else kind

        def add(body: Callable[[Given, bool], None]) -> None:
            def kernel(source: fly.TensorMap, result: fly.TensorMap, x: fly.Tensor, out: fly.Tensor, *, right: bool):
                body(Given(source, result, x, out), right)

            kernel.__name__ = body.__name__
            self.append(Mistake(body, fly.kernel(kernel), said, block, grid, schedules))

        return add

    def each(self, test: Callable) -> Callable:
        """A test of every one that is there by now."""
        return pytest.mark.parametrize("case", list(self), ids=str)(test)


# what kernels share


def thread() -> fly.Value:
    return fly.thread_id.x


def line() -> fly.SharedMemory:
    """A word for each of 256 threads."""
    return fly.SharedMemory("line", fly.i32, 256)


def tile(name: str = "tile") -> fly.Pointer:
    return fly.alloc_shared(name, TILE.bytes, 1024)


def landing(arrivals: int = 1, count: int = 1, name: str = "landed") -> Mbarriers:
    """Barriers that are ready for use."""
    barriers = Mbarriers.allocate(name, count, arrivals)
    init_all([barriers])
    return barriers


def load_tile(source: fly.TensorMap, to: fly.Pointer, landed: Mbarriers, index: int = 0) -> None:
    """One thread starts the copy of a whole tile."""
    with fly.when(thread() == 0):
        landed.arrive_expecting(index, TILE.bytes)
        tma.load(source, to, (0, 0), landed.at(index))


def loaded(source: fly.TensorMap) -> fly.Pointer:
    """A tile that is there."""
    to, landed = tile(), landing()
    load_tile(source, to, landed)
    landed.wait(0, 0)
    return to


def zeroed(name: str = "tile") -> fly.Pointer:
    """A tile that 128 threads have stored zeros to: 64 bytes each."""
    to = tile(name)
    for piece in range(4):
        fly.store(fly.broadcast(fly.i32(0), 4), to.offset(piece * 2048 + thread() * 16), align=16)
    return to


def square(place: fly.Pointer) -> tuple[WarpgroupAtom, Operand, Operand, int]:
    """What `wgmma.issue` takes for the product of a tile with itself."""
    both = Operand(place, TILE)
    return ATOM, both, both, 4


def keep(total: fly.Value, out: fly.Tensor) -> None:
    """Use accumulators that have been waited for."""
    out.store(total[0].to(fly.i32), thread())
