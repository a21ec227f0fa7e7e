"""Timing of several calls against each other: interleaved, so that clocks and heat are the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]
FLUSH_BYTES = 256 << 20  # more than any L2


@dataclass(frozen=True)
class Timing:
    """Times of one call in milliseconds: the median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Sum up at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def _turns(names: list[str], iters: int) -> list[str]:
    """Every name once per round, each round starting with the next name."""
    return [names[(first + i) % len(names)] for first in range(iters) for i in range(len(names))]


def _on_gpu(calls: Mapping[str, Call], iters: int, flush: bool) -> dict[str, list[float]]:
    # writing the scratch buffer empties the L2 and keeps the GPU busy while the host queues the next call, so
    # that host time does not show between the events
    scratch = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for name in _turns(list(calls), iters):
        scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _on_host(calls: Mapping[str, Call], iters: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in _turns(list(calls), iters):
        start = time.perf_counter()
        calls[name]()
        samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def measure(
    calls: Mapping[str, Call], *, device: str, iters: int, warmup: int, flush: bool = True
) -> dict[str, Timing]:
    """Time each call `iters` times (≥ 1), taking turns, after `warmup` calls of each.

    On "cuda" with events on the current stream, on "cpu" by the clock. `flush` empties the L2 cache before
    each call; without it, calls shorter than their launch show host time.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    samples = _on_gpu(calls, iters, flush) if device == "cuda" else _on_host(calls, iters)
    return {name: Timing.of(times) for name, times in samples.items()}


def host_microseconds(call: Call, *, device: str, calls: int = 300, repeats: int = 7) -> float:
    """Host time of one warm call in µs: the best of `repeats` runs, without waiting for the device.

    `calls` stays below the depth of a GPU's launch queue, past which the host waits for the device.
    """
    call()
    best = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    if device == "cuda":
        torch.cuda.synchronize()
    return best
