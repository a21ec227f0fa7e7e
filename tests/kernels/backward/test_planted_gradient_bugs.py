"""Bugs that the generic backward kernels could have, planted one at a time: gradients are wrong, or a report says it.

A bug whose text is no longer in the kernels fails its test: plant it again where its place is now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import flash_attn_generic_bwd as bwd
from kernels.problem.gradients import Weights
from kernels.problem.mask import QueryRange
from kernels.work.row_statistics import row_statistics
from kernels.work.sequences import Sequence
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.backward.test_gradient_cases import among_nan
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_acceptance import DOUT
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """The simulated Hopper GPU without what was planned or traced before."""
    emulate("sm_90a", "generic")
    forget(monkeypatch)


def wrong(
    seed: int,
    queries: int = 40,
    keys: int = 40,
    heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    causal: bool = True,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **options: Any,
) -> bool:
    """Whether gradients of a call are."""
    inputs = Inputs([queries], [keys], heads, 1, dims[0], head_dim_v=dims[1], seed=seed)
    q, k, v = (place(x) for x in inputs.tensors())
    dout = place(inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype, scale=DOUT))
    dlse = inputs.floats(1, heads, queries, scale=DOUT)
    found = by_autograd(q, k, v, causal, dout, dlse, **options)
    return bool(gradients(q, k, v, causal, dout, dlse, **options).wrong(found))


CASES: Cases = {
    "causal": lambda seed: wrong(seed, 70, 40),
    "heads": lambda seed: wrong(seed, heads=3),
    "window": lambda seed: wrong(seed, 40, 150, causal=False, window_size=(9, 4)),
    "dims": lambda seed: wrong(seed, dims=(64, 32)),
    "softcap": lambda seed: wrong(seed, softcap=1.0),
    "bias": lambda seed: wrong(seed, 130, 40, bias=Inputs([1], [1], seed=seed).floats(1, 1, 130, 40)),
    "among NaN": lambda seed: wrong(seed, dims=(40, 40), place=lambda x: among_nan(x[0], 3)[None, : x.shape[1]]),
}

BUGS = (
    Bug(
        "the gradient of the log-sum-exp is left out",
        row_statistics,
        "function",
        "total = total - everything.vector(dlse, head).load(number) => pass",
        "causal",
        "wrong",
    ),
    Bug(
        "rows without keys have a log-sum-exp of -inf",
        row_statistics,
        "function",
        "fly.select(empty, math.inf, log2) => fly.select(empty, -math.inf, log2)",
        "causal",
        "wrong",
    ),
    Bug("the log-sum-exp is not in log2 units", row_statistics, "function", "log * LOG2_E => log", "heads", "wrong"),
    Bug(
        "dk is not scaled",
        bwd.flash_attn_generic_dkdv,
        "function",
        '_scaled(results["dk"], parameters.reread(), fly.reread(scale_log2)) => results["dk"]',
        "heads",
        "wrong",
    ),
    Bug("dq and dk have log2's scale", bwd, "_scaled", "scale_log2 * (1 / LOG2_E) => scale_log2", "heads", "wrong"),
    Bug(
        "a group's first head is taken for all",
        bwd.flash_attn_generic_dkdv,
        "function",
        "HeadOfKeys(fly.remade(batch), head, seen) => HeadOfKeys(fly.remade(batch), first_head, seen)",
        "heads",
        "wrong",
    ),
    Bug(
        "delta is left out of dq",
        bwd.flash_attn_generic_dq,
        "function",
        "less = zeros.map(lambda zero, r, c: -zeros.spread(deltas, r)) => less = zeros",
        "heads",
        "wrong",
    ),
    Bug(
        "keys are seen by a query too many",
        QueryRange,
        "of",
        "left = 0 if seen.causal => left = 1 if seen.causal",
        "causal",
        "wrong",
    ),
    Bug("keys are seen by all later queries", QueryRange, "of", "left, seen.left, => left, None,", "window", "wrong"),
    Bug(
        "the last tiles are not masked",
        bwd,
        "walk",
        "(whole_end, end, True) => (whole_end, end, False)",
        "causal",
        "wrong",
    ),
    Bug(
        "dv has the columns of dk",
        bwd.flash_attn_generic_dkdv,
        "function",
        '"dv": options.head_dim_v} => "dv": options.head_dim}',
        "dims",
        "wrong shared-race out-of-bounds global-race",
    ),
    Bug(
        "the way back through what modified scores is left out",
        Weights,
        "score_gradients",
        "self.pull(excess.map(lambda x, r, c: self.weights.tiles[r][c] * x)) => "
        "ScoreGradients(excess.map(lambda x, r, c: self.weights.tiles[r][c] * x))",
        "softcap",
        "wrong",
    ),
    Bug(
        "every tile has the first queries' biases",
        bwd._KeyBlock,
        "take_in",
        "queries = lse.rows().map(lambda row: row + first_query) => queries = lse.rows()",
        "bias",
        "wrong",
    ),
    Bug(
        "columns behind the head dimension are copied",
        Sequence,
        "rows",
        ".rows(columns) => .rows(-(-columns // 32) * 32)",
        "among NaN",
        "wrong out-of-bounds",
    ),
    Bug(
        "the next head's tiles are copied over those of the last",
        bwd._KeyBlock,
        "take_in",
        "fly.barrier()  # nobody reads the slots of the head before any more => pass",
        "heads",
        "shared-race",
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_there_is_none(case, seed):
    assert not CASES[case](seed), f"seed {seed}"


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, monkeypatch, seed):
    found = shown(CASES, bug, monkeypatch, seed)
    assert found in bug.found.split(), f"{found}, seed {seed}"
