"""Tiles of queries in pairs in the Hopper backward kernel (`sm90.paired`): simulated, bugs planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import flash_attn_sm90_bwd as bwd
from kernels.problem.features import Features
from kernels.sm90 import ahead, exchange, key_work, paired, walk
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.backward.fused_calls import wrong
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import by_autograd
from tests.kernels.sm90.planting import Bug

CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "an odd number of tiles": ({"queries": [310], "keys": [270], "head_dim": 128}, False),
    "an even number": ({"queries": [250] * 2, "keys": [520] * 2, "heads": 1, "head_dim": 112}, False),
    "causal, rows without keys": ({"queries": [390], "keys": [300], "head_dim": 128}, True),
    # of the second cluster the tile in front of the whole ones is the first of a pair
    "causal, more keys": (
        {"queries": [520], "keys": [650], "heads": 1, "kv_heads": 1, "head_dim": 104, "head_dim_v": 128},
        True,
    ),
    "heads share keys": ({"queries": [330], "keys": [300], "heads": 3, "kv_heads": 1, "head_dim": 128}, False),
    "packed, empty sequences": (
        {"queries": [0, 133, 1, 260], "keys": [20, 300, 0, 90], "packed": True, "head_dim": 128, "dtype": "f16"},
        False,
    ),
    "packed, causal": ({"queries": [140, 70], "keys": [140, 270], "packed": True, "head_dim": 128}, True),
    "one query": ({"queries": [1], "keys": [290], "head_dim": 128, "dtype": "f16"}, False),
    "V of fewer columns": ({"queries": [200], "keys": [100], "head_dim": 128, "head_dim_v": 40}, True),
}


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """A simulated Hopper GPU without what was planned or traced before, where short sequences are in pairs too."""
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    monkeypatch.setattr(paired, "LONG", {False: 1, True: 1})
    forget(monkeypatch)


@pytest.fixture
def pairs(monkeypatch) -> list[bool]:
    """Whether the calls that follow have them."""
    found: list[bool] = []
    monkeypatch.setattr(bwd, "pays", lambda *given: found.append(paired.pays(*given)) or found[-1])
    return found


def wrong_in(name: str, seed: int) -> list[str]:
    """Which gradients of a call are."""
    sizes, causal = CALLS[name]
    return wrong(Inputs(**sizes, seed=seed), causal)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_references(name, pairs, monkeypatch, seed):
    monkeypatch.setenv("FLY_SIMULATOR_SEED", str(seed % 1000))
    assert not wrong_in(name, seed), f"seed {seed}"
    assert pairs == [True]


@pytest.mark.parametrize("parts", [1, 2])
def test_sums_are_cleared_ahead_and_heads_are_in_parts_there_too(parts, pairs, monkeypatch, seed):
    of_few = lambda request, options, slices, blocks, *_: ahead.distance_of(request, options, slices, blocks, 1, 1)  # noqa: E731
    monkeypatch.setattr(bwd, "distance_of", of_few)
    monkeypatch.setattr(bwd, "parts_of", lambda *_: parts)
    inputs = Inputs([140] * 3, [150] * 3, 2, 1, 128, seed=seed)
    assert not wrong(inputs, False), f"seed {seed}"
    assert pairs == [True]


def test_neighbours_of_a_packed_sequence_may_be_nan(seed):
    """A pair's tile behind a sequence's last one is of the next sequence."""
    inputs = Inputs([50, 140, 30], [60, 270, 45], 2, 1, 128, packed=True, seed=seed)
    q, k, v = inputs.tensors()
    form = {**inputs.form(), "max_seqlen_q": 140, "max_seqlen_kv": 270}
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    expected = by_autograd(q, k, v, False, dout, None, **form)
    for x, (start, end) in ((q, (50, 190)), (k, (60, 330)), (v, (60, 330)), (dout, (50, 190))):
        x.detach()[start:end] = torch.nan
    found = by_autograd(q, k, v, False, dout, None, **form)
    for mine, theirs, (start, end) in zip(found, expected, ((50, 190), (60, 330), (60, 330)), strict=True):
        assert torch.equal(mine[:start], theirs[:start]) and torch.equal(mine[end:], theirs[end:])


@pytest.mark.parametrize(
    ("lengths", "changed", "found"),
    [
        ((1536, 1536), {}, True),
        ((1535, 4096), {}, False),
        ((4096, 1535), {}, False),
        ((4095, 8192), {"causal": True}, False),
        ((4096, 4096), {"causal": True}, True),
        ((4096, 4096), {"head_dim": 64}, True),
        ((4096, 4096), {"head_dim": 96, "head_dim_v": 96}, False),
        ((4096, 4096), {"packed": True}, True),
        ((4096, 4096), {"ordered": True}, False),
        ((4096, 4096), {"head_dim": 256, "apart": True}, False),
        ((4096, 4096), {"features": Features(operands=("softcap",))}, False),
    ],
    ids=str,
)
def test_which_calls_have_pairs(lengths, changed, found, monkeypatch):
    monkeypatch.undo()
    options = Sm90BackwardOptions(128, 128, False)
    # one that has too much shared memory is asked about too
    assert paired.pays(replace(options, **changed), *lengths) == found


CASES: Cases = {name: lambda seed, name=name: bool(wrong_in(name, seed)) for name in CALLS}  # type: ignore[misc]  # not inferred with defaults
BUGS = (
    Bug(
        "dS is sent before all warps have stored it",
        paired.Paired,
        "_sent",
        "barrier_sync(STORED + self.index, WARPGROUP) => pass",
        "an even number",
        "shared-race uninitialised",
    ),
    Bug(
        "dS that is sent is not handed to the copies' proxy",
        paired.Paired,
        "_sent",
        "fence_async_shared() => pass",
        "an even number",
        "proxy-fence",
    ),
    Bug(
        "dS is written over while it is on its way to the other block",
        exchange.Exchange,
        "claim",
        "self.read.wait(at.index, at.phase ^ 1) => pass",
        "an even number",
        "shared-race mbarrier-count mbarrier-bytes",
    ),
    Bug(
        "the other block's dS is not waited for",
        exchange.Exchange,
        "wait",
        "self.arrived.wait(at.index, at.phase) => pass",
        "an even number",
        "shared-race uninitialised",
    ),
    Bug(
        "the other consumer's dS is not waited for",
        paired.Paired,
        "_own",
        "buffers.written.wait(at.index, at.phase) => pass",
        "an even number",
        "shared-race uninitialised",
    ),
    Bug(
        "the other block may send again before dS has been read",
        paired.Paired,
        "_own",
        "exchange.release(at) => exchange.release(at) if False else None",
        "an even number",
        "deadlock",
    ),
    Bug(
        "both blocks make dQ of the same tiles",
        walk.Walk,
        "in_pairs",
        "swapped=rank ^ 1 => swapped=1",
        "an even number",
        "wrong",
    ),
    Bug(
        "a tile behind the last one gets a part of dQ",
        paired.Paired,
        "_own",
        "j < self.work.tiles.end => j >= 0",
        "an odd number of tiles",
        "wrong out-of-bounds global-race",
    ),
    Bug(
        "the last pair is not made whole",
        walk.Walk,
        "in_pairs",
        "tiles.end - tiles.first + 1 => tiles.end - tiles.first",
        "an odd number of tiles",
        "wrong deadlock uninitialised",
    ),
    Bug(
        "pairs with a tile that needs a mask have none",
        paired.Paired,
        "_through",
        "whole(tiles.whole_from + 1) => whole(tiles.whole_from)",
        "causal, more keys",
        "wrong",
    ),
    Bug(
        "both blocks of a cluster have the keys of the first",
        key_work.KeyBlocks,
        "work",
        "first_key + rank * options.block_n => first_key + rank * 0",
        "causal, more keys",
        "wrong global-race",
    ),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_there_is_none(case, seed):
    assert not CASES[case](seed), f"seed {seed}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, monkeypatch, seed):
    found = shown(CASES, bug, monkeypatch, seed)
    assert found in bug.found.split(), f"{found}, seed {seed}"
