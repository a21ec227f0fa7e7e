"""Dropout's mask: Philox by its published vectors, the mask by its definition, instructions' tiles by the mask."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import fly
from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import target
from fly.errors import ArgumentError, AtomError
from fly.lang.fragment import AccumulatorLayout
from fly_attention.problem.dropout import RandomHead, byte_bits, philox, scale, threshold
from fly_attention.problem.dropout_mask import dropout_mask
from fly_attention.problem.dropout_mask import philox as philox_in_torch
from fly_attention.problem.dropout_tile import kept_tile, plan
from tests.backends.builds import build
from tests.layouts import accumulator_layouts
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

ONES, PI = (0xFFFFFFFF,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)
# known answers of Random123 (kat_vectors, philox4x32): rounds, counter, key, words
KNOWN = (
    (7, (0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, ONES[:2], (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)
KNOWN_ANSWERS = pytest.mark.parametrize(("rounds", "counter", "key", "wanted"), KNOWN)
EMULATED = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


@fly.kernel
def words_of(numbers: fly.Tensor, out: fly.Tensor, *, rounds: int):
    """out = Philox of the counter numbers[:4] and the key numbers[4:], in every thread."""
    given = [numbers.load(i) for i in range(6)]
    for i, word in enumerate(philox((given[4], given[5]), tuple(given[:4]), rounds)):
        out.store(word, i, fly.thread_id.x)


@KNOWN_ANSWERS
@EMULATED
def test_known_answers_on_amd(arch, rounds, counter, key, wanted, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    out = np.zeros((4, 64), np.int32)
    words_of[1, 64](np.array([*counter, *key], np.uint32).view(np.int32), out, rounds=rounds)
    np.testing.assert_array_equal(out.view(np.uint32), np.array(wanted, np.uint32)[:, None] + np.zeros(64, np.uint32))


@KNOWN_ANSWERS
def test_known_answers_on_nvidia(rounds, counter, key, wanted):
    out = np.zeros((4, 32), np.int32)
    module = trace(words_of, matrix("i32"), matrix("i32", 2), arch="sm_90a", rounds=rounds)
    Machine(Program.of(module, target("sm_90a")))(flat(np.array([*counter, *key], np.uint32).view(np.int32), out))
    np.testing.assert_array_equal(out.view(np.uint32), np.array(wanted, np.uint32)[:, None] + np.zeros(32, np.uint32))


@KNOWN_ANSWERS
def test_known_answers_in_torch(rounds, counter, key, wanted):
    words = philox_in_torch(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)), rounds)
    assert tuple(map(int, words)) == wanted


# the mask


def random_state(seed: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 2))


def word(value: int) -> int:
    return value & 0xFFFFFFFF


def rotated(value: int, bits: int) -> int:
    return word(value << bits) | value >> 32 - bits


def kept(state: torch.Tensor, head: int, q: int, k: int, dropped: int, rounds: int) -> bool:
    """The definition, in Python's integers."""
    seed, offset = map(int, state)
    key = [word(seed), word(seed >> 32)]
    c = [(k >> 4 << 1) | (k >> 2 & 1), (q >> 4 << 2) | (q >> 1 & 3), head, word(offset)]
    for _ in range(rounds):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], word(b), (a >> 32) ^ c[3] ^ key[1], word(a)]
        key = [word(key[0] + 0x9E3779B9), word(key[1] + 0xBB67AE85)]
    bits = [*c, *(rotated(c[w], (14, 3, 8, 18)[w]) ^ rotated(c[0], 2) for w in range(4))]
    j = (k & 1) + 2 * (q >> 3 & 1) + 4 * (k >> 3 & 1) + 8 * (q & 1) + 16 * (k >> 1 & 1)
    return int("".join(str(w >> j & 1) for w in bits), 2) >= dropped


@pytest.mark.parametrize("rounds", [7, 10])
def test_the_mask_is_its_definition(rounds):
    seed = np.random.SeedSequence().entropy % 2**32
    state, shape = random_state(seed), (2, 3, 37, 41)
    mask = dropout_mask(state, shape, 0.3, rounds)
    assert mask.shape == shape and mask.dtype is torch.bool
    random = np.random.default_rng(seed)
    for b, h, q, k in zip(*(random.integers(0, size, 300).tolist() for size in shape), strict=True):
        assert bool(mask[b, h, q, k]) == kept(state, b * 3 + h, q, k, threshold(0.3), rounds), (seed, b, h, q, k)


