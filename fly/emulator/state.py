"""Architectural state of waves that stand at the same instruction.

A `Group` holds W waves as arrays: vector registers `(register, wave, lane)`, scalar registers as pairs `(pair,
wave, 2)` so that a 64-bit operand is one contiguous view. Row lists (`vu`, `vf`, `su`, …) are views of these arrays
that are made once a group, because making a view costs more than reading one from a list.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from fly.emulator import defined

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fly.emulator.decode import Instruction
    from fly.emulator.executing import Executing

EXEC_PAIR = 63
SGPR_PAIRS = 64
LANES = 64


def pack(mask: np.ndarray) -> np.ndarray:
    """Lane mask bool (W, 64) -> uint64 (W, 1)."""
    return np.packbits(mask, axis=-1, bitorder="little").view(np.uint64)


def unpack(bits: np.ndarray) -> np.ndarray:
    """uint64 (W, 1) -> lane mask bool (W, 64)."""
    return np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=-1, bitorder="little").view(bool)


class Outstanding(Protocol):
    """An operation on a counter's queue; see `fly.emulator.checks.Pending`."""

    @property
    def inst(self) -> Instruction:
        """What was issued."""

    @property
    def registers(self) -> int:
        """Those that it will write, as a bit mask."""

    @property
    def kind(self) -> str:
        """The counter that it is on."""

    @property
    def lds(self) -> tuple[Any, ...]:
        """Its LDS accesses."""

    def take(self, index: np.ndarray) -> Self:
        """The part of the waves at `index`."""

    def join(self, other: Self) -> Self:
        """This operation in two groups that merge."""


class MatrixResult(Protocol):
    """A matrix result that is not ready; see `fly.emulator.hazards.InFlight`."""

    @property
    def inst(self) -> Instruction:
        """What computes it."""

    @property
    def registers(self) -> int:
        """Those that hold it, as a bit mask."""

    @property
    def ready(self) -> int:
        """Tick from which uses are safe."""

    @property
    def ready_c(self) -> int:
        """Tick from which uses as an overlapping C are."""

    def shifted(self, ticks: int) -> Self:
        """The same, on a clock that differs by `ticks`."""


