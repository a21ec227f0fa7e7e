"""Timing of several calls against each other: interleaved, so that clocks and heat are the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fly.runtime.paired import Call, gpu_milliseconds, turns

FLUSH_BYTES = 1 << 30  # more than any L2, and read in more time than a call takes to queue
WARM_BURST = 10


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


def _on_host(calls: Mapping[str, Call], order: list[str]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in order:
        start = time.perf_counter()
        calls[name]()
        samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def samples(
    calls: Mapping[str, Call], *, device: str, iters: int, warmup: int, flushes: int = 1, seed: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of each call in `iters` (≥ 1) rounds after `warmup` calls of each: sample i is of round i.

    In a round every call has one turn, in an order drawn from `seed`. On "cuda" timed with events on the current
    stream, on "cpu" by the clock. The L2 cache is emptied before each call, by so many `flushes` of
    `FLUSH_BYTES`, during which the host queues it; with none, a turn is `WARM_BURST` calls and the sample their mean,
    in which calls shorter than their launch show host time.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    order = turns(list(calls), iters, seed)
    if device != "cuda":
        return _on_host(calls, order)
    burst = 1 if flushes else WARM_BURST
    return gpu_milliseconds(calls, order, flushes=flushes, burst=burst, flush_bytes=FLUSH_BYTES)


def measure(
    calls: Mapping[str, Call], *, device: str, iters: int, warmup: int, flushes: int = 1
) -> dict[str, Timing]:
    """`samples`, summed up."""
    taken = samples(calls, device=device, iters=iters, warmup=warmup, flushes=flushes)
    return {name: Timing.of(times) for name, times in taken.items()}


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
