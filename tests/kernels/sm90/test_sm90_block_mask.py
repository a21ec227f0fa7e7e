"""Block-sparse masks on the Hopper kernel, without one: which key tiles its blocks walk, and with which build.

`tests/kernels/problem/test_block_mask_gpu.py` has the results of whole calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from fly.errors import ShapeError, UnsupportedError
from kernels import dispatch
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from kernels.sm90.builds import DECODE_ROWS, Sm90Options, build_for, options_of, section_for
from kernels.sm90.schedule import STOP
from kernels.sm90.tiles import TILES
from kernels.work.tile_list import PARTIAL, WHOLE
from tests.kernels.feature_cases import stripes
from tests.kernels.sm90.hopper_stub import UNITS
from tests.kernels.sm90.test_sm90_builds import request
from tests.kernels.sm90.test_sm90_features import Counting, some
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

FIELDS = ("batch", "head", "first_row", "split", "first", "partial", "last", "seen_first", "seen_end")
DIMS = sorted({row[:2] for row in TILES})


def walk(
    out: fly.Tensor,
    found: fly.Tensor,
    counters: fly.Tensor,
    seq_len: fly.i32,
    seq_len_kv: fly.i32,
    heads: fly.i32,
    batch: fly.i32,
    splits: fly.i32,
    *operands: fly.Operand,
    features: Features,
    causal: bool,
    block_m: int,
    block_n: int,
):
    """Every tile that a lone block finds, one a row of `out`, and of `found` the key tiles that its steps take.

    What consumers make of the numbers that a producer publishes is stored, not what the producer knows.
    """
    schedule = Counting(
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        heads=heads,
        batch=batch,
        splits=splits,
        section=heads,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        counters=counters,
        causal=causal,
        block_m=block_m,
        block_n=block_n,
        given=features.bind(operands),
    )
    carry = (schedule.find(schedule.take()), fly.i32(0))
    for work, row in (tiles := fly.while_(carry, lambda c: c[0].exists)):
        place = (work.batch, work.head, work.first_row, work.part)
        steps = (work.tiles.first, work.tiles.whole_end, work.tiles.end)
        read = schedule.work(place, work.queries, work.kv, steps)
        steps = (read.tiles.first, read.tiles.whole_end, read.tiles.end)
        for i, number in enumerate((*place, *steps, read.seen.whole_from, read.seen.whole_end)):
            out.store(number if isinstance(number, fly.Value) else fly.i32(number), row, i)
        for step in fly.range(work.tiles.first, work.tiles.end):
            found.store(work.listed.tile(step), row, step - work.tiles.first)
        tiles.next(schedule.find(schedule.take()), row + 1)
    # other blocks than the last one to end take numbers further past the launch's end
    for more in (1, 700):
        out.store(schedule.find(schedule.total + more).batch, fly.i32(511), 0)


def lists_of(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, indices) of key blocks, in order; what is behind them is a block as well."""
    indices = np.zeros(flags.shape, np.int32)
    for place in np.ndindex(flags.shape[:-1]):
        listed = np.flatnonzero(flags[place])
        indices[place][: len(listed)] = listed
    return flags.sum(-1).astype(np.int32), indices


