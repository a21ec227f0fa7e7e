"""Code generation through LLVM: options stay with their kernel, and what LLVM rejects is an error."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest

from fly.backends.llvm import Machine, emit
from fly.backends.rocdl.codegen import TRIPLE
from fly.errors import CompileError, ShapeError
from tests.backends.builds import build, scaled

# a sum of four loads, so that there is something to schedule
SUM = """
define amdgpu_kernel void @sum(ptr addrspace(1) %a, ptr addrspace(1) %out) "amdgpu-flat-work-group-size"="64,64" {
  %x = load <4 x float>, ptr addrspace(1) %a
  %q = getelementptr i8, ptr addrspace(1) %a, i64 4096
  %y = load <4 x float>, ptr addrspace(1) %q
  %s = fadd <4 x float> %x, %y
  store <4 x float> %s, ptr addrspace(1) %out
  ret void
}
"""
VISIBLE = ("--amdgpu-waitcnt-forcezero",)  # a wait before every instruction


def waits(options: tuple[str, ...] = ()) -> int:
    emitted = emit(SUM, Machine(TRIPLE, "gfx942", options=options), want_object=False)
    return emitted.assembly.count("s_waitcnt")


def test_options_change_their_compile_and_no_other():
    before = waits()
    assert waits(VISIBLE) > before + 3
    assert waits() == before


def test_options_do_not_leak_between_threads():
    plain, forced = waits(), waits(VISIBLE)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(waits, [(), VISIBLE] * 2))
    assert results == [plain, forced] * 2


def test_options_of_a_kernel_reach_its_isa():
    plain = build(scaled, "gfx942")
    forced = build(scaled, "gfx942", options=VISIBLE)
    assert forced.isa.count("s_waitcnt") > plain.isa.count("s_waitcnt")
    assert build(scaled, "gfx942").isa == plain.isa


def test_several_options_are_all_used():
    both = emit(SUM, Machine(TRIPLE, "gfx942", options=("--enable-post-misched=false", *VISIBLE)), want_object=True)
    assert both.object.startswith(b"\x7fELF")
    assert both.assembly.count("s_waitcnt") == waits(VISIBLE)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--no-such-option-anywhere", "unknown option --no-such-option-anywhere$"),
        ("--enable-post-mished=false", "unknown option .*; did you mean --enable-post-misched?"),
        ("--enable-post-misched=banana", "for the --enable-post-misched option: 'banana' is invalid"),
    ],
)
def test_a_bad_option_is_an_error(option, reason):
    with pytest.raises(CompileError, match=f"^LLVM with options {option} failed for gfx942: .*{reason}"):
        waits((option,))


def test_what_is_no_option_is_the_authors_error():
    with pytest.raises(ShapeError, match=r"compiler option 'fast' is no string that starts with '-'"):
        build(scaled, "gfx942", options=("fast",))


@pytest.mark.parametrize("options", [(), VISIBLE])
def test_bad_ir_is_an_error(options):
    with pytest.raises(CompileError, match=r"(?s)for gfx942: .*expected"):
        emit("define void @f( {", Machine(TRIPLE, "gfx942", options=options), want_object=False)


def test_options_work_from_any_directory(tmp_path):
    """The process that a kernel with options is compiled in finds the package that started it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fly.backends.llvm import Machine, emit\n"
        "emit(sys.argv[2], Machine('amdgcn-amd-amdhsa', 'gfx942', options=('--enable-post-misched=false',)), "
        "want_object=False)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), SUM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_object_code_is_only_made_when_wanted():
    machine = Machine(TRIPLE, "gfx950")
    assert emit(SUM, machine, want_object=False).object == b""
    emitted = emit(SUM, machine, want_object=True)
    assert emitted.object.startswith(b"\x7fELF")
    assert "define amdgpu_kernel void @sum" in emitted.llvm_ir
    assert "v_pk_add_f32" in emitted.assembly
