"""Traced modules run on numpy arrays by the product's simulator: a short way for tests of any target.

    Machine(Program.of(module, target))(flat(x, y, 3), grid)

Regions of a launch are named "argument 0" and so on, by the flat arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.simulator import Launch, Program, Region, SharedAccess

__all__ = ["Machine", "Program", "SharedAccess", "flat"]


@dataclass
class Machine:
    """A program, how it runs, and what was observed.

    Copies land when they are issued or, with `late_copies`, only when their tokens are waited for: a kernel that is
    right in both is right in between. `seed`: another schedule than these two.
    """

    program: Program
    late_copies: bool = False
    observe_shared: bool = False
    seed: int | None = None
    shared_accesses: list[SharedAccess] = field(default_factory=list)

    def __call__(self, arguments: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1)) -> None:
        """Run a grid of blocks; `arguments` are what `flat` makes: numbers, and arrays, which change in place."""
        regions = [
            Region(argument.ctypes.data, argument.nbytes, f"argument {number}")
            for number, argument in enumerate(arguments)
            if isinstance(argument, np.ndarray)
        ]
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        seed = int(self.late_copies) if self.seed is None else self.seed
        launch = Launch(self.program, grid, regions, values, seed, observe_shared=self.observe_shared)
        launch.run()
        self.shared_accesses += launch.shared_accesses


def flat(*arguments: Any) -> list[Any]:
    """The flat kernel arguments of arrays with unit last stride (whole buffers), scalars, and None for an optional
    argument that is not given."""
    result: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            strides = [s // argument.itemsize for s in argument.strides]
            assert not argument.ndim or strides[-1] == 1
            result += [argument, *argument.shape, *strides[:-1]]
        elif argument is not None:
            result.append(argument)
    return result
