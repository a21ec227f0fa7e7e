"""Clusters: blocks next to each other along x that run at the same time and reach into each other's shared memory.

PTX ISA, "Cluster of Cooperative Thread Arrays", "mapa" and "cp.async.bulk". An address of shared memory means the
same place in each block of a cluster, whose `rank` is `fly.block_id.x` modulo their number. A block must not end
while others may reach into it: `sync` is the last thing that kernels with clusters do, and what comes behind the
initialisation of mbarriers.
"""

from __future__ import annotations

from typing import Any

from fly.backends.nvvm.emit import as_i32, operation, require_hopper, shared_address
from fly.backends.nvvm.mbarrier import Mbarriers
from fly.errors import ShapeError
from fly.ir.context import current
from fly.ir.memory import Pointer, i64_attribute

MOST = 8  # blocks that every device takes


def declare(blocks: int) -> None:
    """Launch the kernel in clusters of so many blocks along x, of which grids have a multiple.

    Raises:
        ShapeError: out of range.
        TargetError: the target has no clusters.
    """
    require_hopper()
    if not isinstance(blocks, int) or not 1 < blocks <= MOST:
        raise ShapeError(f"a cluster of {blocks!r} blocks; expected 2 to {MOST}")
    current().memo["function"].attributes["fly.cluster"] = i64_attribute(blocks)


def sync() -> None:
    """All threads of all blocks of the cluster arrive before any goes on; memory accesses are ordered across it."""
    operation("cluster_sync")


def arrive(barriers: Mbarriers, index: Any, rank: Any) -> None:
    """This thread's arrival at a barrier of block `rank`, where `Mbarriers.wait` waits for it.

    It says that products and copies have read what the other block's copies may then write over. Stores and loads of
    threads are not ordered by it, but by `sync`: an order for the whole cluster would wait for all additions to
    global memory too.
    """
    barriers.arrive_at(index, rank)


def arrive_expecting(barriers: Mbarriers, index: Any, count: Any, rank: Any) -> None:
    """The same, and `count` more bytes that the phase waits for."""
    at, nbytes = barriers.at(index), as_i32(count, "byte count")
    operation("mbarrier_arrive_expect_at", [at, nbytes, as_i32(rank, "rank")])


def copy(destination: Pointer, source: Pointer, count: Any, barriers: Mbarriers, index: Any, rank: Any) -> None:
    """One thread starts a copy of shared memory to block `rank`, whose bytes arrive at a barrier there.

    `count` is a multiple of 16, as are both addresses. The source has been read when the bytes have arrived.
    """
    to, at, nbytes = shared_address(destination), shared_address(source), as_i32(count, "byte count")
    operation("copy_at", [to, at, nbytes, barriers.at(index), as_i32(rank, "rank")])
