"""What CDNA kernels call beyond `fly.*`: the instructions that come out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.rocdl.intrinsics import (
    Group,
    permute_bytes,
    s_nop,
    s_setprio,
    sched_group_barrier,
    sched_groups,
    unlikely,
)
from fly.errors import DTypeError, ShapeError
from fly.runtime.compile import compile_kernel
from tests.isa import opcodes
from tests.tracing import matrix, trace


@fly.kernel
def woven(a: fly.Tensor, b: fly.Tensor, out: fly.Tensor, *, groups: bool):
    """Eight matrix instructions, and eight exponentials that have nothing to do with them."""
    link = fly.chain(fly.target().mma("bf16", (32, 32, 16)))
    lane = fly.lane_id()
    rows, columns = (x.load(lane, 0, length=8) for x in (a, b))
    numbers = [x.load(lane, 8, length=2).to(fly.f32) for x in (a, b)]
    exponents = [(n * float(i + 1)) for n in numbers for i in range(2)]
    fly.sched_barrier()
    total = fly.Fragment.zeros(link.layout, 1, 1).tiles[0][0]
    for _ in range(8):
        total = link.mma(rows, columns, total)
    powers = fly.concat([fly.exp2(e) for e in exponents])
    if groups:
        sched_groups((Group.MFMA, 1), (Group.TRANS, 1), repeat=8)
    fly.sched_barrier()
    for i in range(16):
        out.store(total[i], lane, i)
    for i in range(8):
        out.store(powers[i], lane, 16 + i)


def order(groups: bool) -> str:
    """The order of matrix instructions and exponentials."""
    specs = (matrix("bf16", 2), matrix("bf16", 2), matrix("f32", 2))
    isa = compile_kernel(woven, specs, {"groups": groups}, "gfx950", (64, 1, 1)).isa
    kinds = {"v_mfma": "M", "v_exp_": "e"}
    return "".join(kinds.get(opcode[:6], "") for opcode in opcodes(isa))


def test_schedule_groups_say_what_stands_between_matrix_instructions():
    assert order(groups=True) == "Me" * 8
    assert order(groups=False) != "Me" * 8


@pytest.mark.parametrize(
    ("groups", "repeat", "message"),
    [
        (((Group.VALU, 0),), 1, "sched_groups: 0 of VALU, 1 times; expected positive numbers"),
        (((Group.MFMA, 1), (Group.TRANS, 2)), 0, "sched_groups: 1 of MFMA, 0 times; expected positive numbers"),
    ],
)
def test_groups_have_members(groups, repeat, message):
    with pytest.raises(ShapeError) as caught:
        trace(lambda: sched_groups(*groups, repeat=repeat))
    assert message in str(caught.value)


def test_one_group():
    module = str(trace(lambda: sched_group_barrier(Group.DS_READ, 3, 1)))
    assert '"llvm.amdgcn.sched.group.barrier"' in module
    assert all(f"arith.constant {number} : i32" in module for number in (0x100, 3, 1))


@fly.kernel
def seldom(a: fly.Tensor, out: fly.Tensor, *, told: bool):
    """out = a, or where some lane's is above 0, 2**(2**a)."""
    lane = fly.lane_id()
    x = a.load(lane)
    above = fly.any_lane(x > 0.0)
    out.store(fly.cond(unlikely(above) if told else above, lambda: fly.exp2(fly.exp2(x)), lambda: x), lane)


@pytest.mark.parametrize("told", [False, True])
def test_what_is_unlikely_is_behind_everything_else(told, monkeypatch):
    isa = compile_kernel(seldom, (matrix("f32", 1),) * 2, {"told": told}, "gfx950", (64, 1, 1)).isa
    assert (isa.index("v_exp_f32") > isa.index("global_store_dword")) is told
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    for sign in (-1.0, 1.0):
        a = sign * np.ones(64, np.float32)
        out = np.zeros_like(a)
        seldom[1, 64](a, out, told=told)
        np.testing.assert_array_equal(out, a if sign < 0 else 4 * a)


@pytest.mark.parametrize("states", [0, 17])
def test_wait_states(states):
    with pytest.raises(ShapeError, match=f"{states} wait states are out of range; expected 1 to 16"):
        trace(lambda: s_nop(states))


@pytest.mark.parametrize("level", [-1, 4])
def test_priorities(level):
    with pytest.raises(ShapeError, match=f"priority {level} is out of range; expected 0 to 3"):
        trace(lambda: s_setprio(level))


@fly.kernel
def permuted(words: fly.Tensor, out: fly.Tensor, *, selectors: tuple[int, ...]):
    """out[i] = bytes of words[0] and words[1]."""
    low, high = words.load(0), words.load(1)
    for i, selector in enumerate(selectors):
        out.store(permute_bytes(low, high, selector), i)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_bytes_and_signs_of_two_words(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    words, out = np.array([0x04030201, 0x88078605], np.uint32).view(np.int32), np.zeros(5, np.int32)
    # the highest bits of the low word's halves, 0 and 0, and of the high word's, 1 and 1
    selectors = (0x03020100, 0x07060504, 0x00050704, 0x0B0B0A0A, 0x0A0A0808)
    permuted[1, 1](words, out, selectors=selectors)
    assert [hex(x) for x in out.view(np.uint32)] == [
        "0x4030201",
        "0x88078605",
        "0x1868805",
        "0xffffffff",
        "0xffff0000",
    ]
    isa = compile_kernel(permuted, (matrix("i32"), matrix("i32")), {"selectors": selectors}, arch, (64, 1, 1)).isa
    assert isa.count("v_perm_b32") >= 3


@pytest.mark.parametrize(
    ("word", "selector", "error", "message"),
    [
        (1.0, 0, DTypeError, "permute_bytes takes scalars of i32, not "),
        (1, 0x0C000000, ShapeError, "selector 201326592 is out of range; expected four bytes of 0 to 11"),
        (1, 1 << 32, ShapeError, "selector 4294967296 is out of range"),
        (1, "0", ShapeError, "selector '0' is out of range"),
    ],
)
def test_other_bytes_are_refused(word, selector, error, message):
    def kernel():
        value = fly.f32(word) if isinstance(word, float) else fly.i32(word)
        permute_bytes(value, value, selector)

    with pytest.raises(error) as caught:
        trace(kernel)
    assert message in str(caught.value)
