"""A role: up to four warps that go through the kernel together, and what its operations do.

Lanes that take different branches are told apart by masks: None stands for all lanes. Methods are named by
`translate`; those that may have to wait are generators, which yield what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.simulator import lanes as lane_operations
from fly.simulator.arithmetic import below, is_array
from fly.simulator.barriers import Mbarrier
from fly.simulator.clocks import Party
from fly.simulator.products import InFlight, Located, multiply, registers_as_rows
from fly.simulator.program import Node, Type
from fly.simulator.report import Finding
from fly.simulator.shared import CHUNK, words_between
from fly.simulator.tensor_map import TensorMap

if TYPE_CHECKING:
    from fly.simulator.block import Block

Mask = np.ndarray | None
Wait = tuple[Callable[[], bool], Callable[[], str]]
Waiting = Generator[Wait | None, None, Any]
_WARP, _WARPGROUP = 32, 128
_FREE: Wait = (lambda: True, lambda: "nothing")


class Role:
    """Warps `4 * number` to `4 * number + 3` of a block, as far as it has them."""

    def __init__(self, block: Block, number: int):
        self.block, self.number = block, number
        first = number * _WARPGROUP
        self.lanes = min(_WARPGROUP, block.threads - first)
        self.first_warp, self.warps = first // _WARP, -(-self.lanes // _WARP)
        self.clocks = block.clocks[self.first_warp : self.first_warp + self.warps]
        thread = np.arange(first, first + self.lanes, dtype=np.int32)
        x, y, _ = block.program.block
        self.thread_id = (thread % x, thread // x % y, thread // (x * y))
        self.warp_of = np.arange(self.lanes) // _WARP
        self.own = [block.components.warp(self.first_warp + w) for w in range(self.warps)]
        self.products, self.stores = block.components.products(number), block.components.stores(number)
        self.groups = self.retired = self.store_groups = 0
        self.open_store = False
        self.late: dict[int, Callable[[], None]] = {}  # products whose operands are read at the wait
        self.ended, self.waits = False, _FREE
        self.async_copies: list[Callable[[], None] | None] = []

    # being scheduled

    def start(self, steps: Generator[Wait | None, None, None]) -> None:
        self.steps = steps

    def ready(self) -> bool:
        return not self.ended and self.waits[0]()

    def advance(self) -> None:
        """Go on until there is something to wait for."""
        try:
            self.waits = next(self.steps) or _FREE
        except StopIteration:
            self.ended = True

    def waits_for(self) -> str:
        return f"waits for {self.waits[1]()}"

    @property
    def line(self) -> int:
        """The line of the translated kernel that it is at."""
        return self.steps.gi_frame.f_lineno

    def check_end(self) -> None:
        """Raises a Finding where products or stores were not waited for."""
        if self.retired < self.groups:
            raise Finding("unfinished", f"warpgroup {self.number} ends with products that it has not waited for")

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
        return np.arange(self.lanes) if m is None else np.flatnonzero(m)

    def active_warps(self, m: Mask) -> list[int]:
        """Warps, counted in the role, with a lane in the mask."""
        return list(range(self.warps)) if m is None else np.unique(self.warp_of[m]).tolist()

    def whole_warps(self, m: Mask, what: str) -> list[int]:
        """The warps of a mask.

        Raises:
            Finding: some lanes of a warp are elsewhere.
        """
        warps = self.active_warps(m)
        if m is not None:
            for warp in warps:
                if not m[warp * _WARP : (warp + 1) * _WARP].all():
                    raise Finding("divergence", f"{what} in a part of a warp", warp)
        return warps

    def whole(self, m: Mask, what: str) -> None:
        """Raises a Finding where it is not a whole warpgroup."""
        if m is not None or self.lanes < _WARPGROUP:
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

    # what warps know

    def party(self, warp: int, lanes: Any) -> Party:
        own = self.own[warp]
        return Party(lanes, self.clocks[warp, 0], own, int(self.clocks[warp, 0, own]))

    def parties(self, m: Mask, indices: np.ndarray) -> list[Party]:
        """Of accesses of these lanes, a party for each warp."""
        warps = self.warp_of[indices]
        return [self.party(warp, np.flatnonzero(warps == warp)) for warp in self.active_warps(m)]

    def released(self, warps: list[int]) -> np.ndarray:
        """What warps know together, and their time goes on: what they do from here on is not part of it."""
        known = self.clocks[warps].max(axis=0)
        for warp in warps:
            self.clocks[warp, 0, self.own[warp]] += 1
        return known

    def learn(self, warps: list[int], clocks: np.ndarray) -> None:
        for warp in warps:
            np.maximum(self.clocks[warp], clocks, out=self.clocks[warp])

    # places and lanes

    def id(self, node: Node, m: Mask, *, name: str) -> Any:
        kind, axis = name.split(".")
        if kind == "thread_id":
            return self.thread_id["xyz".index(axis)]
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
        return lane_operations.shuffle(value, lane, mode, self.lanes)

    def pair(self, node: Node, m: Mask, value: Any, *, mask: int) -> tuple[Any, Any]:
        self.whole_warps(m, "a shuffle")
        return lane_operations.pair(value, mask, self.lanes)

    def any_lane(self, node: Node, m: Mask, condition: Any) -> Any:
        self.whole_warps(m, "a vote")
        return lane_operations.any_lane(condition, m, self.lanes)

    def sync_warp(self, node: Node, m: Mask) -> None:
        self.whole_warps(m, "bar.warp.sync")

    def prmt(self, node: Node, m: Mask, low: Any, high: Any, selector: Any) -> Any:
        return lane_operations.permute_bytes(low, high, selector)

    def mma(self, node: Node, m: Mask, a: Any, b: Any, c: Any, *, atom: str) -> np.ndarray:
        self.whole_warps(m, "mma")
        return lane_operations.mma(self.block.program.target.atom(atom), a, b, c, self.lanes)

    # memory

    def alloc_shared(self, node: Node, m: Mask, *, name: str, bytes: int, align: int) -> np.int64:
        return np.int64(self.block.shared.allocate(node.place, name, bytes, align))

    def read(
        self, shared: bool, m: Mask, address: Any, size: int, align: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(bytes at each address, the lanes that they are for; None: all have the same)."""
        memory = self.block.shared if shared else self.block.memory
        if not is_array(address):
            one = np.array([address], np.int64)
            parties = [self.party(warp, slice(None)) for warp in self.active_warps(m)]
            return memory.read(one, size, align, parties), None
        indices = self.indices(m)
        return memory.read(address[indices], size, align, self.parties(m, indices)), indices

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
        type_ = node.types[0]
        data, indices = self.read(node.operand_types[0].shared, m, address, type_.bytes, alignment)
        return self.spread(data, indices, type_)

    def store(self, node: Node, m: Mask, value: Any, address: Any, *, alignment: int) -> None:
        _, pointer = node.operand_types
        self.write(pointer.shared, m, bitcast_rows(value), address, alignment)

    def write(self, shared: bool, m: Mask, data: np.ndarray, address: Any, align: int) -> None:
        """Store rows of bytes, one a lane or one for all."""
        if m is None and not is_array(address) and len(data) == 1:
            indices = np.arange(0, self.lanes, _WARP)  # one lane of each warp
        else:
            indices = self.indices(m)
        places = np.broadcast_to(np.asarray(address, np.int64), self.lanes)[indices]
        rows = data[indices] if len(data) > 1 else np.repeat(data, len(indices), axis=0)
        parties = self.parties(m, indices)
        if shared:
            self.block.shared.write(places, rows, align, parties, 1 + self.number)
        else:
            self.block.memory.write(places, rows, align, parties)

    def load_bounded(self, node: Node, m: Mask, base: Any, offset: Any, bound: Any, *, align: int) -> Any:
        type_ = node.types[0]
        inside = self.inside(m, offset, bound, type_.bytes)
        if inside is False:
            zeros = np.zeros((1, type_.length or 1), type_.dtype)
            return zeros if type_.length else zeros[0, 0]
        address = base + np.asarray(offset).view(np.uint32)[()].astype(np.int64)
        data, indices = self.read(node.operand_types[0].shared, inside, address, type_.bytes, align)
        if indices is None and inside is not m:
            indices = self.indices(inside)
            data = np.repeat(data, len(indices), axis=0)
        return self.spread(data, indices, type_)

    def store_bounded(
        self, node: Node, m: Mask, value: Any, base: Any, offset: Any, bound: Any, *, align: int
    ) -> None:
        type_, pointer, *_ = node.operand_types
        inside = self.inside(m, offset, bound, type_.bytes)
        if inside is not False:
            address = base + np.asarray(offset).view(np.uint32)[()].astype(np.int64)
            self.write(pointer.shared, inside, bitcast_rows(value), address, align)

    def inside(self, m: Mask, offset: Any, bound: Any, size: int) -> Any:
        """The lanes whose offset is below the bound; False for none.

        Raises:
            Finding: an access begins below its bound and ends above it.
        """
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

    def word(self, address: int, dtype: np.dtype) -> np.ndarray:
        """A number in global memory, to be changed in place."""
        span = self.block.memory.span(address, address + dtype.itemsize)
        start = address - span.start
        return span.bytes[start : start + dtype.itemsize].view(dtype)

    def atomic(self, node: Node, m: Mask, address: Any, operand: Any, *, order: str, operation: str) -> Any:
        """`add`, or `inc`: count up to the operand and then from 0; `acq_rel` hands on what others know."""
        before = np.zeros(self.lanes, np.int32)
        operands, places = (np.broadcast_to(v, self.lanes) for v in (operand, address))
        for lane in self.indices(m):
            word, place = self.word(int(places[lane]), np.dtype(np.uint32)), int(places[lane])
            old, given = int(word[0]), int(operands[lane]) & 0xFFFFFFFF
            before[lane] = np.uint32(old).view(np.int32)
            word[0] = (old + given) & 0xFFFFFFFF if operation == "add" else 0 if old >= given else old + 1
            if order == "acq_rel":
                warp = int(self.warp_of[lane])
                known = self.block.atomics.setdefault(place, np.zeros_like(self.clocks[0]))
                np.maximum(known, self.released([warp]), out=known)
                self.learn([warp], known)
        return before if m is None or m.sum() > 1 else before[m][0]

    def load_matrix(self, node: Node, m: Mask, address: Any, *, atom: str) -> np.ndarray:
        self.whole_warps(m, "ldmatrix")
        load, type_ = self.block.program.target.matrix_load(atom), node.types[0]
        size = load.run * type_.dtype.itemsize
        data, indices = self.read(True, m, np.broadcast_to(address, self.lanes).astype(np.int64), size, size)
        runs = self.spread(data, indices, Type(type_.dtype, load.run))
        return lane_operations.load_matrix(load, runs)

    def ldmatrix_turned(self, node: Node, m: Mask, address: Any) -> tuple[np.ndarray, ...]:
        self.whole_warps(m, "ldmatrix")
        data, indices = self.read(True, m, np.broadcast_to(address, self.lanes).astype(np.int64), CHUNK, CHUNK)
        return lane_operations.turned_matrices(self.spread(data, indices, Type(np.dtype(np.uint8), CHUNK)))

    def stmatrix(self, node: Node, m: Mask, address: Any, *words: Any) -> None:
        self.whole_warps(m, "stmatrix")
        rows = lane_operations.matrix_rows([np.broadcast_to(w, self.lanes) for w in words])
        self.write(True, m, rows, np.broadcast_to(address, self.lanes).astype(np.int64), CHUNK)

    # copies of sm_80

    def copy_async(self, node: Node, m: Mask, destination: Any, source: Any, inside: Any, *, bytes: int) -> frozenset:
        mask = None if m is None else m.copy()

        def land() -> None:
            held = self.active(mask, inside)
            data = np.zeros((self.lanes, bytes), np.uint8)
            if held is not False:
                got, indices = self.read(False, held, np.broadcast_to(source, self.lanes), bytes, bytes)
                data[indices] = got
            self.write(True, mask, data, np.broadcast_to(destination, self.lanes), bytes)

        self.async_copies.append(land)
        number = len(self.async_copies) - 1
        if not self.block.policy.late_products:
            self._finish_copy(number)
        return frozenset([number])

    def _finish_copy(self, number: int) -> None:
        land, self.async_copies[number] = self.async_copies[number], None
        if land is not None:
            land()

    def join(self, node: Node, m: Mask, *tokens: frozenset) -> frozenset:
        return frozenset().union(*tokens)

    def wait_copies(self, node: Node, m: Mask, token: frozenset) -> None:
        for number in sorted(token):
            self._finish_copy(number)

    # barriers

    def pause(self) -> Waiting:
        """Perhaps let others go first."""
        if self.block.policy.interrupt():
            yield None

    def barrier(self, node: Node, m: Mask) -> Waiting:
        if m is not None:
            raise Finding("divergence", "fly.barrier in a part of a block")
        yield from self._sync(node, m, 0, _WARP * self.block.components.warps)

    def barrier_sync(self, node: Node, m: Mask, number: Any, threads: Any) -> Waiting:
        yield from self._sync(node, m, number, threads)

    def barrier_any(self, node: Node, m: Mask, number: Any, threads: Any, condition: Any) -> Waiting:
        holds = bool(np.any(np.broadcast_to(condition, self.lanes)[self.indices(m)] != 0))
        barrier = yield from self._sync(node, m, number, threads, holds)
        return np.int32(barrier.held)

    def barrier_arrive(self, node: Node, m: Mask, number: Any, threads: Any) -> Waiting:
        yield from self.pause()
        self._arrive(m, number, threads)

    def _arrive(self, m: Mask, number: Any, threads: Any, condition: bool = False) -> tuple[Any, list[int]]:
        warps = self.whole_warps(m, "a named barrier")
        barrier = self.block.named_barrier(self.uniform(m, number, "a barrier's number"))
        count = self.uniform(m, threads, "a barrier's threads")
        barrier.arrive(_WARP * len(warps), count, self.released(warps), condition)
        return barrier, warps

    def _sync(self, node: Node, m: Mask, number: Any, threads: Any, condition: bool = False) -> Waiting:
        yield from self.pause()
        which = self.block.named_barrier(self.uniform(m, number, "a barrier's number"))
        generation = which.generation
        barrier, warps = self._arrive(m, number, threads, condition)
        if barrier.generation == generation:
            yield (lambda: barrier.generation != generation), barrier.__str__
        self.learn(warps, barrier.done)
        return barrier

    def setmaxnreg(self, node: Node, m: Mask, *, action: str, registers: int) -> Waiting:
        self.whole(m, "setmaxnreg")
        pool = self.block.registers
        held = pool.held[self.number]
        if (registers > held) if action == "dec" else (registers < held):
            raise Finding("registers", f"setmaxnreg.{action} to {registers} registers, with {held}")
        if action == "inc" and pool.free() < registers - held:
            short = registers - held
            yield (lambda: pool.free() >= short), lambda: f"{short} registers a thread, where {pool.free()} are free"
        pool.held[self.number] = registers

    def fence_async_shared(self, node: Node, m: Mask) -> None:
        for warp in self.active_warps(m):
            self.clocks[warp, 1] = np.maximum(self.clocks[warp, 1], self.clocks[warp, 0])
            self.clocks[warp, 0, self.own[warp]] += 1

    def fence_mbarrier_init(self, node: Node, m: Mask) -> None:
        self.fence_async_shared(node, m)

    # mbarriers

    def mbarrier_init(self, node: Node, m: Mask, address: Any, arrivals: Any) -> None:
        warp = self.active_warps(m)[0]
        party = self.party(warp, None)
        place = self.uniform(m, address, "an mbarrier's address")
        self.block.make_mbarrier(place, self.uniform(m, arrivals, "a count"), (party.component, party.now))

    def _each_mbarrier(self, m: Mask, address: Any) -> Iterator[tuple[Mbarrier, int, int]]:
        """(mbarrier, warp, lanes) of each warp of the mask."""
        for warp in self.active_warps(m):
            inside = self.warp_of == warp if m is None else m & (self.warp_of == warp)
            place = self.uniform(inside, address, "an mbarrier's address")
            yield self.block.mbarrier(place, self.clocks[warp, 0]), warp, int(inside.sum())

    def mbarrier_arrive(self, node: Node, m: Mask, address: Any) -> Waiting:
        yield from self.pause()
        for barrier, warp, lanes in self._each_mbarrier(m, address):
            barrier.arrive(lanes, self.released([warp]))
            barrier.advance()

    def mbarrier_arrive_expect(self, node: Node, m: Mask, address: Any, count: Any) -> Waiting:
        yield from self.pause()
        for barrier, warp, lanes in self._each_mbarrier(m, address):
            barrier.expect(lanes * self.uniform(m, count, "a byte count"))
            barrier.arrive(lanes, self.released([warp]))
            barrier.advance()

    def mbarrier_wait(self, node: Node, m: Mask, address: Any, parity: Any) -> Waiting:
        yield from self.pause()
        for barrier, warp, _ in list(self._each_mbarrier(m, address)):
            wanted = self.uniform(m, parity, "a parity")
            if not barrier.passed(wanted):
                yield (lambda b=barrier, p=wanted: b.passed(p)), barrier.__str__
            self.learn([warp], barrier.done)

    # bulk copies

    def tma_prefetch(self, node: Node, m: Mask, tensor_map: TensorMap) -> None:
        """Only the cache would know."""

    def _one_lane(self, m: Mask) -> int:
        """The warp of the only active lane: every lane would start a copy of its own."""
        if m is None or m.sum() != 1:
            raise Finding("divergence", f"{self.lanes if m is None else int(m.sum())} lanes start a bulk copy each")
        return int(self.warp_of[m][0])

    def tma_load(
        self, node: Node, m: Mask, destination: Any, tensor_map: TensorMap, mbarrier: Any, *at: Any
    ) -> Waiting:
        yield from self.pause()
        warp, block = self._one_lane(m), self.block
        corner = [self.uniform(m, c, "a coordinate") for c in reversed(at)]
        place = self.uniform(m, destination, "a destination")
        clocks = self.clocks[warp].copy()
        barrier = block.mbarrier(self.uniform(m, mbarrier, "an mbarrier's address"), clocks[0])
        words = self._box(tensor_map, place, corner)
        phase = barrier.phase + 1
        block.shared.announce(words, clocks[0], barrier.component, phase)

        def land() -> None:
            data = tensor_map.fetch(block.memory, corner)
            block.shared.chunks[tensor_map.chunks(place)] = data.ravel().view(np.complex128)
            barrier.landed(tensor_map.bytes, clocks)
            barrier.advance()

        self._start_copy(land)

    def _start_copy(self, land: Callable[[], None]) -> None:
        from fly.simulator.block import Copy

        location = self.block.program.translated.location(self.line)
        self.block.copies.append(Copy(self.block, self, location, land))

    def _box(self, tensor_map: TensorMap, place: int, corner: list[int]) -> slice:
        """The words of shared memory that a box at a place takes."""
        if place % 128:
            raise Finding("misaligned", f"a bulk copy at {self.block.shared.named(place)}; expected 128 bytes")
        tensor_map.check(corner)
        self.block.shared.buffer(place, place + tensor_map.bytes)
        return words_between(place, place + tensor_map.bytes)

    def tma_store(self, node: Node, m: Mask, source: Any, tensor_map: TensorMap, *at: Any) -> Waiting:
        yield from self.pause()
        warp, block = self._one_lane(m), self.block
        corner = [self.uniform(m, c, "a coordinate") for c in reversed(at)]
        place = self.uniform(m, source, "a source")
        words = self._box(tensor_map, place, corner)
        block.shared.check_read(words, self.clocks[warp, 0], self.clocks[warp, 1])
        block.shared.shadow.read(words, self.stores, self.store_groups + 1)
        self.open_store = True

        def land() -> None:
            data = block.shared.chunks[tensor_map.chunks(place)].view(np.uint8)
            tensor_map.put(block.memory, corner, data.reshape(-1, tensor_map.line_bytes))

        self._start_copy(land)

    def tma_commit(self, node: Node, m: Mask) -> None:
        self.store_groups += 1
        self.open_store = False

    def tma_wait_read(self, node: Node, m: Mask, *, newer: int) -> Waiting:
        """All stores of the role land first: one that is later than it must be is found by what overwrites it."""
        while any(copy.role is self for copy in self.block.copies):
            yield (lambda: not any(c.role is self for c in self.block.copies)), lambda: "its bulk stores"
        for warp in self.active_warps(m):
            self.clocks[warp, 0, self.stores] = max(0, self.store_groups - newer)

    # products

    def wgmma(
        self,
        node: Node,
        m: Mask,
        *operands: Any,
        n: int,
        dtype: str,
        accumulates: int,
        a_registers: int,
        a_transposed: int,
        b_transposed: int,
        a_steps: list[int],
        b_steps: list[int],
    ) -> InFlight:
        self.whole(m, "wgmma")
        rest = list(operands)
        accumulator = rest.pop(0) if accumulates else None
        atom = WarpgroupAtom(n, dtype)
        size = 32 // atom.k
        b = Located.of(self.uniform(m, rest[0], "a descriptor"), tuple(b_steps), n, bool(b_transposed), size)
        self.groups += 1
        self._reads(b)
        a = None
        if a_registers:
            rows = registers_as_rows(atom, rest[1:])
        else:
            a = Located.of(self.uniform(m, rest[1], "a descriptor"), tuple(a_steps), 64, bool(a_transposed), size)
            self._reads(a)
        result = InFlight(np.zeros(0), self.groups)
        if isinstance(accumulator, InFlight):
            self._finish_product(accumulator.group)
            accumulator = accumulator.values

        def compute() -> None:
            chunks = self.block.shared.chunks
            left = rows if a is None else a.load(chunks, dtype)
            result.values = multiply(atom, left, b.load(chunks, dtype), accumulator)

        self.late[self.groups] = compute
        if not self.block.policy.late_products:
            self._finish_product(self.groups)
        return result

    def _reads(self, operand: Located) -> None:
        """A product reads an operand from here until it is waited for; all four warps must know what is there."""
        shared = self.block.shared
        known, proxy = self.clocks[:, 0].min(axis=0), self.clocks[:, 1].min(axis=0)
        for first, last in operand.runs:
            shared.buffer(first * CHUNK, last * CHUNK)
            words = words_between(first * CHUNK, last * CHUNK)
            shared.check_read(words, known, proxy)
            shared.shadow.read(words, self.products, self.groups)

    def _finish_product(self, group: int) -> None:
        compute = self.late.pop(group, None)
        if compute is not None:
            compute()

    def wgmma_wait(self, node: Node, m: Mask, *values: Any, newer: int, accumulators: int) -> list[Any]:
        self.whole(m, "wgmma.wait_group")
        self.retired = max(self.retired, self.groups - newer)
        for group in sorted(g for g in self.late if g <= self.retired):
            self._finish_product(group)
        self.clocks[:, 0, self.products] = self.retired
        return [self._arrived(value) for value in values[:accumulators]]

    def _arrived(self, value: Any) -> Any:
        if not isinstance(value, InFlight):
            return value
        if value.group > self.retired:
            raise Finding("in-flight", "the wait leaves the product unfinished whose accumulators it gives")
        return value.values


def bitcast_rows(value: Any) -> np.ndarray:
    """A value as rows of bytes, one a lane or one for all."""
    if not is_array(value) or value.ndim == 1:
        value = np.reshape(value, (-1, 1))
    return np.ascontiguousarray(value).view(np.uint8)