@dataclass(frozen=True)
class Problem:
    """A launch with lists; `kinds`, (B, H, query blocks, key blocks): 0 hidden, 1 seen in part, 2 whole."""

    queries: int
    keys: int
    size: tuple[int, int]
    kinds: np.ndarray
    with_whole: bool
    causal: bool
    left: int | None
    used: tuple[int, ...] | None
    splits: int

    def count(self, b: int) -> int:
        """Keys of a sequence that count."""
        return self.keys if self.used is None else min(max(self.used[b], 0), self.keys)

    def run(self, block_m: int, block_n: int) -> tuple[np.ndarray, np.ndarray]:
        """What `walk` stores."""
        partial = self.kinds == 1 if self.with_whole else self.kinds > 0
        lists = [*lists_of(partial), *(lists_of(self.kinds == 2) if self.with_whole else ())]
        return self.walked(lists, block_m, block_n)

    def walked(self, lists: list[np.ndarray], block_m: int, block_n: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of these lists."""
        batch, heads = self.kinds.shape[:2]
        names = ["seqused_kv"] * (self.used is not None) + ["window_left"] * (self.left is not None)
        operands = [np.array(self.used, np.int32)] if self.used is not None else []
        operands += [self.left] if self.left is not None else []
        names += [*PARTIAL, *(WHOLE if self.with_whole else ())]
        operands += lists
        features = Features(tuple(names), mask_mod=Mod.of(stripes), block_size=self.size)
        specs = [matrix("i32", x.ndim) if isinstance(x, np.ndarray) else "i32" for x in operands]
        statics = {"features": features, "causal": self.causal, "block_m": block_m, "block_n": block_n}
        results = [matrix("i32", 2), matrix("i32", 2), matrix("i32")]
        module = trace(walk, *results, *["i32"] * 5, *specs, arch="sm_90a", block=1, **statics)
        out, found = np.full((512, len(FIELDS)), -7, np.int32), np.full((512, 64), -7, np.int32)
        sizes = (self.queries, self.keys, heads, batch, self.splits)
        machine = Machine(Program.of(module, target("sm_90a")))
        every_number = np.array((0, 1, 0, 0), np.int32)  # as of `Counting`
        machine(flat(out, found, every_number, *sizes, *operands), (1, 1, 1))
        assert out[511, 0] == STOP
        rows = int((out[:, 0] >= 0).sum())
        return out[:rows], found[:rows]


@st.composite
def problems(draw) -> Problem:
    """Small ones; sizes are small too."""
    queries, keys = draw(some(40, 1)), draw(some(60, 1))
    size = draw(st.sampled_from([(8, 8), (16, 8), (8, 24)]))
    batch, heads = draw(some(2, 1)), draw(some(2, 1))
    shape = (batch, heads, -(-queries // size[0]), -(-keys // size[1]))
    hidden = draw(st.sampled_from([0.2, 0.7]))
    kinds = np.random.default_rng(draw(some(1000))).choice(3, shape, p=[hidden, *[(1 - hidden) / 2] * 2])
    left = draw(st.none() | some(30))
    used = draw(st.none() | st.just(tuple(draw(some(70, -3)) for _ in range(batch))))
    return Problem(queries, keys, size, kinds, draw(st.booleans()), draw(st.booleans()), left, used, draw(some(5, 1)))


def sees(problem: Problem, b: int) -> np.ndarray:
    """(queries, keys): what lengths, causality and windows leave of the keys."""
    keys = problem.count(b)
    position = np.arange(problem.queries)[:, None] + keys - problem.queries
    key = np.arange(problem.keys)[None]
    seen = np.broadcast_to(key < keys, (problem.queries, problem.keys)).copy()
    if problem.causal:
        seen &= key <= position
    if problem.left is not None:
        seen &= key >= position - problem.left
    return seen


@settings(max_examples=25, deadline=None)
@given(problem=problems(), block_m=st.sampled_from([4, 8]), block_n=st.sampled_from([4, 8]))
def test_steps_are_the_tiles_of_listed_blocks_whole_ones_first(problem, block_m, block_n):
    walked = {}
    for place, numbers in zip(*problem.run(block_m, block_n)):
        tile = dict(zip(FIELDS, place.tolist()))
        b, row = tile["batch"], tile["first_row"]
        seen, end = sees(problem, b), -(-problem.count(b) // block_n)
        assert tile["first"] < tile["last"]
        kept = walked.setdefault((b, tile["head"], row), [])
        for step in range(tile["first"], tile["last"]):
            key_tile = int(numbers[step - tile["first"]])
            assert 0 <= key_tile <= end  # the one past all keys is masked whole
            kept.append((key_tile, step >= tile["partial"]))
            if tile["seen_first"] <= key_tile < tile["seen_end"]:
                columns = slice(key_tile * block_n, (key_tile + 1) * block_n)
                assert columns.stop <= problem.keys and seen[row : row + block_m, columns].all()
        assert (numbers[tile["last"] - tile["first"] :] == -7).all()
    rows, keys = problem.size
    blocks = -(-problem.queries // block_m)
    assert len(walked) == problem.kinds.shape[0] * problem.kinds.shape[1] * blocks
    for (b, h, row), kept in walked.items():
        kinds = problem.kinds[b, h, row // rows]
        end = -(-problem.count(b) // block_n)
        wanted = [
            (block * (keys // block_n) + i, partial)
            for partial in (False, True)
            for block, kind in enumerate(kinds)
            if kind and partial == (kind == 1 or not problem.with_whole)
            for i in range(keys // block_n)
        ]
        assert [x for x in sorted(kept) if x[0] < end] == [x for x in sorted(wanted) if x[0] < end]


def test_lists_that_are_wrong_stay_inside():
    """Numbers and indices that no list has are cut; the simulator faults on any access outside of the tensors."""
    kinds = np.zeros((1, 2, 2, 3), int)
    problem = Problem(10, 20, (8, 8), kinds, True, False, None, None, 2)
    indices = np.full((1, 2, 2, 3), 2**20, np.int32)
    indices[..., 0] = -7
    for count, whole in ((1000, -1000), (-1000, 1000), (2, 3)):
        numbers = [np.full((1, 2, 2), n, np.int32) for n in (count, whole)]
        out, found = problem.walked([numbers[0], indices, numbers[1], indices], 8, 4)
        assert len(out) == 2 * 2 * 2
        assert ((found == -7) | ((found >= 0) & (found <= 5))).all()


def listed(size=(128, 128), *names: str, **functions) -> Features:
    """A call's features with a block mask."""
    return Features((*names, *PARTIAL, *WHOLE), mask_mod=Mod.of(stripes), block_size=size, **functions)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (192, 320), (256, 64)], ids=str)
