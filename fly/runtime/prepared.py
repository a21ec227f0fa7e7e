"""Launches whose arguments are bound once; a call only puts in the tensors' addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard, cast

from fly.errors import ArgumentError
from fly.lang.messages import LOG_FIELD
from fly.lang.signature import MAX_ALIGNMENT, TensorMapSpec, TensorSpec
from fly.runtime import cuda
from fly.runtime.arguments import Argument
from fly.runtime.device import Allocation, Dim3, LoadedKernel
from fly.runtime.launch import Compile, Entry, KernelLike, collect_binding, launcher_of, stream_handle
from fly.runtime.packing import WORD, ArgumentSlot, SharedArguments, dim3, offsets


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    alignment: int
    start: int  # where its memory starts, in bytes from its address
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch with everything fixed but the tensors' addresses; may be called from many threads.

    The caller answers for the new tensors having the sizes, strides, dtypes and device of the bound ones.
    """

    entry: Entry
    grid: Dim3
    block: Dim3
    tensors: tuple[_Tensor, ...]
    arguments: ArgumentSlot  # with everything in it but the addresses
    places: tuple[int, ...]  # of the addresses, in words

    def __call__(self, *addresses: int, stream: Any = None) -> None:
        """Launch with one address per tensor argument, in order, None arguments left out; returns at once.

        `stream` is as in `fly.runtime.launch.launch`.

        Raises:
            ArgumentError: a wrong number of addresses, or one less aligned than the kernel was compiled for.
            ArgumentTypeError: a stream that is neither a handle nor has one.
            LaunchError: a stream of another device.
            DeviceError: the driver reported a failure.
        """
        if len(addresses) != len(self.tensors):
            names = ", ".join(tensor.name for tensor in self.tensors)
            raise ArgumentError(f"{len(addresses)} addresses; accepted: one each for {names}")
        for address in addresses:
            if address.__class__ is not int or not 0 <= address < 2**64:
                raise ArgumentError(f"addresses {addresses!r}; accepted: ints from 0 to 2^64 - 1")
        self._check_alignment(addresses)
        entry = self.entry
        self.launch(addresses, entry.current_stream() if stream is None else stream_handle(stream, entry.device))

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """The same on a driver's stream handle, without looking at addresses: for callers that know what they pass.

        Raises:
            ArgumentError: a wrong number of addresses.
            DeviceError: the driver reported a failure.
        """
        entry, arguments, places = self.entry, self.arguments, self.places
        words = arguments.words
        if len(addresses) != len(places):
            raise ArgumentError(f"{len(addresses)} addresses; accepted: {len(places)}")
        for place, address in zip(places, addresses):  # a strict zip takes 0.2 µs more
            words[place] = address
        allocations = self._allocations(addresses) if entry.needs_allocations else ()
        entry.kernel.launch(self.grid, self.block, arguments, stream, allocations)

    def _check_alignment(self, addresses: Sequence[int]) -> None:
        for tensor, address in zip(self.tensors, addresses):
            if address % tensor.alignment:
                raise ArgumentError(
                    f"argument {tensor.name!r} has address {address:#x}; accepted: multiples of {tensor.alignment}"
                )

    def _allocations(self, addresses: Sequence[int]) -> tuple[Allocation, ...]:
        return tuple(Allocation(t.name, a + t.start, t.nbytes) for t, a in zip(self.tensors, addresses))


def _tensor(argument: Argument) -> _Tensor:
    memory = argument.allocation
    assert memory is not None
    if isinstance(argument.spec, TensorMapSpec):
        return _Tensor(argument.name, MAX_ALIGNMENT, 0, memory.nbytes)
    spec, address = cast("TensorSpec", argument.spec), cast("int", argument.values[0])
    return _Tensor(argument.name, spec.alignment, memory.address - address, memory.nbytes)


def bind(
    kernel: KernelLike,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    statics: Mapping[str, Any],
    compile: Compile,
) -> Prepared:
    """Check, compile, load and pack a launch of `kernel` with these arguments, without launching it.

    Arguments and errors are those of `fly.runtime.launch.launch`; the tensors must have their final sizes,
    strides, dtypes, alignment and device, and need not be kept.
    """
    grid, block = dim3(grid, "grid"), dim3(block, "block")
    entry, arguments = launcher_of(kernel).enter(block, args, statics, compile)
    collect_binding(kernel, grid, block, arguments, statics)
    packed = entry.pack([value for argument in arguments for value in argument.values])
    starts = offsets(entry.fields)
    # a tensor map starts with its address
    places = tuple(
        at // WORD for field, at in zip(entry.fields, starts) if field.kind in ("ptr", "map") and field != LOG_FIELD
    )
    tensors = tuple(_tensor(a) for a in arguments if isinstance(a.spec, TensorSpec | TensorMapSpec))
    return Prepared(entry, grid, block, tensors, ArgumentSlot(starts, packed), places)


def together(
    prepared: Sequence[Prepared], takes: Sequence[Sequence[int]], count: int
) -> Callable[[Sequence[int], int], None]:
    """Several launches on one device, in order, as one function of `count` addresses and a driver's stream handle.

    `takes`: of each, the places of its own among these addresses. On an NVIDIA GPU an address is written once, for
    all that take it, and the device's context is looked at once. May be called from many threads.
    """
    kernels = [launch.entry.kernel for launch in prepared]
    if [*takes] == [[*range(count)]]:
        (alone,) = prepared
        if not _are_cuda(kernels):
            return alone.launch
        return cuda.launch_of(kernels[0], alone.grid, alone.block, alone.arguments, alone.places)
    if len(prepared) == 1 or not _are_cuda(kernels):
        steps = tuple((launch.launch, picker(taken)) for launch, taken in zip(prepared, takes, strict=True))

        def run_each(addresses: Sequence[int], stream: int) -> None:
            for launch, pick in steps:
                launch(pick(addresses), stream)

        return run_each
    described = []
    for launch, taken in zip(prepared, takes, strict=True):
        fields, index = launch.entry.fields, iter(taken)
        starts = offsets(fields)
        found = [(i, field.kind, next(index)) for i, field in enumerate(fields) if field.kind in ("ptr", "map")]
        addresses = [(i, at) for i, kind, at in found if kind == "ptr"]
        maps = [(starts[i] // WORD, at) for i, kind, at in found if kind == "map"]
        described.append((starts, bytes(launch.arguments.view), addresses, maps))
    sizes = [(launch.grid, launch.block) for launch in prepared]
    return cuda.launches(kernels, sizes, SharedArguments(count, described))


def _are_cuda(kernels: list[LoadedKernel]) -> TypeGuard[list[cuda.CudaKernel]]:
    return all(isinstance(kernel, cuda.CudaKernel) for kernel in kernels)


def picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Takes the values under these keys: several in half the time that as many subscripts take."""
    return itemgetter(*keys) if len(keys) > 1 else lambda values: [values[key] for key in keys]