@pytest.mark.parametrize("p", [1 / 512, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("rounds", [7, 10])
def test_the_kept_share_is_right_within_four_sigma(p, rounds):
    mask = dropout_mask(random_state(20), (2, 4, 512, 512), p, rounds)
    share = 1 - threshold(p) / 256
    assert abs(share - (1 - p)) <= 1 / 512
    assert abs(mask.double().mean().item() - share) <= 4 * math.sqrt(share * (1 - share) / mask.numel())


def rank(rows: Sequence[int]) -> int:
    """Of rows of bits, modulo 2."""
    reduced: list[int] = []
    for row in rows:
        for other in reduced:
            row = min(row, row ^ other)
        if row:
            reduced.append(row)
    return len(reduced)


def bits_of_a_byte(j: int) -> list[int]:
    """Of the byte of position j: each as the set of a call's 128 bits that it is the sum of, modulo 2.

    Found by calls of one bit each: the function is linear.
    """
    found = [0] * 8
    for number in range(128):
        words = tuple(1 << number % 32 if w == number // 32 else 0 for w in range(4))
        for i, bits in enumerate(byte_bits(words)):
            found[i] |= (bits >> j & 1) << number
    return found


def test_bytes_of_two_positions_are_independent():
    """Exactly, if a call's 128 bits are; the upper four bits of all 32 positions too, since they are these bits."""
    bytes_ = [bits_of_a_byte(j) for j in range(32)]
    pairs = itertools.combinations(bytes_, 2)
    assert all(rank([*one, *other]) == 16 for one, other in pairs)
    assert rank([bit for byte in bytes_ for bit in byte[:4]]) == 128
    triples = [rank([*bytes_[0], *bytes_[i], *bytes_[j]]) for i, j in itertools.combinations(range(1, 32), 2)]
    assert (len(triples), triples.count(24), min(triples)) == (465, 435, 23)


STEPS = [(0, 0, 1), (0, 1, 0), (0, 0, 2), (0, 0, 8), (0, 8, 0), (0, 1, 1), (0, 8, 8), (0, 16, 1), (1, 0, 0)]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """The correlation of every position with those around it, of other heads too, is that of independent ones."""
    mask, share = dropout_mask(random_state(3), (1, 8, 256, 256), p).double(), 1 - threshold(p) / 256
    mask = (mask - share) / math.sqrt(share * (1 - share))
    count = 7 * 240 * 240
    for step in STEPS:
        moved = mask[0, step[0] : step[0] + 7, step[1] : step[1] + 240, step[2] : step[2] + 240]
        assert abs((mask[0, :7, :240, :240] * moved).mean().item()) < 4 / math.sqrt(count), step


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_how_many_of_a_call_are_kept(p):
    """The number of a call's positions that are kept has the variance, and the skewness, of 32 independent ones.

    Of 2**16 calls, within 4.5 sigma of what such estimates spread by.
    """
    mask, share = dropout_mask(random_state(4), (1, 8, 512, 512), p).double(), 1 - threshold(p) / 256
    # bits of positions that are not those of a call, and then those
    bits = mask.view(8, 32, 2, 4, 2, 32, 2, 2, 4).permute(0, 1, 3, 5, 7, 2, 4, 6, 8).reshape(8, 32, 4, 32, 2, -1)
    kept = bits.sum(-1).flatten() - 32 * share
    assert kept.numel() == 2**16
    variance, skew = 32 * share * (1 - share), 32 * share * (1 - share) * (1 - 2 * share)
    fourth = 3 * variance**2 + variance * (1 - 6 * share * (1 - share))
    sigma = math.sqrt((fourth - variance**2) / kept.numel())
    assert abs(kept.square().mean().item() - variance) < 4.5 * sigma
    sixth = 15 * variance**3 * 1.5  # above the binomial one's
    assert abs(kept.pow(3).mean().item() - skew) < 4.5 * math.sqrt(sixth / kept.numel())


def test_a_mask_is_a_part_of_a_larger_one():
    state = random_state(5)
    whole = dropout_mask(state, (3, 2, 70, 90), 0.2)
    assert torch.equal(whole[:, :, :33, :17], dropout_mask(state, (3, 2, 33, 17), 0.2))
    assert torch.equal(whole.flatten(0, 1), dropout_mask(state, (1, 6, 70, 90), 0.2)[0])
    assert dropout_mask(state, (0, 2, 3, 0), 0.2).shape == (0, 2, 3, 0)


def test_more_dropout_drops_more_of_the_same():
    state, shape = random_state(6), (1, 2, 64, 64)
    masks = [dropout_mask(state, shape, p) for p in (0, 0.1, 0.5, 0.9)]
    assert masks[0].all()
    assert all((less | ~more).all() for less, more in itertools.pairwise(masks))


def test_seed_offset_and_rounds_give_other_masks():
    state, shape = torch.tensor([1, 2]), (1, 1, 64, 64)
    others = [(torch.tensor(pair), 7) for pair in ([2, 2], [1 + 2**32, 2], [1, 3])] + [(state, 10)]
    for other, rounds in others:
        assert not torch.equal(dropout_mask(state, shape, 0.5), dropout_mask(other, shape, 0.5, rounds))
    again = torch.tensor([1, 2 + 2**32])  # the low word of an offset counts
    assert torch.equal(dropout_mask(state, shape, 0.5), dropout_mask(again, shape, 0.5))


def test_probabilities_are_rounded_to_256ths():
    assert [threshold(p) for p in (0, 0.0, 1 / 512, 1 / 256, 0.1, 0.5, 510.9 / 512)] == [0, 0, 1, 1, 26, 128, 255]
    assert scale(threshold(0.5)) == 2.0 and scale(0) == 1.0


@pytest.mark.parametrize("p", [-0.1, 0.001, 1 / 512 - 1e-9, 511 / 512, 1.0, 2, math.nan])
def test_other_probabilities_are_refused_by_name(p):
    message = (
        rf"f: dropout_p must be 0 or from 1/512 up to 511/512, as it is rounded to 256ths, got {re.escape(repr(p))}"
    )
    with pytest.raises(ArgumentError, match=message):
        threshold(p, "f")


# kernels


@fly.kernel
def one_by_one(state: fly.Tensor, out: fly.Tensor, heads: fly.i32, *, dropped: int):
    """out[b, h, q, k] of a block's head and query: whether the weight is kept."""
    b, h, q = fly.block_id.z, fly.block_id.y, fly.block_id.x
    head = RandomHead.load(state, b * heads + h)
    for k in fly.range(fly.thread_id.x, out.shape[3], 64):
        out.store(head.keeps(q, k, dropped).to(fly.i8), b, h, q, k)


@EMULATED
def test_single_positions_in_a_kernel(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    seed = np.random.SeedSequence().entropy % 2**32
    state, shape = random_state(seed), (2, 2, 19, 77)
    out = torch.full(shape, -1, dtype=torch.int8)
    one_by_one[(19, 2, 2), 64](state, out, 2, dropped=threshold(0.4))
    assert torch.equal(out != 0, dropout_mask(state, shape, 0.4)), seed


LAYOUTS = accumulator_layouts(warpgroups=(8, 96))
ON_AMD = [layout for layout in LAYOUTS if layout.values[0].startswith("gfx")]
# (tiles of rows, tiles of columns): where everything can be shared, where calls are few, and numbers that are odd
TILES = ((2, 2), (1, 1), (3, 3))


@fly.kernel
def of_a_tile(
    state: fly.Tensor,
    out: fly.Tensor,
    head: fly.i32,
    row: fly.i32,
    column: fly.i32,
    dropped: fly.i32,
    *,
    layout: AccumulatorLayout,
    tiles: tuple[int, int],
    queries: str,
    shared: bool,
):
    """out[r, c] = whether dropout keeps element (row + r, column + c)."""
    lane = fly.lane_of(layout.atom.lanes)
    row0, column0 = fly.evaluate(layout.row_lane, lane), layout.first_column()
    random = RandomHead.load(state, head)
    like = fly.Fragment.zeros(layout, *tiles)
    kept = kept_tile(like, row, column, random, dropped, queries=queries, shared=shared)
    for r, c in itertools.product(*map(range, tiles)):
        for i, j, keep in zip(layout.value_rows, layout.value_columns, kept.conditions(r, c), strict=True):
            out.store(keep.to(fly.i8), row0 + (r * layout.rows + i), column0 + (c * layout.columns + j))


OF_A_TILE = (matrix("i64"), matrix("i8", 2, 1), *["i32"] * 4)


def check_tile(run, layout: AccumulatorLayout, tiles: tuple[int, int], queries: str) -> None:
    """What `run(arguments)` leaves of a tile at some place is the mask's part there."""
    seed = np.random.SeedSequence().entropy % 2**32
    random, state = np.random.default_rng(seed), random_state(seed)
    rows, columns = tiles[0] * layout.rows, tiles[1] * layout.columns
    row, column, head = int(random.integers(0, 9)) * 16, int(random.integers(0, 9)) * 16, int(random.integers(0, 6))
    out = np.full((rows, columns), -1, np.int8)
    run((state.numpy(), out, head, row, column, threshold(0.4)))
    if queries == "rows":
        mask = dropout_mask(state, (1, 6, row + rows, column + columns), 0.4)[0, head]
    else:
        mask = dropout_mask(state, (1, 6, column + columns, row + rows), 0.4)[0, head].T
    np.testing.assert_array_equal(out != 0, mask[row:, column:].numpy(), f"seed {seed}")


QUERIES = pytest.mark.parametrize("queries", ["rows", "columns"])
SHARED = pytest.mark.parametrize("shared", [True, False])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "layout"), LAYOUTS)
@pytest.mark.parametrize("tiles", TILES)
@QUERIES
@SHARED
def test_tiles_are_parts_of_the_mask(arch, layout, tiles, queries, shared):
    statics = {"layout": layout, "tiles": tiles, "queries": queries, "shared": shared}

    def run(arguments):
        module = trace(of_a_tile, *OF_A_TILE, arch=arch, block=layout.atom.lanes, **statics)
        Machine(Program.of(module, target(arch)))(flat(*arguments))

    check_tile(run, layout, tiles, queries)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "layout"), ON_AMD)
