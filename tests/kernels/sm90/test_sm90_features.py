"""Features on the Hopper kernel, without one: which key tiles its blocks walk, and what happens to a tile's scores.

Run in numpy as traced; `tests/kernels/problem/test_features_gpu.py` has the results of whole calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import target
from kernels.problem.contract import Request
from kernels.problem.features import Features
from kernels.problem.mask import KeyRange
from kernels.problem.mods import Mod
from kernels.problem.scores import LOG2_E
from kernels.sm90.builds import build_for, keys_seen
from kernels.sm90.producer import entry_of
from kernels.sm90.schedule import Schedule, query_of
from tests.kernels.feature_reference import Scores, Span
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

SM90 = target("sm_90a")
FIELDS = ("batch", "head", "first_row", "split", "q_first", "k_first", "entry", "first", "whole", "full", "last")
LENGTHS = ("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx")


@dataclass(frozen=True)
class Counting(Schedule):
    """One block, which takes every so many numbers: the next one, and how many, are in plain memory."""

    def take(self) -> fly.Value:
        number = self.counters.load(0)
        self.counters.store(number + self.counters.load(1), 0)
        return number


def walk(
    out: fly.Tensor,
    counters: fly.Tensor,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
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
    """Every tile that a lone block finds, one a row of `out`, with the lengths after `FIELDS`."""
    schedule = Counting(
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
        heads=heads,
        batch=batch,
        splits=splits,
        section=heads,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        counters=counters,
        causal=causal,
        block_m=block_m,
        block_n=block_n,
        given=features.bind(operands),
    )
    carry = (schedule.find(schedule.take()), fly.i32(0))
    for work, row in (tiles := fly.while_(carry, lambda c: c[0].exists)):
        numbers = (work.batch, work.head, work.first_row, work.part)
        numbers += (work.queries.start, work.kv.start, entry_of(work.kv))
        numbers += (work.tiles.first, work.tiles.whole_from, work.tiles.whole_end, work.tiles.end)
        for i, number in enumerate((*numbers, work.keys.queries, work.keys.keys, work.keys.stop)):
            out.store(number if isinstance(number, fly.Value) else fly.i32(number), row, i)
        tiles.next(schedule.find(schedule.take(), work), row + 1)


@dataclass(frozen=True)
class Problem:
    """Sequences of a launch: what they have, and what counts."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    packed: bool
    causal: bool
    splits: int
    heads: int
    left: int | None
    right: int | None
    lengths: dict[str, tuple[int, ...]]
    dense_keys: bool = False  # packed queries of a (B, Skv, Hkv, D) cache
    before: int = 0  # packed queries before the first sequence's

    @property
    def packed_keys(self) -> bool:
        return self.packed and not self.dense_keys

    @property
    def features(self) -> Features:
        sides = {"window_left": self.left, "window_right": self.right}
        return Features((*self.lengths, *(name for name, side in sides.items() if side is not None)))

    def in_use(self, b: int) -> tuple[int, int, int]:
        """(queries, first key, keys) of a sequence that count."""

        def cut(name: str, length: int) -> int:
            return min(max(self.lengths[name][b], 0), length) if name in self.lengths else length

        keys = cut("seqused_kv", self.keys[b])
        skipped = cut("cache_leftpad", keys) if "cache_leftpad" in self.lengths else 0
        return cut("seqused_q", self.queries[b]), skipped, keys - skipped

    def sees(self, b: int) -> np.ndarray:
        """(queries, keys) that count: whether one sees the other."""
        queries, _, keys = self.in_use(b)
        position = np.arange(queries)[:, None] + keys - queries
        key = np.arange(keys)[None]
        seen = np.ones((queries, keys), bool)
        right = 0 if self.causal else self.right
        if self.left is not None:
            seen &= key >= position - self.left
        if right is not None:
            seen &= key <= position + right
        return seen

    def tiles(self, block_m: int, block_n: int, first: int = 0, blocks: int = 1) -> np.ndarray:
        """What `walk` finds, of every number or as one of several `blocks` that take turns, from the `first` on."""
        i32 = np.int32
        sides = ((self.queries, self.packed), (self.keys, self.packed_keys))
        offsets = [np.cumsum((0, *x), dtype=i32) if packed else None for x, packed in sides]
        if self.packed:
            offsets[0] += i32(self.before)
        operands = [np.array(x, i32) for x in self.lengths.values()]
        window = [x for x in (self.left, self.right) if x is not None]
        total = [sum(x) if packed else x[0] for x, packed in sides]
        total[0] += self.before
        numbers = (*total, self.heads, len(self.queries), self.splits)
        optional = [None if x is None else matrix("i32") for x in offsets]
        specs = [matrix("i32", 2), matrix("i32"), *optional, *["i32"] * 5, *[matrix("i32")] * len(operands)]
        statics = {"features": self.features, "causal": self.causal, "block_m": block_m, "block_n": block_n}
        module = trace(walk, *specs, *["i32"] * len(window), arch="sm_90a", block=1, **statics)
        out = np.full((4096, len(FIELDS) + 3), -7, i32)
        given = flat(out, np.array((first, blocks, 0, 0), i32), *offsets, *numbers, *operands, *window)
        Machine(Program.of(module, SM90))(given, (1, 1, 1))
        return out[: int((out[:, 0] != -7).sum())]


