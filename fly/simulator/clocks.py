"""Who knows of what: vector clocks, and for each word of memory who wrote it last and who has read it since.

Flanagan and Freund, "FastTrack" (2009). A component of a clock belongs to somebody who does things to memory: the
host, a warp, a warpgroup's products, its bulk stores, or the copies that complete on one mbarrier. An access is right
where the clock of who does it has reached that of the accesses it must come after, in whatever order they happened to
run here. So a missing wait is found in every schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

HOST = 0  # the component of what was there before the launch
WORD = 2  # bytes of shared memory whose accesses are told apart; of global memory it is each
NOBODY, NEVER = -1, np.iinfo(np.int32).max
ASYNC = 0  # layer of bulk copies and of the host; generic writes have one for each role

Words = np.ndarray | slice


@dataclass(frozen=True)
class Party:
    """A warp's share of an access: which of its addresses, what the warp knows, who it is and its own time."""

    lanes: np.ndarray | slice
    clocks: np.ndarray
    component: int
    now: int


@dataclass(frozen=True)
class Parties:
    """Accesses of several warps: the warp of each, and of each warp what it knows, who it is and its own time."""

    rows: np.ndarray
    clocks: np.ndarray  # (warps, components)
    components: np.ndarray
    now: np.ndarray

    def of(self, lanes: np.ndarray | slice) -> Parties:
        """Of some of the accesses."""
        return Parties(self.rows[lanes], self.clocks, self.components, self.now)

    def __iter__(self) -> Iterator[Party]:
        for row in np.unique(self.rows):
            lanes = np.flatnonzero(self.rows == row)
            yield Party(lanes, self.clocks[row], int(self.components[row]), int(self.now[row]))


@dataclass(frozen=True)
class Conflict:
    """An access that another is not ordered before: `by` is its component, `word` the first word concerned."""

    word: int
    by: int


class Shadow:
    """For each word of a memory: last writers, by layers, and readers (components from `first_reader` on).

    Several roles may write the same value without an order between them; such a write is kept beside the others, in
    its role's layer, and who reads must know of one of them. `written`: the host wrote all of it.
    """

    def __init__(self, words: int, layers: int, readers: int = 0, first_reader: int = 0, written: bool = False):
        self.writer = np.full((layers, words), NOBODY, np.int32)
        self.clock = np.full((layers, words), NEVER, np.int32)
        self.reads = np.zeros((readers, words), np.int32)
        self.newest = np.zeros(readers, np.int32)  # of each reader's reads of any word
        self.first_reader = first_reader
        if written:
            self.writer[ASYNC], self.clock[ASYNC] = HOST, 0

    def known(self, words: np.ndarray, rows: np.ndarray, clocks: np.ndarray) -> bool:
        """Whether somebody wrote every word of whom its row of `clocks` knows."""
        writer, clock = self.writer.take(words, axis=1), self.clock.take(words, axis=1)
        return bool((clocks[rows, writer] >= clock).any(axis=0).all())

    def ordered(self, words: np.ndarray, rows: np.ndarray, clocks: np.ndarray, part: bool = False) -> bool:
        """Whether each word's row of `clocks` knows of all writers and readers; `part`: see `unordered`."""
        layers = slice(1 if part else None)
        writer, clock = self.writer[layers].take(words, axis=1), self.clock[layers].take(words, axis=1)
        if ((clocks[rows, writer] < clock) & (writer != NOBODY)).any():
            return False
        known = clocks[:, self.first_reader : self.first_reader + len(self.reads)]
        behind = np.flatnonzero((self.newest > known).any(axis=0))  # readers that some warp may have to wait for
        if not len(behind):
            return True
        return bool((self.reads[behind[:, None], words] <= known[:, behind][rows].T).all())

    def _known_at_once(self, layer: int, words: Words, clocks: np.ndarray) -> bool | None:
        """Whether `clocks` knows of all writes of words that have one writer, as most accesses do; None of none, and
        False also where it would take a look at each word.
        """
        writer = self.writer[layer, words]
        first, last = int(writer.min(initial=NEVER)), int(writer.max(initial=NOBODY))
        if first != last:
            return False
        return None if first == NOBODY else bool(clocks[first] >= self.clock[layer, words].max())

    def unwritten(self, words: Words) -> int | None:
        """The first word of an access that nobody has written."""
        if any(writer[words].min(initial=NEVER) != NOBODY for writer in self.writer):
            return None
        return _first((self.writer[:, words] == NOBODY).all(axis=0), words)

    def unseen(self, words: Words, clocks: np.ndarray, generic: np.ndarray | None = None) -> Conflict | None:
        """The first word whose last writers are all unknown to `clocks`.

        `generic`: clocks that count for what roles wrote, where they are others than for bulk copies.
        """
        if self._known_at_once(ASYNC, words, clocks):
            return None
        seen = self._knows(ASYNC, words, clocks)
        if seen.all():
            return None
        for layer in range(1, len(self.writer)):
            seen = seen | self._knows(layer, words, clocks if generic is None else generic)
        return self._conflict(~seen & (self.writer[:, words] != NOBODY).any(axis=0), words)

    def _knows(self, layer: int, words: Words, clocks: np.ndarray) -> np.ndarray:
        writer = self.writer[layer, words]
        return clocks[writer] >= self.clock[layer, words]

    def stored_unseen(self, words: Words, generic: np.ndarray) -> Conflict | None:
        """The first word with a store of a role that `generic` does not know of."""
        for layer in range(1, len(self.writer)):
            if self._known_at_once(layer, words, generic) is not False:
                continue
            writer = self.writer[layer, words]
            late = (generic[writer] < self.clock[layer, words]) & (writer != NOBODY)
            if late.any():
                return self._conflict(late, words)
        return None

    def unordered(self, words: Words, clocks: np.ndarray, part: bool = False) -> Conflict | None:
        """The first word with a writer or a reader that `clocks` does not know of.

        `part`: the access is of a part of a word, and warps may write other parts.
        """
        layers = range(1 if part else len(self.writer))
        doubtful = [layer for layer in layers if self._known_at_once(layer, words, clocks) is False]
        if doubtful:
            writer, clock = _at(self.writer[doubtful], words), _at(self.clock[doubtful], words)
            late = ((clocks[writer] < clock) & (writer != NOBODY)).any(axis=0)
            if late.any():
                return self._conflict(late, words)
        known = clocks[self.first_reader : self.first_reader + len(self.reads)]
        for row in np.flatnonzero(self.newest > known).tolist():
            late = self.reads[row, words] > known[row]
            if late.any():
                return Conflict(_word(words, int(late.argmax())), self.first_reader + row)
        return None

    def _conflict(self, bad: np.ndarray, words: Words) -> Conflict | None:
        word = _first(bad, words)
        return None if word is None else Conflict(word, int(self.writer[:, word].max()))

    def wrote(self, words: Words, layer: int, by: int | np.ndarray, clock: int | np.ndarray) -> None:
        """Words have a new value."""
        self.writer[:, words], self.clock[:, words] = NOBODY, NEVER
        self.wrote_same(words, layer, by, clock)

    def wrote_same(self, words: Words, layer: int, by: int | np.ndarray, clock: int | np.ndarray) -> None:
        """Words were written with the value that they had."""
        self.writer[layer, words], self.clock[layer, words] = by, clock

    def read(self, words: Words, by: int | np.ndarray, clock: int | np.ndarray) -> None:
        """Words were read; a reader's clock only grows."""
        reader = by - self.first_reader
        self.reads[reader, words] = clock
        self.newest[reader] = clock


