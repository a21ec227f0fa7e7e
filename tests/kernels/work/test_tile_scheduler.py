"""Which block computes what: grids, sequences from offsets, key tiles of splits, and how many splits are best."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from kernels.work.sequences import PagedSequence, Sequence, tokens_of
from kernels.work.tile_scheduler import (
    MAX_SPLITS,
    automatic_splits,
    block_work,
    grid,
    shared_keys_place,
)
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

BLOCK_M, BLOCK_N = 32, 16


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [((2, 8, 256, 128), (2, 8, 2)), ((2, 8, 257, 128), (3, 8, 2)), ((3, 4, 1, 64, 5), (1, 4, 15))],
)
def test_grid(arguments, wanted):
    assert grid(*arguments) == wanted


@given(st.integers(1, 600), st.integers(0, 5000), st.integers(1, 400))
def test_enough_blocks_are_never_split(blocks, key_tiles, units):
    splits = automatic_splits(blocks, key_tiles, units)
    assert 1 <= splits <= max(1, min(MAX_SPLITS, key_tiles))
    if blocks >= units:
        assert splits == 1


@pytest.mark.parametrize(
    ("blocks", "key_tiles", "units", "wanted"),
    [
        (8, 128, 256, 32),  # one query block a head, long keys: fill the device
        (128, 128, 256, 2),
        (200, 128, 256, 1),  # a second round would cost more than it saves
        (8, 4, 256, 1),  # little to split
        (1, 4096, 256, MAX_SPLITS),
        (256, 4096, 256, 1),
    ],
)
def test_automatic_splits(blocks, key_tiles, units, wanted):
    assert automatic_splits(blocks, key_tiles, units) == wanted


def test_the_units_are_the_devices():
    assert [automatic_splits(100, 64, target(arch).compute_units) for arch in ("gfx942", "gfx950")] == [3, 2]


def span(offsets: fly.Tensor, tokens: fly.Tensor, found: fly.Tensor):
    """found[b] = (first token, length) of sequence b."""
    sequence = Sequence.of(tokens_of(tokens, offsets), offsets, fly.block_id.x)
    found.store(sequence.first, fly.block_id.x, 0)
    found.store(sequence.length, fly.block_id.x, 1)


@pytest.mark.parametrize(
    ("offsets", "wanted"),
    [
        ([0, 3, 3, 10], [(0, 3), (3, 0), (3, 7)]),
        ([2, 3, 9], [(2, 1), (3, 6)]),
        ([0, 7, 4, 10], [(0, 7), (7, 0), (4, 6)]),  # decreasing
        ([-5, 4, 100], [(0, 4), (4, 6)]),  # outside of the 10 tokens
        ([20, 30], [(10, 0)]),
    ],
)
def test_offsets_never_leave_the_tensor(offsets, wanted):
    module = trace(span, matrix("i32"), matrix("bf16", 3), matrix("i32", 2), arch="sm_80")
    found = np.full((len(wanted), 2), -1, np.int32)
    tokens = np.zeros((10, 1, 1), np.int16)
    Machine(Program.of(module, target("sm_80")))(
        flat(np.array(offsets, np.int32), tokens, found), (len(wanted), 1, 1)
    )
    assert [tuple(row) for row in found.tolist()] == wanted


def paged_span(table: fly.Tensor, offsets: fly.Tensor | None, used: fly.Tensor | None, found: fly.Tensor):
    """found[b] = length of sequence b, whose keys are in pages of `PAGE_SIZE`."""
    found.store(PagedSequence.of(table, PAGE_SIZE, offsets, fly.block_id.x, used).length, fly.block_id.x)


PAGES, PAGE_SIZE = 4, 3  # of each sequence: 12 keys


@pytest.mark.parametrize(
    ("used", "offsets", "wanted"),
    [
        ([0, 5, 12], None, [0, 5, 12]),
        ([13, 2**30, 2**31 - 1], None, [12, 12, 12]),  # more than there are pages for
        ([-1, -(2**31), 1], None, [0, 0, 1]),
        (None, [0, 3, 3, 15], [3, 0, 12]),
        (None, [0, 2**30, 5, 2**31 - 1], [12, 0, 12]),  # long, decreasing, long
        ([5, 5, 2**30], [0, 3, 10, 2**30], [3, 5, 12]),  # the smaller one
        (None, None, [12, 12, 12]),
    ],
)
def test_lengths_never_leave_the_pages(used, offsets, wanted):
    """A length that is too large is a loop over keys that are not there, which ends after hours."""
    specs = [None if given is None else matrix("i32", 1) for given in (offsets, used)]
    module = trace(paged_span, matrix("i32", 2), *specs, matrix("i32", 1), arch="sm_80")
    found = np.full(len(wanted), -1, np.int32)
    given = [None if values is None else np.array(values, np.int32) for values in (offsets, used)]
    table = np.zeros((len(wanted), PAGES), np.int32)
    Machine(Program.of(module, target("sm_80")))(flat(table, *given, found), (len(wanted), 1, 1))
    assert found.tolist() == wanted


def tiles(q: fly.Tensor, k: fly.Tensor, out: fly.Tensor, lse: fly.Tensor, found: fly.Tensor, *, causal: bool):
    """found[block] = first row, first tile, full tiles, last tile, end of the keys of a block."""
    work = block_work((q, k, k, out, lse, None, None), head_dim=16, causal=causal, block_m=BLOCK_M, block_n=BLOCK_N)
    block = (fly.block_id.z * fly.grid_dim.x) + fly.block_id.x
    stop = work.keys.keys if work.keys.stop is None else work.keys.stop
    for i, value in enumerate((work.first_row, work.tiles.first, work.tiles.whole_end, work.tiles.end, stop)):
        found.store(value, block, i)


@functools.cache
def tiles_program(causal: bool) -> Program:
    specs = (matrix("bf16", 4), matrix("bf16", 4), matrix("f32", 5), matrix("f32", 4), matrix("i32", 2))
    return Program.of(trace(tiles, *specs, arch="sm_80", causal=causal), target("sm_80"))


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.integers(1, 100), st.integers(1, 200), st.integers(1, 7))
def test_the_splits_of_a_block_are_its_tiles(causal, queries, keys, splits):
    q, k = np.zeros((1, queries, 1, 16), np.int16), np.zeros((1, keys, 1, 16), np.int16)
    out, lse = np.zeros((splits, *q.shape), np.float32), np.zeros((splits, 1, 1, queries), np.float32)
    blocks = -(-queries // BLOCK_M)
    found = np.full((splits, blocks, 5), -1, np.int32)
    Machine(tiles_program(causal))(flat(q, k, out, lse, found.reshape(-1, 5)), (blocks, 1, splits))
    for of_block in found.transpose(1, 0, 2).tolist():
        row = of_block[0][0]
        assert row % BLOCK_M == 0 and {r for r, *_ in of_block} == {row}
        # what the last row of the block sees, and what all of its rows see
        seen = keys if not causal else max(0, min(keys, min(row + BLOCK_M, queries) + keys - queries))
        whole = keys if not causal else max(0, min(keys, row + 1 + keys - queries))
        ends = [0] + [last for _, _, _, last, _ in of_block]
        assert [first for _, first, *_ in of_block] == ends[:-1] and ends[-1] == -(-seen // BLOCK_N)
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        assert max(sizes) - min(sizes) <= 1
        for _, first, full, last, stop in of_block:
            assert full == min(max(whole // BLOCK_N, first), last)
            assert stop == min(last * BLOCK_N, keys)


def places(blocks: int, key_heads: int, group: int, sequences: int, xcds: int) -> list[tuple[int, int, int]]:
    """What each block works on, in the order in which hardware starts them."""
    shape = (blocks, key_heads * group, sequences)
    found = [shared_keys_place(i, shape, key_heads, xcds) for i in range(blocks * key_heads * group * sequences)]
    assert all(key_head == head // group for _, head, _, key_head in found)
    return [place[:3] for place in found]


grids = (st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))


@given(*grids)
def test_places_are_a_permutation_of_every_grid(blocks, key_heads, group, sequences, xcds):
    every = itertools.product(range(blocks), range(key_heads * group), range(sequences))
    assert sorted(places(blocks, key_heads, group, sequences, xcds)) == sorted(every)


@given(*grids)
def test_blocks_that_share_keys_are_on_one_die(blocks, key_heads, group, sequences, xcds):
    """When their groups divide among the dies; otherwise a group is on neighbours, no more than it needs."""
    dies: dict[tuple[int, int], set[int]] = {}
    for i, (_, head, sequence) in enumerate(places(blocks, key_heads, group, sequences, xcds)):
        dies.setdefault((sequence, head // group), set()).add(i % xcds)
    share = blocks * key_heads * group * sequences // xcds
    for on in dies.values():
        if key_heads * sequences % xcds == 0:
            assert len(on) == 1
        elif share:
            assert len(on) <= -(-(blocks * group) // share) + 1
            assert sorted(on) == list(range(min(on), max(on) + 1))


@given(*grids)
def test_a_die_takes_the_blocks_of_a_group_in_order(blocks, key_heads, group, sequences, xcds):
    """So that causal attention, which counts blocks from the last, starts each group's longest blocks first."""
    last: dict[tuple, int] = {}
    for i, (block, head, sequence) in enumerate(places(blocks, key_heads, group, sequences, xcds)):
        key = (i % xcds, sequence, head // group)
        assert last.get(key, 0) <= block
        last[key] = block


@pytest.mark.parametrize("folded", [False, True])
def test_places_of_traced_blocks(folded):
    """The same in a kernel, for every block of a grid."""
    shape, key_heads, xcds = (3, 6, 4), 3, 8

    def body(out: fly.Tensor):
        linear = fly.block_id.x
        place = shared_keys_place(linear, tuple(fly.i32(n) for n in shape), fly.i32(key_heads), xcds, folded=folded)
        for i, value in enumerate(place):
            out.store(value, linear, i)

    out = np.full((72, 4), -1, np.int32)
    Machine(Program.of(trace(body, matrix("i32", 2)), target("gfx950")))(flat(out), (72, 1, 1))
    assert [tuple(row) for row in out.tolist()] == [shared_keys_place(i, shape, key_heads, xcds) for i in range(72)]
