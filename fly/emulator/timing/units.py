"""What the waves of a compute unit share: LDS, and the path to memory. Both tell at issue when an operation ends."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from fly.emulator.timing.figures import Parameters
from fly.emulator.timing.record import LINE


class Calendar:
    """A unit that one operation at a time occupies; an operation takes the first gap that is long enough."""

    def __init__(self) -> None:
        self.busy: list[tuple[int, int]] = []  # from, until; ascending

    def reserve(self, earliest: int, length: int, now: int) -> int:
        """Occupy the unit for `length` cycles from `earliest` on; returns when that starts."""
        busy = self.busy
        while busy and busy[0][1] <= now:
            busy.pop(0)
        start, at = earliest, len(busy)
        for i, (begin, end) in enumerate(busy):
            if begin >= start + length:
                at = i
                break
            start = max(start, end)
        busy.insert(at, (start, start + length))
        return start


class Lds:
    """The banks of a CU, and one port for each pair of its SIMDs."""

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self.banks = Calendar()
        self.port_free = [0, 0]
        self.busy = 0  # cycles of the banks

    def access(self, now: int, simd: int, cycles: int, nbytes: int, write: bool) -> int:
        """An instruction issued now that needs the banks for `cycles`; returns when its data has moved."""
        p = self.parameters
        pair = simd >> 1
        transfer = -(-nbytes // (p.write_port if write else p.read_port))
        if not cycles:  # permutes, which have no addresses
            cycles = -(-nbytes // p.lds_direct_write)
        elif not p.conflicts:
            cycles = -(-nbytes // (4 * (p.write_banks if write else p.read_banks)))
        start = self.banks.reserve(max(now, self.port_free[pair]), cycles, now)
        length = max(cycles, transfer)
        self.port_free[pair] = start + length
        self.busy += cycles
        return start + p.lds_latency + length

    def deposit(self, now: int, arrival: int, nbytes: int) -> int:
        """Data from memory that is written to LDS when it arrives; returns when that is done."""
        cycles = -(-nbytes // self.parameters.lds_direct_write)
        self.busy += cycles
        return self.banks.reserve(arrival, cycles, now) + cycles


class MemoryPath:
    """Address unit, L1, and this CU's share of L2 and memory bandwidth.

    A line that this CU has not touched comes from memory when its number is a multiple of `cold`, otherwise from L2:
    workgroups on the other CUs of the die that read the same data share the misses. 0: everything is in L2.
    """

    def __init__(self, parameters: Parameters, cold: int):
        self.parameters, self.cold = parameters, cold
        self.queue: deque[int] = deque()  # when the address unit starts on each instruction
        self.address_free = 0
        self.fill_free: float = 0
        self.memory_free: float = 0
        share = parameters.memory_bandwidth / parameters.sustained_clock / parameters.compute_units
        self.memory_cycles = LINE / share  # a line from memory
        self.fill_cycles = LINE / parameters.fill_rate
        self.atomic_cycles = LINE / parameters.atomic_rate
        self.atomic_free: float = 0
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.capacity = parameters.l1_bytes // LINE
        self.lines = {"L1": 0, "L2": 0, "memory": 0}

    def blocked_until(self, now: int) -> int:
        """When the next instruction can be issued; `now` or earlier when it can at once."""
        queue = self.queue
        while queue and queue[0] <= now:
            queue.popleft()
        depth = self.parameters.memory_queue
        return queue[len(queue) - depth] if len(queue) >= depth else 0

    def _start(self, now: int, lines: Sequence[int], lane_bytes: int) -> int:
        """The address unit takes an instruction: 64 bytes a cycle, and no more than one line."""
        p = self.parameters
        start = max(now + p.turn, self.address_free)
        self.address_free = start + max(p.turn, 64 * lane_bytes // p.address_rate, len(lines))
        self.queue.append(start)
        return start

    def load(self, now: int, lines: Sequence[int], lane_bytes: int) -> int:
        """Returns when all of the data has arrived."""
        p = self.parameters
        start = self._start(now, lines, lane_bytes)
        done: float = self.address_free + p.l1_latency
        for line in lines:
            if line in self.cached:
                self.cached.move_to_end(line)
                self.lines["L1"] += 1
                continue
            self.cached[line] = None
            if len(self.cached) > self.capacity:
                self.cached.popitem(last=False)
            arrival: float = start + p.l2_latency
            if self.cold and line % self.cold == 0:
                self.memory_free = max(start + p.memory_latency, self.memory_free + self.memory_cycles)
                arrival = self.memory_free
                self.lines["memory"] += 1
            else:
                self.lines["L2"] += 1
            self.fill_free = max(arrival, self.fill_free + self.fill_cycles)
            done = max(done, self.fill_free)
        return int(done)

    def atomic(self, now: int, lines: Sequence[int], lane_bytes: int) -> int:
        """Returns when L2 has answered: it works on one line after the other, of every CU its share."""
        start = self._start(now, lines, lane_bytes) + self.parameters.l2_latency
        self.atomic_free = max(start, self.atomic_free) + len(lines) * self.atomic_cycles
        return int(self.atomic_free)

    def store(self, now: int, lines: Sequence[int], lane_bytes: int) -> int:
        """Returns when the write is acknowledged."""
        self._start(now, lines, lane_bytes)
        return self.address_free + self.parameters.l2_latency
