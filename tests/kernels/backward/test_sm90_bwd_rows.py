"""What the Hopper backward kernel does for rows of queries besides the launches before and after it."""

from __future__ import annotations

import pytest

from kernels.sm90 import ahead
from tests.kernels.backward.fused_calls import wrong
from tests.kernels.feature_cases import Inputs

CASES = {
    "several blocks": ({"queries": [140] * 3, "keys": [300] * 3, "head_dim": 128}, False),
    "causal, rows without keys": ({"queries": [150] * 3, "keys": [90] * 3, "head_dim": 64}, True),
    "heads share keys": ({"queries": [150], "keys": [290], "heads": 6, "kv_heads": 3, "head_dim": 64}, True),
    "columns that are filled up": ({"queries": [70] * 4, "keys": [200] * 4, "heads": 1, "head_dim": 72}, False),
    "clusters": ({"queries": [100] * 3, "keys": [200] * 3, "head_dim": 192}, True),
    "wide heads": ({"queries": [100] * 3, "keys": [150] * 3, "heads": 1, "head_dim": 256}, True),
}


@pytest.fixture(autouse=True)
def sm90(emulate, monkeypatch):
    emulate("sm_90a", "")


@pytest.mark.parametrize("name", CASES)
def test_blocks_clear_sums_of_later_heads(name, monkeypatch, seed):
    monkeypatch.setattr(ahead, "ROUNDS", 0.001)
    sizes, causal = CASES[name]
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90_wide" if sizes["head_dim"] > 128 else "sm90")
    assert not wrong(Inputs(**sizes, seed=seed), causal), f"seed {seed}"
