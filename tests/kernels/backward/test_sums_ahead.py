"""Blocks of the Hopper backward kernel clear sums of later heads (`sm90.ahead`): simulated, with planted bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernels import flash_attn_sm90_bwd as bwd
from kernels.sm90 import ahead
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.backward.fused_calls import wrong
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.call.test_dispatch import REQUEST
from tests.kernels.feature_cases import Inputs
from tests.kernels.sm90.planting import Bug

CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "several blocks": ({"queries": [140] * 3, "keys": [300] * 3, "head_dim": 128}, False),
    "causal, rows without keys": ({"queries": [150] * 3, "keys": [90] * 3, "head_dim": 112}, True),
    "heads share keys": ({"queries": [150], "keys": [290], "heads": 6, "kv_heads": 3, "head_dim": 104}, True),
    "columns that are filled up": ({"queries": [70] * 4, "keys": [200] * 4, "heads": 1, "head_dim": 120}, False),
    "clusters": ({"queries": [100] * 3, "keys": [200] * 3, "head_dim": 192}, True),
    "wide heads": ({"queries": [100] * 3, "keys": [150] * 3, "heads": 1, "head_dim": 256}, True),
}


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """A simulated Hopper GPU of one multiprocessor, without what was planned or traced before."""
    emulate("sm_90a", "")
    of_few = lambda request, options, slices, blocks, *_: ahead.distance_of(request, options, slices, blocks, 1, 1)  # noqa: E731
    monkeypatch.setattr(bwd, "parts_of", lambda *_: 1)
    monkeypatch.setattr(ahead, "SHORT", 0)
    monkeypatch.setattr(bwd, "distance_of", of_few)
    forget(monkeypatch)


def wrong_in(name: str, seed: int) -> list[str]:
    """Which gradients of a call are."""
    sizes, causal = CALLS[name]
    return wrong(Inputs(**sizes, seed=seed), causal)


@pytest.fixture
def distances(monkeypatch) -> list[int]:
    """Those of the calls that follow."""
    found: list[int] = []

    of_few = bwd.distance_of

    def noted(*given: Any) -> int:
        found.append(of_few(*given))
        return found[-1]

    monkeypatch.setattr(bwd, "distance_of", noted)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_references(name, distances, seed):
    assert not wrong_in(name, seed), f"seed {seed}"
    assert distances == [1]


def test_blocks_clear_what_nobody_clears_for_them(monkeypatch, seed):
    nobody = Bug("", ahead.Ahead, "work", "ready != 0, later, head => ready != 0, self.heads, head", "", "")
    nobody.plant(monkeypatch)
    assert not wrong_in("several blocks", seed), f"seed {seed}"


CASES: Cases = {name: lambda seed, name=name: bool(wrong_in(name, seed)) for name in CALLS}  # type: ignore[misc]  # not inferred with defaults
BUGS = (
    Bug(
        "consumers do not wait for zeros",
        ahead.Ahead,
        "wait",
        "self.cleared.wait(0, 0) => pass",
        "several blocks",
        "global-race",
    ),
    Bug(
        "zeros need not be seen",
        ahead.Ahead,
        "work",
        'order="release" => order="relaxed"',
        "several blocks",
        "global-race",
    ),
    Bug(
        "a part is ready before all workers cleared theirs",
        ahead.Ahead,
        "work",
        "barrier_sync(MET, WORKERS) => pass",
        "several blocks",
        "global-race",
    ),
    Bug(
        "the launch before clears a head less",
        bwd,
        "prepare",
        ": plan.distance * group => : (plan.distance - 1) * group + 1",
        "several blocks",
        "wrong",
    ),
    Bug(
        "parts are of one query head",
        ahead.Ahead,
        "_clear",
        "self.group * self.sums.shape[2], => self.sums.shape[2],",
        "heads share keys",
        "wrong",
    ),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_shows(bug, monkeypatch, seed):
    assert shown(CASES, bug, monkeypatch, seed) in bug.found.split(), f"seed {seed}"


@pytest.mark.parametrize(
    ("change", "distance"),
    [
        ({}, 17),
        ({"num_heads": 8}, 17),
        ({"head_dim": 192}, 17),
        ({"batch": 2}, 0),
        ({"beside": 30}, 30),
        ({"beside": 60}, 0),
        ({"head_dim": 96}, 0),
        ({"seq_len": 4097}, 0),
        ({"seq_len": 8193, "seq_len_kv": 8193}, 0),
        ({"causal": True}, 0),
        ({"causal": True, "head_dim": 192}, 17),
        ({"causal": True, "seq_len": 2048}, 17),
        ({"deterministic": True}, 0),
        ({"packed": True}, 0),
    ],
    ids=str,
)
def test_which_calls_work_ahead(change, distance, monkeypatch):
    monkeypatch.setattr(ahead, "SHORT", 2048)
    sizes = {"batch": 17, "num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "seq_len": 1024, "seq_len_kv": 2048}
    change = dict(change)
    packed, beside = change.pop("packed", False), change.pop("beside", 1)
    request = replace(REQUEST, **({"causal": False} | sizes | change))
    dims = request.head_dim, request.value_dim
    how = {"packed": packed, "ordered": request.deterministic, "apart": request.head_dim > 128}
    options = Sm90BackwardOptions(*dims, request.causal, **how)
    slices = request.batch * request.num_kv_heads
    assert ahead.distance_of(request, options, slices, 8, beside, 132) == distance
