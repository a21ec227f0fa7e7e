"""Bugs that the Hopper backward kernel could have, planted one at a time: gradients are wrong, or a report says it.

A bug whose text is no longer in the kernels fails its test: plant it again where its place is now.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fly import config
from kernels import flash_attn_sm90_bwd as bwd
from kernels import flash_attn_sm90_bwd_wide as wide
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from kernels.sm90 import exchange, key_block, later, turns
from kernels.sm90.dropout import Stored
from kernels.work import row_statistics as rows
from kernels.work.kept_pairs import KeptPairs
from kernels.work.sink_gradients import sink_gradients
from tests.kernels.backward.fused_calls import wrong as wrong_gradients
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """The simulated Hopper GPU without what was planned or traced before."""
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    forget(monkeypatch)


def wrong(
    seed: int,
    queries: int,
    keys: int,
    causal: bool = False,
    deterministic: bool = False,
    kernel: str = "sm90",
    head_dim: int = 64,
) -> bool:
    """Whether gradients of a call are."""
    inputs = Inputs([queries], [keys], 1, 1, head_dim, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    with config.BACKWARD_KERNEL.set_to(kernel):
        found = by_autograd(q, k, v, causal, dout, None, deterministic=deterministic)
    return bool(gradients(q, k, v, causal, dout).wrong(found))


def wrong_with_dropout(seed: int, head_dim: int, kernel: str = "sm90_wide") -> bool:
    """Of a call whose weights are dropped."""
    with config.BACKWARD_KERNEL.set_to(kernel):
        inputs = Inputs([150], [100], 1, 1, head_dim, seed=seed)
        return bool(wrong_gradients(inputs, False, dropout_p=0.3, rng_state=state_of(seed)))


def wrong_of_sinks(seed: int) -> bool:
    """With dropout; by more than a fiftieth of the largest, as plain attention's own error may be small."""
    inputs = Inputs([90], [70], 8, 8, 64, seed=seed)
    q, k, v = inputs.tensors()
    dout, options = inputs.floats(*q.shape, dtype=q.dtype), {"dropout_p": 0.4, "rng_state": state_of(seed)}
    *leaves, sink = [x.requires_grad_() for x in (q, k, v, inputs.floats(8))]
    (found,) = torch.autograd.grad(flydsl_flash_attn_func(*leaves, False, sink=sink, **options), sink, dout)
    exact = gradients(q, k, v, False, dout, of=["sink"], sink=sink, **options).exact[-1]
    return bool((found - exact).abs().max() > 0.02 * exact.abs().max())


def wrong_with_lists(seed: int) -> bool:
    """Of a causal call whose block mask lists whole blocks alone, and has a function that hides everything."""
    inputs = Inputs([100], [140], 1, 1, 64, seed=seed)
    q, k, v = leaves = [x.requires_grad_() for x in inputs.tensors()]
    mask = create_block_mask(first_block, None, None, 100, 140, "cpu", 128)
    mask = replace(mask, mask_mod=lambda b, h, query, key: key < 0)
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    found = torch.autograd.grad(flydsl_flash_attn_func(*leaves, True, block_mask=mask), leaves, dout)
    return bool(gradients(q, k, v, True, dout, mask_mod=first_block).wrong(found))


