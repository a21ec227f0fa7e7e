"""Warps that go through a kernel together: which lanes are where, what the warps know, and what they do to memory.

Lanes that take different branches are told apart by masks: None stands for all lanes. Methods that operations are
have the names that `translate` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fly.simulator import lanes as lane_operations
from fly.simulator.arithmetic import below, is_array
from fly.simulator.clocks import Parties, Party
from fly.simulator.program import ROLE_WARPS, Node, Type
from fly.simulator.report import Finding, Together
from fly.simulator.shared import CHUNK, SharedAccess

if TYPE_CHECKING:
    from types import FrameType

    from fly.simulator.block import Block

Mask = np.ndarray[Any, np.dtype[np.bool_]] | None
Wait = tuple[Callable[[], bool], Callable[[], str]]  # whether it is over, and what it is for
FREE: Wait = (lambda: True, lambda: "nothing")


class Steps(Protocol):
    """A kernel's generator that has not ended."""

    @property
    def gi_frame(self) -> FrameType: ...

    def __next__(self) -> Wait | None: ...

    def close(self) -> None: ...


class Warps:
    """Four warps of a block from warp `4 * number` on, or as many as it has; or `alone`, the one with that number."""

    def __init__(self, block: Block, number: int, alone: int | None = None):
        self.block, self.number, self.alone = block, number, alone is not None
        program = block.program
        self.arch, self.wave = program.target.arch, program.target.wave_size
        self.scalar_bases = program.target.backend == "rocdl"  # bounded accesses go through buffer descriptors
        self.first_warp, most = (number * ROLE_WARPS, ROLE_WARPS) if alone is None else (alone, 1)
        first = self.first_warp * self.wave
        self.lanes = min(most * self.wave, program.threads - first)
        self.warps = -(-self.lanes // self.wave)
        self.clocks = block.clocks[self.first_warp : self.first_warp + self.warps]
        thread = np.arange(first, first + self.lanes, dtype=np.int32)
        x, y, _ = program.block
        self.thread_id = (thread % x, thread // x % y, thread // (x * y))
        self.warp_of = np.arange(self.lanes) // self.wave
        self.lanes_of = [self.warp_of == warp for warp in range(self.warps)]
        self.starts = np.arange(0, self.lanes, self.wave)
        numbers = range(self.first_warp, self.first_warp + self.warps)
        self.own = np.array([block.components.warp(number) for number in numbers])
        self.all_lanes = np.arange(self.lanes)
        self.copies = np.array([block.components.copies(number) for number in numbers])
        self.ended, self.waits = False, FREE

    # being scheduled

    def start(self, steps: Steps) -> None:
        self.steps = steps

    def close(self) -> None:
        """Let go of the block, and of all that the kernel's values are."""
        self.steps.close()
        del self.steps, self.clocks

    def ready(self) -> bool:
        return not self.ended and self.waits[0]()

    def advance(self) -> None:
        """Go on until there is something to wait for."""
        try:
            self.waits = next(self.steps) or FREE
        except StopIteration:
            self.ended = True

    def waits_for(self) -> str:
        """For messages: who it is, where, and what for."""
        who = f"warp {self.first_warp}" if self.warps == 1 else f"warpgroup {self.number}"
        return f"block {self.block.index} {who} at {self.place}: waits for {self.waits[1]()}"

    @property
    def apart(self) -> bool:
        """Whether some of its warps are elsewhere in the kernel than those that go on."""
        m = self.steps.gi_frame.f_locals["m"]
        return len(self.active_warps(m)) < self.warps

    @property
    def line(self) -> int:
        """The line of the translated kernel that it is at."""
        return self.steps.gi_frame.f_lineno

    @property
    def place(self) -> str:
        """The author's file and line that it is at."""
        return self.block.program.translated.location(self.line)

    # masks

    def split(self, m: Mask, condition: Any) -> tuple[Any, Any]:
        """The lanes that take a branch, and those that do not; False where there are none."""
        if not is_array(condition):
            return (m, False) if condition else (False, m)
        return self.active(m, condition), self.active(m, ~condition)

    def active(self, m: Mask, condition: Any) -> Any:
        """The lanes of `m` in which a condition holds: `m` itself for all of them, False for none."""
        if not is_array(condition):
            return m if condition else False
        held = condition if m is None else condition & m
        if not held.any():
            return False
        everywhere = held.all() if m is None else (held == m).all()
        return m if everywhere else held

    def indices(self, m: Mask) -> np.ndarray:
        return self.all_lanes if m is None else np.flatnonzero(m)

    def each(self, value: Any) -> np.ndarray:
        """A scalar of every lane."""
        return value if is_array(value) else np.full(self.lanes, value)

    def active_warps(self, m: Mask) -> list[int]:
        """Warps, counted in the role, with a lane in the mask."""
        if m is None:
            return list(range(self.warps))
        warps: list[int] = np.flatnonzero(np.logical_or.reduceat(m, self.starts)).tolist()
        return warps

    def inside_warp(self, m: Mask, warp: int) -> np.ndarray:
        """The lanes of a mask that are in a warp."""
        lanes: np.ndarray = self.lanes_of[warp]
        return lanes if m is None else m & lanes

    def whole_warps(self, m: Mask, what: str) -> list[int]:
        """The warps of a mask.

        Raises:
            Finding: some lanes of a warp are elsewhere.
        """
        warps = self.active_warps(m)
        if m is not None:
            for warp in warps:
                if not m[warp * self.wave : (warp + 1) * self.wave].all():
                    raise Finding("divergence", f"{what} in a part of a warp", warp)
        return warps

    def whole(self, m: Mask, what: str) -> None:
        """Raises a Finding where it is not a whole warpgroup, or `Together`."""
        if self.alone:
            raise Together
        if m is not None or self.warps < ROLE_WARPS:
            raise Finding("divergence", f"{what} in a part of a warpgroup")

    def uniform(self, m: Mask, value: Any, what: str) -> int:
        """A value that all active lanes have.

        Raises:
            Finding: they have several.
        """
        if not is_array(value):
            return int(value)
        values = value if m is None else value[m]
        if (values != values[0]).any():
            raise Finding("divergence", f"{what} differs between lanes")
        return int(values[0])

    def warp_uniform(self, m: Mask, value: Any, what: str) -> None:
        """Raises a Finding where active lanes of a warp have several values."""
        if is_array(value):
            for warp in self.active_warps(m):
                self.uniform(self.inside_warp(m, warp), value, what)

    # what warps know

    def party(self, warp: int, lanes: Any) -> Party:
        own = self.own[warp]
        return Party(lanes, self.clocks[warp, 0], own, int(self.clocks[warp, 0, own]))

    def parties(self, indices: np.ndarray) -> Parties:
        """Of accesses of these lanes."""
        now = self.clocks[np.arange(self.warps), 0, self.own]
        return Parties(self.warp_of[indices], self.clocks[:, 0], self.own, now)

    def released(self, warps: list[int]) -> np.ndarray:
        """What warps know together, and their time goes on: what they do from here on is not part of it."""
        known: np.ndarray = self.clocks[warps].max(axis=0)
        for warp in warps:
            self.clocks[warp, 0, self.own[warp]] += 1
        return known

    def learn(self, warps: list[int], clocks: np.ndarray) -> None:
        for warp in warps:
            np.maximum(self.clocks[warp], clocks, out=self.clocks[warp])

    # places and lanes

    def id(self, name: str) -> Any:
        kind, axis, *_ = name.split(".")
        if kind == "thread_id":
            return self.thread_id["xyz".index(axis)]
        if kind == "lane_id":
            return self.thread_id[0] % self.wave
        sizes = {"block_id": self.block.index, "grid_dim": self.block.grid}[kind]
        return np.int32(sizes["xyz".index(axis)])

    def elect(self, node: Node, m: Mask) -> np.ndarray:
        chosen = np.zeros(self.lanes, np.int32)
        indices = self.indices(m)
        _, first = np.unique(self.warp_of[indices], return_index=True)
        chosen[indices[first]] = 1
        return chosen

    def shuffle(self, node: Node, m: Mask, value: Any, lane: Any, *, mode: str) -> Any:
        self.whole_warps(m, "a shuffle")
        return lane_operations.shuffle(value, lane, mode, self.wave)

    def pair(self, node: Node, m: Mask, value: Any, *, mask: int) -> tuple[Any, Any]:
        self.whole_warps(m, "a shuffle")
        return lane_operations.pair(value, mask)

    def swap(self, node: Node, m: Mask, first: Any, second: Any, *, mask: int) -> tuple[Any, Any]:
        self.whole_warps(m, "a swap of lanes")
        return lane_operations.swap(self.each(first), self.each(second), mask)

    def any_lane(self, node: Node, m: Mask, condition: Any) -> Any:
        self.whole_warps(m, "a vote")
        return lane_operations.any_lane(condition, m, self.wave)

    def sync_warp(self, node: Node, m: Mask) -> None:
        self.whole_warps(m, "bar.warp.sync")

    def prmt(self, node: Node, m: Mask, low: Any, high: Any, selector: Any) -> Any:
        return lane_operations.permute_bytes(low, high, selector)

    def mma(self, node: Node, m: Mask, a: Any, b: Any, c: Any, *, atom: str) -> np.ndarray:
        self.whole_warps(m, "mma")
        return lane_operations.WarpProduct.of(self.arch, atom)(a, b, c, self.lanes)

    # memory

    def observe(self, kind: str, m: Mask, address: Any, size: int) -> None:
        """Tell the launch of accesses to shared memory, if it wants to know."""
        if self.block.shared_accesses is None:
            return
        places: list[int | None] = [None] * self.lanes
        for lane in self.indices(m):
            places[lane] = int(address[lane] if is_array(address) else address)
        for warp in self.active_warps(m):
            lanes = slice(warp * self.wave, (warp + 1) * self.wave)
            self.block.shared_accesses.append(SharedAccess(kind, size, tuple(places[lanes])))

    def alloc_shared(self, node: Node, m: Mask, *, name: str, bytes: int, align: int) -> np.int64:
        return np.int64(self.block.shared.allocate(node.place, name, bytes, align))

    def read(
        self, shared: bool, m: Mask, address: Any, size: int, align: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(bytes at each address, the lanes that they are for; None: all have the same)."""
        memory = self.block.shared if shared else self.block.memory
        indices = self.indices(m)
        if not is_array(address):
            _, first = np.unique(self.warp_of[indices], return_index=True)  # one lane of each warp
            places = np.full(len(first), address, np.int64)
            return memory.read(places, size, align, self.parties(indices[first]))[:1], None
        return memory.read(address[indices], size, align, self.parties(indices)), indices

    def spread(self, data: np.ndarray, indices: np.ndarray | None, type_: Type) -> Any:
        """What `read` gave as a value; zeros in other lanes."""
        values = np.ascontiguousarray(data).view(type_.dtype)
        if indices is None:
            return values if type_.length else values[0, 0]
        if len(indices) < self.lanes:
            whole = np.zeros((self.lanes, values.shape[1]), type_.dtype)
            whole[indices] = values
            values = whole
        return values if type_.length else values[:, 0]

    def load(self, node: Node, m: Mask, address: Any, *, alignment: int) -> Any:
        type_, shared = node.types[0], node.operand_types[0].shared
        if shared:
            self.observe("load", m, address, type_.bytes)
        data, indices = self.read(shared, m, address, type_.bytes, alignment)
        return self.spread(data, indices, type_)

    def store(self, node: Node, m: Mask, value: Any, address: Any, *, alignment: int) -> None:
        type_, pointer = node.operand_types
        if pointer.shared:
            self.observe("store", m, address, type_.bytes)
        self.write(pointer.shared, m, bitcast_rows(value), address, alignment)

    def write(self, shared: bool, m: Mask, data: np.ndarray, address: Any, align: int) -> None:
        """Store rows of bytes, one a lane or one for all."""
        if m is None and not is_array(address) and len(data) == 1:
            indices = np.arange(0, self.lanes, self.wave)  # one lane of each warp
        else:
            indices = self.indices(m)
        places = np.broadcast_to(np.asarray(address, np.int64), self.lanes)[indices]
        rows = data[indices] if len(data) > 1 else np.repeat(data, len(indices), axis=0)
        parties = self.parties(indices)
        if shared:
            self.block.shared.write(places, rows, align, parties, 1 + self.number)
        else:
            self.block.memory.write(places, rows, align, parties)

    def load_bounded(self, node: Node, m: Mask, base: Any, offset: Any, bound: Any, *, align: int) -> Any:
        type_ = node.types[0]
        inside = self.inside(m, base, offset, bound, type_.bytes)
        if inside is False:
            zeros = np.zeros((1, type_.length or 1), type_.dtype)
            return zeros if type_.length else zeros[0, 0]
        address = address_of(base, offset)
        data, indices = self.read(node.operand_types[0].shared, inside, address, type_.bytes, align)
        if indices is None and inside is not m:
            indices = self.indices(inside)
            data = np.repeat(data, len(indices), axis=0)
        return self.spread(data, indices, type_)

    def store_bounded(
        self, node: Node, m: Mask, value: Any, base: Any, offset: Any, bound: Any, *, align: int
    ) -> None:
        type_, pointer, *_ = node.operand_types
        inside = self.inside(m, base, offset, bound, type_.bytes)
        if inside is not False:
            self.write(pointer.shared, inside, bitcast_rows(value), address_of(base, offset), align)

    def inside(self, m: Mask, base: Any, offset: Any, bound: Any, size: int) -> Any:
        """The lanes whose offset is below the bound; False for none.

        Raises:
            Finding: an access begins below its bound and ends above it, or lanes of a warp have several bases or
                bounds where a buffer descriptor holds them.
        """
        if self.scalar_bases:
            self.warp_uniform(m, base, "the base of a bounded access")
            self.warp_uniform(m, bound, "the bound of a bounded access")
        held = self.active(m, below(offset, bound))
        if held is not False:
            first, end = (np.broadcast_to(v, self.lanes).astype(np.int64) & 0xFFFFFFFF for v in (offset, bound))
            straddles = first + size > end
            if (straddles if held is None else straddles & held).any():
                raise Finding("out-of-bounds", "a bounded access begins below its bound and ends above it")
        return held

    def atomic_add(self, node: Node, m: Mask, address: Any, value: Any, *, bin_op: int) -> Any:
        """One lane after the other; of integers."""
        before = np.zeros(self.lanes, node.types[0].dtype)
        values = np.broadcast_to(value, self.lanes)
        for lane, place in zip(self.indices(m), np.broadcast_to(address, self.lanes)[self.indices(m)]):
            word = self.word(int(place), before.dtype)
            before[lane] = word[0]
            word[0] += values[lane]
        return before

    def word(self, address: int, dtype: np.dtype[np.generic]) -> np.ndarray:
        """A number in global memory, to be changed in place."""
        span = self.block.memory.span(address, address + dtype.itemsize)
        span.begin_writing()
        start = address - span.start
        return span.bytes[start : start + dtype.itemsize].view(dtype)

    def atomic(self, node: Node, m: Mask, address: Any, operand: Any, *, order: str, operation: str) -> Any:
        """`add`, or `inc`: count up to the operand and then from 0; see `hand_on` for the order."""
        before = np.zeros(self.lanes, np.int32)
        operands, places = (np.broadcast_to(v, self.lanes) for v in (operand, address))
        self.block.memory.changes += 1
        for lane in self.indices(m):
            word, place = self.word(int(places[lane]), np.dtype(np.uint32)), int(places[lane])
            old, given = int(word[0]), int(operands[lane]) & 0xFFFFFFFF
            before[lane] = np.uint32(old).view(np.int32)
            word[0] = (old + given) & 0xFFFFFFFF if operation == "add" else 0 if old >= given else old + 1
            self.hand_on(place, int(self.warp_of[lane]), order)
        return before if m is None or m.sum() > 1 else before[m][0]

    def hand_on(self, place: int, warp: int, order: str) -> None:
        """A release leaves what the warp knows at a counter, an acquire takes what releases have left there."""
        known = self.block.atomics.setdefault(place, np.zeros_like(self.clocks[0]))
        if order in ("release", "acq_rel"):
            np.maximum(known, self.released([warp]), out=known)
        if order in ("acquire", "acq_rel"):
            self.learn([warp], known)

    def accumulate(
        self, node: Node, m: Mask, value: Any, address: Any, *, align: int, order: str = "relaxed"
    ) -> None:
        """Add without an answer, lane after lane."""
        type_ = node.operand_types[0]
        if type_.dtype == np.int32:
            self.atomic(node, m, address, value, order=order, operation="add")
            return
        indices, length = self.indices(m), type_.length or 1
        rows = np.asarray(value).reshape(-1, length)
        rows = np.broadcast_to(rows, (self.lanes, length))[indices]
        places = np.broadcast_to(np.asarray(address, np.int64), self.lanes)[indices]
        self.block.memory.add(places, rows, align, self.parties(indices))

    def accumulate_bounded(
        self, node: Node, m: Mask, value: Any, base: Any, offset: Any, bound: Any, *, align: int
    ) -> None:
        inside = self.inside(m, base, offset, bound, node.operand_types[0].bytes)
        if inside is not False:
            self.accumulate(node, inside, value, address_of(base, offset), align=align)

    def load_matrix(self, node: Node, m: Mask, address: Any, *, atom: str) -> np.ndarray:
        self.whole_warps(m, "a matrix load")
        load, type_ = lane_operations.WarpLoad.of(self.arch, atom), node.types[0]
        size = load.run * type_.dtype.itemsize
        self.observe(load.name, m, address, size)
        data, indices = self.read(True, m, self.each(address), size, size)
        runs = self.spread(data, indices, Type(type_.dtype, load.run))
        return load(runs)

    def ldmatrix_turned(self, node: Node, m: Mask, address: Any) -> tuple[np.ndarray, ...]:
        self.whole_warps(m, "ldmatrix")
        self.observe("ldmatrix", m, address, CHUNK)
        data, indices = self.read(True, m, self.each(address), CHUNK, CHUNK)
        return lane_operations.turned_matrices(self.spread(data, indices, Type(np.dtype(np.uint8), CHUNK)))

    def stmatrix(self, node: Node, m: Mask, address: Any, *words: Any) -> None:
        self.whole_warps(m, "stmatrix")
        self.observe("stmatrix", m, address, CHUNK)
        rows = lane_operations.matrix_rows([np.broadcast_to(w, self.lanes) for w in words])
        self.write(True, m, rows, self.each(address), CHUNK)


def address_of(base: Any, offset: Any) -> Any:
    """A base and an unsigned offset of 32 bits."""
    return base + np.asarray(offset).view(np.uint32)[()].astype(np.int64)


def bitcast_rows(value: Any) -> np.ndarray:
    """A value as rows of bytes, one a lane or one for all."""
    if not is_array(value) or value.ndim == 1:
        value = np.reshape(value, (-1, 1))
    return np.ascontiguousarray(value).view(np.uint8)
