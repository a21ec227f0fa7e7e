"""Bank conflicts of the generic kernel's shared-memory accesses, counted over what its lanes really address.

The model: shared memory has banks of 4 bytes and serves lanes in order, as many at a time as fill all banks once
(8 lanes of 16 bytes with 32 banks). Within such a group every further word in a bank costs one more cycle. How the
hardware groups lanes is not published for every access, so the model guards layouts and predicts no times.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import numpy as np
import pytest

from fly.backends.target import target
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic
from tests.simulated import Machine, Program, SharedAccess, flat
from tests.tracing import matrix, trace


def extra_cycles(access: SharedAccess, banks: int) -> int:
    """The most words beyond the first that a bank has to serve within one group of lanes."""
    worst = 0
    group = banks * 4 // access.bytes
    for first in range(0, len(access.addresses), group):
        words = defaultdict(set)
        for address in (a for a in access.addresses[first : first + group] if a is not None):
            for word in range(address // 4, -(-(address + access.bytes) // 4)):
                words[word % banks].add(word)
        worst = max(worst, max(map(len, words.values())) - 1)
    return worst


@functools.cache
def accesses(arch: str, head_dim: int) -> list[SharedAccess]:
    """What one block of the generic kernel does with shared memory for 64 keys."""
    registers = arch.startswith("gfx")
    options = GenericOptions(head_dim, False, 128 if registers else 64, 64, 4, 1 if registers else 2)
    tensor = matrix("f16", 4)
    block = options.waves * target(arch).wave_size
    module = trace(
        flash_attn_generic,
        *[tensor] * 4,
        matrix("f32", 3),
        "f32",
        None,
        None,
        arch=arch,
        block=block,
        options=options,
    )
    q, k, v, out = (np.zeros((1, 64, 1, head_dim), np.float16) for _ in range(4))
    machine = Machine(Program.of(module, target(arch)), observe_shared=True)
    machine(flat(q, k, v, out, np.zeros((1, 1, 64), np.float32), 1.0))
    return machine.shared_accesses


def conflicts(arch: str, head_dim: int, banks: int) -> dict[tuple[str, int], int]:
    """Extra cycles by kind and width of access."""
    worst: dict[tuple[str, int], int] = {}
    for access in accesses(arch, head_dim):
        key = access.kind, access.bytes
        worst[key] = max(worst.get(key, 0), extra_cycles(access, banks))
    return worst


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize(
    ("arch", "banks", "expected"),
    [
        # V is stored turned, 8 bytes at a time: two rows of 8 pieces meet in a bank
        ("gfx942", 32, {("load", 16): 0, ("store", 16): 0, ("store", 8): 1}),
        ("gfx950", 32, {("load", 16): 0, ("store", 16): 0, ("ds_read_b64_tr_b16", 8): 0}),
        ("sm_80", 32, {("ldmatrix_x4", 16): 0, ("ldmatrix_x4_trans", 16): 0}),
        ("sm_90a", 32, {("ldmatrix_x4", 16): 0, ("ldmatrix_x4_trans", 16): 0}),
    ],
)
def test_operand_loads_are_free_of_conflicts(arch, banks, expected, head_dim):
    assert conflicts(arch, head_dim, banks) == expected


@pytest.mark.parametrize(("head_dim", "transposing"), [(64, 0), (128, 1)])
def test_with_64_banks_gfx950_has_conflicts(head_dim, transposing):
    """CDNA4 may serve 256 bytes at a time: 16 lanes of K's reads then meet in pairs, as do V's at head dim 128."""
    wanted = {("load", 16): 1, ("store", 16): 0, ("ds_read_b64_tr_b16", 8): transposing}
    assert conflicts("gfx950", head_dim, 64) == wanted


def test_the_model_sees_conflicts():
    rows_of_128_bytes = SharedAccess("load", 16, tuple(lane * 128 for lane in range(32)))
    contiguous = SharedAccess("load", 16, tuple(lane * 16 for lane in range(32)))
    assert extra_cycles(rows_of_128_bytes, 32) == 7
    assert extra_cycles(contiguous, 32) == 0
    assert extra_cycles(SharedAccess("load", 4, (64,) * 32), 32) == 0  # the same word is broadcast
