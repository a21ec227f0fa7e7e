"""Gradients of biases, sinks and auxiliary tensors, and with block masks, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from tests.kernels.backward.test_block_mask_gradients import uneven
from tests.kernels.backward.test_block_mask_gradients import wrong as wrong_with_mask
from tests.kernels.backward.test_operand_gradients import by_key_and_head, wrong
from tests.kernels.feature_cases import Inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def inputs_of(head_dim: int, seed: int, heads: int = 4) -> Inputs:
    return Inputs([700] * 2, [900] * 2, heads, 2, head_dim, seed=seed, device="cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 4, 700, 900), (700, 900), (2, 1, 1, 900), (4, 700, 1)], ids=str)
def test_biases(shape, head_dim, seed):
    inputs = inputs_of(head_dim, seed)
    bias = inputs.floats(*shape, dtype=torch.bfloat16)
    assert not wrong(inputs, True, ("bias", "sink"), bias=bias, sink=inputs.floats(4)), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_auxiliary_tensors(head_dim, seed):
    # heads enough that plain attention's error, the bound of a number of each head, is not small by chance
    inputs = inputs_of(head_dim, seed, heads=24)
    tables = inputs.floats(24, 900), inputs.floats(24)
    options = {"score_mod": by_key_and_head, "aux_tensors": tables}
    assert not wrong(inputs, False, ("aux_tensors",), **options), f"seed {seed}"


def test_sinks_of_packed_sequences(seed):
    lengths = [0, 1, 777, 64, 2000, 129]
    inputs = Inputs(lengths, [5, 1, 777, 300, 1500, 0], 4, 1, 64, packed=True, seed=seed, device="cuda")
    assert not wrong(inputs, True, ("sink",), sink=inputs.floats(4)), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block", [128, (32, 64), (50, 40)], ids=str)
def test_block_masks(block, head_dim, seed):
    inputs = inputs_of(head_dim, seed)
    mask = create_block_mask(uneven, None, 4, 700, 900, "cuda", block)
    assert not wrong_with_mask(inputs, False, mask), f"seed {seed}"


def test_deterministic_gradients_are_the_same_bits_every_time(seed):
    inputs = inputs_of(64, seed)
    leaves = [*inputs.tensors(), inputs.floats(1, 4, 700, 900), inputs.floats(4)]
    for leaf in leaves:
        leaf.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        out = flydsl_flash_attn_func(*leaves[:3], bias=leaves[3], sink=leaves[4])
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(100):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
