"""A block's shared memory: bytes, the buffers in it, and who wrote and read each word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fly.simulator.clocks import ASYNC, WORD, Conflict, Parties, Shadow, Words, words_of
from fly.simulator.memory import check_alignment, gather, scatter, store_together
from fly.simulator.report import Finding

GAP = 128  # bytes between buffers that belong to none
CHUNK = 16  # bytes that products and bulk copies move at once
_ADDRESSES = 1 << 18  # what a matrix descriptor can name


@dataclass(frozen=True)
class SharedAccess:
    """One access of a warp: a byte address a lane, None of lanes that take no part, and how many bytes each moves.

    `kind`: "load", "store", or the name of a matrix load or store.
    """

    kind: str
    bytes: int
    addresses: tuple[int | None, ...]


@dataclass(frozen=True)
class Buffer:
    """One allocation."""

    name: str
    start: int
    bytes: int

    @property
    def end(self) -> int:
        return self.start + self.bytes


class SharedMemory:
    """`limit`: bytes that a block may have; `sizes`: bytes and alignment of each buffer that the kernel has;
    `readers` components from `first_reader` on; `roles`: layers of writes.

    Buffers lie apart, so that an access beyond one is found, and bytes that were never written are all ones: NaN.
    """

    def __init__(self, limit: int, sizes: Iterable[tuple[int, int]], roles: int, first_reader: int, readers: int):
        self.limit, self.used = limit, 0
        size = min(sum(GAP + align + nbytes for nbytes, align in sizes), _ADDRESSES)
        self.bytes = np.full(-(-size // CHUNK) * CHUNK, 0xFF, np.uint8)
        self.chunks = self.bytes.view(np.complex128)  # 16 bytes each
        self.shadow = Shadow(len(self.bytes) // WORD, 1 + roles, readers, first_reader)
        self.buffers: list[Buffer] = []
        self.places: dict[int, Buffer] = {}
        # a component for a message; the block says who they are
        self.who: Callable[[int], str] = lambda component: f"component {component}"

    def allocate(self, place: int, name: str, nbytes: int, align: int) -> int:
        """The address of the buffer that operation `place` allocates, the same for all roles."""
        if place not in self.places:
            end = self.buffers[-1].end if self.buffers else 0
            start = -(-(end + GAP) // align) * align
            self.used = -(-self.used // align) * align + nbytes
            if self.used > self.limit or start + nbytes > _ADDRESSES:
                raise Finding(
                    "out-of-bounds", f"buffer {name!r} ends at byte {self.used} of {self.limit} of shared memory"
                )
            self.places[place] = Buffer(name, start, nbytes)
            self.buffers.append(self.places[place])
        return self.places[place].start

    def buffer(self, low: int, high: int) -> Buffer:
        """The buffer that holds bytes `low` to `high`.

        Raises:
            Finding: none does.
        """
        for buffer in self.buffers:
            if buffer.start <= low and high <= buffer.end:
                return buffer
        near = min(self.buffers, key=lambda b: max(b.start - low, high - b.end), default=None)
        text = f"{high - low} bytes of shared memory at {low:#x}"
        if near is None:
            raise Finding("out-of-bounds", f"{text}, and there are no buffers")
        raise Finding("out-of-bounds", f"{text}, byte {low - near.start} of {near.name!r}, which has {near.bytes}")

    def same_place(self, address: int, other: SharedMemory) -> int:
        """The address in another block's memory of what is at an address of this one's.

        Raises:
            Finding: no buffer is there, or the other block has not come to it.
        """
        buffer = self.buffer(address, address + 1)
        place = next(place for place, found in self.places.items() if found is buffer)
        if place not in other.places:
            raise Finding("out-of-bounds", f"{buffer.name!r}, which the other block of the cluster does not have yet")
        return other.places[place].start + address - buffer.start

    def named(self, address: int) -> str:
        """An address for a message: the byte of a buffer."""
        for buffer in self.buffers:
            if buffer.start <= address < buffer.end:
                return f"byte {address - buffer.start} of {buffer.name!r}"
        return f"shared memory at {address:#x}"

    # accesses of lanes

    def read(self, addresses: np.ndarray, size: int, align: int, parties: Parties) -> np.ndarray:
        """(lanes, size) bytes at addresses, of which each of `parties` reads its own."""
        self._bounds(addresses, size, align)
        words = words_of(addresses, size, WORD)
        rows = parties.rows.repeat(len(words) // len(addresses))
        if not self.shadow.known(words, rows, parties.clocks):
            for party in parties:
                self.check_read(words_of(addresses[party.lanes], size, WORD), party.clocks)
        self.shadow.read(words, parties.components[rows], parties.now[rows])
        return gather(self.bytes, addresses, size)

    def write(self, addresses: np.ndarray, data: np.ndarray, align: int, parties: Parties, layer: int) -> None:
        """Store (lanes, size) bytes, of which each of `parties` stores its own; `layer`: of its role."""
        size = data.shape[1]
        self._bounds(addresses, size, align)
        if store_together(self.bytes, self.shadow, addresses, data, parties, layer, WORD):
            return
        for party in parties:
            own, values = addresses[party.lanes], data[party.lanes]
            words = words_of(own, size, WORD)
            changed = (gather(self.bytes, own, size) != values).any()
            if changed or self.shadow.unwritten(words) is not None:
                self.check_write(words, party.clocks, part=size < WORD)
                self.shadow.wrote(words, layer, party.component, party.now)
                scatter(self.bytes, own, values)
            else:
                self.shadow.wrote_same(words, layer, party.component, party.now)

    def _bounds(self, addresses: np.ndarray, size: int, align: int) -> None:
        check_alignment(addresses, align)
        low, high = int(addresses.min()), int(addresses.max()) + size
        if not any(b.start <= low and high <= b.end for b in self.buffers):
            for address in addresses.tolist():
                self.buffer(address, address + size)

    # checks that all kinds of accesses share

    def check_read(self, words: Words, clocks: np.ndarray, generic: np.ndarray | None = None) -> None:
        """Raises a Finding where a word was never written, or by somebody of whom `clocks` knows nothing.

        `generic`: what is known to the asynchronous proxy of stores of warps, see `Shadow.unseen`.
        """
        word = self.shadow.unwritten(words)
        if word is not None:
            raise Finding("uninitialised", f"reads {self.named(word * WORD)}, which nothing has written")
        conflict = self.shadow.unseen(words, clocks, generic)
        if conflict is None:
            return
        if generic is not None and self.shadow.unseen(words, clocks) is None:
            self._no_fence(conflict, "reads")
        self._race(conflict, "reads", "written")

    def check_write(self, words: Words, clocks: np.ndarray, part: bool = False) -> None:
        """Raises a Finding where somebody of whom `clocks` knows nothing wrote or read a word."""
        conflict = self.shadow.unordered(words, clocks, part)
        if conflict is not None:
            self._race(conflict, "writes", "in use")

    def _no_fence(self, conflict: Conflict, does: str) -> None:
        place = self.named(conflict.word * WORD)
        raise Finding("proxy-fence", f"{does} {place}, which a warp stored with no fence.proxy.async since")

    def _race(self, conflict: Conflict, does: str, state: str) -> None:
        place = self.named(conflict.word * WORD)
        raise Finding(
            "shared-race", f"{does} {place}, {state} by {self.who(conflict.by)} with nothing that orders the two"
        )

    # copies and products

    def announce(self, words: Words, clocks: np.ndarray, proxy: np.ndarray, by: int, phase: int) -> None:
        """A bulk copy will write words, until `by` has reached `phase`; `proxy` as `generic` of `check_read`."""
        self.check_write(words, clocks)
        conflict = self.shadow.stored_unseen(words, proxy)
        if conflict is not None:
            self._no_fence(conflict, "writes over")
        self.shadow.wrote(words, ASYNC, by, phase)

    def announce_lanes(self, addresses: np.ndarray, size: int, parties: Parties, layer: int) -> None:
        """Copies will write `size` bytes at addresses, of which each of `parties` has its own."""
        self._bounds(addresses, size, size)
        words = words_of(addresses, size, WORD)
        rows = parties.rows.repeat(len(words) // len(addresses))
        if self.shadow.ordered(words, rows, parties.clocks):
            by = parties.components[rows]
            self.shadow.wrote(words, layer, by, parties.now[rows])
            if (self.shadow.writer[layer].take(words) == by).all():
                return  # no two warps copy to one place
        for party in parties:
            words = words_of(addresses[party.lanes], size, WORD)
            self.check_write(words, party.clocks)
            self.shadow.wrote(words, layer, party.component, party.now)


def words_between(low: int, high: int) -> slice:
    """The words of bytes `low` to `high`."""
    return slice(low // WORD, -(-high // WORD))
