"""Global memory: the host's own, seen through the regions that a launch may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fly.simulator.clocks import ASYNC, Additions, Conflict, Parties, Party, Shadow, words_of
from fly.simulator.report import Finding

if TYPE_CHECKING:
    import numpy.typing as npt

# by size
_WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True)
class Region:
    """Memory that a kernel may touch: `nbytes` bytes from `address`; `name` is for reports."""

    address: int
    nbytes: int
    name: str

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class GlobalMemory:
    """Regions as arrays of bytes, those that overlap as one, and who wrote each byte of them."""

    def __init__(self, regions: Sequence[Region]):
        self.regions = [region for region in regions if region.nbytes]
        self.spans = [Span(*ends) for ends in _merged(self.regions)]
        self.starts = np.array([span.start for span in self.spans], np.int64)
        self.changes = 0  # stores and additions so far

    def span(self, low: int, high: int) -> Span:
        """The memory that holds bytes `low` to `high`.

        Raises:
            Finding: they are not all in the regions of the launch.
        """
        place = int(np.searchsorted(self.starts, low, "right")) - 1
        if place < 0 or high > self.spans[place].end:
            raise Finding("out-of-bounds", self._described(low, high))
        return self.spans[place]

    def _span_of(self, addresses: np.ndarray, size: int) -> Span:
        """The memory that holds accesses. Raises a Finding of the first that it does not hold."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        place = int(np.searchsorted(self.starts, low, "right")) - 1
        if place >= 0 and high <= self.spans[place].end:
            return self.spans[place]
        spans = [self.span(address, address + size) for address in addresses.tolist()]
        return spans[0]

    def _described(self, low: int, high: int) -> str:
        """Where an address is, by the region that it is nearest to."""
        text = f"{high - low} bytes of global memory at {low:#x}"
        if not self.regions:
            return f"{text}, and the launch has no memory"
        near = min(self.regions, key=lambda r: max(r.address - low, high - r.end))
        return f"{text}, byte {low - near.address} of {near.name}, which has {near.nbytes}"

    def read(self, addresses: np.ndarray, size: int, align: int, parties: Parties) -> np.ndarray:
        """(lanes, size) bytes at addresses, of which each of `parties` reads its own."""
        check_alignment(addresses, align)
        data = np.empty((len(addresses), size), np.uint8)
        for span, lanes in self._apart(addresses, size):
            offsets = addresses[lanes] - span.start
            data[lanes] = gather(span.bytes, offsets, size)
            if span.written:
                words, rows = words_of(offsets, size, 1), parties.rows[lanes].repeat(size)
                if not span.shadow.known(words, rows, parties.clocks):
                    for party in parties.of(lanes):
                        words = words_of(offsets[party.lanes], size, 1)
                        self._check(span.shadow.unseen(words, party.clocks), span, "reads")
                self._check_added(span, offsets, size, parties.of(lanes), "reads")
        return data

    def write(self, addresses: np.ndarray, data: np.ndarray, align: int, parties: Parties) -> None:
        """Store (lanes, size) bytes, of which each of `parties` stores its own."""
        check_alignment(addresses, align)
        for span, lanes in self._apart(addresses, data.shape[1]):
            offsets, values, who = addresses[lanes] - span.start, data[lanes], parties.of(lanes)
            span.begin_writing()
            self.changes += 1
            self._check_added(span, offsets, data.shape[1], who, "writes")
            if not store_together(span.bytes, span.shadow, offsets, values, who, ASYNC, 1):
                for party in who:
                    self.put(span, offsets[party.lanes], values[party.lanes], party)

    def put(self, span: Span, offsets: np.ndarray, data: np.ndarray, party: Party) -> None:
        """Store runs of bytes, (offsets, bytes). The same bytes again may be stored with nothing that orders that."""
        words = words_of(offsets, data.shape[1], 1)
        self.changes += 1
        if (gather(span.bytes, offsets, data.shape[1]) != data).any():
            self._check(span.shadow.unordered(words, party.clocks), span, "writes")
        span.begin_writing()
        span.shadow.wrote(words, ASYNC, party.component, party.now)
        scatter(span.bytes, offsets, data)

    def add(self, addresses: np.ndarray, values: np.ndarray, align: int, parties: Parties) -> None:
        """Add (lanes, elements) numbers atomically, lane after lane, of which each of `parties` adds its own.

        Raises:
            Finding: a plain store to a place is not ordered with the addition, or an address is wrong.
        """
        check_alignment(addresses, align)
        size = values.shape[1] * values.itemsize
        self.changes += 1
        for span, lanes in self._apart(addresses, size):
            offsets, numbers = addresses[lanes] - span.start, values[lanes]
            span.begin_writing()
            for party in parties.of(lanes):
                own = offsets[party.lanes]
                self._check(span.shadow.unordered(words_of(own, size, 1), party.clocks), span, "adds to")
                span.additions.add(span.units(own, size), party.component, party.now, len(party.clocks))
            for i in range(values.shape[1]):
                elements, places = span.elements(values.dtype, offsets + i * values.itemsize)
                np.add.at(elements, places, numbers[:, i])

    def _check_added(self, span: Span, offsets: np.ndarray, size: int, parties: Parties, does: str) -> None:
        """Raises a Finding where one of `parties` does not know of an addition; what it writes takes their place."""
        if span.added is None:
            return
        for party in parties:
            units = span.units(offsets[party.lanes], size)
            late = span.added.late(units, party.clocks)
            if late is not None:
                place = self._named(span, 4 * late - span.start % 4)
                what = f"{does} {place}, which another warp added to with an atomic"
                raise Finding("global-race", f"{what}, with nothing that orders the two")
            if does == "writes":
                span.added.forget(units)

    def check_fetch(self, span: Span, offsets: np.ndarray, size: int, clocks: np.ndarray, fenced: np.ndarray) -> None:
        """Raises a Finding where a bulk copy reads what it does not know of, or not by its warp's last fence."""
        if not span.written:
            return
        words = words_of(offsets, size, 1)
        self._check(span.shadow.unseen(words, clocks), span, "reads")
        stored = span.shadow.unseen(words, fenced)
        if stored is not None:
            what = f"a bulk copy reads {self._named(span, stored.word)}, which the launch has stored"
            raise Finding("proxy-fence", f"{what}, with no fence.proxy.async.global since that is known")

    def restore(self) -> None:
        """Take back what the launch stored: counters of a launch that fails would mislead the next one."""
        for span in self.spans:
            if span.before is not None:
                span.bytes[:] = span.before

    def _apart(self, addresses: np.ndarray, size: int) -> list[tuple[Span, np.ndarray | slice]]:
        """The memory of each access: (memory, which accesses)."""
        if not len(addresses):
            return []
        places = np.searchsorted(self.starts, addresses, "right") - 1
        if (places == places[0]).all():
            return [(self._span_of(addresses, size), slice(None))]
        found: list[tuple[Span, np.ndarray | slice]] = []
        for place in np.unique(places):
            lanes = np.flatnonzero(places == place)
            found.append((self._span_of(addresses[lanes], size), lanes))
        return found

    def _check(self, conflict: Conflict | None, span: Span, does: str) -> None:
        if conflict is None:
            return
        what = f"{does} {self._named(span, conflict.word)}, which another warp or copy wrote"
        raise Finding("global-race", f"{what} with nothing that orders the two")

    def _named(self, span: Span, offset: int) -> str:
        """A byte for a message."""
        address = span.start + offset
        inside = next((r for r in self.regions if r.address <= address < r.end), None)
        return f"byte {address - inside.address} of {inside.name}" if inside else f"{address:#x}"


