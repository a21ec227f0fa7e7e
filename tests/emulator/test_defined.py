"""Undefined registers: computing with them is allowed, letting their values out is reported."""

import struct

import numpy as np
import pytest

from fly.emulator import Program, Region
from fly.errors import EmulatorError, EmulatorReportError
from tests.emulator.assembly import assemble

archs = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
# v21 is written by workgroups below `first`, v20 computed from it by all, v20 stored by workgroups below `second`
PATHS = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshl_add_u32 v1, s2, 8, 0
    v_lshl_add_u32 v1, v0, 2, v1
    s_waitcnt lgkmcnt(0)
    s_cmp_ge_i32 s2, s6
    s_cbranch_scc1 .Ljoin
    v_mov_b32 v21, 7
.Ljoin:
    v_add_u32 v20, 1, v21
    v_add_u32 v19, v20, v20
    s_cmp_ge_i32 s2, s7
    s_cbranch_scc1 .Ldone
    global_store_dword v1, v19, s[4:5]
.Ldone:
    s_endpgm
"""
# four turns of a loop that feeds v20 to itself
TURNS = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_mov_b32 s8, 4
.Lturn:
    v_add_u32 v20, 1, v20
    s_sub_u32 s8, s8, 1
    s_cmp_lg_u32 s8, 0
    s_cbranch_scc1 .Lturn
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v20, s[4:5]
    s_endpgm
"""


def run(body: str, arch: str, first: int = 0, second: int = 0) -> list[int]:
    """Four workgroups of one wave; what they stored in their first lane."""
    out = np.zeros((4, 64), np.uint32)
    kernarg = struct.pack("<Qii", out.ctypes.data, first, second)
    Program(assemble(body, arch)).launch("k", (4,), (64,), kernarg, [Region(out.ctypes.data, out.nbytes, "out")])
    assert (out == out[:, :1]).all()
    return out[:, 0].tolist()


def findings(body: str, arch: str, first: int = 0, second: int = 0) -> tuple:
    with pytest.raises(EmulatorReportError) as caught:
        run(body, arch, first, second)
    return caught.value.reports


@archs
def test_an_undefined_result_that_nobody_uses(arch):
    assert run(PATHS, arch, 0, 0) == [0, 0, 0, 0]


@archs
def test_waves_that_come_on_different_paths_are_told_apart(arch):
    assert run(PATHS, arch, 2, 2) == [16, 16, 0, 0]
    assert run(PATHS, arch, 3, 1) == [16, 0, 0, 0]
    assert run(PATHS, arch, 4, 4) == [16, 16, 16, 16]


@archs
def test_storing_an_undefined_result_names_where_it_came_from(arch):
    (report,) = findings(PATHS, arch, 2, 3)
    assert (report.kind, report.workgroup, report.wave) == ("uninitialised-register", (2, 0, 0), 0)
    assert report.instruction.startswith("global_store_dword")
    assert "reads v19, computed by `v_add_u32 v19, v20, v20`" in report.text
    assert "from v21, which nothing has written" in report.text


@archs
def test_a_register_that_feeds_itself(arch):
    (report,) = findings(TURNS, arch)
    assert "computed by `v_add_u32 v20, 1, v20`" in report.text and "from v20, which nothing" in report.text


@archs
@pytest.mark.parametrize(
    "use, named",
    [
        ("s_cbranch_vccz .Lhere\n.Lhere:", "vcc_lo, vcc_hi"),
        ("s_cmp_eq_u32 s30, 0", "s30"),
        ("s_and_saveexec_b64 s[8:9], s[30:31]", "s30, s31"),
        ("s_mov_b64 exec, s[30:31]", "s30, s31"),
        ("s_mov_b32 m0, s30", "s30"),
        ("v_cmpx_eq_u32 vcc, v30, v30", "v30"),
        ("global_load_dword v2, v[30:31], off", "v30, v31"),
        ("ds_write_b32 v0, v30", "v30"),
        ("ds_bpermute_b32 v2, v30, v0", "v30"),
        ("v_readfirstlane_b32 s8, v30\ns_cmp_eq_u32 s8, 0", "s8, computed by"),
    ],
)
def test_what_counts_as_a_use(arch, use, named):
    report = findings(f"{use}\ns_endpgm", arch)[0]
    assert report.kind == "uninitialised-register" and f"reads {named}" in report.text


# a constant in one register of a pair, moved as a pair: packed instructions read such constants' lower words alone
HALF = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b32 s8, 0x40e00000
    v_lshlrev_b32 v1, 2, v0
    {move}
    s_nop 4
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, {stored}, s[4:5]
    s_endpgm
"""
MOVES = (
    "v_mov_b64 v[20:21], s[8:9]",
    "s_mov_b64 s[10:11], s[8:9]\n    v_mov_b64 v[20:21], s[10:11]",
    "v_mov_b64 v[22:23], s[8:9]\n    v_pk_mul_f32 v[20:21], v[22:23], 1.0 op_sel_hi:[1,0]",
    "v_mov_b64 v[22:23], s[8:9]\n    v_pk_mov_b32 v[20:21], v[22:23], v[22:23] op_sel:[0,1]",
)


@archs
@pytest.mark.parametrize("move", MOVES)
def test_a_pair_with_one_defined_word_moves_and_multiplies_word_by_word(arch, move):
    assert run(HALF.format(move=move, stored="v20"), arch)[0] == 0x40E00000
    (report,) = findings(HALF.format(move=move, stored="v21"), arch)
    assert report.kind == "uninitialised-register"


# v20 and v21, of which only v20 is written, go to scratch as a pair and come back as v22 and v23
SPILL = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshl_add_u32 v1, s2, 8, 0
    v_lshl_add_u32 v1, v0, 2, v1
    v_mov_b32 v20, 7
    {before}
    scratch_store_dwordx2 off, v[20:21], off offset:8
    {between}
    scratch_load_dwordx2 v[22:23], off, off offset:8
    s_waitcnt vmcnt(0) lgkmcnt(0)
    {after}
    global_store_dword v1, {stored}, s[4:5]
.Ldone:
    s_endpgm
"""
SOME, NONE, ALL = "s_mov_b32 exec_hi, 0\n", "s_mov_b64 exec, 0\n", "s_mov_b64 exec, -1\n"


