"""Consumers of the Hopper backward kernel that make P in turn, with dropout (`sm90.later.Alternating`)."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import flash_attn_sm90_bwd as bwd
from kernels.problem.features import NO_FEATURES
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.backward import builds
from tests.kernels.backward.fused_calls import wrong
from tests.kernels.backward.planted import forget
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.feature_cases import Inputs

# in PTX
WAIT, START = "wgmma.wait_group", "wgmma.commit_group"
STATISTICS, WORDS = "ld.shared.v2.b32", "ld.shared.v4.b32"

# with dropout: sizes, causal, how likely
CALLS: dict[str, tuple[dict[str, Any], bool, float]] = {
    "several blocks": ({"queries": [200], "keys": [290], "heads": 1, "head_dim": 64}, False, 0.1),
    "causal": ({"queries": [330], "keys": [330], "heads": 1, "head_dim": 64}, True, 0.1),
    "causal, rows without keys": ({"queries": [210], "keys": [90], "head_dim": 40}, True, 0.5),
    "heads share keys": ({"queries": [140], "keys": [150], "heads": 3, "kv_heads": 1, "head_dim": 64}, True, 0.3),
    "one query": ({"queries": [1], "keys": [190], "head_dim": 64, "dtype": "f16"}, False, 0.3),
    "V of fewer columns": ({"queries": [100], "keys": [140], "head_dim": 64, "head_dim_v": 24}, False, 255 / 256),
}


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """A simulated Hopper GPU without what was planned or traced before."""
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    forget(monkeypatch)


def features_of(**options: Any) -> Any:
    """Those of a call."""
    return builds.arguments_of(Inputs([64], [64], 1, 1, 64), False, **options)[1].static_features


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_references(name, monkeypatch, seed):
    sizes, causal, probability = CALLS[name]
    used = []
    monkeypatch.setattr(bwd, "_consumer_of", lambda options: used.append(options.alternates) or bwd.Alternating)
    assert not wrong(Inputs(**sizes, seed=seed), causal, dropout_p=probability, rng_state=state_of(seed))
    assert used == [True]


# what a build has besides dropout at 64 columns, and whether consumers alternate
@pytest.mark.parametrize(
    ("more", "alternates"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"causal": True, "packed": True}, False),
        ({"ordered": True}, False),
        ({"head_dim": 72, "head_dim_v": 72}, False),
        ({"apart": True}, False),
    ],
)
def test_who_alternates(more, alternates):
    features = features_of(dropout_p=0.1, rng_state=state_of(1))
    options = {"head_dim": 64, "head_dim_v": 64, "causal": False, "features": features, **more}
    assert Sm90BackwardOptions(**options).alternates is alternates
    assert not Sm90BackwardOptions(**{**options, "features": NO_FEATURES}).alternates


@pytest.mark.parametrize("given", [{"window_size": (20, -1)}, {"softcap": 5.0}])
def test_calls_with_more_than_dropout_do_not(given):
    features = features_of(dropout_p=0.1, rng_state=state_of(1), **given)
    assert not Sm90BackwardOptions(64, 64, False, features=features).alternates


@pytest.mark.parametrize("more", [{}, {"ordered": True}, {"head_dim": 72, "head_dim_v": 72}])
def test_statistics_are_read_early_where_consumers_alternate_under_a_causal_mask(more):
    features = features_of(dropout_p=0.1, rng_state=state_of(1))
    options = {"head_dim": 64, "head_dim_v": 64, "features": features, **more}
    assert not Sm90BackwardOptions(**options, causal=False).reads_early
    assert Sm90BackwardOptions(**options, causal=True).reads_early is not bool(more)


@pytest.mark.parametrize("causal", [False, True])
def test_a_turn_is_all_of_p(causal):
    """In PTX, from barrier to barrier: S, the start of dP, exponentials, Philox's words from shared memory, dV.

    Under a causal mask lse2 is loaded before the wait for S, and delta in the turn, not behind it.
    """
    options = {"dropout_p": 0.1, "rng_state": state_of(1)}
    found = builds.bindings_of("sm_90a", Inputs([256], [256], 1, 1, 64), causal, module=bwd, **options)
    (kernel,) = (x for x in found if x.kernel.name == "flash_attn_sm90_bwd")
    first, *turns = builds.compiled("sm_90a", kernel).isa.split("barrier.cta.sync.aligned")
    assert len(turns) == 4  # three loops, and the last tile
    assert first.count("barrier.cta.arrive") == 1
    order = [WAIT, START, STATISTICS, "ex2.approx", WORDS, START]
    if causal:
        order = [STATISTICS, WAIT, START, "ex2.approx", WORDS, STATISTICS, START]
    for turn in turns:
        taken, rest = turn.split("barrier.cta.arrive.aligned")
        places = [taken.index(order[0])]
        for name in order[1:]:
            places.append(taken.index(name, places[-1] + 1))
        assert taken.count(START) == 2
        before_dp, after = taken.split(START, 1)
        loads = [part.count(STATISTICS) for part in (before_dp, after, rest.split(WAIT)[0])]
        assert loads == ([8, 8, 0] if causal else [0, 8, 8])
