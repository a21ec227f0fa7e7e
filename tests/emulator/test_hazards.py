"""Wait states behind matrix instructions: as many as are needed give no finding, one fewer does."""

import pytest

from fly.emulator import Program
from fly.errors import EmulatorReportError
from tests.emulator.assembly import assemble

# instruction: (result registers, A and B registers, wait states before a use on gfx942, on gfx950)
MATRIX = {
    "v_mfma_f32_32x32x8_f16": (16, 2, 11, 12),
    "v_mfma_f32_16x16x16_f16": (4, 2, 7, 8),
    "v_mfma_f32_4x4x4_16b_f16": (4, 2, 5, 5),
    "v_mfma_f32_32x32x2_f32": (16, 1, 18, 18),
    "v_mfma_f32_16x16x4_f32": (4, 1, 10, 10),
    "v_mfma_f32_32x32x64_f8f6f4": (16, 8, 0, 20),
    "v_mfma_f32_16x16x128_f8f6f4": (4, 8, 0, 12),
}
# what follows, with the result in v16 and up; how many wait states fewer than for a use it needs
USES = {
    "read": ("v_mov_b32 v60, v19", 0),
    "overwrite": ("v_mov_b32 v19, 0", 0),
    "address": ("ds_read_b32 v60, v16", 0),
    "A": ("v_mfma_f32_16x16x16_f16 v[48:51], v[18:19], v[2:3], v[52:55]", 0),
    "B": ("v_mfma_f32_16x16x16_f16 v[48:51], v[2:3], v[16:17], v[52:55]", 0),
    "part of C": ("v_mfma_f32_16x16x16_f16 v[48:51], v[2:3], v[4:5], v[18:21]", 2),
}


def findings(code: str, arch: str) -> list[str]:
    try:
        Program(assemble(code + "\ns_endpgm", arch, lds=256)).launch("k", (1,), (64,), bytes(64), [])
    except EmulatorReportError as error:
        return [r.text for r in error.reports if r.kind == "matrix-hazard"]
    return []


def spaced(name: str, states: int, use: str) -> str:
    """A matrix instruction, so many wait states, and what follows."""
    count, inputs, *_ = MATRIX[name]
    a, b = ("v0", "v2") if inputs == 1 else (f"v[{first}:{first + inputs - 1}]" for first in (0, inputs))
    nops = [f"s_nop {min(16, states - at) - 1}" for at in range(0, states, 16)]
    return "\n".join([f"{name} v[16:{15 + count}], {a}, {b}, v[32:{31 + count}]", *nops, use])


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", MATRIX)
def test_a_use_needs_its_wait_states(name, arch):
    needed = MATRIX[name][2 if arch == "gfx942" else 3]
    if not needed:
        pytest.skip(f"{arch} has no {name}")
    assert findings(spaced(name, needed, USES["read"][0]), arch) == []
    (text,) = findings(spaced(name, needed - 1, USES["read"][0]), arch)
    assert f"needs 1 more wait state(s) behind `{name}" in text
    (text,) = findings(spaced(name, 1, USES["read"][0]), arch)
    assert f"needs {needed - 1} more" in text


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kind", USES)
def test_what_counts_as_a_use(kind, arch):
    name = "v_mfma_f32_16x16x16_f16"
    use, fewer = USES[kind]
    needed = MATRIX[name][2 if arch == "gfx942" else 3] - fewer
    assert findings(spaced(name, needed, use), arch) == []
    assert f"needs 1 more wait state(s) behind `{name}" in findings(spaced(name, needed - 1, use), arch)[0]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_whole_result_is_forwarded_as_c(arch):
    name = "v_mfma_f32_16x16x16_f16"
    assert findings(spaced(name, 1, f"{name} v[16:19], v[2:3], v[4:5], v[16:19]"), arch) == []
    assert findings(spaced(name, 1, f"{name} v[48:51], v[2:3], v[4:5], v[52:55]"), arch) == []