def first_block(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """The first 128 keys."""
    return key < 128


CASES: Cases = {
    "causal": lambda seed: wrong(seed, 140, 100, causal=True),
    "causal, at once": lambda seed: wrong(seed, 140, 100, causal=True, head_dim=128),
    "full": lambda seed: wrong(seed, 300, 100),
    "in turn": lambda seed: wrong(seed, 70, 140, deterministic=True),
    "in turn, queries without keys": lambda seed: wrong(seed, 150, 40, causal=True, deterministic=True),
    "whole blocks": wrong_with_lists,
    "clusters": lambda seed: wrong(seed, 300, 100, kernel="sm90_wide"),
    "chunks": lambda seed: wrong(seed, 200, 100, kernel="sm90_wide", head_dim=256),
    "clusters in turn": lambda seed: wrong(seed, 70, 140, deterministic=True, kernel="sm90_wide"),
    "clusters, dropout": lambda seed: wrong_with_dropout(seed, 64),
    "chunks, dropout": lambda seed: wrong_with_dropout(seed, 256),
    "dropout": lambda seed: wrong_with_dropout(seed, 64, "sm90"),
    "sinks, dropout": wrong_of_sinks,
}

BUGS = (
    Bug(
        "a block does not wait for its turn",
        turns.Turns,
        "take",
        "tile < block.end_before => tile < 0",
        "in turn",
        "global-race wrong",
    ),
    Bug(
        "the next block is let in before all have added",
        turns.Turns,
        "hand_on",
        "self.added.wait(at.index, at.phase) => pass",
        "in turn",
        "global-race deadlock",
    ),
    Bug(
        "the next block need not see what was added",
        turns.Turns,
        "hand_on",
        'order="release" => order="relaxed"',
        "in turn",
        "global-race",
    ),
    Bug(
        "the last block does not round",
        turns.Neighbours,
        "last_of",
        "fly.minimum(tiles.end, self.first_after) => fly.i32(0)",
        "in turn",
        "wrong",
    ),
    Bug(
        "queries without keys keep what was there",
        turns,
        "may_see_nothing",
        "return few or varying => return varying",
        "in turn, queries without keys",
        "wrong",
    ),
    Bug(
        "sums begin with what was there",
        rows,
        "clear",
        "fly.store(zero, begin.offset(at * 4), align=16) => pass",
        "causal",
        "wrong",
    ),
    Bug(
        "a row gets the statistics of the row before",
        rows.row_statistics,
        "function",
        "lane == i => lane == i - 1",
        "full",
        "wrong",
    ),
    Bug(
        "rows past the end are loaded",
        rows.row_statistics,
        "function",
        "fly.minimum(row + i, everything.length - 1 - first) => row + i",
        "full",
        "out-of-bounds",
    ),
    Bug(
        "delta is not times the share that dropout keeps",
        rows.row_statistics,
        "function",
        "total = total * kept_share(threshold) => pass",
        "dropout",
        "wrong",
    ),
    Bug(
        "gradients of sinks are times that share",
        sink_gradients,
        "function",
        "total = total * fly.rcp(kept_share(threshold)) => pass",
        "sinks, dropout",
        "wrong",
    ),
    Bug(
        "dP of what is dropped is in dS",
        KeptPairs,
        "add_f32",
        "lambda i: sums[i]) => lambda i: fly.fma(weights[i], values[i], sums[i]))",
        "dropout",
        "wrong",
    ),
    Bug(
        "what is dropped has no -delta in dS",
        KeptPairs,
        "add_f32",
        "lambda i: sums[i]) => lambda i: fly.f32(0.0))",
        "dropout",
        "wrong",
    ),
    Bug(
        "a round of Philox adds its first word twice",
        Stored,
        "put",
        "for which in (0, 1)) => for which in (0, 0))",
        "dropout",
        "wrong",
    ),
    Bug(
        "the threshold's bits begin with the second",
        Stored,
        "put",
        "(lane - _KEYS) & => (lane - _KEYS + 1) &",
        "dropout",
        "wrong",
    ),
    Bug(
        "what random numbers start from is read before it is there",
        Stored,
        "put",
        "sync_warp() => pass",
        "dropout",
        "shared-race uninitialised",
    ),
    Bug(
        "consumers have their own turn next",
        later.Alternating,
        "_hand_on",
        "TURN + 1 - self.index => TURN + self.index",
        "dropout",
        "deadlock",
    ),
    Bug(
        "dS is read before both have written it",
        bwd.Consumer,
        "_put",
        "barrier_sync(WRITTEN, CONSUMERS * WARPGROUP) => pass",
        "causal, at once",
        "shared-race uninitialised",
    ),
    Bug(
        "dS is not handed to the tensor cores' proxy",
        bwd.Consumer,
        "_put",
        "fence_async_shared() => pass",
        "causal, at once",
        "proxy-fence",
    ),
    Bug(
        "dS of the tile before is read before both have written it",
        bwd.Later,
        "_wait_for",
        "self.buffers.written.wait(pending.at.index, pending.at.phase) => pass",
        "causal",
        "shared-race uninitialised",
    ),
    Bug(
        "dS of the tile before is not handed to the tensor cores' proxy",
        bwd.Later,
        "_publish",
        "fence_async_shared() => pass",
        "causal",
        "proxy-fence",
    ),
    Bug(
        "the last tile's dQ is not added",
        bwd.Later,
        "end",
        "self._add_late(part, slot, q_at) => pass",
        "causal",
        "wrong",
    ),
    Bug(
        "a tile's dQ is added to the next one's",
        bwd.Later,
        "step",
        "_add_late(part, before, state.q_at) => _add_late(part, Pending(before.at, before.head, j), state.q_at)",
        "causal",
        "wrong",
    ),
    *(
        Bug(
            f"dS of the tile before is read behind its slot's next writing, {case}",
            bwd.Behind,
            "_published",
            "here = Pending(before.at.next(self.options.ds_own), => here = Pending(before.at.next(2),",
            case,
            "shared-race wrong",
        )
        for case in ("full", "dropout")
    ),
    Bug(
        "dP of the tile is not waited for",
        bwd.Batched,
        "step",
        "wgmma.wait(0, *state.product) => wgmma.wait(1, *state.product)",
        "full",
        "in-flight",
    ),
    Bug(
        "dQ is taken for done, and dO for free, one product too early",
        bwd.Behind,
        "_rest",
        "wgmma.wait(1 + ahead, => wgmma.wait(2 + ahead,",
        "full",
        "in-flight",
    ),
    Bug(
        "Q is given back before dK is done",
        bwd.Behind,
        "_rest",
        "(dk,) = wgmma.wait(ahead, dk)\n    q.ring.release(state.q_at) => "
        "q.ring.release(state.q_at)\n    (dk,) = wgmma.wait(ahead, dk)",
        "full",
        "in-flight shared-race",
    ),
    Bug(
        "dS is written over while it is on its way to the other block",
        exchange.Exchange,
        "claim",
        "self.read.wait(at.index, at.phase ^ 1) => pass",
        "clusters",
        "shared-race mbarrier-count mbarrier-bytes",
    ),
    Bug(
        "the other block's dS is not waited for",
        exchange.Exchange,
        "wait",
        "self.arrived.wait(at.index, at.phase) => pass",
        "clusters",
        "shared-race uninitialised",
    ),
    Bug(
        "P is written over before it has been read",
        wide._OfValues,
        "meet_before",
        "barrier_sync(WRITTEN, CONSUMERS * WARPGROUP) => pass",
        "clusters",
        "shared-race named-barrier uninitialised",
    ),
    *(
        Bug(
            f"what dropout decides for the consumer of keys is the first thread's, {case}",
            wide._OfKeys,
            "_weights",
            "self._own_decisions.offset(place) => "
            "self._own_decisions.offset(place - fly.thread_id.x % WARPGROUP * 4)",
            case,
            "wrong",
        )
        for case in ("clusters, dropout", "chunks, dropout")
    ),
    Bug(
        "what dropout decides is written where P is",
        wide._Half,
        "_own_decisions",
        "behind = 4 * BLOCK_M * self.options.block_n => behind = 0",
        "clusters, dropout",
        "wrong shared-race",
    ),
    Bug(
        "a chunk of dV is taken for done, and its part of dO for free, one product too early",
        wide._OfValues,
        "step",
        "behind = len(started) => behind = 1 + len(started)",
        "chunks",
        "in-flight",
    ),
    Bug(
        "chunks of dO are of the columns before",
        key_block.Chunks,
        "first_column",
        "chunk * self.tile.columns => max(chunk - 1, 0) * self.tile.columns",
        "chunks",
        "wrong",
    ),
    Bug(
        "the second block of a cluster does not wait for its keys' number",
        turns,
        "taken",
        "told.wait(0, 0) => pass",
        "clusters in turn",
        "uninitialised shared-race",
    ),
    Bug(
        "a late part is added in the turn of the tile behind",
        later.Later,
        "_add_late",
        "q_at.before(self.options.stages) => q_at",
        "in turn",
        "deadlock wrong",
    ),
    Bug(
        "zeros before the first tile take a turn",
        later.Later,
        "_add_late",
        "pending.tile != NONE => pending.head >= 0",
        "in turn",
        "deadlock wrong out-of-bounds",
    ),
    Bug(
        "keys are masked as the next ones",
        bwd.Consumer,
        "_limit",
        "keys = row_numbers(self.layout, 1, start) => keys = row_numbers(self.layout, 1, start + 1)",
        "causal",
        "wrong",
    ),
    Bug(
        "the last block, a whole one, is masked by the function of partial ones",
        bwd.Consumer,
        "weigh",
        "number < listed.whole_steps => number < 0",
        "whole blocks",
        "wrong",
    ),
    Bug(
        "whole blocks are not cut by causality",
        bwd.Consumer,
        "weigh",
        "self.work.tiles.sees_whole(j) => step.number >= 0",
        "whole blocks",
        "wrong",
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