def some(maximum: int, minimum: int = 0):
    return st.integers(minimum, maximum)


@st.composite
def problems(draw) -> Problem:
    """Small ones; block sizes are small too."""
    batch, packed = draw(some(3, 1)), draw(st.booleans())
    size = batch if packed else 1
    queries, keys = (tuple(draw(some(40)) for _ in range(size)) for _ in range(2))
    dense_keys = packed and draw(st.booleans())
    if dense_keys:
        keys = keys[:1] * batch
    if not packed:
        queries, keys = (max(1, queries[0]),) * batch, keys * batch
    names = [n for n in LENGTHS[: 2 if packed and not dense_keys else 4] if draw(st.booleans())]
    lengths = {n: tuple(draw(some(50, -3)) for _ in range(batch)) for n in names}
    causal = draw(st.booleans())
    sides = [draw(st.none() | some(30)) for _ in range(2)]
    heads, splits = draw(some(2, 1)), draw(some(3, 1))
    window = (sides[0], None if causal else sides[1])
    return Problem(queries, keys, packed, causal, splits, heads, *window, lengths, dense_keys)


@settings(max_examples=25, deadline=None)
@given(problem=problems(), block_m=st.sampled_from([4, 16]), block_n=st.sampled_from([4, 8]))
def test_tiles_cover_what_is_seen_once_and_need_no_mask_where_they_say_so(problem, block_m, block_n):
    covered = {
        (b, h): np.zeros(problem.sees(b).shape, int) for b in range(len(problem.keys)) for h in range(problem.heads)
    }
    rows = set()
    for found in problem.tiles(block_m, block_n):
        tile = dict(zip(FIELDS, found.tolist()))
        queries, keys, stop = found[len(FIELDS) :].tolist()
        b, h = tile["batch"], tile["head"]
        used, skipped, count = problem.in_use(b)
        starts = (
            sum(problem.queries[:b]) if problem.packed else 0,
            sum(problem.keys[:b]) if problem.packed_keys else 0,
        )
        assert (queries, keys) == (used, count)
        assert (tile["q_first"], tile["k_first"]) == (starts[0], starts[1] + skipped)
        entry = problem.lengths["kv_batch_idx"][b] if "kv_batch_idx" in problem.lengths else b
        assert tile["entry"] == (0 if problem.packed_keys else entry)
        assert tile["first"] < tile["last"] and tile["first"] <= tile["whole"] and tile["full"] <= tile["last"]
        first = tile["first_row"]
        assert 0 <= first < queries
        assert (b, h, first, tile["split"]) not in rows
        rows.add((b, h, first, tile["split"]))
        sees = problem.sees(b)[first : first + block_m]
        masked = sees.copy()
        masked[:, stop:] = False
        begin, end = tile["first"] * block_n, tile["last"] * block_n
        covered[b, h][first : first + block_m, begin:end] += masked[:, begin:end]
        whole = slice(max(tile["whole"], tile["first"]) * block_n, tile["full"] * block_n)
        assert whole.stop <= whole.start or (whole.stop <= min(stop, keys) and sees[:, whole].all())
    for (b, _), counts in covered.items():
        assert (counts == problem.sees(b)).all()
    if not problem.packed and "seqused_q" not in problem.lengths:
        blocks = -(-problem.queries[0] // block_m)
        assert len(rows) == blocks * problem.heads * len(problem.queries) * problem.splits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [{}, {"seqused_q": (5, 0, 0, 17, 1, 0)}], ids=["all", "in use"])