class Span:
    """One stretch of memory. Its bytes are only looked at once the kernel has written some."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end
        memory = (ctypes.c_uint8 * (end - start)).from_address(start)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]  # takes any buffer
        self.before: np.ndarray | None = None  # what was there before the first store
        self._shadow: Shadow | None = None
        self.added: Additions | None = None  # None while there are none

    @property
    def additions(self) -> Additions:
        """The atomic additions, of words of 4 bytes from the multiple of 4 at or below `start` on."""
        if self.added is None:
            self.added = Additions((self.end - self.start + 3) // 4 + 1)
        return self.added

    def units(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """The words of 4 bytes that runs of bytes touch."""
        first = offsets + self.start % 4
        return np.unique((first[:, None] + np.arange(size)) // 4)

    def load_word(self, address: int) -> np.int32:
        """An i32."""
        start = address - self.start
        word: np.int32 = self.bytes[start : start + 4].view(np.int32)[0]
        return word

    def elements(self, dtype: np.dtype[np.generic], offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The memory as numbers, and which of them lie at offsets."""
        skipped = -self.start % dtype.itemsize
        whole = (len(self.bytes) - skipped) // dtype.itemsize * dtype.itemsize
        return self.bytes[skipped : skipped + whole].view(dtype), (offsets - skipped) // dtype.itemsize

    @property
    def written(self) -> bool:
        return self.before is not None

    def begin_writing(self) -> None:
        """To be called before a store."""
        if self.before is None:
            self.before = self.bytes.copy()

    @property
    def shadow(self) -> Shadow:
        if self._shadow is None:
            self._shadow = Shadow(self.end - self.start, 1, written=True)
        return self._shadow


