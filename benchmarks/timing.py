"""Timing of several calls against each other: interleaved, so that clocks and heat are the same for all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]
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


def _turns(names: list[str], rounds: int, seed: int) -> list[str]:
    """Every name once per round, each round in an order of its own."""
    order = random.Random(seed)
    return [name for _ in range(rounds) for name in order.sample(names, len(names))]


def _on_gpu(calls: Mapping[str, Call], turns: list[str], flushes: int) -> dict[str, list[float]]:
    # reading the scratch buffer empties the L2, without lines that the call would have to write back, and keeps the
    # GPU busy while the host queues the next call, so that host time does not show between the events
    scratch = torch.zeros(FLUSH_BYTES // 4 if flushes else 0, device="cuda")
    burst = 1 if flushes else WARM_BURST
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for name in turns:
        for _ in range(flushes):
            scratch.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(burst):
            calls[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) / burst for start, end in pairs] for name, pairs in events.items()}


def _on_host(calls: Mapping[str, Call], turns: list[str]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns:
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
    turns = _turns(list(calls), iters, seed)
    return _on_gpu(calls, turns, flushes) if device == "cuda" else _on_host(calls, turns)


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