class Additions:
    """For each word of 4 bytes that atomics have added to, when each component last did.

    Additions do not race with each other. Who reads or stores plainly must know of all of them.
    """

    def __init__(self, words: int):
        self._row = np.full(words, NOBODY, np.int32)
        self._times = np.zeros((0, 0), np.int32)
        self._used = 0

    def late(self, words: np.ndarray, clocks: np.ndarray) -> int | None:
        """The first word with an addition that `clocks` does not know of."""
        found = words[self._row[words] != NOBODY]
        return _first((self._times[self._row[found]] > clocks).any(axis=1), found) if len(found) else None

    def add(self, words: np.ndarray, component: int, now: int, components: int) -> None:
        """By a component at its time, of so many."""
        fresh = np.unique(words[self._row[words] == NOBODY])
        self._row[fresh] = np.arange(self._used, self._used + len(fresh))
        self._used += len(fresh)
        if self._used > len(self._times):
            grown = np.zeros((2 * self._used, components), np.int32)
            grown[: len(self._times), : self._times.shape[1]] = self._times
            self._times = grown
        self._times[self._row[words], component] = now

    def forget(self, words: np.ndarray) -> None:
        """Words have been stored by who knew of all additions to them."""
        self._row[words] = NOBODY


def _at(table: np.ndarray, words: Words) -> np.ndarray:
    """Columns of a table."""
    return table[:, words] if isinstance(words, slice) else table.take(words, axis=1)


def words_of(offsets: np.ndarray, size: int, word: int) -> np.ndarray:
    """The words of `word` bytes of accesses of `size` bytes, aligned to that or to a word, one after the other."""
    return (offsets[:, None] // word + np.arange(max(1, size // word))).ravel()


def _word(words: Words, place: int) -> int:
    return words.start + place if isinstance(words, slice) else int(words[place])


def _first(bad: np.ndarray, words: Words) -> int | None:
    return _word(words, int(np.flatnonzero(bad)[0])) if bad.any() else None
