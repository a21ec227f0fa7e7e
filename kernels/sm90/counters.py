"""Counters in device memory, i32, from which persistent blocks take their tiles: zero before and after each launch.

Two for all launches; after them, in larger sets, one for each tile that is put together from parts, or two more and
one for each key head whose values are transposed (`sm90.values_ahead`). A launch resets what it used, so one set
serves all launches that cannot overlap: those on one stream. A launch that is captured into a graph gets a set of its
own, since the graph may be replayed beside anything.
"""

from __future__ import annotations

import threading

import torch

from fly.errors import DeviceError

FIRST_ARRIVAL = 4  # as tensors are aligned to 16 bytes
MAX_ARRIVALS, MANY_ARRIVALS = 252, 1020
# by the number of arrivals: 1 and two times 16 MiB
_SETS = {0: 1 << 16, MAX_ARRIVALS: 1 << 14, MANY_ARRIVALS: 1 << 12}


class TileCounters:
    """Sets of counters of one device, with so many `arrivals` (a key of `_SETS`); use `counters_of`.

    Making it waits for the device, once.
    """

    def __init__(self, device: torch.device, arrivals: int = 0):
        self.device = device
        self._sets, self._size = _SETS[arrivals], FIRST_ARRIVAL + arrivals
        self._memory = torch.zeros(self._sets * self._size, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"  # else a simulated one
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self._streams: dict[int | tuple[int, int], int] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def example(self) -> torch.Tensor:
        """A tensor like every set, to bind launches with."""
        return self._memory[: self._size]

    def address(self, stream: int) -> int:
        """The set for a launch on a stream, a driver's handle.

        Raises:
            DeviceError: 65536 launches have been captured into graphs, or 16384 that put parts together, or 4096 that
                transpose values.
        """
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return self._new()
        # a handle below 3 may be the default stream of each thread
        key = stream if stream >= 3 else (stream, threading.get_ident())
        address = self._streams.get(key)
        if address is None:
            address = self._streams[key] = self._new()
        return address

    def _new(self) -> int:
        with self._lock:
            if self._used == self._sets:
                raise DeviceError(
                    f"{self._sets} launches of persistent kernels were captured on {self.device}; there are no "
                    "counters for more: capture fewer, or set FLY_KERNEL=generic"
                )
            self._used += 1
            return self._memory.data_ptr() + (self._used - 1) * self._size * self._memory.element_size()


_counters: dict[tuple[torch.device, int], TileCounters] = {}
_lock = threading.Lock()


def counters_of(device: torch.device, arrivals: int = 0) -> TileCounters:
    """The counters of a device, made on first use."""
    with _lock:
        if (device, arrivals) not in _counters:
            _counters[device, arrivals] = TileCounters(device, arrivals)
        return _counters[device, arrivals]
