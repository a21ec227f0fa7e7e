"""`@fly.tune`: of several static parameters of a kernel, those that are fastest on a device for some arguments."""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fly import config
from fly.errors import ArgumentError, FlyError, KernelDefinitionError
from fly.runtime import prebuilt, tuned_results
from fly.runtime.arguments import Argument, collect, describe_all
from fly.runtime.compile import compile_to_launch
from fly.runtime.device import CPU, Device, DeviceKey, device_for, is_planning
from fly.runtime.identity import identity_of, place_of
from fly.runtime.launch import launcher_of, static_key, stream_handle
from fly.runtime.packing import dim3
from fly.runtime.paired import gpu_milliseconds, paired_ratio, turns

BLOCK = "block"  # of a candidate: the launch's, no static parameter
_WARM_UP = 2
_FLUSH_BYTES = 1 << 28  # more than any L2
Size = int | Sequence[int]
OfCandidate = Callable[[Mapping[str, Any]], Size]


def tune(
    candidates: Sequence[Mapping[str, Any]], *, by: Callable[..., Any] | None = None, rounds: int = 15
) -> Callable[[Any], Tuned]:
    """Make a kernel choose among static parameters: put it above `@fly.kernel`.

    `candidates`: static parameters by name, each time some; `block` among them is the launch's block. `by`: a
    function of the arguments whose value decides the choice too, such as `lambda x, y: x.shape`; without it arguments
    count by dtype, rank, alignment and unit stride alone. `rounds`: turns that every candidate has.

    The first launch of a kind tries all candidates on its arguments, whose contents are put back, and keeps the
    fastest for the device in a file beside the disk cache (`fly.export_tuned`, `fly.import_tuned`). On a GPU they are
    timed in turns, with torch's events, and what counts is the median of the ratios to the first candidate's time in
    the same round. In the emulator what counts are the cycles of the whole grid by the timing model
    (docs/timing-model.md), not the emulator's time. Where nothing can be timed a launch takes the first candidate:
    while its stream is captured, on simulated GPUs, without torch, and with `FLY_PREBUILT`, unless a choice is kept.

    Raises:
        KernelDefinitionError: no candidates, or one that names what is no static parameter of the kernel.
    """

    def decorate(kernel: Any) -> Tuned:
        return Tuned(kernel, candidates, by, rounds)

    return decorate


@dataclass(frozen=True)
class _Candidate:
    """Static parameters, the launch's block if it says one, and what it is in results."""

    statics: Mapping[str, Any]
    block: Any
    text: str