def spilled(arch: str, stored: str, **code: str) -> tuple:
    """What the checks report of the spill; on a run without findings, the numbers that the first lanes stored."""
    body = SPILL.format(stored=stored, **{"before": "", "between": "", "after": "", **code})
    out = np.zeros((4, 64), np.uint32)
    kernarg, regions = struct.pack("<Q", out.ctypes.data), [Region(out.ctypes.data, out.nbytes, "out")]
    try:
        Program(assemble(body, arch, scratch=32)).launch("k", (4,), (64,), kernarg, regions)
    except EmulatorReportError as error:
        return error.reports
    return tuple(out[:, 0].tolist())


@archs
def test_spilling_an_undefined_half_of_a_pair_is_no_use_of_it(arch):
    assert spilled(arch, "v22") == (7, 7, 7, 7)
    assert spilled(arch, "v22", after="v_add_u32 v24, 1, v23") == (7, 7, 7, 7)


@archs
@pytest.mark.parametrize("after, stored", [("", "v23"), ("v_add_u32 v24, 1, v23", "v24")])
def test_a_use_of_the_undefined_half_that_comes_back_is_reported(arch, after, stored):
    (report,) = spilled(arch, stored, after=after)
    assert report.kind == "uninitialised-register" and report.instruction.startswith("global_store_dword")
    assert f"reads {stored}, computed by" in report.text and "from v21, which nothing has written" in report.text


@archs
def test_a_defined_value_in_the_place_of_a_spilled_one(arch):
    second = "v_mov_b32 v25, 9\n scratch_store_dword off, v25, off offset:12"
    assert spilled(arch, "v23", between=second) == (9, 9, 9, 9)
    (report,) = spilled(arch, "v22", between="scratch_store_dword off, v30, off offset:8")
    assert "from v30, which nothing has written" in report.text
    # part of a dword, and a register that is stored elsewhere
    assert spilled(arch, "v23", between="scratch_store_byte off, v20, off offset:12")[0] & 255 == 7
    (report,) = spilled(arch, "v23", between="scratch_store_dword off, v20, off offset:16")
    assert report.kind == "uninitialised-register"


@archs
def test_spills_of_waves_that_came_on_different_paths(arch):
    """Workgroups 2 and 3 have not written v21 when all of them spill it; only workgroup 0 stores it."""
    before = "s_cmp_ge_i32 s2, 2\n s_cbranch_scc1 .Ljoin\n v_mov_b32 v21, 5\n.Ljoin:"
    after = "s_cmp_ge_i32 s2, {}\n s_cbranch_scc1 .Ldone"
    assert spilled(arch, "v23", before=before, after=after.format(2)) == (5, 5, 0, 0)
    (report,) = spilled(arch, "v23", before=before, after=after.format(3))
    assert report.workgroup == (2, 0, 0)


@archs
def test_a_value_that_is_defined_in_some_lanes_is_defined(arch):
    """As a register is: a compiler's spill in a branch, and its reload after it."""
    between = "v_mov_b32 v25, 9\n" + SOME + "scratch_store_dword off, v25, off offset:12\n" + ALL
    assert spilled(arch, "v23", between=between) == (9, 9, 9, 9)
    (report,) = spilled(arch, "v23", between=between.replace(SOME, NONE))
    assert report.kind == "uninitialised-register"


@archs
@pytest.mark.parametrize(
    "store, named",
    [
        ("scratch_store_short off, v30, off", "v30"),  # parts of dwords are not followed
        ("scratch_store_dword v30, v0, off", "v30"),  # an address
        ("scratch_store_dword off, v0, s30", "s30"),
    ],
)
def test_what_counts_as_a_use_in_a_store_to_scratch(arch, store, named):
    report = spilled(arch, "v22", before=store)[0]
    assert report.kind == "uninitialised-register" and f"reads {named}, which nothing" in report.text


@archs
def test_an_undefined_carry_makes_an_undefined_sum(arch):
    carried = "v_addc_co_u32 v20, vcc, 4, v19, vcc"
    code = HALF.format(move="v_mov_b32 v19, 3\n{}" + carried, stored="v20")
    assert run(code.format("s_mov_b64 vcc, -1\n"), arch)[0] == 8
    (report,) = findings(code.format(""), arch)
    assert f"reads v20, computed by `{carried}`" in report.text and "from vcc_lo, vcc_hi, which" in report.text


@archs
@pytest.mark.parametrize("place, fits", [(28, True), (29, False), (32, False)])
def test_the_last_dword_of_scratch(arch, place, fits):
    program = Program(assemble(f"scratch_store_dword off, v0, off offset:{place}\ns_endpgm", arch, scratch=32))
    if fits:
        program.launch("k", (1,), (64,), bytes(64), [])
        return
    with pytest.raises(EmulatorError, match=f"scratch offset {place} of 32 bytes"):
        program.launch("k", (1,), (64,), bytes(64), [])
