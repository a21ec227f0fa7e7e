"""Which build of the Hopper kernel serves what: packed heads, decoding, key splits; and where packed rows lie."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fly
from fly.backends.target import target
from fly.errors import ShapeError
from kernels import flash_attn_sm90
from kernels.problem.catalogue import BY_NAME
from kernels.problem.contract import HEAD_DIMS, Request
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from kernels.sm90.builds import (
    DECODE_ROWS,
    PACKS,
    Sm90Options,
    build_for,
    decode_options,
    options_of,
    packed_heads,
    rows_for,
    section_for,
    visited,
)
from kernels.sm90.cost import decode_splits
from kernels.sm90.counters import MAX_ARRIVALS
from kernels.sm90.schedule import PackedRows, PackedVector, query_of
from kernels.sm90.tiles import TILES
from kernels.work.tile_scheduler import MAX_SPLITS
from tests.kernels.sm90 import hopper_stub
from tests.kernels.sm90.hopper_stub import UNITS
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

DIMS = sorted({row[:2] for row in TILES if row[3] == 1})
groups = st.integers(1, 128)


def request(seq_len=1, seq_len_kv=4096, heads=64, kv_heads=8, batch=1, **changes) -> Request:
    """A decoding call, or a change of it."""
    dims = {"head_dim": 128, "dtype": "bf16", "causal": True, "cross_seqlen": True, "return_lse": False}
    lengths = {"seq_len": seq_len, "seq_len_kv": seq_len_kv, "batch": batch}
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "softmax_scale": 1.0, "num_kv_splits": 0}
    return Request(**dims | lengths | sizes | changes)


TWO = Sm90Options(128, 128, False, 2, 128, 2, 1)


def square(head_dim: int, length: int, causal: bool, **changes) -> Request:
    """A call of as many queries as keys, on many heads."""
    dims = {"head_dim": head_dim, "causal": causal, "num_kv_splits": 1}
    return request(length, length, 32, 32, 8, **dims | changes)


@pytest.mark.parametrize(
    ("call", "blocks"),
    [
        (square(104, 1024, False), 2),  # six tiles of 192 queries
        (square(104, 2048, False), 1),  # eleven
        (square(72, 1024, True), 2),
        (square(72, 4096, True), 1),  # past the row's end
        (square(104, 4100, True), 1),  # between causal rows' lengths
        (square(216, 16384, False), 2),
        (square(200, 4096, True), 2),
        (square(80, 1024, False), 1),  # rows are whole sectors
        (square(64, 1024, False), 1),
        (square(104, 1024, False, features=("softcap",), static_features=Features(("softcap",))), 1),
        (square(104, 1024, False, num_kv_splits=2), 1),
        (replace(square(104, 1024, False), seq_len_kv=2048), 1),
        (replace(square(104, 1024, False), batch=1, num_heads=8, num_kv_heads=8), 1),  # 48 tiles
    ],
)
def test_which_calls_two_blocks_load_the_keys_of_together(call, blocks):
    options, _ = build_for(call, UNITS)
    assert options.blocks == blocks
    assert options.boxes[1][1] == options.block_n // blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": 3}, "blocks is 3; expected 1 or 2"),
        ({"blocks": 2, "block_n": 120}, "blocks is 2 with tiles of 120 keys .* or parts of a multiple of 8 keys"),
        ({"blocks": 2, "features": Features(("softcap",))}, "expected 1, or .* no features"),
    ],
)
def test_what_no_two_blocks_share(fields, message):
    with pytest.raises(ShapeError, match=message):
        replace(TWO, **fields)


@pytest.mark.parametrize(
    ("group", "seq_len", "wanted"),
    [
        (8, 1, 8),
        (1, 1, 1),
        (7, 1, 1),
        (6, 1, 2),  # three sets of a key head
        (24, 1, 8),
        (128, 3, 64),
        (8, 64, 8),
        (8, 100, 8),  # 7 tiles instead of 8
        (8, 128, 1),  # nothing to gain
        (8, 200, 8),
        (4, 300, 4),
        (8, 512, 1),
        (8, 8192, 1),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_heads_are_packed_where_that_saves_tiles(group, seq_len, causal, wanted):
    assert packed_heads(group, seq_len, 16384, causal, TWO) == wanted


@pytest.mark.parametrize(
    ("causal", "seq_len", "wanted"), [(True, 512, 8), (True, 8192, 8), (True, 65536, 1), (False, 512, 1)]
)
def test_heads_are_packed_where_that_saves_keys(causal, seq_len, wanted):
    """512 queries: 1, 2, 3 and 4 tiles of 160 keys for 128 of them; one after the other for 16 of them."""
    assert packed_heads(8, seq_len, seq_len, causal, replace(TWO, block_n=160)) == wanted


@given(st.integers(1, 300), st.integers(0, 500), st.booleans(), st.integers(1, 200), st.integers(1, 200))
def test_visited_tiles(seq_len, seq_len_kv, causal, queries, block_n):
    """Those with a key that a query of the tile sees, and at least one, in which nothing is seen."""
    wanted = 0
    for first in range(0, seq_len, queries):
        last = min(first + queries, seq_len) - 1
        keys = [key for key in range(seq_len_kv) if not causal or key <= last + seq_len_kv - seq_len]
        wanted += max(1, len({key // block_n for key in keys}))
    assert visited(seq_len, seq_len_kv, causal, queries, block_n) == wanted


@given(groups, st.integers(1, 3000), st.integers(0, 3000), st.booleans(), st.sampled_from([64, 128, 192]))
def test_packed_heads_share_a_key_head_and_never_cost_tiles(group, seq_len, seq_len_kv, causal, block_m):
    pack = packed_heads(group, seq_len, seq_len_kv, causal, replace(TWO, consumers=block_m // 64))
    assert pack in PACKS and group % pack == 0
    plain, packed = (visited(seq_len, seq_len_kv, causal, block_m // p, 128) for p in (1, pack))
    assert packed <= plain * pack


def test_packs_that_no_tile_holds_are_refused():
    with pytest.raises(ShapeError, match=r"pack_gqa is 3; expected one of 1, 2, 4, 8, 16, 32, 64"):
        Sm90Options(128, 128, False, 1, 128, 2, 1, pack_gqa=3)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_the_boxes_are_the_tiles(pack, consumers):
    options = Sm90Options(128, 128, False, consumers, 96, 2, 1, pack_gqa=pack)
    q, k, v = options.boxes
    assert q[0] == q[2] == 1 and q[1:] == ((options.queries, 1, pack, 64) if pack > 1 else (64 * consumers, 1, 64))
    assert options.queries * pack == options.block_m
    assert k == v == (1, 96, 1, 64)


@pytest.mark.parametrize(
    ("dims", "wide"),
    [
        *(((8, 8), (64, 64)), ((40, 72), (96, 96)), ((88, 88), (96, 96)), ((96, 128), (128, 128))),
        *(((168, 128), (192, 128)), ((192, 8), (192, 128)), ((168, 168), (192, 192)), ((8, 200), (256, 256))),
    ],
)
def test_head_dimensions_between_rows_have_the_builds_of_wider_ones(dims, wide):
    asked = (Features(), Features(operands=("bias",)))
    for (seq_len, heads), features in itertools.product(((5000, 64), (300, 1)), asked):
        call = request(seq_len, 5000, heads, heads, static_features=features)
        mine, like = (build_for(replace(call, head_dim=d, head_dim_v=dv), UNITS)[0] for d, dv in (dims, wide))
        assert mine == replace(like, head_dim=dims[0], head_dim_v=dims[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "early"), [(64, False), (96, False), (104, True), (128, True), (256, False)])
def test_dropout_decides_early_where_scores_take_as_long(head_dim, early, causal):
    dropping = Features(("rng_state", "dropped", "query_heads"))
    changes = {"head_dim": head_dim, "causal": causal, "static_features": dropping, "features": ("dropout",)}
    options, _ = build_for(request(4096, 4096, 16, 16, 4, **changes), UNITS)
    assert options.decides_early is early
    if early:
        assert (options.consumers, options.block_n) == (2, 128)


def test_head_dimensions_that_no_row_is_wide_enough_for():
    with pytest.raises(LookupError, match=r"table has no \(264, 8, True\) for 5000 keys"):
        build_for(request(5000, 5000, head_dim=264, head_dim_v=8), UNITS)


def test_every_head_dimension_fits_shared_memory():
    """In all rows that are for it, and in decoding."""
    for dims, causal in itertools.product(itertools.product(HEAD_DIMS, repeat=2), (True, False)):
        rows = [replace(options_of(row), head_dim=dims[0], head_dim_v=dims[1]) for row in rows_for(*dims, causal)]
        builds = [*rows, decode_options(*dims, causal, paged=True)]
        assert {1, 2} <= {options.consumers for options in rows}
        assert max(options.tile_bytes for options in builds) <= (227 << 10) - 2048, dims


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_decode_builds_have_what_memory_takes_in_flight(dims, causal, paged):
    """Between 64 and 80 KiB: with 48 memory was not busy, and from 96 on blocks finished unevenly."""
    options = decode_options(*dims, causal, 8, paged=paged)
    assert 64 << 10 <= options.key_bytes * (options.stages - paged) <= 80 << 10
    assert options.stages >= 2 and options.q_stages == 2
    assert not paged or options.block_n in (32, 64, 128)
    assert options.consumers == 1 and not options.ping_pong
    assert (options.causal, options.pack_gqa, options.queries) == (causal, 8, 8)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_tiles_of_decoding_are_no_wider_than_short_sequences(dims):
    usual = decode_options(*dims, False)
    assert decode_options(*dims, False, keys=65) == usual
    short = decode_options(*dims, False, keys=64)
    assert short == replace(usual, block_n=min(64, usual.block_n))
    call = request(4, 64, 1, 1, head_dim=dims[0], head_dim_v=dims[1])
    assert build_for(call, UNITS)[0].block_n == short.block_n


@pytest.mark.parametrize(
    ("blocks", "key_tiles", "wanted"),
    [
        (8, 1024, 16),  # one round of 128 blocks
        (32, 1024, 4),
        (128, 1024, 1),
        (8, 32, 16),
        (24, 256, 5),  # a round of 120 blocks: one of 144 would take two
        (2, 4, 1),  # combining costs more than it saves
        (1, 1024, MAX_SPLITS),
        (8, 1, 1),
        (8, 0, 1),
        (1056, 128, 1),  # whole rounds
    ],
)
def test_decode_splits(blocks, key_tiles, wanted):
    assert decode_splits(blocks, key_tiles, 64 << 10, UNITS) == wanted


@pytest.mark.parametrize("blocks", [8, 32, 128])
def test_splits_follow_bytes_and_not_tiles(blocks):
    assert len({decode_splits(blocks, 1024 * n, (64 << 10) // n, UNITS) for n in (1, 2, 4)}) == 1
    assert decode_splits(blocks, 8, 64 << 10, UNITS) > decode_splits(blocks, 8, 4 << 10, UNITS) or blocks == 128


def test_a_little_more_than_a_round_is_split():
    """136 blocks of which 4 would run alone."""
    splits = decode_splits(136, 1024, 64 << 10, UNITS)
    assert splits > 1
    assert -(-136 * splits // UNITS) * UNITS <= 1.1 * 136 * splits


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 200))
def test_splits_have_keys(blocks, key_tiles, units):
    assert 1 <= decode_splits(blocks, key_tiles, 40 << 10, units) <= max(1, min(MAX_SPLITS, key_tiles))


def test_decoding_takes_its_build():
    options, splits = build_for(request(seq_len_kv=131072), UNITS)
    full, causal = (replace(decode_options(128, 128, masked, 8), combines=True) for masked in (False, True))
    assert options == full  # one query sees all keys
    assert splits == 16
    packed = request(features=("packed",))  # lengths may be anything
    assert build_for(packed, UNITS)[0] == causal
    assert build_for(request(seq_len=8), UNITS)[0] == causal
    assert build_for(request(kv_heads=64), UNITS)[0] == replace(full, pack_gqa=1)
    assert build_for(request(num_kv_splits=5), UNITS)[1] == 5


def test_who_puts_split_keys_together():
    """The kernel, where its tiles have counters; a second one after it in larger launches."""

    def combines(**shape):
        return build_for(request(**shape), UNITS)[0].combines

    assert combines(num_kv_splits=2) and not combines(num_kv_splits=1)
    assert combines(num_kv_splits=2, batch=31) and not combines(num_kv_splits=2, batch=32)  # of 8 key heads
    assert not combines(num_kv_splits=2, seq_len=64)
    with pytest.raises(ShapeError, match="consumers is 2; expected 1 where the kernel combines split keys"):
        replace(options_of((128, 128, True, 2, None)), combines=True)


@pytest.mark.parametrize("lse", [True, False])
def test_what_a_kernel_that_combines_gets(monkeypatch, lse):
    """The counters of its tiles, and out and lse after them: both when it is bound and in a call."""
    made = hopper_stub.record(monkeypatch)
    q, k, v, out = (
        torch.empty(2, n, h, 128, dtype=torch.bfloat16) for n, h in ((1, 16), (300, 2), (300, 2), (1, 16))
    )
    results = (out, torch.empty(2, 16, 1)) if lse else (out, None)
    workspace = torch.empty(2 * 16 * 4 * 129, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": results[1], "workspace": workspace}
    launch = flash_attn_sm90.prepare(tensors, request(1, 300, 16, 2, 2, num_kv_splits=4))
    assert launch.workspace_bytes == 4 * workspace.numel()
    ((_, grid, _, arguments, _, _),) = made.bound
    assert (grid, made.arrivals) == (2 * 2 * 4, [MAX_ARRIVALS])
    assert arguments[7:10] == ("counters", *results)
    launch.run(tensors, None)
    memory = workspace.data_ptr()
    parts = (memory, memory + 2 * 16 * 4 * 128 * 4)
    ends = [t.data_ptr() for t in results if t is not None]
    inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr())
    stream = "current stream"
    assert made.launched == [("flash_attn_sm90", (*inputs, *parts, f"counters of {stream}", *ends), stream)]


def test_more_rows_than_one_consumer_has_take_a_row_of_the_table():
    rows = DECODE_ROWS // 8 + 1
    options, _ = build_for(request(seq_len=rows), UNITS)
    assert options.pack_gqa == 8
    assert replace(options, pack_gqa=1) in {options_of(row) for row in TILES if row[:3] == (128, 128, True)}


def test_packed_sequences_are_judged_by_their_mean_length():
    """A long one among 63 of one query."""
    mixed = request(seq_len=2048, batch=64, features=("packed",))
    options, _ = build_for(mixed, UNITS, (33, 4096))
    assert (options.pack_gqa, options.consumers) == (8, 3)
    full = replace(mixed, causal=False)
    assert [build_for(full, UNITS, (queries, 4096))[0].pack_gqa for queries in (33, 2048)] == [8, 1]


@pytest.mark.parametrize(
    ("head_dim", "causal", "batch", "seq_len", "heads", "consumers"),
    [
        (64, True, 1, 512, 16, 1),
        (64, True, 8, 1024, 16, 2),
        (64, True, 1, 2048, 32, 2),
        (64, True, 8, 2048, 32, 3),
        (64, True, 4, 1500, 12, 3),
        (64, True, 4, 4096, 16, 3),
        (64, False, 1, 1024, 16, 2),
        (64, False, 4, 2048, 16, 3),
        (64, False, 1, 1536, 16, 3),  # one round
        (96, True, 4, 4096, 21, 3),
        (96, False, 16, 1024, 21, 2),
        (96, False, 4, 4096, 21, 3),
        (128, True, 8, 2048, 16, 2),
        (128, True, 1, 4096, 16, 2),
        (128, True, 4, 4096, 16, 2),
        (128, True, 2, 8192, 8, 3),
        (128, False, 16, 1024, 16, 2),
        (128, False, 8, 2048, 16, 3),
        (128, False, 1, 4096, 16, 2),
        (128, False, 2, 8192, 8, 2),
    ],
)
def test_rows_that_were_fastest_are_chosen(head_dim, causal, batch, seq_len, heads, consumers):
    """Those of a sweep on an H200 whose times differ by more than a percent."""
    shape = {"seq_len_kv": seq_len, "heads": heads, "kv_heads": heads, "batch": batch, "head_dim": head_dim}
    options, splits = build_for(request(seq_len, **shape, causal=causal), UNITS)
    assert (options.consumers, splits) == (consumers, 1)
    assert options in {options_of(row) for row in TILES if row[:4] == (head_dim, head_dim, causal, consumers)}


def test_a_little_more_than_a_round_of_causal_tiles_takes_no_more_than_one():
    """144 tiles of two consumers, the short ones last, or 96 of three, which are half as long again."""
    assert build_for(request(1152, 1152, heads=16, kv_heads=16), UNITS)[0].consumers == 2


def test_rows_are_without_features_that_there_are():
    assert {name for row in TILES.values() for name in row.get("without", ())} <= set(BY_NAME)


@pytest.mark.parametrize(
    ("head_dim", "causal", "features", "consumers"),
    [
        (128, True, (), 2),
        (128, True, ("window", "sink", "seqused"), 2),
        (128, True, ("softcap",), 2),
        (128, True, ("sink", "alibi"), 2),
        (128, True, ("packed",), 2),
        (128, False, ("paged",), 2),
        (96, True, ("score_mod",), 2),
        (96, False, ("score_mod", "softcap", "packed"), 3),
        (96, False, ("bias",), 2),
        (64, True, ("paged", "bias"), 3),
    ],
)
def test_features_take_rows_that_serve_them_well(head_dim, causal, features, consumers):
    call = request(4096, heads=16, kv_heads=16, batch=4, head_dim=head_dim, causal=causal, features=features)
    assert build_for(call, UNITS)[0].consumers == consumers


def test_packing_counts_for_what_it_saves():
    """8 x 1024 queries of 64 heads on 8: three consumers' tiles fit when heads are packed."""
    call = request(1024, 1024, batch=8, causal=False)
    options, _ = build_for(call, UNITS)
    assert (options.consumers, options.pack_gqa) == (3, 8)
    assert build_for(replace(call, num_kv_heads=64), UNITS)[0].consumers == 2


