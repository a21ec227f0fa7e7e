"""What a wait makes available: loads on one counter return in order, scalar and flat ones in any."""

import struct

import numpy as np
import pytest

from fly.emulator import Program, Region
from fly.errors import EmulatorReportError
from tests.emulator.assembly import assemble

SCALARS = "s_load_dword s8, s[0:1], 0x0\n s_load_dword s9, s[0:1], 0x4"
LDS = "ds_read_b32 v10, v3\n ds_read_b32 v11, v3"
GLOBAL = "global_load_dword v10, v2, s[4:5]\n global_load_dword v11, v2, s[4:5]"
MANY_LDS = "\n".join(f"ds_read_b32 v{10 + i}, v3" for i in range(16))
MANY_GLOBAL = "\n".join(f"global_load_dword v{20 + i}, v2, s[4:5]" for i in range(64))
# name: (loads, wait, what reads a result, the register and counter of the report or nothing)
CASES = {
    "scalar, all": (SCALARS, "lgkmcnt(0)", "s_add_u32 s10, s8, s9", None),
    "scalar, the first of two": (SCALARS, "lgkmcnt(1)", "s_mov_b32 s10, s8", "s8 lgkmcnt"),
    "scalar, the second of two": (SCALARS, "lgkmcnt(1)", "s_mov_b32 s10, s9", "s9 lgkmcnt"),
    "LDS, the first of two": (LDS, "lgkmcnt(1)", "v_mov_b32 v20, v10", None),
    "LDS, the second of two": (LDS, "lgkmcnt(1)", "v_mov_b32 v20, v11", "v11 lgkmcnt"),
    "LDS before scalar": (f"{LDS}\n s_load_dword s8, s[0:1], 0x0", "lgkmcnt(1)", "v_mov_b32 v20, v10", "v10 lgkmcnt"),
    "scalar before LDS": (f"s_load_dword s8, s[0:1], 0x0\n {LDS}", "lgkmcnt(2)", "s_mov_b32 s10, s8", "s8 lgkmcnt"),
    "LDS and scalar, all": (f"{LDS}\n{SCALARS}", "lgkmcnt(0)", "v_mov_b32 v20, v11\n s_mov_b32 s10, s8", None),
    "global, the first of two": (GLOBAL, "vmcnt(1)", "v_mov_b32 v20, v10", None),
    "global, the second of two": (GLOBAL, "vmcnt(1)", "v_mov_b32 v20, v11", "v11 vmcnt"),
    "global, the other counter": (GLOBAL, "lgkmcnt(0)", "v_mov_b32 v20, v10", "v10 vmcnt"),
    "LDS, the other counter": (LDS, "vmcnt(0)", "v_mov_b32 v20, v10", "v10 lgkmcnt"),
    "flat, both": ("flat_load_dword v10, v[4:5]", "vmcnt(0) lgkmcnt(0)", "v_mov_b32 v20, v10", None),
    "flat, as global": ("flat_load_dword v10, v[4:5]", "vmcnt(0)", "v_mov_b32 v20, v10", "v10"),
    "flat, as LDS": ("flat_load_dword v10, v[4:5]", "lgkmcnt(0)", "v_mov_b32 v20, v10", "v10"),
    # an overwrite as a use
    "overwritten while outstanding": (GLOBAL, "vmcnt(1)", "v_mov_b32 v11, 0", "v11 vmcnt"),
    # the next one is issued when a full counter has room
    "LDS, more than the counter holds": (MANY_LDS, "lgkmcnt(15)", "v_mov_b32 v30, v10", None),
    "LDS, as many as the counter holds": (MANY_LDS, "lgkmcnt(15)", "v_mov_b32 v30, v11", "v11 lgkmcnt"),
    "global, more than the counter holds": (MANY_GLOBAL, "vmcnt(63)", "v_mov_b32 v10, v20", None),
    "global, as many as the counter holds": (MANY_GLOBAL, "vmcnt(63)", "v_mov_b32 v10, v21", "v21 vmcnt"),
}
BODY = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32 v2, 2, v0
    v_lshlrev_b32 v3, 2, v0
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v4, s4
    v_mov_b32 v5, s5
    ds_write_b32 v3, v0
    s_waitcnt lgkmcnt(0)
    {loads}
    s_waitcnt {wait}
    {use}
    s_endpgm
"""


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_wait_makes_available(case, arch):
    loads, wait, use, named = CASES[case]
    data = np.arange(64, dtype=np.uint32)
    program = Program(assemble(BODY.format(loads=loads, wait=wait, use=use), arch, lds=256, registers=128))
    kernarg, regions = struct.pack("<QQ", data.ctypes.data, 0), [Region(data.ctypes.data, data.nbytes, "data")]
    if named is None:
        program.launch("k", (1,), (64,), kernarg, regions)
        return
    with pytest.raises(EmulatorReportError) as caught:
        program.launch("k", (1,), (64,), kernarg, regions)
    (report,) = caught.value.reports
    register, _, counter = named.partition(" ")
    assert report.kind == "missing-wait" and f"uses {register} while" in report.text and counter in report.text