class Tuned:
    """A kernel with candidates; see `tune`. `kernel` is the kernel itself."""

    def __init__(
        self, kernel: Any, candidates: Sequence[Mapping[str, Any]], by: Callable[..., Any] | None, rounds: int
    ):
        self.kernel, self.name, self.rounds = kernel, kernel.name, rounds
        self._by, self._lock = by, threading.RLock()
        self._chosen: dict[Any, _Candidate] = {}
        if not candidates or rounds < 1:
            raise KernelDefinitionError(
                f"@fly.tune of kernel {self.name} has {len(candidates)} candidates and {rounds} rounds; accepted: "
                "one or more of each"
            )
        known = kernel.signature.statics
        for candidate in candidates:
            for name in candidate:
                if name not in known and name != BLOCK:
                    raise KernelDefinitionError(
                        f"@fly.tune: kernel {self.name} has no static parameter {name!r}; it has "
                        f"{', '.join(known) or 'none'}"
                    )
        self.candidates = tuple(self._candidate(candidate) for candidate in candidates)
        self.__doc__, self.__wrapped__ = kernel.function.__doc__, kernel.function

    def _candidate(self, given: Mapping[str, Any]) -> _Candidate:
        what = f"a candidate of kernel {self.name}"
        text = ", ".join(f"{name}={identity_of(value, what)}" for name, value in sorted(given.items()))
        statics = {name: value for name, value in given.items() if name != BLOCK}
        return _Candidate(statics, given.get(BLOCK), text)

    def __repr__(self) -> str:
        return f"<tuned kernel {self.name}, {len(self.candidates)} candidates>"

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        """`tuned[grid, block]`: a callable that launches, as of a kernel.

        Both may be functions of the chosen candidate, a dictionary; block is None where candidates say it.
        """
        if not isinstance(configuration, tuple) or len(configuration) != 2:
            raise ArgumentError(f"tuned kernel {self.name} takes [grid, block], not [{configuration!r}]")
        return functools.partial(self._launch, *configuration)

    def _launch(self, grid: Any, block: Any, *args: Any, stream: Any = None, **named: Any) -> None:
        given, statics = launcher_of(self.kernel).complete(args, named)
        by = None if self._by is None else _plain(self._by(*given))
        launch = _Launch(self.kernel, grid, block, given, statics, stream)
        key = (collect(given, []), static_key(statics), by, config.ARCH.get())
        launch.run(self._chosen.get(key) or self._choose(launch, by, key))

    def _choose(self, launch: _Launch, by: Any, key: Any) -> _Candidate:
        """What is kept for such a launch, else what trials find; the first where nothing can be timed."""
        if is_planning():
            return self._planned(launch)
        with self._lock:
            if key in self._chosen:
                return self._chosen[key]
            bound, place = describe_all(self.kernel.signature, launch.arguments)
            device = device_for(place)
            name, arguments = device_name(device, place), self._arguments(bound, launch.statics, by)
            digest = hashlib.sha256("\n".join((arguments, *sorted(c.text for c in self.candidates))).encode())
            kernel, entry = place_of(self.kernel.function), digest.hexdigest()[:20]
            by_text = {candidate.text: candidate for candidate in self.candidates}
            found = tuned_results.kept(name).get(kernel, {}).get(entry)
            if found is None or found["chosen"] not in by_text:
                clock = _clock(device, place, launch.stream)
                if clock is None or prebuilt.folder_in_use() is not None:
                    return self.candidates[0]
                found = {"arguments": arguments, **self._tried(clock, launch, bound)}
                tuned_results.keep({name: {kernel: {entry: found}}})
            chosen = self._chosen[key] = by_text[found["chosen"]]
            return chosen

    def _planned(self, launch: _Launch) -> _Candidate:
        """The first, after a launch with each of the others was planned: any may be the one that a device takes."""
        for candidate in self.candidates[1:]:
            with suppress(FlyError):  # a candidate that does not fit is left out by trials too
                launch.run(candidate)
        return self.candidates[0]

    def _arguments(self, bound: Sequence[Argument], statics: Mapping[str, Any], by: Any) -> str:
        what = f"kernel {self.name}"
        named = (f"{argument.name}: {argument.spec}" for argument in bound)
        given = (f"{name}={identity_of(value, what)}" for name, value in sorted(statics.items()))
        return "; ".join((*named, *given, f"by {identity_of(by, what)}"))

    def _tried(self, clock: Clock, launch: _Launch, bound: Sequence[Argument]) -> dict[str, Any]:
        """The result of trials. A candidate that fails has the reason in the place of a time.

        Raises:
            FlyError: the first candidate's, if all fail.
        """
        trials: dict[str, Any] = {}
        errors: list[FlyError] = []

        def works(candidate: _Candidate, act: Callable[[_Candidate], Any]) -> bool:
            try:
                act(candidate)
            except FlyError as error:
                errors.append(error)
                trials[candidate.text] = f"{type(error).__name__}: {error}".splitlines()[0]
                return False
            return True

        written: set[str] = set()
        compiled = [c for c in self.candidates if works(c, lambda c: written.update(launch.written(c, bound)))]
        arrays = [a for a, argument in zip(launch.arguments, bound) if argument.name in written]
        with _restored(arrays):
            calls = {c.text: functools.partial(launch.run, c) for c in compiled if works(c, clock.try_once(launch))}
            times = clock.times(calls, self.rounds) if calls else {}
        if not calls:
            raise errors[0]
        first = next(iter(calls))
        speeds = {text: paired_ratio(times[first], taken) for text, taken in times.items()}
        chosen = max(speeds, key=lambda text: speeds[text])
        trials |= {text: sorted(taken)[len(taken) // 2] for text, taken in times.items()}
        return {"chosen": chosen, "speed": speeds[chosen], "unit": clock.unit, "trials": trials}


@dataclass(frozen=True)
class _Launch:
    """A launch without a candidate; `grid` and `block` as of `Tuned`, one argument a parameter."""

    kernel: Any
    grid: Any
    block: Any
    arguments: Sequence[Any]
    statics: Mapping[str, Any]
    stream: Any

    def sizes(self, candidate: _Candidate) -> tuple[Any, Any]:
        """(grid, block).

        Raises:
            ArgumentError: the block is said twice, or not at all.
        """
        named = {**self.kernel.signature.statics, **self.statics, **candidate.statics, BLOCK: candidate.block}
        grid, block = (size(named) if callable(size) else size for size in (self.grid, self.block))
        if (block is None) == (candidate.block is None):
            both = "neither the launch nor" if block is None else "both the launch and"
            raise ArgumentError(
                f"tuned kernel {self.kernel.name}: {both} the candidate ({candidate.text}) says the block; accepted: "
                "one of them"
            )
        return grid, candidate.block if block is None else block

    def run(self, candidate: _Candidate) -> None:
        """Launch it with a candidate."""
        grid, block = self.sizes(candidate)
        self.kernel[grid, block](*self.arguments, stream=self.stream, **{**self.statics, **candidate.statics})

    def written(self, candidate: _Candidate, bound: Sequence[Argument]) -> Sequence[str]:
        """Compile a candidate; which arguments it may write."""
        _, block = self.sizes(candidate)
        statics = {**self.statics, **candidate.statics}
        launcher = launcher_of(self.kernel)
        entry, _ = launcher.enter(dim3(block, BLOCK), self.arguments, statics, compile_to_launch)
        names = entry.written
        return [argument.name for argument in bound if argument.allocation] if names is None else names


def _plain(value: Any) -> Any:
    """torch's sizes as tuples, lists too."""
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def device_name(device: Device, place: DeviceKey) -> str:
    """What results are kept under: the GPU's name where torch knows it, else its architecture and size."""
    torch = sys.modules.get("torch")
    if place != CPU and torch is not None:
        return str(torch.cuda.get_device_name(place[1]))
    where = "emulated or simulated " if place == CPU else ""
    return f"{where}{device.target}, {device.compute_units} compute units"


class Clock:
    """How candidates are measured on one kind of device; `unit` of what `times` gives."""

    unit: str

    def try_once(self, launch: _Launch) -> Callable[[_Candidate], Any]:
        """Runs a candidate as far as it takes to see that it runs."""
        raise NotImplementedError

    def times(self, calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
        """Of each call, one time for each round."""
        raise NotImplementedError


class _Events(Clock):
    unit = "ms"

    def __init__(self, ordinal: int, stream: Any):
        self._ordinal, self._stream = ordinal, stream

    def try_once(self, launch: _Launch) -> Callable[[_Candidate], Any]:
        return launch.run

    def times(self, calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
        import torch

        handle = None if self._stream is None else stream_handle(self._stream, ("cuda", self._ordinal))
        with torch.cuda.device(self._ordinal):
            external: Any = torch.cuda.ExternalStream
            stream = torch.cuda.current_stream() if handle is None else external(handle)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    for call in calls.values():
                        call()
                order = turns(list(calls), rounds, seed=0)
                return gpu_milliseconds(calls, order, flushes=1, burst=1, flush_bytes=_FLUSH_BYTES)


class _Modelled(Clock):
    unit = "cycles"

    def __init__(self, device: Any):
        self._device = device

    def try_once(self, launch: _Launch) -> Callable[[_Candidate], Any]:
        return lambda candidate: self._launch_of(functools.partial(launch.run, candidate))

    def times(self, calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
        from fly.emulator.timing import Parameters, whole_launch

        parameters = Parameters.of(self._device.target)
        launches = {name: self._launch_of(call) for name, call in calls.items()}
        # the model has the same cycles every time
        return {name: [whole_launch(launch, parameters).time().cycles] for name, launch in launches.items()}

    def _launch_of(self, call: Callable[[], None]) -> Any:
        launches: list[Any] = []
        self._device.intercept = launches.append
        try:
            call()
        finally:
            self._device.intercept = None
        return launches[0]


def _clock(device: Any, place: DeviceKey, stream: Any) -> Clock | None:
    """What measures launches there; None where nothing does."""
    if place == CPU:
        return _Modelled(device) if hasattr(device, "intercept") else None
    if "torch" not in sys.modules:
        return None
    import torch

    handle = torch.cuda.current_stream(place[1]).cuda_stream if stream is None else stream_handle(stream, place)
    return None if device.is_capturing(handle) else _Events(place[1], stream)


@contextmanager
def _restored(arrays: Sequence[Any]) -> Iterator[None]:
    """The contents of these before, put back after: trials write to a launch's own results."""
    before = [a.detach().clone() if hasattr(a, "clone") else a.copy() for a in arrays]
    _wait()
    try:
        yield
    finally:
        _wait()
        for a, content in zip(arrays, before):
            if hasattr(a, "copy_"):
                a.detach().copy_(content)
            else:
                a[...] = content
        _wait()


def _wait() -> None:
    """For the GPU, whatever the stream."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