ONE, OTHER = Mod.of(lambda s, *_: s), Mod.of(lambda b, h, q, k: q == k)
BIAS, SCORES, MASK = Features(("bias",)), Features(score_mod=ONE), Features(mask_mod=OTHER)


@pytest.mark.parametrize(
    ("asked", "shape", "wanted"),
    [
        (BIAS, {}, 112),
        (BIAS, {"seq_len_kv": 2048}, 64),  # fewer keys leave more of the last tile empty
        (BIAS, {"seq_len_kv": 2048, "causal": False}, 112),
        (BIAS, {"seq_len": 512, "batch": 1, "heads": 8, "kv_heads": 8, "num_kv_splits": 1}, 128),
        (BIAS, {"head_dim": 96}, 128),
        (BIAS, {"head_dim": 64}, 64),
        (BIAS, {"seq_len": 1}, 64),  # decoding: a power of two
        (Features(("bias",), score_mod=ONE), {"seq_len": 1, "head_dim": 64}, 128),
        (SCORES, {}, 128),
        (MASK, {"seq_len_kv": 1024}, 128),
        (SCORES, {"head_dim": 192}, 64),
        (SCORES, {"head_dim": 192, "head_dim_v": 128}, 128),
        (SCORES, {"head_dim": 64}, 64),
        (SCORES, {"head_dim": 64, "causal": False}, 80),
        (SCORES, {"head_dim": 256}, 64),
        (MASK, {"page_size": 128}, 64),
        (Features(score_mod=ONE, mask_mod=OTHER), {}, 64),
        (Features(("bias",), score_mod=ONE), {}, 64),
        (Features(("softcap", "bias")), {}, 64),
        (Features(("seqused_kv",), mask_mod=OTHER), {}, 64),
        (Features(("softcap", "alibi_slopes")), {}, 128),
        (SCORES, {"head_dim": 96, "causal": False}, 112),
        (SCORES, {"head_dim": 96}, 128),
    ],
)
def test_tiles_are_as_wide_as_what_is_computed_for_every_score_leaves_them(asked, shape, wanted):
    if "page_size" in shape:
        asked = replace(asked, operands=("block_table",))
    features = [*asked.operands, asked.score_mod and "score_mod", asked.mask_mod and "mask_mod"]
    call = {"seq_len": 4096, "heads": 16, "kv_heads": 16, "batch": 4, "features": (*features,)} | shape
    assert build_for(request(**call, static_features=asked), UNITS)[0].block_n == wanted


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_smaller_tiles_of_decoding_are_as_many_more(dims):
    call = request(head_dim=dims[0], head_dim_v=dims[1], static_features=Features(("bias",), score_mod=ONE))
    options, _ = build_for(call, UNITS)
    assert 48 << 10 < options.key_bytes * options.stages <= 80 << 10


