"""The two wave groups of a gfx950 block, each with a wave on each SIMD: one barrier apart from `part` to `rejoin`.

Every wave passes as many barriers, so that the groups meet at each: the first group is at the end of one cluster when
the second is at the end of the cluster before.
"""

from __future__ import annotations

import fly
from fly.backends.rocdl.intrinsics import s_barrier, s_waitcnt_lds, sched_barrier

from .options import WAVES


def part(wave: fly.Value) -> None:
    """The second group waits for one barrier more from here on. `wave`: `fly.wave_id()`."""
    with fly.when(wave >= WAVES // 2):
        s_barrier()


def meet() -> None:
    """All waves wait for each other, and no instruction is scheduled across."""
    sched_barrier()
    s_barrier()
    sched_barrier()


def land(tile: fly.PipelineTile, flight: fly.Token) -> None:
    """The stage that waits for the copies of a tile, and for the operands read in its cluster."""
    fly.wait(flight)
    s_waitcnt_lds()


def rejoin(wave: fly.Value) -> None:
    """The first group passes the barrier that the second one has passed more.

    `wave`: as for `part`, and from before a long loop; taken anew it keeps a vector register over the loop.
    """
    with fly.when(wave < WAVES // 2):
        s_barrier()
