"""Launches of kernels with `fly.print` and `fly.check`: the log they write, and what becomes of it.

These are tools for debugging: a launch with messages waits for the kernel, and launches of one kernel take turns.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fly import config
from fly.backends.artefact import Artefact
from fly.errors import CheckError, DeviceError, EmulatorError, UnsupportedError
from fly.lang.messages import (
    CAPACITY,
    DROPPED,
    FAILED,
    HEADER_BYTES,
    LOG_FIELD,
    METADATA_KEY,
    RECORD_WORDS,
    Message,
    from_text,
)
from fly.runtime.device import Allocation, Device, Dim3, LoadedKernel
from fly.runtime.packing import WORD, ArgumentSlot, offsets

_MOST_SHOWN = 8  # failed checks in an error's message


class LogMemory(Protocol):
    """Memory that a device writes and the host reads, at one address: what `Device.log_memory` gives."""

    address: int
    nbytes: int

    def finish(self, stream: int) -> None:
        """Wait until what was launched on the stream has finished.

        Raises:
            DeviceError: it failed.
        """
        ...


class HostMemory:
    """A log for emulated devices, which have finished when a launch returns."""

    def __init__(self, nbytes: int):
        self._buffer = ctypes.create_string_buffer(nbytes + WORD)
        start = ctypes.addressof(self._buffer)
        self.address, self.nbytes = start + -start % WORD, nbytes

    def finish(self, stream: int) -> None:
        """See `LogMemory`: there is nothing to wait for."""


def has_messages(artefact: Artefact) -> bool:
    """Whether the kernel has a log, its last argument."""
    return METADATA_KEY in artefact.metadata and artefact.fields[-1:] == (LOG_FIELD,)


def load(device: Device, artefact: Artefact) -> LoadedKernel:
    """Load a kernel; one with messages with what prints them.

    Raises:
        ArtefactError: the artefact does not say what its messages are.
        CompileError, DeviceError, EmulatorError: see `Device.load`.
    """
    loaded = device.load(artefact)
    if not has_messages(artefact):
        return loaded
    return LoggedKernel(loaded, device, artefact, from_text(artefact.metadata[METADATA_KEY], artefact.kernel))


@dataclass(frozen=True)
class Line:
    """One record of a log: who wrote it, which message it is, and its text."""

    block: Dim3
    thread: int
    message: Message
    text: str


class LoggedKernel:
    """A kernel with messages; see `fly.runtime.device.LoadedKernel`."""

    def __init__(self, kernel: LoadedKernel, device: Device, artefact: Artefact, messages: Sequence[Message]):
        self._kernel, self._device = kernel, device
        self._name, self._messages = artefact.kernel, messages
        self._place = offsets(artefact.fields)[artefact.fields.index(LOG_FIELD)] // WORD
        self._memory: LogMemory | None = None
        self._lock = threading.Lock()

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: ArgumentSlot,
        stream: int,
        allocations: Sequence[Allocation] = (),
    ) -> None:
        """Run the kernel, wait for it, and print what it printed.

        Raises:
            CheckError: a `fly.check` failed.
            UnsupportedError: the stream is being captured into a graph.
            EmulatorError, LaunchError, DeviceError: as of other kernels; what was logged before is printed.
        """
        with self._lock:
            if self._device.is_capturing(stream):
                raise UnsupportedError(
                    f"{self._name}: a kernel with fly.print or fly.check is waited for, which a graph capture does "
                    "not allow; accepted: launches outside of a capture, or the kernel without them"
                )
            memory = self._clear_memory()
            arguments.words[self._place] = memory.address
            own = Allocation(LOG_FIELD.name, memory.address, memory.nbytes)
            fault = None
            try:
                self._kernel.launch(grid, block, arguments, stream, (*allocations, own))
                memory.finish(stream)
            except (EmulatorError, DeviceError) as error:
                fault = error
            self._report(ctypes.string_at(memory.address, memory.nbytes), grid, block, fault)
            if fault is not None:
                raise fault

    def _clear_memory(self) -> LogMemory:
        nbytes = config.PRINT_SIZE.get()
        if self._memory is None or self._memory.nbytes != nbytes:
            self._memory = self._device.log_memory(nbytes)
        ctypes.memset(self._memory.address, 0, nbytes)
        words = ctypes.c_int64((nbytes - HEADER_BYTES) // 4)
        ctypes.memmove(self._memory.address + CAPACITY, ctypes.byref(words), ctypes.sizeof(words))
        return self._memory

    def _report(self, data: bytes, grid: Dim3, block: Dim3, fault: Exception | None) -> None:
        """Print what was printed, then raise what failed."""
        dropped, failed = (struct.unpack_from("<q", data, at)[0] for at in (DROPPED, FAILED))
        lines = sorted(_lines(data, self._messages), key=lambda line: (line.block[::-1], line.thread))
        for line in lines:
            if line.message.kind == "print":
                sys.stdout.write(f"{_place(line, grid, block)}: {line.text}\n")
        if dropped:
            sys.stdout.write(
                f"{self._name}: {dropped} more lines were dropped; the log holds {len(data) >> 20} MiB "
                f"({config.PRINT_SIZE.name})\n"
            )
        if failed:
            checks = [line for line in lines if line.message.kind == "check"]
            raise CheckError(_failure(self._name, checks, failed, grid, block)) from fault


def _lines(data: bytes, messages: Sequence[Message]) -> Iterator[Line]:
    """The records of a log, in the order in which they were begun."""
    at = HEADER_BYTES
    while at + 4 * RECORD_WORDS <= len(data):
        number, x, y, z, thread = struct.unpack_from("<5i", data, at)
        if not 0 < number <= len(messages):  # nothing was written here
            return
        message = messages[number - 1]
        values = data[at + 4 * RECORD_WORDS : at + 4 * message.words]
        yield Line((x, y, z), thread, message, message.line(values))
        at += 4 * message.words


def _place(line: Line, grid: Dim3, block: Dim3) -> str:
    x, y, _ = block
    thread = (line.thread % x, line.thread // x % y, line.thread // (x * y))
    return f"block {_index(line.block, grid)}, thread {_index(thread, block)}"


def _index(index: Dim3, sizes: Dim3) -> str:
    """An index with as many coordinates as its space has."""
    rank = max([1, *(i + 1 for i in range(3) if sizes[i] > 1)])
    return str(index[0]) if rank == 1 else str(index[:rank])


def _failure(name: str, checks: Sequence[Line], failed: int, grid: Dim3, block: Dim3) -> str:
    if not checks:
        return f"{name}: fly.check failed {failed} times, of which the log had room for none"
    shown = [
        f"{line.message.at}: fly.check failed in {name}, {_place(line, grid, block)}"
        + (f": {line.text}" if line.text else "")
        for line in checks[:_MOST_SHOWN]
    ]
    more = [f"and {failed - len(shown)} more"] if failed > len(shown) else []
    return "\n".join([*shown, *more])
