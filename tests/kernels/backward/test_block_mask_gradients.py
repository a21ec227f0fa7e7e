"""Gradients of calls with a block-sparse mask, where there is no GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fly.backends.target import target, targets
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.generic.backward import options_for
from kernels.problem.block_mask import BlockMask, create_block_mask
from kernels.problem.catalogue import BLOCKS
from kernels.problem.features import Features
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import gradients


def uneven(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Whole, partial and no blocks; the last keys are seen by nobody, and by the second head fewer."""
    return (key < 64) | ((key <= query) & (key < 170 - 100 * head) & (key > query // 2))


def wrong(inputs: Inputs, causal: bool, mask: BlockMask, of: Any = (), **options: Any) -> list[str]:
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    more = [options[name].requires_grad_() for name in of]
    out = flydsl_flash_attn_func(*leaves, causal, block_mask=mask, **options)
    found = torch.autograd.grad(out, [*leaves, *more], dout)
    assert not any(x[:, 192:].any() for x in found[1:3])
    return gradients(q, k, v, causal, dout, of=of, mask_mod=mask.mask_mod, **options).wrong(found)


CASES: dict[str, tuple[dict[str, Any], bool, int | tuple[int, int]]] = {
    "blocks of several tiles": ({"queries": [150], "keys": [200], "head_dim": 64}, False, 128),
    "blocks of 64, causal": ({"queries": [130], "keys": [250], "head_dim": 32}, True, 64),
    "small blocks": ({"queries": [70], "keys": [130], "head_dim": 32}, False, (32, 64)),
    "tiles in parts, causal": ({"queries": [150], "keys": [140], "head_dim": 160}, True, 128),
    "blocks that no tile divides": ({"queries": [90], "keys": [130], "head_dim": 128}, False, (50, 40)),
}
PLACES = [
    ("gfx942", "blocks of 64, causal"),
    ("gfx942", "tiles in parts, causal"),
    ("gfx950", "blocks of several tiles"),
    ("gfx950", "blocks of 64, causal"),
    *(("sm_90a", name) for name in CASES),
]


@pytest.mark.parametrize(("arch", "name"), PLACES)
def test_gradients_with_a_block_mask_are_the_references(arch, name, emulate, seed):
    emulate(arch, "generic")
    sizes, causal, block = CASES[name]
    inputs = Inputs(**sizes, seed=seed)
    mask = create_block_mask(uneven, None, 2, inputs.queries[0], inputs.keys[0], "cpu", block)
    assert not wrong(inputs, causal, mask), f"seed {seed}"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_gradients_with_a_block_mask_and_dropout_where_tiles_are_masked_in_parts(arch, emulate, seed):
    emulate(arch, "generic")
    inputs = Inputs([130], [200], head_dim=32, seed=seed)
    mask = create_block_mask(uneven, None, 2, 130, 200, "cpu", 128)
    rng_state = torch.tensor([seed, 3], dtype=torch.int64)
    assert not wrong(inputs, True, mask, dropout_p=0.25, rng_state=rng_state), f"seed {seed}"


@pytest.fixture
def simulated(emulate):
    emulate("sm_90a", "generic")


def test_lists_by_keys_that_a_mask_brings_are_used(simulated, seed):
    inputs = Inputs([70], [130], seed=seed)
    mask = create_block_mask(uneven, None, 2, 70, 130, "cpu", 64)
    by_keys = mask.transposed()
    names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    brought = BlockMask(**{**vars(mask), **dict(zip(names, by_keys, strict=True))})
    bias = inputs.floats(1, 2, 70, 130)
    assert not wrong(inputs, False, brought, of=("bias",), bias=bias), f"seed {seed}"
    for numbers in by_keys[::2]:
        numbers.zero_()
    q, k, v = (x.requires_grad_() for x in inputs.tensors())
    found = torch.autograd.grad(flydsl_flash_attn_func(q, k, v, False, block_mask=brought).sum(), (q, k, v))
    assert found[0].any() and not found[1].any() and not found[2].any()


def test_lists_may_change_between_calls(simulated, seed):
    inputs = Inputs([70], [130], seed=seed)
    mask = create_block_mask(uneven, None, 2, 70, 130, "cpu", 64)
    assert not wrong(inputs, False, mask), f"seed {seed}"
    narrow = create_block_mask(lambda b, h, q, k: uneven(b, h, q, k) & (k < 64), None, 2, 70, 130, "cpu", 64)
    for old, new in zip(mask.tensors, narrow.tensors, strict=True):
        old.copy_(new)
    q, k, v = (x.requires_grad_() for x in inputs.tensors())
    _, dk, dv = torch.autograd.grad(flydsl_flash_attn_func(q, k, v, False, block_mask=mask).sum(), (q, k, v))
    assert dk[:, :64].any() and not dk[:, 64:].any() and not dv[:, 64:].any()


@pytest.mark.parametrize("arch", [t.arch for t in targets()])
def test_every_head_dimension_has_tiles_within_blocks(arch):
    for head_dim, queries, keys in itertools.product((32, 64, 96, 128, 160, 192, 224, 256), (32, 64, 96), (64, 192)):
        features = Features(BLOCKS, block_size=(queries, keys))
        of_keys, of_queries = options_for(target(arch), head_dim, head_dim, False, features)
        assert queries % of_queries.block_m == keys % of_queries.block_n == 0
        assert all(keys % options.block_m == queries % options.block_n == 0 for options in of_keys)
