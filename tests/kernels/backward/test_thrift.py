"""Builds of the Hopper backward kernel that do things again or later for want of registers, in the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernels.problem.block_mask import create_block_mask
from kernels.sm90.backward import Sm90BackwardOptions
from kernels.sm90.thrift import APART, APART_IN_TURN, IN_TURN, TOGETHER, Thrift
from kernels.work import gradient_steps
from tests.kernels.backward.fused_calls import Options, wrong
from tests.kernels.backward.planted import forget
from tests.kernels.backward.test_block_mask_gradients import uneven
from tests.kernels.backward.test_block_mask_gradients import wrong as wrong_with_mask
from tests.kernels.backward.test_dropout_kernels import state_of
from tests.kernels.feature_cases import FEATURES, Inputs

TOKENS: dict[str, Any] = {"queries": [100], "keys": [140], "heads": 2, "kv_heads": 1}
PACKED: dict[str, Any] = {"queries": [0, 90, 20], "keys": [20, 140, 0], "heads": 2, "kv_heads": 1, "packed": True}


def dropped(inputs: Inputs) -> dict[str, Any]:
    return {"dropout_p": 0.3, "rng_state": state_of(inputs.seed).to(inputs.device)}


def biased(inputs: Inputs) -> dict[str, Any]:
    return {"bias": inputs.floats(1, 2, inputs.queries[0], inputs.keys[0])}


def capped_and_dropped(inputs: Inputs) -> dict[str, Any]:
    return {"softcap": 3.0, **dropped(inputs)}


def listed(inputs: Inputs) -> dict[str, Any]:
    return {"mask": create_block_mask(uneven, None, 2, inputs.queries[0], inputs.keys[0], inputs.device, (64, 128))}


def listed_and_dropped(inputs: Inputs) -> dict[str, Any]:
    return {**listed(inputs), **dropped(inputs)}


def sloped(inputs: Inputs) -> dict[str, Any]:
    return {"alibi_slopes": inputs.floats(2).abs()}


def listed_and_sloped(inputs: Inputs) -> dict[str, Any]:
    return {**listed(inputs), **sloped(inputs)}


# sizes, head dimension, causal, in turn, the call's options
CASES: dict[str, tuple[dict[str, Any], int, bool, bool, Options]] = {
    "softcap, in turn": (TOKENS, 128, True, True, lambda i: {"softcap": 3.0}),
    "a bias": (TOKENS, 128, True, False, biased),
    "a bias, narrower": (TOKENS, 96, True, False, biased),
    "softcap and dropout": (TOKENS, 128, True, False, capped_and_dropped),
    "packed, softcap and dropout": (PACKED, 120, False, False, capped_and_dropped),
    "a block mask and dropout": (TOKENS, 128, False, False, listed_and_dropped),
    "a bias, in turn": (TOKENS, 128, True, True, biased),
    "a bias, in turn, narrower": (TOKENS, 96, False, True, biased),
    "a bias, in turn, narrow": (TOKENS, 64, True, True, biased),
    "softcap and dropout, in turn": (TOKENS, 128, False, True, capped_and_dropped),
    "softcap and dropout, in turn, narrower": (TOKENS, 96, True, True, capped_and_dropped),
    "packed, in turn": (PACKED, 128, True, True, lambda i: {}),
    "packed, in turn, narrow": (PACKED, 120, True, True, lambda i: {}),
    "packed, in turn, narrower": (PACKED, 96, False, True, lambda i: {}),
    "dropout in a window, in turn": (
        TOKENS,
        128,
        False,
        True,
        lambda i: {"window_size": (40, 20), **dropped(i)},
    ),
    "a function with a tensor, in turn": (TOKENS, 128, True, True, FEATURES["score_mod aux"]),
    "dropout, apart": (TOKENS, 256, True, False, dropped),
    "packed, in clusters": (PACKED, 160, False, False, lambda i: {}),
    "a function with a tensor, apart": (TOKENS, 256, True, False, FEATURES["score_mod aux"]),
    "a bias, apart": (TOKENS, 256, True, False, biased),
    "a bias, apart, in turn": (TOKENS, 256, False, True, biased),
    "dropout, apart, in turn": (TOKENS, 256, True, True, dropped),
    "packed, apart, in turn": (PACKED, 256, True, True, lambda i: {}),
    "a bias, apart, in turn, causal": (TOKENS, 256, True, True, biased),
    "slopes, apart, in turn": (TOKENS, 256, True, True, sloped),
    "a bias in float32, apart": (TOKENS, 256, False, False, biased),
    "softcap and dropout, apart": (TOKENS, 256, False, False, capped_and_dropped),
    "dropout, apart, narrower": (TOKENS, 224, True, False, dropped),
    "a bias, apart, in turn, narrower": (TOKENS, 224, True, True, biased),
    "softcap and dropout, in clusters": (TOKENS, 192, True, False, capped_and_dropped),
    "packed, apart, in turn, narrower": (PACKED, 224, True, True, lambda i: {}),
    "softcap in a window, in wider clusters": (
        TOKENS,
        192,
        True,
        False,
        lambda i: {"softcap": 3.0, "window_size": (40, 20)},
    ),
    "a bias, in turn, full": (TOKENS, 128, False, True, biased),
    "slopes, in turn": (TOKENS, 128, True, True, sloped),
    "slopes, in turn, full": (TOKENS, 128, False, True, sloped),
    "packed, in wider clusters, in turn": (PACKED, 192, True, True, lambda i: {}),
    "dropout, in clusters, in turn": (TOKENS, 160, False, True, dropped),
    "a function with a tensor, in clusters": (TOKENS, 152, True, False, FEATURES["score_mod aux"]),
    "a bias, apart, 208 columns": (TOKENS, 208, True, False, biased),
    "a bias and dropout, apart": (TOKENS, 256, False, False, lambda i: {**biased(i), **dropped(i)}),
    "packed and dropout, apart": (PACKED, 200, True, False, dropped),
    "dropout, in wider clusters, in turn": (TOKENS, 192, True, True, dropped),
    "softcap and dropout, in wider clusters, in turn": (TOKENS, 184, False, True, capped_and_dropped),
    "slopes, apart, in turn, 216 columns": (TOKENS, 216, False, True, sloped),
    "a block mask and slopes": (TOKENS, 128, False, False, listed_and_sloped),
    "softcap and slopes": (TOKENS, 128, True, False, lambda i: {"softcap": 3.0, **sloped(i)}),
    "softcap and slopes, in clusters": (TOKENS, 160, True, False, lambda i: {"softcap": 3.0, **sloped(i)}),
    "dropout and slopes": (TOKENS, 128, True, False, lambda i: {**dropped(i), **sloped(i)}),
    "packed, dropout": (PACKED, 128, False, False, dropped),
    "a bias and dropout": (TOKENS, 128, False, False, lambda i: {**biased(i), **dropped(i)}),
    "a bias and dropout, narrow": (TOKENS, 64, True, False, lambda i: {**biased(i), **dropped(i)}),
    "a mask and dropout": (TOKENS, 88, True, False, lambda i: {**FEATURES["mask_mod"](i), **dropped(i)}),
    "a bias and dropout, narrower": (TOKENS, 96, False, False, lambda i: {**biased(i), **dropped(i)}),
    "a bias and dropout, causal": (TOKENS, 128, True, False, lambda i: {**biased(i), **dropped(i)}),
    "a bias and dropout, apart, causal": (TOKENS, 256, True, False, lambda i: {**biased(i), **dropped(i)}),
    "softcap and dropout, apart, in turn": (TOKENS, 256, True, True, capped_and_dropped),
    "a bias, apart, 248 columns": (TOKENS, 248, True, False, biased),
    "softcap in a window, in wider clusters, full": (
        TOKENS,
        184,
        False,
        False,
        lambda i: {"softcap": 3.0, "window_size": (40, 20)},
    ),
    "softcap in a window, in clusters": (
        TOKENS,
        160,
        False,
        False,
        lambda i: {"softcap": 3.0, "window_size": (40, 20)},
    ),
}


@pytest.fixture(autouse=True)
def sm90(emulate, monkeypatch):
    emulate("sm_90a", "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90")


@pytest.fixture
def builds(monkeypatch):
    """Options of the kernels that calls bind."""
    forget(monkeypatch)
    found: list[Sm90BackwardOptions] = []
    bound = gradient_steps.bind_kernel

    def bind(*arguments: Any, **named: Any) -> Any:
        found.extend(x["options"] for x in arguments if isinstance(x, dict) and "options" in x)
        return bound(*arguments, **named)

    monkeypatch.setattr(gradient_steps, "bind_kernel", bind)
    return found


def wrong_of_case(name: str, times: int, monkeypatch: Any, seed: int, device: str = "cpu") -> list[str]:
    """Which gradients are wrong of a case whose sequences are so many times as long."""
    sizes, head_dim, causal, in_turn, options_of = CASES[name]
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", "sm90" if head_dim <= 128 else "sm90_wide")
    longer = {side: [times * n for n in sizes[side]] for side in ("queries", "keys")}
    inputs = Inputs(**{**sizes, **longer}, head_dim=head_dim, seed=seed, device=device)
    options = options_of(inputs)
    if "mask" in options:
        return wrong_with_mask(inputs, causal, **options)
    return wrong(inputs, causal, in_turn, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_references(name, builds, monkeypatch, seed):
    assert not wrong_of_case(name, 1, monkeypatch, seed), f"seed {seed}"
    assert builds and all(options.thrift != Thrift() for options in builds)


def test_every_row_has_a_case():
    ways = {(in_turn, head_dim) for _, head_dim, _, in_turn, _ in CASES.values()}
    for rows, in_turn in ((TOGETHER, False), (APART, False), (IN_TURN, True), (APART_IN_TURN, True)):
        assert {(in_turn, row.most) for row in rows} <= ways


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_builds_without_features_do_nothing_again(head_dim, in_turn):
    assert Sm90BackwardOptions(head_dim, head_dim, True, ordered=in_turn).thrift == Thrift()


@pytest.mark.parametrize("head_dim", [136, 192, 200, 256])
def test_nor_do_those_of_wide_heads_but_in_parts(head_dim):
    build = Sm90BackwardOptions(head_dim, head_dim, True, apart=True)
    assert build.thrift == Thrift()
    wanted = Thrift(roles=True, heads=True) if head_dim > 192 else Thrift(tiles=True)
    assert replace(build, parts=2).thrift == wanted