def _merged(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Starts and ends of the memory that regions cover; those that only touch stay apart."""
    ends: list[tuple[int, int]] = []
    for region in sorted(regions, key=lambda r: r.address):
        if ends and region.address < ends[-1][1]:
            ends[-1] = ends[-1][0], max(ends[-1][1], region.end)
        else:
            ends.append((region.address, region.end))
    return ends


def store_together(
    memory: np.ndarray, shadow: Shadow, offsets: np.ndarray, data: np.ndarray, parties: Parties, layer: int, word: int
) -> bool:
    """Store what warps store at one time, (lanes, size) bytes, if all of them may; False: nothing is stored.

    `word`: bytes of the words of `shadow`. Most stores are right, and warps are quicker looked at together.
    """
    size = data.shape[1]
    words = words_of(offsets, size, word)
    rows = parties.rows.repeat(len(words) // len(offsets))
    before = gather(memory, offsets, size)
    changed = (before != data).any() or shadow.unwritten(words) is not None
    if changed and not shadow.ordered(words, rows, parties.clocks, part=size < word):
        return False
    scatter(memory, offsets, data)
    if (gather(memory, offsets, size) != data).any():  # two lanes, perhaps of two warps, at one place
        scatter(memory, offsets, before)
        return False
    record = shadow.wrote if changed else shadow.wrote_same
    record(words, layer, parties.components[rows], parties.now[rows])
    return True


def check_alignment(addresses: np.ndarray, align: int) -> None:
    """Raises a Finding for an address that is no multiple of `align`, a power of 2."""
    if int(np.bitwise_or.reduce(addresses)) & (align - 1):
        wrong = addresses[addresses % align != 0]
        raise Finding("misaligned", f"address {int(wrong[0]):#x}; expected a multiple of {align}")


def gather(memory: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """(len(offsets), size) bytes of memory."""
    if size in _WORDS and not int(np.bitwise_or.reduce(offsets)) & (size - 1):
        words = memory[: len(memory) // size * size].view(_WORDS[size])
        return words.take(offsets // size)[:, None].view(np.uint8)
    return memory[offsets[:, None] + np.arange(size)]


def scatter(memory: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> None:
    """Store (len(offsets), size) bytes."""
    size = data.shape[1]
    if size in _WORDS and not int(np.bitwise_or.reduce(offsets)) & (size - 1):
        words = memory[: len(memory) // size * size].view(_WORDS[size])
        words[offsets // size] = np.ascontiguousarray(data).view(_WORDS[size])[:, 0]
    else:
        memory[offsets[:, None] + np.arange(size)] = data