@pytest.mark.parametrize(("before", "blocks"), [(0, 1), (40, 1), (0, 5)])
def test_packed_tiles_are_never_empty(causal, lengths, before, blocks):
    """Sequences have more slots than blocks: those left over, before a sequence's first row or behind its last one,
    are no tiles. What such a tile would write is another sequence's. Several blocks leave none out."""
    queries, keys, block_m = (5, 0, 0, 33, 1, 16), (40, 7, 0, 20, 9, 3), 16
    problem = Problem(queries, keys, True, causal, 1, 2, None, None, lengths, before=before)
    rows = [row for first in range(blocks) for row in problem.tiles(block_m, 8, first, blocks)]
    found = [dict(zip((*FIELDS, "queries"), row.tolist())) for row in rows]
    used = lengths.get("seqused_q", queries)
    wanted = {(b, h, first) for b, n in enumerate(used) for h in range(2) for first in range(0, n, block_m)}
    assert {(tile["batch"], tile["head"], tile["first_row"]) for tile in found} == wanted
    assert len(found) == len(wanted) and all(tile["queries"] == used[tile["batch"]] for tile in found)


KEYS = 32


def modified(
    out: fly.Tensor,
    scores: fly.Tensor,
    first_row: fly.i32,
    first_key: fly.i32,
    queries: fly.i32,
    keys: fly.i32,
    *operands: fly.Operand,
    features: Features,
    pack: int,
):
    """A warpgroup's 64 x KEYS scores, modified and masked, for head set 1 of sequence 1; `pack` rows a query."""
    layout = fly.AccumulatorLayout(WarpgroupAtom(KEYS, "bf16"), "m")
    rows = fly.RowVector.full(layout, 1, 0.0).rows()
    head = rows.map(lambda row: row % pack + pack) if pack > 1 else fly.i32(1)
    given = features.bind(operands)
    keys_seen = KeyRange(queries, keys, False, left=given.get("window_left"), right=given.get("window_right"))
    place = SimpleNamespace(batch=fly.i32(1), head=head, keys=keys_seen, split=False)
    zeros = fly.Fragment.zeros(layout, 1, 1)
    places = [(row, column + i) for row, column, values in zeros.runs() for i in range(values.length)]
    elements = fly.from_elements([scores.load(*place) for place in places])
    numbers = rows.map(lambda row: query_of(row + first_row, pack))
    fragment = fly.Fragment(layout, ((elements,),))
    fragment = given.at(place).modify(fragment, fly.f32(LOG2_E), numbers, first_key, place)
    fragment = given.mask(keys_seen.apply(fragment, numbers, first_key), numbers, first_key, place)
    ((values,),) = fragment.tiles
    for value, at in zip(values, places):
        out.store(value, *at)
    sinks = given.sink(place)
    if sinks is not None:
        for row, sink in zip(rows.values[0], (sinks if pack > 1 else rows.map(lambda _: sinks)).values[0]):
            out.store(sink, row, KEYS)


def shifted(score, batch, head, query, key, table):
    """Of all five arguments and a tensor."""
    return score * 0.5 + table[head, key] + table[batch, query]


