"""What a device takes in one launch, checked before the driver is asked so that the error names the limit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fly.errors import LaunchError
from fly.runtime.device import Dim3

_MAX_REMEMBERED = 4096
_LDS_BYTES = {"gfx950": 160 * 1024}
_DEFAULT_LDS_BYTES = 64 * 1024


@dataclass(frozen=True)
class Limits:
    """The largest grid (blocks) and block (threads) in x, y, z; threads and shared bytes in one block.

    `axis_threads`: grid times block along one axis stays below this; None where there is no such limit.
    """

    device: str
    grid: Dim3
    block: Dim3
    block_threads: int
    shared_bytes: int
    axis_threads: int | None = None

    def for_kernel(self, block_threads: int) -> Limits:
        """These limits for a kernel whose registers allow `block_threads` threads in a block."""
        return dataclasses.replace(self, block_threads=min(self.block_threads, block_threads))

    def check(self, kernel: str, grid: Dim3, block: Dim3) -> None:
        """Check a launch.

        Raises:
            LaunchError: a size above its limit; names the kernel, the size, the limit and the device.
        """
        for what, sizes, limits in (("grid", grid, self.grid), ("block", block, self.block)):
            for axis, size, limit in zip("xyz", sizes, limits):
                self._check(kernel, f"{what} {axis} is", size, limit)
        self._check(kernel, f"block is {block}, threads:", math.prod(block), self.block_threads)
        if self.axis_threads is not None:
            for axis, blocks, threads in zip("xyz", grid, block):
                self._check(kernel, f"grid times block along {axis} is", blocks * threads, self.axis_threads - 1)

    def check_shared(self, kernel: str, size: int) -> None:
        """Check a kernel's shared memory, in bytes, static and dynamic together.

        Raises:
            LaunchError: more than one block can have.
        """
        self._check(kernel, "shared memory bytes:", size, self.shared_bytes)

    def _check(self, kernel: str, what: str, value: int, limit: int) -> None:
        if value > limit:
            raise LaunchError(f"{kernel}: {what} {value}; {self.device} takes at most {limit}")


def amd_limits(device: str, arch: str) -> Limits:
    """What HIP takes on every AMD GPU, and the LDS of an architecture; `device` names it in errors."""
    return Limits(
        device=f"{device} ({arch})",
        grid=(2**31 - 1, 65536, 65536),
        block=(1024, 1024, 1024),
        block_threads=1024,
        shared_bytes=_LDS_BYTES.get(arch, _DEFAULT_LDS_BYTES),
        axis_threads=2**32,
    )


class CheckedSizes(set[tuple[Dim3, Dim3]]):
    """One kernel's (grid, block) pairs that are within `limits`; emptied when there are too many."""

    def __init__(self, limits: Limits):
        super().__init__()
        self._limits = limits

    def check(self, kernel: str, grid: Dim3, block: Dim3) -> None:
        """Check a pair and remember it.

        Raises:
            LaunchError: a size above its limit.
        """
        self._limits.check(kernel, grid, block)
        if len(self) >= _MAX_REMEMBERED:
            self.clear()
        self.add((grid, block))