@pytest.mark.parametrize("tiles", TILES[:2])
@QUERIES
@SHARED
def test_tiles_are_parts_of_the_mask_on_amd(arch, layout, tiles, queries, shared, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    statics = {"layout": layout, "tiles": tiles, "queries": queries, "shared": shared}
    check_tile(lambda arguments: of_a_tile[1, 64](*arguments, **statics), layout, tiles, queries)


@pytest.mark.parametrize(
    ("arch", "shape", "bits"),
    [
        ("sm_80", (16, 8, 16), {"rows": [1, 4], "columns": [4, 8]}),
        ("gfx950", (32, 32, 16), {"rows": [1, 2, 8], "columns": [1, 8]}),
        ("gfx950", (16, 16, 32), {"rows": [1, 2, 8, 32], "columns": [1, 8, 32]}),
    ],
)
@QUERIES
def test_lanes_that_share_calls_are_those_of_the_instruction(arch, shape, bits, queries):
    layout = AccumulatorLayout(target(arch).mma("bf16", shape), "m")
    made = plan(layout, 4, 8, queries, True)
    assert sorted(mate.lane_bit for mate in made.mates) == bits[queries]
    assert all(mate.shares for mate in made.mates)
    needed = len(made.rows) * len(made.columns)
    assert len(made.made("rows")) * len(made.made("columns")) == needed // 2 ** len(bits[queries])
    alone = plan(layout, 4, 8, queries, False)
    assert len(alone.made("rows")) * len(alone.made("columns")) == needed


def test_lanes_share_where_calls_are_not_a_multiple():
    """Six calls of columns between four lanes: two each, and two of the eight are for nobody; of one, all make it."""
    made = plan(AccumulatorLayout(WarpgroupAtom(96, "bf16"), "m"), 1, 1, "rows", True)
    assert len(made.columns) == 8 and len(made.made("columns")) == 2
    made = plan(AccumulatorLayout(WarpgroupAtom(16, "bf16"), "m"), 1, 1, "rows", True)
    assert len(made.columns) == 1 == len(made.made("columns")) and not any(mate.shares for mate in made.mates)


@pytest.mark.parametrize(
    ("arch", "shape", "tiles", "multiply"),
    [("sm_80", (16, 8, 16), (2, 8), "mul.wide.u32"), ("gfx950", (32, 32, 16), (1, 4), "v_mad_u64_u32")],
)
def test_shared_calls_are_made_once(arch, shape, tiles, multiply):
    """Half of the products of those that each make all calls, or a quarter, beside those of addresses."""
    layout = AccumulatorLayout(target(arch).mma("bf16", shape), "m")
    counts = []
    for shared in (True, False):
        statics = {"layout": layout, "tiles": tiles, "queries": "rows", "shared": shared}
        isa = build(of_a_tile, arch, specs=tuple(map(_spec, OF_A_TILE)), block=layout.atom.lanes, **statics).isa
        counts.append(isa.count(multiply))
    assert counts[0] < 0.6 * counts[1]


def _spec(spec):
    return fly.ScalarSpec(spec) if isinstance(spec, str) else spec


def test_kernels_need_no_torch_for_it():
    """What the choice of a kernel imports stays light."""
    program = "import sys, fly_attention.problem.dropout_tile; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_layout_of_other_places_is_refused():
    class Odd(AccumulatorLayout):
        @property
        def rows(self) -> int:
            return 12

    layout = Odd(target("sm_80").mma("bf16"), "m")
    with pytest.raises(AtomError, match="rows are not made of bits of lanes and registers"):
        plan(layout, 2, 2, "rows", True)
