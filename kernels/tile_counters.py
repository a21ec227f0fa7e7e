"""Counters in device memory from which persistent blocks take their tiles: zero before and after each launch.

A launch resets what it used, so one pair serves all launches that cannot overlap: those on one stream. A launch that
is captured into a graph gets a pair of its own, since the graph may be replayed beside anything.
"""

from __future__ import annotations

import threading

import torch

from fly.errors import DeviceError

_PAIRS = 1 << 16
_PAIR_BYTES = 16  # as tensors are aligned


class TileCounters:
    """The counters of one device; use `counters_of`.

    Making it waits for the device, once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._memory = torch.zeros(_PAIRS * _PAIR_BYTES // 4, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._streams: dict[tuple[int, int], int] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def example(self) -> torch.Tensor:
        """A tensor like every pair, to bind launches with."""
        return self._memory[:2]

    def address(self, stream: int | None) -> int:
        """The pair for a launch on a stream (a driver's handle; None: torch's current one).

        Raises:
            DeviceError: 65536 launches have been captured into graphs.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._new()
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
        # a handle below 3 may be the default stream of each thread
        key = (stream, threading.get_ident() if stream < 3 else 0)
        address = self._streams.get(key)
        if address is None:
            address = self._streams[key] = self._new()
        return address

    def _new(self) -> int:
        with self._lock:
            if self._used == _PAIRS:
                raise DeviceError(
                    f"{_PAIRS} launches of persistent kernels were captured on {self.device}; there are no counters "
                    "for more: capture fewer, or set FLY_KERNEL=generic"
                )
            self._used += 1
            return self._memory.data_ptr() + (self._used - 1) * _PAIR_BYTES


_counters: dict[torch.device, TileCounters] = {}
_lock = threading.Lock()


def counters_of(device: torch.device) -> TileCounters:
    """The counters of a device, made on first use."""
    with _lock:
        if device not in _counters:
            _counters[device] = TileCounters(device)
        return _counters[device]
