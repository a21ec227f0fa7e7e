"""Parts of a key head's query heads in the Hopper backward kernel (`sm90.group_parts`): simulated, bugs planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import flash_attn_sm90_bwd as bwd
from kernels.sm90 import consumer, group_parts, key_block, key_work
from kernels.sm90.backward import Sm90BackwardOptions
from tests.kernels.backward.fused_calls import Options, wrong
from tests.kernels.backward.planted import Cases, forget, shown
from tests.kernels.call.test_dispatch import REQUEST
from tests.kernels.feature_cases import FEATURES, Inputs
from tests.kernels.sm90.planting import Bug

# what may be in as many parts as a group has heads, or not
CALLS: dict[str, tuple[int, dict[str, Any], bool, Options]] = {
    "several blocks": (2, {"queries": [150] * 2, "keys": [290] * 2, "heads": 4, "kv_heads": 2}, True, lambda i: {}),
    "rows without keys": (2, {"queries": [150], "keys": [70], "heads": 4, "kv_heads": 1}, True, lambda i: {}),
    "packed, empty sequences": (
        3,
        {"queries": [0, 70, 1, 130], "keys": [20, 190, 0, 40], "packed": True, "heads": 6, "kv_heads": 2},
        True,
        lambda i: {},
    ),
    "lengths in use": (
        2,
        {"queries": [70] * 3, "keys": [150] * 3, "heads": 4, "kv_heads": 2, "head_dim": 96},
        False,
        lambda i: {
            "seqused_q": torch.tensor([70, 7, 40], dtype=torch.int32),
            "seqused_kv": torch.tensor([0, 140, 20], dtype=torch.int32),
        },
    ),
    "dropout and a bias": (
        2,
        {"queries": [70], "keys": [140], "heads": 4, "kv_heads": 2, "head_dim": 128},
        True,
        lambda i: FEATURES["bias of keys"](i) | {"dropout_p": 0.25, "rng_state": torch.tensor([i.seed, 3])},
    ),
    "V of fewer columns": (
        2,
        {"queries": [70], "keys": [80], "heads": 2, "head_dim": 72, "head_dim_v": 40},
        False,
        lambda i: {},
    ),
    "clusters": (2, {"queries": [100], "keys": [200], "heads": 2, "head_dim": 192}, True, lambda i: {}),
    "wide heads": (2, {"queries": [100], "keys": [150], "heads": 2, "head_dim": 256}, True, lambda i: {}),
}


@pytest.fixture(autouse=True)
def fresh(emulate, monkeypatch):
    """A simulated Hopper GPU, without what was planned or traced before."""
    emulate("sm_90a", "")
    forget(monkeypatch)


def wrong_in(name: str, seed: int, **more: Any) -> list[str]:
    """Which gradients of a call are."""
    _, sizes, causal, options = CALLS[name]
    inputs = Inputs(**({"head_dim": 64} | sizes), seed=seed)
    return wrong(inputs, causal, **options(inputs), **more)


@pytest.mark.sample(3)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in turn"])
@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "whole"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_references(name, whole, deterministic, monkeypatch, seed):
    monkeypatch.setattr(bwd, "parts_of", lambda *_: 1 if whole else CALLS[name][0])
    assert not wrong_in(name, seed, deterministic=deterministic), f"seed {seed}"


BUGS = (
    Bug(
        "a part's number is taken for the key head's",
        key_block.Block,
        "kv_head",
        "self.part if self.parts == 1 else self.part // self.parts => self.part",
        "several blocks",
        "wrong",
    ),
    Bug(
        "a part has all query heads",
        key_work.KeyWork,
        "begun",
        "self.block.part * self.group => self.block.kv_head * self.group",
        "several blocks",
        "wrong",
    ),
    Bug(
        "consumers past the end store over the next sequence's",
        consumer.Consumer,
        "_write",
        "with fly.when(first < written): => with fly.when(first > -1):",
        "packed, empty sequences",
        "wrong global-race out-of-bounds",
    ),
    Bug(
        "the last part is left out",
        group_parts.round_keys,
        "function",
        "for part in range(1, options.parts) => for part in range(1, options.parts - 1)",
        "several blocks",
        "wrong",
    ),
    Bug(
        "dk is not scaled",
        consumer.Consumer,
        "write_keys",
        "sums * self.factor => sums",
        "several blocks",
        "wrong",
    ),
    Bug(
        "dropout's scale is left out",
        consumer.Consumer,
        "write_values",
        "self.given.scale_kept => lambda sums: sums",
        "dropout and a bias",
        "wrong",
    ),
)
CASES: Cases = {name: lambda seed, name=name: bool(wrong_in(name, seed)) for name in CALLS}  # type: ignore[misc]  # not inferred with defaults


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_shows(bug, monkeypatch, seed):
    monkeypatch.setattr(bwd, "parts_of", lambda *_: CALLS[bug.case][0])
    assert shown(CASES, bug, monkeypatch, seed) in bug.found.split(), f"seed {seed}"


# (query heads, key heads, batch, length, causal): parts on 132 multiprocessors, blocks of 128 keys at D=128
CHOSEN = {
    (32, 8, 1, 512, True): 4,
    (32, 8, 1, 2048, True): 2,
    (32, 8, 1, 4096, True): 1,  # causal blocks even each other out
    (32, 8, 4, 512, True): 1,
    (64, 4, 1, 8192, True): 4,  # for the second-level cache
    (32, 8, 1, 512, False): 4,
    (32, 8, 1, 2048, False): 1,
    (64, 4, 1, 2048, False): 2,
    (8, 8, 1, 512, True): 1,  # nothing is shared
    (7, 1, 1, 1024, True): 7,
    (96, 32, 1, 65536, True): 1,  # sums would take as many bytes as those of dQ
}


@pytest.mark.parametrize(("call", "parts"), CHOSEN.items(), ids=str)
def test_parts_are_few_and_fast(call, parts):
    heads, kv_heads, batch, length, causal = call
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "batch": batch, "seq_len": length, "seq_len_kv": length}
    request = replace(REQUEST, causal=causal, **sizes)
    options = Sm90BackwardOptions(128, 128, causal)
    assert group_parts.parts_of(request, options, -(-length // 128), 132) == parts
