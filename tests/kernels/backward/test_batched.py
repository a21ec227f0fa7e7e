"""Consumers of the Hopper backward kernel that start products one behind the other (`sm90.later.Batched`)."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import flash_attn_sm90_bwd as bwd
from kernels.problem.features import NO_FEATURES
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.backward import builds
from tests.kernels.backward.fused_calls import wrong
from tests.kernels.backward.planted import forget
from tests.kernels.feature_cases import Inputs

# sizes, and what else there is
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several blocks": ({"queries": [330], "keys": [290], "heads": 1, "head_dim": 64}, {}),
    "one tile": ({"queries": [64], "keys": [130], "heads": 1, "head_dim": 64, "dtype": "f16"}, {}),
    "one query": ({"queries": [1], "keys": [190], "head_dim": 40}, {}),
    "heads share keys": ({"queries": [140], "keys": [150], "heads": 3, "kv_heads": 1, "head_dim": 64}, {}),
    "V of fewer columns": ({"queries": [100], "keys": [140], "head_dim": 64, "head_dim_v": 24}, {}),
    "K of fewer columns": ({"queries": [200], "keys": [70], "head_dim": 16, "head_dim_v": 64}, {}),
    "packed": ({"queries": [90, 1, 200, 0], "keys": [70, 33, 129, 20], "head_dim": 64, "packed": True}, {}),
}


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """A simulated Hopper GPU without what was planned or traced before."""
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")
    forget(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_references(name, monkeypatch, seed):
    (sizes, options), used = CALLS[name], []
    monkeypatch.setattr(bwd, "_consumer_of", lambda build: used.append(build.batched) or bwd.Batched)
    assert not wrong(Inputs(**sizes, seed=seed), False, **options)
    assert used == [True]


# what a build is besides full attention of 64 columns, and whether its products are batched
@pytest.mark.parametrize(
    ("more", "batched"),
    [
        ({}, True),
        ({"packed": True}, True),
        ({"head_dim": 24, "head_dim_v": 8}, True),
        ({"head_dim": 16, "head_dim_v": 24}, True),
        ({"head_dim": 16, "head_dim_v": 16}, False),
        ({"causal": True}, False),
        ({"ordered": True}, False),
        ({"head_dim": 72}, False),
        ({"head_dim_v": 72}, False),
        ({"apart": True}, False),
    ],
)
def test_who_has_them(more, batched):
    build = Sm90BackwardOptions(
        **{"head_dim": 64, "head_dim_v": 64, "causal": False, "features": NO_FEATURES, **more}
    )
    assert build.batched is batched
    assert build.stages == (3 if batched else 2)


@pytest.mark.parametrize("given", [{"window_size": (20, 7)}, {"softcap": 5.0}, {"dropout_p": 0.1}])
def test_calls_with_features_do_not(given):
    features = builds.arguments_of(Inputs([64], [64], 1, 1, 64), False, **given)[1].static_features
    assert not Sm90BackwardOptions(64, 64, False, features=features).batched


def test_nothing_is_between_the_starts_of_products():
    """In PTX, of each tile: a wait for S and dP, P, dS to shared memory; then starts, and no exponentials."""
    found = builds.bindings_of("sm_90a", Inputs([256], [256], 1, 1, 64), False, module=bwd)
    (kernel,) = (x for x in found if x.kernel.name == "flash_attn_sm90_bwd")
    isa = builds.compiled("sm_90a", kernel).isa
    tiles = isa.split("wgmma.wait_group.sync.aligned 0;")[1:5]  # three loops, and the last tile
    for tile, starts in zip(tiles, (5, 5, 5, 3), strict=True):
        made, *started = tile.split("wgmma.commit_group")
        assert made.count("ex2.approx") == 32
        assert made.count("stmatrix") == 4
        batch = started[: starts - 1]
        assert not any("ex2.approx" in text or "stmatrix" in text or "wait_group" in text for text in batch)
        assert "wait_group" in started[starts - 1]