class Group:
    """W waves at one program counter.

    Attributes:
        v: uint32 (registers, W, 64), architectural then accumulation registers.
        s: uint32 (64, W, 2), scalar registers by pair, with VCC at 53, M0 at 62, EXEC at 63.
        mask, full: EXEC as bool (W, 64), and whether all of it is set.
        scc: bool (W, 1).
        wg, wave: int64 (W,), workgroup of the batch and wave in the workgroup.
        phase: number of workgroup barriers passed, int64 (W,).
        acquired: whether it has read what others release since it was last chosen to go on.
        written, variants: which registers are defined; see `fly.emulator.defined`.
    """

    __slots__ = (
        "acquired", "address", "barrier", "clock", "flush32", "full", "hazard", "last", "lgkm", "machine", "mask",
        "mfma", "mode", "pc", "pending", "phase", "previous", "root", "s", "s64", "scc", "sf", "si", "start",
        "stride", "su", "ticks", "v", "variants", "vf", "vi", "vm", "vu", "wave", "wg", "written",
    )  # fmt: skip
    variants: defined.Variants
    vu: list[NDArray[np.uint32]]
    vi: list[NDArray[np.int32]]
    vf: list[NDArray[np.float32]]

    def __init__(self, machine: Executing, v: np.ndarray, s: np.ndarray, wg: np.ndarray, wave: np.ndarray):
        self.machine, self.wg, self.wave = machine, wg, wave
        self.pc = 0
        self.scc = np.zeros((len(wg), 1), bool)
        self.phase = np.zeros(len(wg), np.int64)
        self.barrier = self.acquired = False
        self.set_mode(0xF0)
        self.written, self.variants, self.pending, self.clock = 0, (), 0, 0
        self.ticks, self.hazard = 0, 0
        self.last = self.previous = (-8, 0, False)
        self.vm: deque[Outstanding] = deque()
        self.lgkm: deque[Outstanding] = deque()
        self.mfma: list[MatrixResult] = []
        self._attach((v, s), 0)

    def _attach(self, root: tuple[np.ndarray, np.ndarray], start: int) -> None:
        """Use waves [start, start + W) of the backing arrays `root`."""
        self.root, self.start = root, start
        v, s = (x[:, start : start + self.waves] for x in root)
        self.v, self.s = v, s
        self.address, self.stride = v.ctypes.data, v.strides[0]
        self.vu, self.vi, self.vf = list(v), list(v.view(np.int32)), list(v.view(np.float32))
        halves = [s[i >> 1, :, (i & 1) : (i & 1) + 1] for i in range(2 * SGPR_PAIRS)]
        self.su = halves
        self.si = [h.view(np.int32) for h in halves]
        self.sf = [h.view(np.float32) for h in halves]
        self.s64 = list(s.view(np.uint64))
        self.refresh_exec()

    @property
    def waves(self) -> int:
        """Number of waves in the group."""
        return len(self.wg)

    def refresh_exec(self) -> None:
        """Recompute `mask` and `full` after a write to EXEC."""
        bits = self.s64[EXEC_PAIR]
        self.full = bool((bits == np.uint64(0xFFFFFFFFFFFFFFFF)).all())
        self.mask = unpack(bits)

    def set_mode(self, mode: int) -> None:
        """Set MODE; only the denormal bits of f32 change what is executed."""
        self.mode = mode
        self.flush32 = (mode >> 4 & 3) != 3

    def half(self, row: int, high: int) -> np.ndarray:
        """uint16 view (W, 64) of the low or high half of a vector register."""
        return self.vu[row].view(np.uint16)[:, high::2]

    def take(self, index: np.ndarray) -> Group:
        """A new group of the waves at `index` (ascending int array); a run of waves shares the backing arrays."""
        other = self._like(self)
        other.wg, other.wave, other.phase = self.wg[index], self.wave[index], self.phase[index]
        other.scc = self.scc[index]
        defined.take(other, self, index)
        other.vm = deque(entry.take(index) for entry in self.vm)
        other.lgkm = deque(entry.take(index) for entry in self.lgkm)
        first = int(index[0])
        if int(index[-1]) - first + 1 == len(index):
            other._attach(self.root, self.start + first)
        else:
            other._attach((np.ascontiguousarray(self.v[:, index]), np.ascontiguousarray(self.s[:, index])), 0)
        return other

    @staticmethod
    def _like(a: Group) -> Group:
        other = Group.__new__(Group)
        other.machine, other.pc, other.barrier, other.acquired = a.machine, a.pc, a.barrier, a.acquired
        other.mode, other.flush32 = a.mode, a.flush32
        other.pending, other.clock, other.mfma = a.pending, a.clock, list(a.mfma)
        other.ticks, other.hazard = a.ticks, a.hazard
        other.last, other.previous = a.last, a.previous
        return other

    def mergeable(self, other: Group) -> bool:
        """Whether two groups at one instruction agree in everything that is kept once for a group."""
        return (
            self.mode == other.mode and self.barrier == other.barrier
            and [e.inst for e in self.vm] == [e.inst for e in other.vm]
            and [e.inst for e in self.lgkm] == [e.inst for e in other.lgkm]
        )  # fmt: skip

    @staticmethod
    def merge(a: Group, b: Group) -> Group:
        """Join two `mergeable` groups at the same instruction."""
        if a.root is b.root and b.start + b.waves == a.start:
            a, b = b, a
        other = Group._like(a)
        for name in ("wg", "wave", "phase", "scc"):
            setattr(other, name, np.concatenate([getattr(a, name), getattr(b, name)]))
        defined.join(other, a, b)
        other.pending = a.pending | b.pending
        other.clock = max(a.clock, b.clock)
        other.mfma = a.mfma + [m.shifted(a.ticks - b.ticks) for m in b.mfma]
        other.hazard = a.hazard | b.hazard
        other.vm = deque(x.join(y) for x, y in zip(a.vm, b.vm))
        other.lgkm = deque(x.join(y) for x, y in zip(a.lgkm, b.lgkm))
        if a.root is b.root and a.start + a.waves == b.start:
            other._attach(a.root, a.start)
        else:
            other._attach((np.concatenate([a.v, b.v], 1), np.concatenate([a.s, b.s], 1)), 0)
        return other
