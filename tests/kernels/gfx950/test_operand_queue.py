"""The order in which the gfx950 backward kernel's steps are traced."""

from __future__ import annotations

from kernels.gfx950.operand_queue import Compute, Meet, Multiply, Room, Step, in_order, merged, spread


def traced(*steps: str | int, registers: int = 0) -> str:
    """What is traced of steps: a letter multiplies and is read as a capital, a number computes.

    A number with "|" before it is a barrier with so many multiplications behind it that are read before; with ":" the
    registers from there on. An operand takes one register.
    """
    found: list[str] = []

    def multiply(name: str) -> Multiply:
        return Multiply(lambda: found.append(name.upper()), lambda read: found.append(name), 1)

    def step(given: str | int) -> Step:
        if isinstance(given, int):
            return Compute(lambda: found.append(str(given)))
        if given[0] == "|":
            return Meet(lambda: found.append("|"), int(given[1:]))
        return Room(int(given[1:])) if given[0] == ":" else multiply(given)

    in_order([step(x) for x in steps], registers)
    return "".join(found)


def test_reads_are_as_far_ahead_as_registers_hold():
    assert traced("a", "b", "c", registers=1) == "AaBbCc"
    assert traced("a", "b", 1, "c", "d", registers=2) == "ABaCb1Dcd"
    assert traced("a", "b", ":3", "c", "d", "e", "f", registers=1) == "AaBbCDEcFdef"


def test_no_read_crosses_a_barrier_that_it_comes_behind():
    assert traced("a", "|0", "b", "c", registers=3) == "Aa|BCbc"
    # those of the next two come before it, whatever registers there are
    assert traced("a", "|2", "b", "c", "d", registers=1) == "AaBC|bcDd"


def test_others_come_evenly_between():
    a, b = (Multiply(lambda: None, lambda read: None) for _ in range(2))
    one, two, three = (Compute(lambda: None) for _ in range(3))
    assert spread([a, b], [one, two]) == [a, one, b, two]
    assert spread([a, b], [one]) == [a, b, one]
    assert merged([one, two], [three]) == [one, two, three]
    assert merged([one], [two, three]) == [two, one, three]