def test_builds_divide_blocks(dims, causal, size):
    for seq_len in (4096, 100, 1):
        asked = request(seq_len, 4096, 64, 8, 2, head_dim=dims[0], head_dim_v=dims[1], causal=causal)
        options, _ = build_for(replace(asked, static_features=listed(size)), UNITS)
        assert size[0] % options.block_m == 0 and size[1] % options.block_n == 0
        assert options.block_n >= (64 if seq_len > DECODE_ROWS else 32)
        assert options.pack_gqa == 1 and options.stages >= 2
        assert options.tile_bytes + 2048 <= target("sm_90a").shared_bytes


def test_whole_blocks_keep_wide_tiles():
    """Functions for every tile take 64 keys; one for partial blocks alone does not."""
    long = request(4096, 4096, 16, 16, 4)
    wanted = {
        listed(): (2, 128, 2, 2),
        listed((128, 64)): (2, 64, 4, 2),
        listed((64, 128)): (1, 128, 2, 2),
        listed((128, 128), "bias"): (2, 64, 4, 2),
        listed(score_mod=Mod.of(stripes)): (2, 64, 4, 2),
    }
    for features, fields in wanted.items():
        options, _ = build_for(replace(long, static_features=features), UNITS)
        assert (options.consumers, options.block_n, options.stages, options.q_stages) == fields


def test_lists_are_taken_to_differ_in_length():
    options = Sm90Options(128, 128, False, 2, 128, 2, 1)
    full, lists = (
        section_for(request(4096, 4096, 16, 16, 4, causal=False, static_features=asked), options)
        for asked in (Features(), listed())
    )
    assert (full, lists) == (1, 16)


def test_builds_that_cannot_walk_lists_are_refused():
    options = Sm90Options(128, 128, False, 2, 128, 2, 1, features=listed())
    for changes, message in (
        ({"pack_gqa": 2}, r"pack_gqa is 2 and consumers 2; expected 1, and 1 or 2 with a block mask"),
        ({"consumers": 3}, r"pack_gqa is 1 and consumers 3; expected 1, and 1 or 2 with a block mask"),
        ({"block_n": 96}, r"blocks of 128 x 128 do not divide into tiles of 128 x 96"),
        ({"features": listed((64, 128))}, r"blocks of 64 x 128 do not divide into tiles of 128 x 128"),
    ):
        with pytest.raises(ShapeError, match=message):
            replace(options, **changes)
    assert (
        options.registers == replace(options_of((128, 128, True, 2, None)), features=listed(), block_n=128).registers
    )


def test_the_paths_of_block_masks(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    asked = request(4096, 4096, features=("block_mask",))
    for size, kernel in (((128, 128), "sm90"), ((64, 192), "sm90"), ((32, 64), "generic"), ((128, 32), "generic")):
        assert dispatch.choose("sm_90a", replace(asked, static_features=listed(size))).name == kernel
    monkeypatch.setenv("FLY_KERNEL", "sm90")
    message = (
        r"the sm90 kernel takes a block_mask whose BLOCK_SIZE is a multiple of \(64, 64\), not \(32, 64\): build it "
        "with such blocks, or pass its mask_mod as mask_mod"
    )
    with pytest.raises(UnsupportedError, match=message):
        dispatch.choose("sm_90a", replace(asked, static_features=listed((32, 64))))
