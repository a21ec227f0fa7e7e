"""Timing calls against each other in turns, so that clocks and heat are the same for all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = Callable[[], object]


def turns(names: Sequence[str], rounds: int, seed: int) -> list[str]:
    """Every name once per round, each round in an order of its own."""
    order = random.Random(seed)
    return [name for _ in range(rounds) for name in order.sample(names, len(names))]


def gpu_milliseconds(
    calls: Mapping[str, Call], order: Sequence[str], *, flushes: int, burst: int, flush_bytes: int
) -> dict[str, list[float]]:
    """Of each call, its times in the turns of `order`, by torch's events on its current stream of its current GPU.

    Before a turn, `flushes` times `flush_bytes` of scratch are read: it empties the L2, without lines that the call
    would have to write back, and keeps the GPU busy while the host queues the call, so that host time does not show
    between the events. A turn is `burst` calls, and the time their mean.
    """
    import torch

    event: Any = torch.cuda.Event
    scratch = torch.zeros(flush_bytes // 4 if flushes else 0, device="cuda")
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for name in order:
        for _ in range(flushes):
            scratch.sum()
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(burst):
            calls[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) / burst for start, end in pairs] for name, pairs in events.items()}


def paired_ratio(incumbent: Sequence[float], candidate: Sequence[float]) -> float:
    """The candidate's speed over the incumbent's: the median over rounds of the ratio within a round."""
    ratios = sorted(a / b for a, b in zip(incumbent, candidate, strict=True))
    middle = len(ratios) // 2
    return ratios[middle] if len(ratios) % 2 else math.sqrt(ratios[middle - 1] * ratios[middle])