def pattern(batch, head, query, key, table):
    """Another one for each head."""
    return (key + query + head + batch) % 3 != 0


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize(
    "names",
    [("softcap",), ("alibi_slopes",), ("bias",), ("sink",), ("window_left",), ("window_left", "window_right"), ()],
    ids=lambda names: "+".join(names) or "functions",
)
def test_scores_of_packed_heads_are_those_of_their_heads(names, pack):
    rng = np.random.default_rng(7)
    heads, queries, keys, first_row, first_key = 2 * pack, 50, 60, 8 * pack, 32
    f32 = np.float32
    operands = {
        "window_left": 9,
        "window_right": 4,
        "softcap": 1.5,
        "alibi_slopes": rng.normal(size=(2, heads)).astype(f32),
        "bias": rng.normal(size=(2, heads, queries, keys)).astype(f32),
        "sink": rng.normal(size=heads).astype(f32),
    }
    table = rng.normal(size=(heads, keys)).astype(f32)
    mods = {} if names else {"score_mod": Mod.of(shifted), "mask_mod": Mod.of(pattern)}
    aux = [] if names else [table]
    values = [operands[name] for name in names] + aux
    specs = [matrix("f32", v.ndim) if isinstance(v, np.ndarray) else "f32" if v == 1.5 else "i32" for v in values]
    statics = {"features": Features(names, **mods), "pack": pack}
    module = trace(
        modified, matrix("f32", 2), matrix("f32", 2), *["i32"] * 4, *specs, arch="sm_90a", block=128, **statics
    )
    scores, out = rng.normal(size=(64, KEYS)).astype(f32), np.full((64, KEYS + 1), 9.0, f32)
    Machine(Program.of(module, SM90))(flat(out, scores, first_row, first_key, queries, keys, *values), (1, 1, 1))

    # what the reference says of these heads' whole scores, cut to the tile
    sides = tuple(operands[n] if n in names else -1 for n in ("window_left", "window_right"))
    torch_of = {n: torch.from_numpy(operands[n]) for n in ("alibi_slopes", "bias") if n in names}
    functions = (
        {} if names else {"score_mod": shifted, "mask_mod": pattern, "aux_tensors": (torch.from_numpy(table),)}
    )
    softcap = 1.5 if "softcap" in names else 0.0
    reference = Scores(False, 1.0, sides, softcap=softcap, **torch_of, **functions)
    for row in range(64):
        query, head = (first_row + row) // pack, (row % pack + pack if pack > 1 else 1)
        if query >= queries:
            continue
        whole = torch.zeros(heads, queries, keys)
        inside = min(keys - first_key, KEYS)
        whole[head, query, first_key : first_key + inside] = torch.from_numpy(scores[row, :inside])
        # keys that are unit vectors make the queries the scores
        span = Span(1, (), torch.eye(keys)[:, None].expand(keys, heads, keys), torch.zeros(keys, heads, 1))
        wanted = reference.of(whole, span, slice(head, head + 1), slice(query, query + 1))[0, 0]
        np.testing.assert_allclose(out[row, :inside], wanted[first_key : first_key + inside], 2e-5, 2e-5)
        assert (out[row, inside:KEYS] == -np.inf).all()
        if "sink" in names:
            assert out[row, KEYS] == operands["sink"][head]


def test_a_window_leaves_few_keys_to_split():
    asked = Features(("seqused_kv", "window_left", "sink"))
    request = Request(
        128, "bf16", True, True, False, 1, 4, 131072, 64, 8, 1.0, num_kv_splits=0, static_features=asked
    )
    assert keys_seen(request, {"seqused_kv": "counts", "window_left": 256, "sink": "sinks"}) == 260
    assert keys_seen(replace(request, static_features=Features()), {}) == 131072
    assert build_for(request, 132)[1] > 4 >= build_for(replace(request, seq_len_kv=260), 132)[1]


def test_builds_have_the_features_asked_for_and_smaller_tiles_where_scores_have_code_of_their_own():
    asked = Features(("window_left", "sink"))
    request = Request(128, "bf16", True, False, True, 2, 4096, 4096, 16, 16, 1.0, static_features=asked)
    options, _ = build_for(request, 132)
    assert options.features == asked and options.block_n > 64
    functions = {"score_mod": Mod.of(shifted)}, {"mask_mod": Mod.of(pattern)}
    for asked in (Features(("bias", "sink")), *(Features(("sink",), **function) for function in functions)):
        for seq_len in (4096, 1):
            options, _ = build_for(replace(request, seq_len=seq_len, static_features=asked), 132)
            assert options.block_n == 64 and options.features == asked
