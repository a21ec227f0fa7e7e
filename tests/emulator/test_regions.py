"""Which bytes a table of allocations lets a kernel touch, to the byte."""

import numpy as np
import pytest

from fly.emulator.memory import AccessError, Memory, Region

BUFFER = np.zeros(1024, np.uint8)
BASE = BUFFER.ctypes.data + 64
# two apart from each other, then a large one with a smaller one that starts later and ends sooner
REGIONS = [
    Region(BASE, 100, "a"),
    Region(BASE + 200, 50, "b"),
    Region(BASE + 400, 300, "c"),
    Region(BASE + 410, 8, "d"),
]


def bad(*accesses: int, size: int = 4, active: tuple[bool, ...] | None = None) -> list[int]:
    """The lanes whose accesses at these offsets are refused."""
    mask = None if active is None else np.array(active)
    try:
        Memory(REGIONS).check(np.array([BASE + a for a in accesses], np.uint64), size, mask)
    except AccessError as error:
        return np.flatnonzero(error.lanes).tolist()
    return []


@pytest.mark.parametrize("size", [1, 2, 4, 12, 16])
@pytest.mark.parametrize(("start", "end"), [(0, 100), (200, 250), (400, 700)])
def test_the_first_and_the_last_byte_of_an_allocation(start, end, size):
    assert bad(start, size=size) == bad(end - size, size=size) == []
    assert bad(start - 1, size=size) == bad(end - size + 1, size=size) == [0]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_lanes_in_several_allocations(size):
    inside = (0, 100 - size, 200, 250 - size, 400, 700 - size, 418)
    assert bad(*inside, size=size) == []
    assert bad(*inside, 100 - size + 1, 199, 250, 399, size=size) == [7, 8, 9, 10]


def test_lanes_that_are_off_may_point_anywhere():
    assert bad(0, 150, 96, active=(True, False, True)) == []
    assert bad(0, 150, 97, active=(True, False, True)) == [2]


def test_an_allocation_within_another_ends_neither_early():
    assert bad(416) == bad(420) == bad(696) == []
    assert bad(416, 204) == bad(420, 204) == []
    assert bad(697, 204) == [0]
