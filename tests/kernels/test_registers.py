"""The command that counts registers: what it walks, what it says of spills, and a few of the committed builds."""

from __future__ import annotations

import pytest

from benchmarks import registers
from fly.backends.artefact import Resources
from kernels.generic.backward import TOGETHER
from tests.backends.builds import needs_ptxas

# those with all registers in use; Hopper's find things again for want of them (kernels/sm90/thrift.py)
CROWDED_FOR_PTXAS = [
    ("sm_80", "backward", "generic", 64, "plain"),
    ("sm_80", "backward", "generic", 64, "packed"),
    ("sm_80", "forward", "generic", 96, "softcap"),
    ("sm_80", "forward", "generic", 128, "window"),
    ("sm_80", "forward", "generic", 256, "plain"),
    ("sm_90a", "forward", "generic", 256, "packed"),
    ("sm_90a", "backward", "sm90", 128, "softcap, dropout"),
    ("sm_90a", "backward", "sm90", 128, "packed, deterministic"),
    ("sm_90a", "backward", "sm90", 128, "packed, long"),
    ("sm_90a", "backward", "sm90", 128, "alibi, softcap"),
    ("sm_90a", "backward", "sm90_wide", 160, "plain"),
    ("sm_90a", "backward", "sm90_wide", 176, "softcap, window"),
    ("sm_90a", "backward", "sm90_wide", 248, "bias"),
    ("sm_90a", "backward", "sm90_wide", 256, "dropout, deterministic"),
]
# the same, and of scalar ones on AMD
CROWDED = [
    ("gfx942", "backward", "generic", 64, "softcap, dropout"),
    ("gfx942", "backward", "gfx942", 64, "softcap, dropout"),
    ("gfx942", "forward", "gfx942", 128, "bias"),
    ("gfx942", "backward", "generic", 32, "block mask"),
    ("gfx942", "backward", "generic", 224, "plain"),
    ("gfx942", "forward", "generic", 64, "block mask, dropout"),
    ("gfx942", "forward", "generic", 160, "block mask"),
    ("gfx942", "backward", "generic", 64, "alibi, block mask"),
    ("gfx942", "backward", "generic", 128, "window"),
    ("gfx942", "backward", "generic", 128, "bias, dropout"),
    ("gfx942", "backward", "gfx942", 64, "packed, score_mod"),
    ("gfx942", "backward", "gfx942", 64, "score_mod, window"),
    ("gfx942", "backward", "gfx942", 64, "mask_mod, dropout"),
    ("gfx942", "backward", "gfx942", 64, "alibi, dropout"),
    ("gfx942", "backward", "gfx942", 64, "bias, dropout"),
    ("gfx942", "backward", "gfx942", 128, "bias, dropout"),
    ("gfx950", "backward", "generic", 96, "block mask, dropout"),
    ("gfx950", "backward", "generic", 96, "score_mod, gradient"),
    ("gfx950", "forward", "generic", 128, "block mask, blocks of 64"),
    ("gfx950", "backward", "generic", 96, "chunk"),
    ("gfx950", "backward", "generic", 96, "bias"),
    ("gfx950", "backward", "generic", 96, "block mask, blocks of 64"),
    ("gfx950", "backward", "generic", 160, "window"),
    ("gfx950", "backward", "gfx950", 128, "mask_mod"),
    ("gfx950", "backward", "gfx950", 128, "softcap, dropout"),
    ("gfx950", "backward", "gfx950", 128, "bias, dropout"),
    ("gfx950", "forward", "gfx950", 128, "softcap, dropout"),
    ("gfx950", "forward", "gfx950", 192, "block mask, dropout"),
    ("gfx950", "forward", "gfx950", 64, "packed, alibi, dropout"),
    ("gfx950", "forward", "gfx950", 64, "chunk, dropout"),
    ("gfx950", "forward", "gfx950", 64, "alibi, block mask"),
    ("gfx950", "forward", "gfx950", 128, "alibi, dropout"),
    ("gfx950", "forward", "gfx950", 128, "bias, dropout"),
    ("gfx950", "forward", "gfx950", 128, "mask_mod, dropout"),
    ("gfx950", "forward", "gfx950", 192, "alibi, softcap"),
    *(pytest.param(*build, marks=needs_ptxas) for build in CROWDED_FOR_PTXAS),
]


