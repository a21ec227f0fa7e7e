"""Races in LDS of which the last reader is the writer: the others that read the same dword are not forgotten."""

import pytest

from fly.emulator import Program
from fly.errors import EmulatorReportError
from tests.emulator.assembly import assemble

# both waves read the first dword, and one of them overwrites it without a barrier
BODY = """
    v_readfirstlane_b32 s6, v0
    s_lshr_b32 s6, s6, 6
    v_lshlrev_b32 v1, 2, v0
    v_mov_b32 v2, 0
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    {read}
    s_waitcnt lgkmcnt(0)
    {between}
    s_cmp_eq_u32 s6, {writer}
    s_cbranch_scc0 .Ldone
    ds_write_b32 v2, v0
.Ldone:
    s_endpgm
"""
READS = {
    "together": "ds_read_b32 v3, v2",
    # wave 0 first
    "one after the other": """
    s_cmp_eq_u32 s6, 0
    s_cbranch_scc0 .Lsecond
    ds_read_b32 v3, v2
    s_branch .Lread
.Lsecond:
    ds_read_b32 v3, v2
.Lread:""",
    # the dword is the last of four
    "as part of more": "ds_read_b128 v[4:7], v2",
}


def reports(arch: str, **parts: object) -> tuple:
    code = BODY.format(**{"between": "", **parts})
    try:
        Program(assemble(code, arch, lds=512)).launch("k", (1,), (128,), bytes(64), [])
    except EmulatorReportError as error:
        return error.reports
    return ()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("read", READS)
def test_a_write_over_what_another_wave_has_read_is_found(read, writer, arch):
    code = READS[read]
    if "b128" in code:
        code += "\nv_mov_b32 v2, 12"
    found = reports(arch, read=code, writer=writer)
    assert {r.kind for r in found} == {"lds-race"}, found
    assert (
        found[0].wave == writer and "overwrites LDS read in the same barrier phase by several waves" in found[0].text
    )
    assert reports(arch, read=code, writer=writer, between="s_barrier") == ()
