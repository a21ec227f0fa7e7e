"""Undefined registers: computing with them is allowed, letting their values out is reported."""

import struct

import numpy as np
import pytest

from fly.emulator import Program, Region
from fly.errors import EmulatorReportError
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