@pytest.mark.parametrize(("arch", "name", "kernel", "head_dim", "form"), CROWDED)
def test_committed_builds_spill_nothing(arch, name, kernel, head_dim, form):
    found = registers.count(registers.Case(arch, name, kernel, head_dim, True, form))
    kernels = 1 if name == "forward" else 4 if kernel == "generic" and head_dim > TOGETHER else 3
    if form == "dropout, deterministic":
        kernels -= 1  # all queries see keys, so that nobody clears dq
    assert len(found) == kernels and all(map(registers.is_clean, found)), [registers.line(build) for build in found]


@needs_ptxas
@pytest.mark.parametrize(
    ("length", "head_dim", "form"),
    [(512, 128, "bias"), (4096, 64, "score_mod"), (4096, 96, "bias"), (4096, 128, "bias")],
)
def test_calls_of_8_bits_with_code_for_every_score_have_builds(length, head_dim, form, monkeypatch):
    """Long ones of 16 bits have tiles of 80 and 112 keys, which P of 8 bits is no whole operands of."""
    monkeypatch.setattr(registers, "LENGTH", length)
    monkeypatch.setattr(registers, "HEADS", 64)
    found = registers.count(registers.Case("sm_90a", "forward", "sm90_fp8", head_dim, False, form))
    assert found and all(map(registers.is_clean, found)), [registers.line(build) for build in found]


@pytest.mark.parametrize(
    ("form", "causal", "keys", "lazy"),
    [
        ("plain", True, 64, False),
        ("packed", False, 48, True),
        ("seqused", True, 64, False),
        ("window", True, 64, True),
        ("softcap, window", False, 64, True),
        ("softcap, window", True, 48, True),
        ("packed, window, softcap", True, 64, True),
        ("block mask", False, 64, False),
        ("block mask", True, 64, True),
        ("block mask, dropout", False, 32, True),
        ("block mask, dropout", True, 64, True),
    ],
)
def test_generic_builds_that_have_room_on_hopper_stay_as_they_are(form, causal, keys, lazy):
    bindings = registers.bindings_of(registers.Case("sm_90a", "forward", "generic", 256, causal, form))
    (options,) = (b.statics["options"] for b in bindings if b.kernel.name == "flash_attn_generic")
    assert (options.block_n, options.lazy) == (keys, lazy)


def test_a_build_that_spills_is_listed_and_counted(monkeypatch, capsys):
    case = registers.Case("gfx942", "backward", "generic", 64, True, "plain")
    found = [registers.Counted(case, name, Resources(250, 8, 60, n, 0)) for name, n in (("full", 3), ("lean", 0))]
    monkeypatch.setattr(registers, "counted", lambda cases, jobs: iter([found]))
    assert registers.main(["--only_spills", "--arch", "gfx942"]) == 1
    shown = capsys.readouterr().out
    assert "gfx942 generic backward 64 causal plain: full" in shown and "lean" not in shown
    assert shown.endswith("2 builds, 1 with spills\n")


def test_every_row_of_the_dispatch_tables_is_walked():
    options = registers._parser().parse_args([])
    walked = {(case.name, case.kernel, case.arch) for case in registers.cases(options)}
    assert walked == {(n, k.name, arch) for n, of in registers.PASSES.items() for k in of.table() for arch in k.archs}


@pytest.mark.parametrize("form", ["bias of keys, gradient", "score_mod, gradient", "block mask, blocks of 64"])
def test_forms_have_the_builds_of_their_calls(form):
    found = registers.bindings_of(registers.Case("sm_80", "backward", "generic", 64, True, form))
    names = [binding.kernel.name for binding in found]
    assert names == ["row_statistics", "flash_attn_generic_dkdv", "flash_attn_generic_dq"]
    assert "shared" in str(found[-1].statics["options"].resident)


def test_a_deterministic_form_is_of_the_backward_pass_alone():
    options = registers._parser().parse_args(["--form", "deterministic", "--arch", "sm_80"])
    assert {case.name for case in registers.cases(options)} == {"backward"}


@pytest.mark.parametrize("form", ["plain", "deterministic"])
def test_the_deterministic_form_asks_for_such_a_build(form):
    bindings = registers.bindings_of(registers.Case("sm_90a", "backward", "sm90", 128, True, form))
    (options,) = (b.statics["options"] for b in bindings if b.kernel.name == "flash_attn_sm90_bwd")
    assert options.ordered is (form == "deterministic")


def test_the_bias_of_8_bit_inputs_has_the_outputs_dtype():
    bindings = registers.bindings_of(registers.Case("gfx950", "forward", "gfx950_fp8", 128, True, "bias"))
    assert bindings[0].specs[-1].dtype == "bf16"
