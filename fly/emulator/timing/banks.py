"""Bank conflicts of LDS instructions: the cycles that an access takes in the banks, from its addresses.

An access goes through the banks in phases of some lanes. In a phase each bank delivers one dword a cycle, to any
number of lanes. Which lanes form a phase was measured: on gfx942 by pyhip, on gfx950 by HipKittens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fly.emulator.timing.figures import Parameters


def _runs(count: int) -> np.ndarray:
    """Phases of `count` neighbouring lanes."""
    return np.arange(64).reshape(-1, count)


def _crossed(*starts: int) -> list[int]:
    return [lane for start in starts for lane in range(start, start + 4)]


_EIGHT = [_crossed(a, b) for a, b in ((0, 20), (4, 16), (8, 28), (12, 24))]
_SIXTEEN = [_crossed(0, 12, 20, 24), _crossed(4, 8, 16, 28)]


def _twice(half: list[list[int]]) -> np.ndarray:
    """The same phases for lanes 32 to 63."""
    return np.array(half + [[lane + 32 for lane in phase] for phase in half])


# bytes a lane -> lanes of each phase
_READS = {
    "gfx942": {4: _runs(32), 8: _runs(16), 12: _twice(_EIGHT), 16: _twice(_EIGHT)},
    "gfx950": {4: _runs(64), 8: _runs(32), 12: _twice(_EIGHT), 16: _twice(_SIXTEEN)},
}
_WRITES = {4: _runs(32), 8: _runs(16), 12: _runs(8), 16: _runs(8)}


@dataclass(frozen=True)
class Banks:
    """The banks of one chip."""

    parameters: Parameters

    def cycles(self, address: np.ndarray, size: int, mask: np.ndarray | None, write: bool) -> np.ndarray:
        """Cycles in the banks, int64 (W,), of one access.

        Args:
            address: byte addresses uint32 (W, 64). size: bytes a lane. mask: active lanes bool (W, 64), or None.
        """
        words = max(1, size // 4)
        arch = self.parameters.arch
        phases = (_WRITES if write else _READS[arch])[min(words, 4) * 4]
        banks = self.parameters.write_banks if write else self.parameters.read_banks
        dwords = (address >> np.uint32(2)).astype(np.int64)[:, :, None] + np.arange(words)
        if mask is not None:
            dwords = np.where(mask[:, :, None], dwords, -1)
        waves = len(address)
        # (wave, phase) rows of the dwords touched; each counts once
        rows = np.sort(dwords[:, phases].reshape(waves * len(phases), -1), axis=1)
        fresh = rows >= 0
        fresh[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        row, column = np.nonzero(fresh)
        slot = row * banks + rows[row, column] % banks
        busy = np.bincount(slot, minlength=len(rows) * banks).reshape(waves, len(phases), banks)
        return busy.max(axis=2).sum(axis=1)
