"""Buffers that end within a dword or within a lane's dwords, and atomics that wrap: the last value on either side."""

import struct

import numpy as np
import pytest

from fly.emulator import Program, Region
from fly.emulator.memory import ATOMICS
from tests.emulator.assembly import assemble

LOAD = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dword s10, s[0:1], 0x10
    v_lshlrev_b32 v2, 2, v0
    v_lshlrev_b32 v3, 3, v0
    s_mov_b32 s11, 0x20000
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s8, s4
    s_and_b32 s9, s5, 0xffff
    buffer_load_dwordx2 v[10:11], v2, s[8:11], 0 offen
    s_waitcnt vmcnt(0)
    global_store_dwordx2 v3, v[10:11], s[6:7]
    s_endpgm
"""


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("limit", [260, 259, 258, 257, 256, 255, 252, 3])
def test_dwords_that_are_not_whole_within_the_range_read_zero(limit, arch):
    data, out = np.arange(1, 66, dtype=np.uint32), np.zeros((64, 2), np.uint32)
    kernarg = struct.pack("<QQI", data.ctypes.data, out.ctypes.data, limit)
    regions = [Region(data.ctypes.data, data.nbytes, "data"), Region(out.ctypes.data, out.nbytes, "out")]
    Program(assemble(LOAD, arch)).launch("k", (1,), (64,), kernarg, regions)
    place = np.arange(64)[:, None] + np.arange(2)
    assert (out == np.where(4 * place + 4 <= limit, data[place], 0)).all()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_atomic_increments_and_decrements_wrap_at_their_operand(dtype):
    """CDNA3 ISA, ATOMIC_INC and ATOMIC_DEC."""
    old, x = np.array([0, 6, 7, 8], dtype), np.array([7] * 4, dtype)
    assert ATOMICS["inc"](old, x).tolist() == [1, 7, 0, 0]
    assert ATOMICS["dec"](old, x).tolist() == [7, 5, 6, 7]
    assert ATOMICS["inc"](old, x).dtype == ATOMICS["dec"](old, x).dtype == dtype
