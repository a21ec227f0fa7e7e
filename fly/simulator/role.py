"""A role: up to four warps and the units that work for them: copies, barriers, bulk copies and products.

What may have to wait for others is a generator, which yields what it waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.simulator.arithmetic import is_array
from fly.simulator.barriers import Mbarrier, NamedBarrier, Stores
from fly.simulator.clocks import Party
from fly.simulator.memory import scatter
from fly.simulator.products import InFlight, Located, multiply, registers_as_rows
from fly.simulator.program import Node
from fly.simulator.report import Finding
from fly.simulator.shared import CHUNK, words_between
from fly.simulator.tensor_map import TensorMap
from fly.simulator.warps import Mask, Wait, Warps, address_of

if TYPE_CHECKING:
    from fly.simulator.block import Block

Waiting = Generator[Wait | None, None, Any]
Arrival = tuple[NamedBarrier, int, list[int]]  # at which barrier, its generation, and of which warps


class Role(Warps):
    """Warps that go on together: a warpgroup's, as far as the block has them, or one of them `alone`."""

    def __init__(self, block: Block, number: int, alone: int | None = None):
        super().__init__(block, number, alone)
        self.products = block.components.products(number)
        self.groups = self.retired = 0
        self.started = ""  # where the last product was
        self.stored = [Stores() for _ in range(self.warps)]
        self.fenced = self.clocks[:, 0].copy()  # what each warp's bulk copies know of global memory
        self.late: dict[int, Callable[[], None]] = {}  # products whose operands are read at the wait
        self.issued = 0  # asynchronous copies
        self._polled: tuple[tuple[int, bytes], int] | None = (
            None  # the last load_acquire, when memory had changed so often
        )
        self.landing: dict[int, Callable[[], None]] = {}  # of those, what is done when they are waited for

    def check_end(self) -> None:
        """Raises a Finding where products or stores were not waited for."""
        if self.retired < self.groups:
            what = f"warpgroup {self.number} ends with products that it has not waited for"
            raise Finding("unfinished", what, location=self.started)
        for warp, stores in enumerate(self.stored):
            if stores.places:
                what = f"warp {self.first_warp + warp} ends with bulk stores that may still read shared memory"
                raise Finding("unfinished", what, warp, stores.places[stores.over + 1])

    # asynchronous copies of a thread's own

    def copy_async(
        self, node: Node, m: Mask, destination: Any, source: Any, inside: Any, *, bytes: int
    ) -> frozenset[int]:
        return self._copy(m, self.active(m, inside), destination, source, bytes)

    def copy_direct(
        self, node: Node, m: Mask, destination: Any, base: Any, offset: Any, bound: Any, *, bytes: int, shift: int
    ) -> frozenset[int]:
        self.whole_warps(m, "a direct copy")
        self.warp_uniform(m, destination, "the destination of a direct copy")
        offset = offset + np.int32(shift)
        inside = self.inside(m, base, offset, bound, bytes)
        place = destination + shift + np.arange(self.lanes) % self.wave * bytes
        return self._copy(m, inside, place, address_of(base, offset), bytes)

    def _copy(self, m: Mask, inside: Any, destination: Any, source: Any, size: int) -> frozenset[int]:
        """Each lane of `m` copies bytes to shared memory: what lanes of `inside` find, and zeros in the others."""
        indices = self.indices(m)
        data = np.zeros((self.lanes, size), np.uint8)
        if inside is not False:
            got, held = self.read(False, inside, np.broadcast_to(source, self.lanes), size, size)
            data[held] = got
        data = data[indices]
        places = np.broadcast_to(destination, self.lanes)[indices]
        self.issued += 1
        number, shared = self.issued, self.block.shared
        who = dataclasses.replace(self.parties(indices), components=self.copies, now=np.full(self.warps, number))
        shared.announce_lanes(places, size, who, 1 + self.number)
        self.landing[number] = lambda: scatter(shared.bytes, places, data)
        if not self.block.policy.late_copies:
            self.landing.pop(number)()
        return frozenset([number])

    def join(self, node: Node, m: Mask, *tokens: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*tokens)

    def wait_copies(self, node: Node, m: Mask, token: frozenset[int]) -> None:
        for number in sorted(token & self.landing.keys()):
            self.landing.pop(number)()
        newest = max(token, default=0)
        for warp in self.active_warps(m):
            known, copies = self.clocks[warp, 0], self.copies[warp]
            known[copies] = max(known[copies], newest)

    # barriers

    def pause(self) -> Waiting:
        """Perhaps let others go first."""
        if self.block.policy.interrupt():
            yield None

    def barrier(self, node: Node, m: Mask) -> Waiting:
        if m is not None:
            raise Finding("divergence", "fly.barrier in a part of a block")
        yield from self._sync(node, m, 0, self.wave * self.block.components.warps)

    def meet(self, node: Node, m: Mask) -> Waiting:
        """S_BARRIER: warps of a block come to it wherever they are."""
        yield from self._sync(node, m, 0, self.wave * self.block.components.warps)

    def load_acquire(self, node: Node, m: Mask, address: Any) -> Waiting:
        """What is at each lane's address. Who looks again while no memory has changed lets the others go on."""
        yield from self.pause()
        memory, places = self.block.memory, np.broadcast_to(np.asarray(address, np.int64), self.lanes)
        polled = node.place, places[self.indices(m)].tobytes()
        if self._polled == (polled, memory.changes):
            seen = memory.changes
            yield (lambda: memory.changes != seen), lambda: "a counter in global memory to change"
        self._polled = polled, memory.changes
        found = np.zeros(self.lanes, np.int32)
        for lane in self.indices(m):
            place = int(places[lane])
            found[lane] = memory.span(place, place + 4).load_word(place)
            self.hand_on(place, int(self.warp_of[lane]), "acquire")
        return found if m is None or m.sum() > 1 else found[m][0]

    def barrier_sync(self, node: Node, m: Mask, number: Any, threads: Any) -> Waiting:
        yield from self._sync(node, m, number, threads)

    def barrier_any(self, node: Node, m: Mask, number: Any, threads: Any, condition: Any) -> Waiting:
        return (yield from self._sync(node, m, number, threads, condition))

    def barrier_arrive(self, node: Node, m: Mask, number: Any, threads: Any) -> Waiting:
        yield from self.pause()
        self._arrive(m, number, threads)

    def _arrive(self, m: Mask, number: Any, threads: Any, condition: Any = False) -> list[Arrival]:
        """Warps count at the barriers that they name, of which each may name another one."""
        warps = self.whole_warps(m, "a named barrier")
        named: dict[int, list[int]] = {}
        for warp in warps:
            which = self.uniform(self.inside_warp(m, warp), number, "a barrier's number")
            named.setdefault(which, []).append(warp)
        count = self.uniform(m, threads, "a barrier's threads")
        arrivals = []
        for which, these in named.items():
            barrier = self.block.named_barrier(which)
            arrivals.append((barrier, barrier.generation, these))
            held = any(self._holds(self.inside_warp(m, warp), condition) for warp in these)
            barrier.arrive(self.wave * len(these), count, self.released(these), held)
        return arrivals

    def _holds(self, m: np.ndarray, condition: Any) -> bool:
        return bool(np.any(condition[m] != 0) if is_array(condition) else condition != 0)

    def _sync(self, node: Node, m: Mask, number: Any, threads: Any, condition: Any = False) -> Waiting:
        """What each warp's barrier was told: an i32 for all lanes, or one a lane where they were at several."""
        yield from self.pause()
        arrivals, told = self._arrive(m, number, threads, condition), np.zeros(self.warps, np.int32)
        for barrier, generation, warps in arrivals:
            if barrier.generation == generation:
                yield (lambda b=barrier, g=generation: b.generation != g), barrier.__str__  # type: ignore[misc]  # not inferred with defaults
            self.learn(warps, barrier.done)
            told[warps] = barrier.held
        return told[arrivals[0][2][0]] if len(arrivals) == 1 else told[self.warp_of]

    def cluster_sync(self, node: Node, m: Mask) -> Waiting:
        """All threads of all blocks of the cluster."""
        yield from self.pause()
        warps, barrier = self.whole_warps(m, "a cluster's barrier"), self.block.cluster.meeting
        generation, everybody = barrier.generation, self.block.program.threads * self.block.program.cluster
        barrier.arrive(self.wave * len(warps), everybody, self.released(warps))
        if barrier.generation == generation:
            yield (lambda: barrier.generation != generation), lambda: f"its cluster, {barrier}"
        self.learn(warps, barrier.done)

    def setmaxnreg(self, node: Node, m: Mask, *, action: str, registers: int) -> Waiting:
        if m is not None or not self.alone:
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

    def fence_async_global(self, node: Node, m: Mask) -> None:
        for warp in self.active_warps(m):
            self.fenced[warp] = self.clocks[warp, 0]

    def fence_mbarrier_init(self, node: Node, m: Mask) -> None:
        for warp in self.active_warps(m):
            own, clocks = self.own[warp], self.clocks[warp, 0]
            for barrier in self.block.mbarriers.values():
                component, when = barrier.made
                if barrier.fenced is None and clocks[component] >= when:
                    barrier.fenced = own, int(clocks[own])
            clocks[own] += 1

    # mbarriers

    def mbarrier_init(self, node: Node, m: Mask, address: Any, arrivals: Any) -> None:
        warp = self.active_warps(m)[0]
        party = self.party(warp, None)
        place = self.uniform(m, address, "an mbarrier's address")
        self.block.make_mbarrier(place, self.uniform(m, arrivals, "a count"), (party.component, party.now))

    def _each_mbarrier(self, m: Mask, address: Any, rank: Any = None) -> Iterator[tuple[Mbarrier, int, int]]:
        """(mbarrier, warp, lanes) of each warp of the mask; with a `rank`, of each block that its lanes name."""
        for warp in self.active_warps(m):
            inside = self.inside_warp(m, warp)
            place = self.uniform(inside, address, "an mbarrier's address")
            if rank is None:
                yield self.block.mbarrier(place, self.clocks[warp, 0]), warp, int(np.count_nonzero(inside))
                continue
            ranks = np.broadcast_to(rank, self.lanes)[inside]
            for number in np.unique(ranks).tolist():
                block = self.block.cluster.block(number)
                there = self.block.shared.same_place(place, block.shared)
                if block is not self.block:
                    block.reach(self.party(warp, None), self.place)
                yield block.mbarrier(there, self.clocks[warp, 0]), warp, int(np.count_nonzero(ranks == number))

    def mbarrier_arrive(self, node: Node, m: Mask, address: Any, rank: Any = None) -> Waiting:
        yield from self.pause()
        for barrier, warp, lanes in self._each_mbarrier(m, address, rank):
            barrier.arrive(lanes, self.released([warp]))
            barrier.advance()

    def mbarrier_arrive_expect(self, node: Node, m: Mask, address: Any, count: Any, rank: Any = None) -> Waiting:
        yield from self.pause()
        for barrier, warp, lanes in self._each_mbarrier(m, address, rank):
            barrier.place = self.place
            barrier.expect(lanes * self.uniform(self.inside_warp(m, warp), count, "a byte count"))
            barrier.arrive(lanes, self.released([warp]))
            barrier.advance()

    def mbarrier_wait(self, node: Node, m: Mask, address: Any, parity: Any) -> Waiting:
        yield from self.pause()
        for barrier, warp, _ in list(self._each_mbarrier(m, address)):
            wanted = self.uniform(self.inside_warp(m, warp), parity, "a parity")
            if not barrier.passed(wanted):
                yield (lambda b=barrier, p=wanted: b.passed(p)), barrier.__str__  # type: ignore[misc]  # not inferred with defaults
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
        place, arrives = (self.uniform(m, x, "an operand of a copy") for x in (destination, mbarrier))
        self._load_box(m, self.block, place, tensor_map, arrives, at)

    def tma_load_to_all(
        self, node: Node, m: Mask, destination: Any, tensor_map: TensorMap, mbarrier: Any, *at: Any, blocks: int
    ) -> Waiting:
        yield from self.pause()
        own, party = self.block, self.party(self._one_lane(m), None)
        places = [self.uniform(m, x, "an operand of a copy") for x in (destination, mbarrier)]
        for rank in range(blocks):
            other = own.cluster.block(rank)
            if other is not own:
                other.reach(party, self.place)
            place, arrives = (own.shared.same_place(x, other.shared) for x in places)
            self._load_box(m, other, place, tensor_map, arrives, at)

    def _load_box(
        self, m: Mask, block: Block, place: int, tensor_map: TensorMap, arrives: int, at: tuple[Any, ...]
    ) -> None:
        """Start a copy to a block of the cluster, whose mbarrier may not expect the bytes of another one's yet."""
        warp, own = self._one_lane(m), self.block
        corner = [self.uniform(m, c, "a coordinate") for c in reversed(at)]
        clocks, fenced = self.clocks[warp].copy(), self.fenced[warp].copy()
        barrier = block.mbarrier(arrives, clocks[0])
        barrier.check_visible(clocks)
        words = self._box(block, tensor_map, place, corner)
        phase = barrier.phase + 1
        own.counts.update({"bulk copies": 1, "bytes": tensor_map.bytes})
        block.shared.announce(words, clocks[0], clocks[1], barrier.component, phase)

        def land() -> None:
            data = tensor_map.fetch(own.memory, corner, clocks[0], fenced)
            block.shared.chunks[tensor_map.chunks(place)] = data.ravel().view(np.complex128)
            barrier.landed(tensor_map.bytes, clocks, early=block is not own)
            barrier.advance()

        self._start_copy(land)

    def _start_copy(self, land: Callable[[], None], store: tuple[int, int] | None = None) -> None:
        from fly.simulator.block import Copy

        self.block.copies.append(Copy(self.block, self, self.place, land, store))

    def copy_at(
        self, node: Node, m: Mask, destination: Any, source: Any, count: Any, mbarrier: Any, rank: Any
    ) -> Waiting:
        """From this block's shared memory to that of another block of the cluster."""
        yield from self.pause()
        warp, own = self._one_lane(m), self.block
        numbers = (destination, source, count, mbarrier, rank)
        to, at, size, arrives, whose = (self.uniform(m, x, "an operand of a copy") for x in numbers)
        if (to | at | size) % 16 or size <= 0:
            raise Finding("misaligned", f"a copy of {size} bytes from {at:#x} to {to:#x}; expected multiples of 16")
        other, clocks = own.cluster.block(whose), self.clocks[warp].copy()
        own.shared.buffer(at, at + size)
        there = own.shared.same_place(to, other.shared)
        other.reach(self.party(warp, None), self.place)
        other.shared.buffer(there, there + size)
        barrier = other.mbarrier(own.shared.same_place(arrives, other.shared), clocks[0])
        barrier.check_visible(clocks)
        words = words_between(at, at + size)
        own.shared.check_read(words, clocks[0], clocks[1])
        # it has read its source when it lands: who waits for that may write there again
        reader, number = own.components.stores(self.first_warp + warp), self.stored[warp].number()
        own.shared.shadow.read(words, reader, number)
        other.shared.announce(
            words_between(there, there + size), clocks[0], clocks[1], barrier.component, barrier.phase + 1
        )
        own.counts.update({"copies between blocks": 1, "bytes between blocks": size})
        known = clocks.copy()
        known[0, reader] = number

        def land() -> None:
            own.cluster.block(whose)
            other.shared.bytes[there : there + size] = own.shared.bytes[at : at + size]
            barrier.landed(size, known)
            barrier.advance()

        self._start_copy(land)

    def _box(self, block: Block, tensor_map: TensorMap, place: int, corner: list[int]) -> slice:
        """The words of a block's shared memory that a box at a place takes."""
        if place % 128:
            raise Finding("misaligned", f"a bulk copy at {block.shared.named(place)}; expected 128 bytes")
        tensor_map.check(corner)
        block.shared.buffer(place, place + tensor_map.bytes)
        return words_between(place, place + tensor_map.bytes)

    def tma_store(self, node: Node, m: Mask, source: Any, tensor_map: TensorMap, *at: Any) -> Waiting:
        yield from self.pause()
        warp, block = self._one_lane(m), self.block
        corner = [self.uniform(m, c, "a coordinate") for c in reversed(at)]
        place = self.uniform(m, source, "a source")
        words = self._box(block, tensor_map, place, corner)
        block.shared.check_read(words, self.clocks[warp, 0], self.clocks[warp, 1])
        component = block.components.stores(self.first_warp + warp)
        number = self.stored[warp].issue(int(self.indices(m)[0]), self.place)
        block.shared.shadow.read(words, component, number)
        writer = block.components.written(self.first_warp + warp)
        by = Party(slice(None), self.clocks[warp, 0].copy(), writer, number)

        def land() -> None:
            data = block.shared.chunks[tensor_map.chunks(place)].view(np.uint8)
            tensor_map.put(block.memory, corner, data.reshape(-1, tensor_map.line_bytes), by)

        self._start_copy(land, (warp, number))

    def tma_commit(self, node: Node, m: Mask) -> None:
        for lane in self.indices(m).tolist():
            self.stored[self.warp_of[lane]].commit(lane)

    def tma_wait_read(self, node: Node, m: Mask, *, newer: int) -> Waiting:
        over = {
            (warp, number)
            for warp in self.active_warps(m)
            for lane in np.flatnonzero(self.inside_warp(m, warp)).tolist()
            for number in self.stored[warp].wait(lane, newer)
        }
        if self._on_its_way(over):
            yield (lambda: not self._on_its_way(over)), lambda: "its bulk stores"
        for warp, number in over:
            del self.stored[warp].places[number]
        for warp in self.active_warps(m):
            component = self.block.components.stores(self.first_warp + warp)
            self.clocks[warp, 0, component] = self.stored[warp].over

    def tma_wait(self, node: Node, m: Mask, *, newer: int) -> Waiting:
        yield from self.tma_wait_read(node, m, newer=newer)
        for warp in self.active_warps(m):
            component = self.block.components.written(self.first_warp + warp)
            self.clocks[warp, 0, component] = self.stored[warp].over

    def _on_its_way(self, stores: set[tuple[int, int]]) -> bool:
        return any(copy.role is self and copy.store in stores for copy in self.block.copies)

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
        self.started = self.place
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

        steps = len(b_steps)
        self.block.counts.update({"products": steps, "multiply-adds": steps * 64 * n * atom.k})
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

    def computed(self, node: Node, m: Mask, value: Any) -> None:
        """An order for ptxas alone."""
        self.whole(m, "vote.sync")

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
