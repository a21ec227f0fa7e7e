"""Bank conflicts of LDS accesses: the cycles that they take in the banks, from the addresses that a kernel gives.

LDS is made of banks of 4 bytes. An access is served in phases, some lanes at a time; within a phase a bank gives one
word a cycle, to every lane that wants it, and each further word costs a cycle. Which lanes share a phase depends on
the width:

| | banks | lanes of a phase; lanes 32-63 as 0-31 | source |
|---|---|---|---|
| gfx942, 16-byte reads | 32 | 0-3 20-23, 4-7 16-19, 8-11 28-31, 12-15 24-27 | (1), (3) |
| gfx942, 16-byte writes | 32 | 8 neighbours | (1) |
| gfx950, 16-byte reads | 64 | 0-3 12-15 20-27, 4-11 16-19 28-31 | (2) |
| gfx950, 8-byte reads | 64 | 0-31 | (2) |
| gfx950, writes | 32 | neighbours | (2) |
| 12-byte reads | | as gfx942's of 16 bytes | assumed |
| all else, transposing reads and direct copies too | | neighbours, as many as fill all banks once | assumed |

(1) AMD, Composable Kernel documentation, "Understanding AMD GPU LDS and Bank Conflicts". (2) Measured with hardware
counters by HipKittens (arXiv 2511.08083), "phases". (3) Measured by pyhip. AMD documents 160 KiB of LDS on gfx950,
not its banks; so layouts for it should do with 32 banks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fly.errors import EmulatorError

if TYPE_CHECKING:
    from fly.emulator.decode import Instruction

BANK_BYTES = 4


def _halves(*phases: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Phases of lanes 0-31, and the same of lanes 32-63."""
    return (*phases, *(tuple(lane + 32 for lane in phase) for phase in phases))


def _lanes(*ranges: tuple[int, int]) -> tuple[int, ...]:
    return tuple(lane for first, last in ranges for lane in range(first, last + 1))


_READS_32 = _halves(
    _lanes((0, 3), (20, 23)), _lanes((4, 7), (16, 19)), _lanes((8, 11), (28, 31)), _lanes((12, 15), (24, 27))
)
_READS_64 = _halves(_lanes((0, 3), (12, 15), (20, 27)), _lanes((4, 11), (16, 19), (28, 31)))


@dataclass(frozen=True)
class BankModel:
    """Banks of 4 bytes; `reads` has the phases of reads of so many bytes a lane, where they are not neighbours."""

    name: str
    read_banks: int
    write_banks: int
    reads: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict, hash=False)

    def banks(self, write: bool) -> int:
        """How many serve an access."""
        return self.write_banks if write else self.read_banks

    def phases(self, size: int, write: bool) -> tuple[tuple[int, ...], ...]:
        """The lanes that are served together, for accesses of `size` bytes a lane."""
        if not write and size in self.reads:
            return self.reads[size]
        width = min(64, 1 << (self.banks(write) * BANK_BYTES // max(size, BANK_BYTES)).bit_length() - 1)
        return tuple(tuple(range(first, first + width)) for first in range(0, 64, width))

    def cycles(
        self, addresses: np.ndarray, size: int, *, write: bool = False, active: np.ndarray | None = None
    ) -> np.ndarray:
        """Cycles of each phase of some waves' access, int64 (waves, phases); 0 for phases without active lanes.

        Args:
            addresses: LDS byte addresses (waves, 64). size: bytes a lane. active: lanes, bool (waves, 64).
        """
        first, banks = np.asarray(addresses, np.int64)[:, :, None], self.banks(write)
        words = first // BANK_BYTES + np.arange((size + BANK_BYTES - 2) // BANK_BYTES + 1)
        wanted = words * BANK_BYTES < first + size
        if active is not None:
            wanted &= np.asarray(active, bool)[:, :, None]
        phases = np.array(self.phases(size, write))
        # a row for each wave and phase: the words that it wants, each of which counts once
        rows = np.where(wanted, words, -1)[:, phases].reshape(len(first) * len(phases), -1)
        rows.sort(axis=1)
        fresh = rows >= 0
        fresh[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        row, column = np.nonzero(fresh)
        busy = np.bincount(row * banks + rows[row, column] % banks, minlength=len(rows) * banks)
        most: np.ndarray = busy.reshape(len(first), len(phases), banks).max(axis=2)
        return most

    def extra_cycles(
        self, addresses: Sequence[int], size: int, *, write: bool = False, active: Sequence[bool] | None = None
    ) -> int:
        """Cycles beyond one a phase that 64 lanes' accesses at these byte addresses take."""
        lanes = None if active is None else np.array([active])
        cycles = self.cycles(np.array([addresses]), size, write=write, active=lanes)
        return int(np.maximum(cycles - 1, 0).sum())


GFX942 = BankModel("gfx942", 32, 32, {12: _READS_32, 16: _READS_32})
GFX950 = BankModel("gfx950", 64, 32, {12: _READS_32, 16: _READS_64})
MODELS = {model.name: model for model in (GFX942, GFX950)}


@dataclass
class BankCounter:
    """What the LDS instructions of launches cost beyond what they must; see `EmulatedDevice.lds_observer`.

    `accesses` and `extra`: wave accesses and extra cycles by opcode.

    Raises:
        EmulatorError: no model has that name.
    """

    model: str
    accesses: Counter[str] = field(default_factory=Counter)
    extra: Counter[str] = field(default_factory=Counter)
    _seen: dict[tuple[bytes, int, bool, bytes | None], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise EmulatorError(f"no model of banks is named {self.model!r}; expected one of {', '.join(MODELS)}")

    def __call__(
        self, inst: Instruction, address: np.ndarray, size: int, mask: np.ndarray | None, write: bool
    ) -> None:
        """Count an instruction of several waves: LDS byte addresses uint32 (waves, 64)."""
        model = MODELS[self.model]
        for wave, lanes in enumerate(np.broadcast_to(address, (len(address), 64))):
            active = None if mask is None else np.broadcast_to(mask, address.shape)[wave]
            key = (lanes.tobytes(), size, write, None if active is None else active.tobytes())
            if key not in self._seen:
                self._seen[key] = model.extra_cycles(lanes.tolist(), size, write=write, active=active)
            self.accesses[inst.name] += 1
            self.extra[inst.name] += self._seen[key]
