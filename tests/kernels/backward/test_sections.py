"""The order in which blocks of the Hopper backward kernel start (`sm90.sections`)."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest

from fly.errors import ShapeError
from kernels.problem.features import Features
from kernels.sm90 import sections
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.call.test_dispatch import REQUEST

UNITS = 132


def beside(causal: bool, slices: int, length: int, head_dim: int = 128, **options) -> int:
    request = replace(REQUEST, causal=causal, seq_len=length, seq_len_kv=length)
    built = Sm90BackwardOptions(head_dim, head_dim, causal, apart=head_dim > 128, **options)
    return sections.heads_beside(request, built, slices, -(-length // built.block_n), UNITS)


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ((True, 64, 4096), 4),
        ((True, 16, 16384), 1),
        ((True, 256, 1024), 1),  # many waves of short blocks
        ((True, 8, 1024), 16),
        ((False, 64, 4096), 1),
        ((True, 32, 4096, 256), 1),
        ((True, 8, 4096, 256), 2),
    ],
    ids=str,
)
def test_causal_heads_are_side_by_side(given, heads):
    assert beside(*given) == heads


@pytest.mark.parametrize(
    ("names", "more", "found"),
    [
        ((), {}, True),
        ((), {"causal": False}, False),
        ((), {"ordered": True, "causal": False}, True),
        (("window_left",), {}, False),  # blocks take the same time
        (("softcap",), {}, True),
        (("alibi_slopes",), {}, True),
        # their registers are full
        (("bias",), {}, False),
        (("alibi_slopes", "softcap"), {}, False),
        (("softcap",), {"apart": True}, False),
        ((), {"apart": True}, True),
        ((), {"apart": True, "packed": True}, False),
    ],
    ids=str,
)
def test_which_builds_have_sections(names, more, found):
    options = {"causal": True, "features": Features(names)} | more
    assert Sm90BackwardOptions(128, 128, **options).sectioned == found


def test_windows_leave_blocks_alike():
    assert beside(True, 64, 4096, features=Features(("window_left",))) == 1


def test_blocks_in_turn_are_of_twice_as_many_heads():
    assert beside(False, 64, 4096, ordered=True) == 10


@pytest.mark.parametrize("slices", [1, 2, 7, 64, 70_000])
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("wanted", [1, 3, 64])
def test_grids_have_a_place_for_every_block(slices, together, wanted):
    x, y, z = sections.grid(5, slices, together, wanted)
    assert x % together == 0
    assert y == 5
    assert slices <= x // together * z < slices + z
    assert z <= 65_535


def test_too_many_keys_are_refused():
    with pytest.raises(ShapeError, match="seq_len_kv takes 65536 blocks of keys; the Hopper"):
        sections.grid(65_536, 1, 1, 1)


@pytest.mark.parametrize(("slices", "length"), [(64, 4096), (32, 8192), (8, 4096), (128, 2048)])
def test_side_by_side_multiprocessors_end_together(slices, length):
    def end(wanted: int) -> float:
        x, y, z = sections.grid(length // 128, slices, 1, wanted)
        free = [0] * UNITS
        for _ in range(z):
            for number in range(y):
                for _ in range(x):
                    heapq.heappush(free, heapq.heappop(free) + (y - number) * 2 + 4)
        return max(free)

    total = slices * sum((length // 128 - b) * 2 + 4 for b in range(length // 128))
    assert end(beside(True, slices, length)) < 1.03 * total / UNITS
    assert end(beside(True, slices, length)) < 0.97 * end(1)
