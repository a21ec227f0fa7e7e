"""LDS shadow: who wrote and read each dword, in which barrier phase, and whether the write has completed.

A wave's phase is the number of barriers that it has passed. Two accesses of different waves, one of them a write,
are ordered when their phases differ and the earlier one was waited for before its barrier; otherwise they race.
Tags hold `phase << 5 | wave`; wave 31 stands for several readers, wave 30 for a write smaller than a dword:
neighbouring bytes of different waves do not race, so such writes are followed for initialisation only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fly.emulator.decode import Instruction
from fly.emulator.state import Group

if TYPE_CHECKING:
    from fly.emulator.checks import Access, Checker

_NEVER = np.int32(-1)
_OPEN = 1 << 25  # phase of an access that is still outstanding
_MANY, _PART = 31, 30


class LdsShadow:
    """Shadow of one batch's LDS."""

    def __init__(self, checker: Checker):
        self.checker = checker
        self.written = self.read = np.zeros(0, np.int32)

    def start(self, workgroups: int) -> None:
        """Forget everything: LDS contents are undefined when a workgroup starts."""
        size = workgroups * self.checker.machine.lds_stride // 4 + 8
        self.written, self.read = (np.full(size, _NEVER, np.int32) for _ in range(2))

    @staticmethod
    def _tags(g: Group, phase: np.ndarray) -> np.ndarray:
        tags: np.ndarray = (phase << 5 | g.wave).astype(np.int32)[:, None]
        return tags

    @staticmethod
    def _dwords(access: Access) -> tuple[np.ndarray, np.ndarray]:
        """(slot, whether it is accessed) of each dword of an access, wave and lane."""
        slot = (access.index + np.arange(0, access.size, 4)[:, None, None]) >> 2
        return slot, np.broadcast_to(access.mask, slot.shape)

    def access(self, g: Group, inst: Instruction, access: Access, dma: bool) -> None:
        """Check an access against the shadow and enter it."""
        mine = self._tags(g, g.phase)
        slot, mask = self._dwords(access)
        if access.write:
            self._write(g, inst, slot, mask, mine, dma, access.size < 4)
        else:
            self._read(g, inst, slot, mask, mine)

    def _flag(self, g: Group, inst: Instruction, kind: str, bad: np.ndarray, tags: np.ndarray, what: str) -> None:
        if not bad.any():
            return
        first = int(tags[bad][0])
        other = {_MANY: "several waves", _PART: "another wave"}.get(first & 31, f"wave {first & 31}")
        self.checker.report(g, inst, kind, np.any(bad, axis=0), f"{what} by {other}")

    def _read(self, g: Group, inst: Instruction, slot: np.ndarray, mask: np.ndarray, mine: np.ndarray) -> None:
        tags = self.written[slot]
        if (tags == _NEVER).any():
            never = mask & (tags == _NEVER)
            if never.any():
                self.checker.report(
                    g,
                    inst,
                    "uninitialised-lds",
                    np.any(never, axis=0),
                    "reads LDS that nothing has written in this workgroup",
                )
        self._conflicts(g, inst, tags, mask, mine, "written", reading=True)
        old = self.read[slot]
        shared = (old >> 5 == mine >> 5) & (old != mine)
        new = np.where(shared, mine | _MANY, mine)
        self.read[slot[mask]] = np.broadcast_to(new, mask.shape)[mask]
        # waves of one instruction that read the same dword
        again = self.read[slot]
        different = mask & (again != mine) & (again & 31 != _MANY)
        if different.any():
            self.read[slot[different]] = np.broadcast_to(mine | _MANY, mask.shape)[different]

    def _conflicts(
        self,
        g: Group,
        inst: Instruction,
        tags: np.ndarray,
        mask: np.ndarray,
        mine: np.ndarray,
        what: str,
        reading: bool,
    ) -> None:
        same_phase = (tags >> 5 == mine >> 5) & (tags != mine) & (tags != _NEVER) & (tags & 31 != _PART)
        outstanding = tags >> 5 == _OPEN
        if not (same_phase.any() or outstanding.any()):
            return
        verb = "reads" if reading else "overwrites"
        self._flag(g, inst, "lds-race", mask & same_phase, tags, f"{verb} LDS {what} in the same barrier phase")
        self._flag(
            g,
            inst,
            "missing-wait",
            mask & outstanding,
            tags,
            f"{verb} LDS {what} by an operation that nothing waited for",
        )

    def _write(
        self,
        g: Group,
        inst: Instruction,
        slot: np.ndarray,
        mask: np.ndarray,
        mine: np.ndarray,
        dma: bool,
        partial: bool,
    ) -> None:
        tags = self.written[slot]
        self._conflicts(g, inst, tags, mask, mine, "written", reading=False)
        self._conflicts(g, inst, self.read[slot], mask, mine, "read", reading=False)
        tag = mine
        if partial:
            tag = mine & ~31 | _PART
        elif dma:
            tag = self._tags(g, np.full(g.waves, _OPEN))
        self.written[slot[mask]] = np.broadcast_to(tag, mask.shape)[mask]
        if not partial:
            clash = mask & (self.written[slot] != tag)
            self._flag(g, inst, "lds-race", clash, self.written[slot], "writes LDS that is written at the same time")

    def keep_open(self, g: Group, access: Access) -> None:
        """A barrier is reached with this access outstanding: it stays unordered with the other waves."""
        if access.size < 4:
            return
        shadow = self.written if access.write else self.read
        mine, opened = self._tags(g, g.phase), self._tags(g, np.full(g.waves, _OPEN))
        self._retag(shadow, access, mine, opened)

    def close(self, g: Group, access: Access) -> None:
        """A wait has retired this access."""
        if access.size < 4:
            return
        shadow = self.written if access.write else self.read
        mine, opened = self._tags(g, g.phase), self._tags(g, np.full(g.waves, _OPEN))
        self._retag(shadow, access, opened, mine)

    @staticmethod
    def _retag(shadow: np.ndarray, access: Access, old: np.ndarray, new: np.ndarray) -> None:
        if not shadow.size:
            return
        slot, mask = LdsShadow._dwords(access)
        hit = mask & (shadow[slot] == old)
        if hit.any():
            shadow[slot[hit]] = np.broadcast_to(new, hit.shape)[hit]