@pytest.mark.parametrize(
    ("seq_len", "heads", "kv_heads", "batch", "pack", "causal", "wanted"),
    [
        (4096, 16, 16, 4, 1, False, 1),  # all tiles as long
        (512, 16, 16, 32, 1, True, 64),  # no more
        (2048, 16, 16, 8, 1, True, 32),  # 1 MiB of K and V each
        (4096, 16, 16, 4, 1, True, 16),
        (16384, 16, 16, 1, 1, True, 16),  # no fewer
        (4096, 32, 8, 4, 1, True, 64),  # four share what they read
        (4096, 32, 8, 4, 4, True, 16),  # packed sets
        (4096, 20, 20, 2, 1, True, 20),  # two as large as each other
        (4096, 4, 4, 1, 1, True, 4),
    ],
)
def test_heads_of_a_section(seq_len, heads, kv_heads, batch, pack, causal, wanted):
    options = Sm90Options(128, 128, causal, 2, 128, 2, 2, pack_gqa=pack)
    assert section_for(request(seq_len, seq_len, heads, kv_heads, batch, causal=causal), options) == wanted


def test_packed_heads_are_bound(monkeypatch):
    """What a call would launch: the query map's sizes and box, the grid, and how many sets share a key head."""
    made = hopper_stub.record(monkeypatch)
    q, k = (torch.empty(2, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((9, 48), (300, 2)))
    flash_attn_sm90.prepare({"q": q, "k": k, "v": k, "out": q}, request(9, 300, 48, 2, 2, num_kv_splits=1))
    ((_, grid, threads, arguments, statics, _),) = made.bound
    options = statics["options"]
    assert (options.pack_gqa, options.consumers) == (8, 1)
    assert made.maps == [((2, 9, 6, 8, 128), (1, 8, 1, 8, 64))] + [((2, 300, 2, 128), (1, 128, 1, 64))] * 2
    assert (grid, threads) == (2 * 6 * 2, 256)  # 2 sequences of 6 sets of 72 rows
    assert arguments[-4:-2] == (300, 3)


def test_an_unknown_rescale_is_refused():
    with pytest.raises(
        ShapeError, match="rescale is 'lazy'; expected one of 'always', 'rows', 'scaled rows', 'wave'"
    ):
        replace(options_of((128, 128, False, 2, 1024)), rescale="lazy")


PACK, FIRST = 4, 2  # heads 8 to 11 of 12


def places(rows: fly.Tensor, vector: fly.Tensor, queries: fly.Tensor):
    """Every thread stores its row's number where the row lies."""
    row = fly.thread_id.x
    fly.store(row, PackedRows(rows, fly.i32(FIRST * PACK), PACK).at(row, 1), align=4)
    PackedVector(vector, 3, fly.i32(FIRST * PACK), PACK).store(row, row)
    queries.store(query_of(row, PACK), row)


def test_rows_are_a_querys_heads_one_after_the_other():
    module = trace(places, matrix("i32", 3), matrix("i32", 2), matrix("i32"), arch="sm_80")
    rows, vector, queries = (np.full(shape, -1, np.int32) for shape in ((8, 12, 2), (12, 11), (32,)))
    Machine(Program.of(module, target("sm_80")))(flat(rows, vector, queries), (1, 1, 1))
    wanted = np.arange(32).reshape(8, PACK)
    heads = slice(FIRST * PACK, (FIRST + 1) * PACK)
    assert (rows[:, heads, 1] == wanted).all() and (vector[heads, 3:] == wanted.T).all()
    assert (queries == np.arange(32) // PACK).all()
    assert (rows >= 0).sum() == (vector >= 0).sum() == 32
