"""The Hopper kernel on the simulated GPU: every feature, every build of its table, in several schedules.

The acceptance table has a row for it too, see tests/kernels/acceptance.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import flash_attn_interface, flash_attn_sm90
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.sm90.builds import Sm90Options, options_of
from kernels.sm90.tiles import TILES
from tests.kernels.feature_cases import DENSE_ONLY, Inputs
from tests.kernels.paged import Paged
from tests.kernels.problem.test_features_gpu import CASES, wrong
from tests.kernels.reference import check, reference
from tests.kernels.simulated import in_every_schedule, simulated  # noqa: F401

KERNEL = "sm90"
# queries, keys, splits of two sequences: by turns, as features and masks go by
DENSE = [(40, 40, 1), (100, 333, 2), (213, 200, 1), (70, 450, 3)]
HEADS = [(1, 300, 3, (8, 1)), (5, 311, 1, (6, 2)), (100, 3, 1, (8, 1)), (50, 300, 2, (6, 2))]
PACKED = [([100, 0, 1, 170], [133, 40, 300, 0], 1, (2, 2)), ([1] * 4, [300, 0, 425, 64], 3, (8, 1))]

causal_or_full = pytest.mark.parametrize("causal", [True, False])
full_or_causal = pytest.mark.parametrize("causal", [False, True])  # what a sample has causal there it has full here


def turn(feature: str, causal: bool) -> int:
    return 2 * list(CASES).index(feature) + causal


@pytest.mark.sample(2)
@causal_or_full
@pytest.mark.parametrize("feature", CASES)
def test_features_of_dense_sequences(feature, causal, seed):
    number = turn(feature, causal)
    queries, keys, splits = DENSE[(number + number // 4) % 4]
    dim, dim_v = ((64, 64), (80, 80), (128, 128), (40, 72))[(number + number // 4) % 4]
    inputs = Inputs([queries] * 2, [keys] * 2, 2, 2, dim, "bf16", False, dim_v, seed)
    assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}"


@pytest.mark.sample(2)
@full_or_causal
@pytest.mark.parametrize("feature", CASES)
def test_features_of_packed_heads(feature, causal, seed):
    number = turn(feature, causal)
    queries, keys, splits, heads = HEADS[(number + number // 4) % 4]
    dims = ((64, 64), (72, 72), (192, 128), (136, 104))[number % 4]
    inputs = Inputs([queries] * 2, [keys] * 2, *heads, dims[0], "f16", False, dims[1], seed)
    assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}"


@pytest.mark.sample(2)
@causal_or_full
@pytest.mark.parametrize("feature", [name for name in CASES if name not in DENSE_ONLY])
def test_features_of_packed_sequences(feature, causal, seed):
    number = turn(feature, causal)
    queries, keys, splits, heads = PACKED[(number + number // 2) % 2]
    dim = (128, 24)[number // 4 % 2]
    inputs = Inputs(queries, keys, *heads, dim, "bf16", True, dim, seed)
    assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}"


@pytest.fixture
def force(monkeypatch):
    """One build, whatever the request."""

    def take(options) -> None:
        build = lambda request, *_: (  # noqa: E731
            replace(options, features=request.static_features, page_size=request.page_size),
            request.num_kv_splits,
        )
        monkeypatch.setattr(flash_attn_sm90, "build_for", build)
        monkeypatch.setattr(flash_attn_interface, "_plans", {})

    return take


@pytest.mark.parametrize("row", TILES, ids=str)
def test_every_build(row, force, seed):
    """More keys than two tiles, more rows than one tile; the same bits in every schedule."""
    dim, dim_v, causal, consumers, _ = row
    options = options_of(row)
    force(options)
    q = torch.randn(1, 64 * consumers + 9, 2, dim).bfloat16()
    keys = 2 * options.block_n + 5
    k, v = torch.randn(1, keys, 1, dim).bfloat16(), torch.randn(1, keys, 1, dim_v).bfloat16()

    def call():
        out = torch.full((*q.shape[:-1], dim_v), torch.nan, dtype=q.dtype)
        return flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out)

    out, lse = in_every_schedule(call)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


OPTIONS = {
    "no turns": {"ping_pong": False},
    "held exponentials": {"hold": True},
    "every rescale": {"rescale": "always"},
    "growth of rows": {"rescale": "rows"},
    "growth of scaled rows": {"rescale": "scaled rows"},
    "growth of waves": {"rescale": "wave"},
    "one slot for Q": {"q_stages": 1},
    "three slots": {"stages": 3, "block_n": 64},
    "packed heads": {"pack_gqa": 2},
    "late numbers": {"takes_late": True},
    "one consumer": {"consumers": 1},
    "three consumers": {"consumers": 3, "block_n": 80},
    "two blocks": {"blocks": 2},
    "parts combined": {"consumers": 1, "combines": True, "takes_late": True, "pack_gqa": 4, "ping_pong": False},
}


@pytest.mark.sample(2)
@causal_or_full
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, causal, force, seed):
    """Of builds, each by itself, over several tiles a block."""
    # parts are combined where a sequence and key head has no more rows than one tile
    splits, queries = (3, 15) if OPTIONS[name].get("combines") else (1, 150)
    force(replace(options_of((128, 128, causal, 2, None)), **{"block_n": 96, "q_stages": 2, **OPTIONS[name]}))
    heads = max(2, OPTIONS[name].get("pack_gqa", 1))
    q, k, v = (torch.randn(2, n, h, 128).bfloat16() for n, h in ((queries, heads), (230, 1), (230, 1)))

    def call():
        out = torch.full_like(q, torch.nan)
        return flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, num_kv_splits=splits)

    out, lse = in_every_schedule(call)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


# queries, keys, head dimension, consumers, query heads of a tile: more tiles than a block takes at once, a last tile
# without its neighbour, no keys for some rows, and heads as rows
TOGETHER = [(390, 330, 72, 1, 1), (300, 70, 104, 2, 1), (200, 300, 216, 1, 1), (150, 200, 88, 2, 2)]


@pytest.mark.sample(2)
@causal_or_full
@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_two_blocks_load_keys_for_each_other(case, causal, force, seed):
    queries, keys, dim, consumers, pack = case
    force(Sm90Options(dim, dim, causal, consumers, 64, 2, 1, blocks=2, pack_gqa=pack))
    q, k, v = (torch.randn(2, n, h, dim).bfloat16() for n, h in ((queries, 2), (keys, 1), (keys, 1)))

    def call():
        out = torch.full_like(q, torch.nan)
        return flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out)

    out, lse = in_every_schedule(call)
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.sample(2)
@causal_or_full
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("queries", "splits"), [(1, 2), (150, 1)])
def test_pages(page_size, queries, splits, causal, seed):
    """NaN in every row that no sequence has, and entries of the table that are of no page."""
    lengths = (0, 200, 333)
    pages = Paged.of(lengths, page_size, 2, (64, 64), torch.bfloat16, seed)
    q = torch.randn(3, queries, 4, 64).bfloat16()
    options = {**pages.options, "num_kv_splits": splits}
    out, lse = flydsl_flash_attn_func(q, pages.k, pages.v, causal, return_lse=True, **options)
    parts = [(queries, n) for n in lengths]
    exact = reference(q.flatten(0, 1), pages.packed_k, pages.packed_v, causal=causal, lengths=parts)
    report = check(out.flatten(0, 1), exact, lse.transpose(0, 1).flatten(1))
    assert report.ok, f"seed {seed}: {report}"
