"""AMD code objects: what is in them, what they use, and linking."""

from __future__ import annotations

import re
import stat
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import llvmlite.binding as llvm
import pytest

from fly.backends.llvm import Machine, emit
from fly.backends.rocdl import codegen
from fly.backends.target import target
from fly.errors import CompileError, DeviceError
from tests.backends.builds import build, cached, reversed_block, scaled

AMD = ["gfx942", "gfx950"]


def elf_symbols(data: bytes) -> dict[str, int]:
    """Names and sizes of an ELF file's dynamic symbols."""
    offset, entry, count, names = struct.unpack_from("<Q10xHHH", data, 0x28)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
    (table,) = (s for s in sections if s[1] == 11)
    strings = sections[table[6]][4]
    found = {}
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, _, _, size = struct.unpack_from("<IBBHQQ", data, at)
        found[data[strings + name : data.index(b"\0", strings + name)].decode()] = size
    assert names < count
    return found


@pytest.mark.parametrize("arch", AMD)
def test_code_object_is_a_shared_elf_with_the_kernel(arch):
    binary = cached(scaled, arch).binary
    assert binary.startswith(b"\x7fELF\x02\x01")  # 64 bit, little endian
    kind, machine = struct.unpack_from("<HH", binary, 16)
    assert (kind, machine) == (3, 224)  # ET_DYN, EM_AMDGPU
    (flags,) = struct.unpack_from("<I", binary, 0x30)
    assert flags & 0xFF == {"gfx942": 0x4C, "gfx950": 0x4F}[arch]
    symbols = elf_symbols(binary)
    assert symbols["scaled.kd"] == 64  # the kernel descriptor
    assert symbols["scaled"] > 0
    assert b"amdhsa.kernels" in binary


@pytest.mark.parametrize("arch", AMD)
def test_metadata_describes_the_arguments_as_they_are_packed(arch):
    artefact = cached(scaled, arch)
    arguments = artefact.isa.split(".args:")[1].split(".group_segment")[0]
    sizes = [int(x) for x in re.findall(r"\.size:\s+(\d+)", arguments)]
    offsets = [int(x) for x in re.findall(r"\.offset:\s+(\d+)", arguments)]
    assert [f.name for f in artefact.fields] == ["a", "a.shape0", "out", "out.shape0", "factor"]
    assert sizes == [8, 4, 8, 4, 4]
    assert offsets == [0, 8, 16, 24, 28]  # natural alignment
    assert ".kernarg_segment_size: 32" in artefact.isa


@pytest.mark.parametrize("arch", AMD)
def test_resources(arch):
    plain, shared = cached(scaled, arch).resources, cached(reversed_block, arch).resources
    assert (plain.shared_bytes, shared.shared_bytes) == (0, 1024)
    for resources in (plain, shared):
        assert 0 < resources.registers <= 64
        assert resources.accum_registers == 0
        assert 0 < resources.scalar_registers <= 102
        assert (resources.spills, resources.scratch_bytes, resources.occupancy) == (0, 0, 8)


@pytest.mark.parametrize("arch", AMD)
def test_barrier_waits_for_shared_memory(arch):
    """Stores have landed before it, and nothing is read ahead of it."""
    code = [line.strip() for line in cached(reversed_block, arch).isa.splitlines()]
    barrier = code.index("s_barrier")
    store, load = (next(i for i, line in enumerate(code) if line.startswith(x)) for x in ("ds_write", "ds_read"))
    assert store < barrier < load
    assert any("lgkmcnt(0)" in line for line in code[store + 1 : barrier])


def said_by(assembly: str) -> dict[str, int]:
    """The numbers that LLVM writes into the assembly of a kernel."""
    keys = "num_vgpr num_agpr vgpr_count sgpr_count vgpr_spill_count sgpr_spill_count group_segment_fixed_size "
    keys += "private_segment_fixed_size max_flat_workgroup_size"
    return {key: int(re.search(rf"\.{key}(?::\s+|, )(\d+)$", assembly, re.M).group(1)) for key in keys.split()}


def test_accumulation_registers_are_counted_apart():
    text = """
    define amdgpu_kernel void @k(ptr addrspace(1) %p) {
      call void asm sideeffect "v_accvgpr_write_b32 a9, v20", "~{a9},~{v20}"()
      ret void
    }
    """
    # assembly in IR is taken to text only
    emitted = emit(text, Machine(codegen.TRIPLE, "gfx942"), want_object=False)
    resources = codegen.resources(said_by(emitted.assembly), target("gfx942"))
    assert (resources.registers, resources.accum_registers) == (21, 10)


def llvm_occupancy(ir: str, arch: str) -> int:
    """What LLVM says in the comments of its verbose assembly."""
    machine = llvm.Target.from_triple(codegen.TRIPLE).create_target_machine(cpu=arch, opt=3, reloc="pic")
    machine.set_asm_verbosity(True)
    assembly = machine.emit_assembly(llvm.parse_assembly(ir))
    return int(re.search(r"^; Occupancy: (\d+)", assembly, re.M).group(1))


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("elements", [256, 2048, 4096, 8192, 16000])
def test_occupancy_is_what_llvm_says(arch, elements):
    texts = {}
    artefact = build(reversed_block, arch, elements=elements, observe=texts.__setitem__)
    assert artefact.resources.occupancy == llvm_occupancy(texts["llvm-optimised"], arch)


@pytest.mark.parametrize("registers", [64, 65, 96, 129, 170, 256])
def test_occupancy_by_registers_is_what_llvm_says(registers):
    text = f"""
    define amdgpu_kernel void @k() "amdgpu-flat-work-group-size"="256,256" {{
      call void asm sideeffect "v_mov_b32 v{registers - 1}, 0", "~{{v{registers - 1}}}"()
      ret void
    }}
    """
    emitted = emit(text, Machine(codegen.TRIPLE, "gfx950"), want_object=False)
    resources = codegen.resources(said_by(emitted.assembly), target("gfx950"))
    assert resources.registers == registers
    assert resources.occupancy == llvm_occupancy(emitted.llvm_ir, "gfx950")


@pytest.mark.parametrize("kernels", [0, 2])
def test_an_object_without_the_metadata_of_one_kernel_is_an_error(kernels):
    text = "".join(f"define amdgpu_kernel void @k{i}() {{ ret void }}\n" for i in range(kernels))
    emitted = emit(text, Machine(codegen.TRIPLE, "gfx942"), want_object=True, want_assembly=False)
    with pytest.raises(CompileError, match=f"LLVM's object describes {kernels} kernels; expected one"):
        codegen.counts(emitted.object)


@pytest.mark.parametrize("arch", AMD)
def test_an_objects_numbers_are_those_of_the_assembly(arch):
    texts = {}
    build(reversed_block, arch, observe=texts.__setitem__)
    emitted = emit(texts["llvm"], Machine(codegen.TRIPLE, arch), want_object=True)
    found, said = codegen.counts(emitted.object), said_by(emitted.assembly)
    assert said["num_vgpr"] > 0 and said["group_segment_fixed_size"] == 1024
    assert said == {key: found[key] for key in said}


@pytest.mark.parametrize("options", [(), ("--amdgpu-waitcnt-forcezero",)])
def test_without_assembly_there_is_the_same_machine_code(options):
    text = "define amdgpu_kernel void @k(ptr addrspace(1) %p) { store i32 7, ptr addrspace(1) %p ret void }"
    whole, bare = (codegen.generate(text, "gfx950", options, assembly) for assembly in (True, False))
    assert "global_store_dword" in whole[0].assembly and bare[0].assembly == ""
    assert whole[1] == bare[1]


def test_author_limits_reach_the_code():
    texts = {}
    artefact = build(scaled, "gfx950", waves=2, registers=64, blocks=3, observe=texts.__setitem__)
    assert '"amdgpu-waves-per-eu"="2"' in texts["llvm"]
    assert '"amdgpu-flat-work-group-size"="256,256"' in texts["llvm"]
    assert '"uniform-work-group-size"' in texts["llvm"]
    assert re.search(r"\.reqd_workgroup_size:\n\s+- 256\n\s+- 1\n\s+- 1\n", artefact.isa)
    assert re.search(r"\.max_flat_workgroup_size: 256$", artefact.isa, re.M)
    assert ".amdhsa_ieee_mode 0" in artefact.isa


def test_denormals_are_kept_unless_flushed():
    kept, flushed = (build(reversed_block, "gfx942", flush=flush).isa for flush in (False, True))
    assert ".amdhsa_float_denorm_mode_32 3" in kept
    assert ".amdhsa_float_denorm_mode_32 0" in flushed


def test_an_undefined_symbol_is_a_link_error():
    text = "declare void @missing()\ndefine amdgpu_kernel void @k() {\n  call void @missing()\n  ret void\n}"
    with pytest.raises(CompileError, match=r"(?s)linking with .* failed: .*undefined symbol: missing"):
        codegen.generate(text, "gfx942", ())


def test_what_is_no_object_is_a_link_error():
    with pytest.raises(CompileError, match=r"linking with .* failed"):
        codegen.link(b"no object")


def script(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_forced_linker_must_exist(monkeypatch, tmp_path):
    for path in (tmp_path / "none", tmp_path):
        monkeypatch.setenv("FLY_LLD", str(path))
        with pytest.raises(DeviceError, match=f"FLY_LLD='{path}' is no program; expected the path of ld.lld"):
            codegen.link(b"")


def test_forced_linker_is_used_and_its_failure_shown(monkeypatch, tmp_path):
    path = script(tmp_path / "lld", "echo this linker is broken >&2; exit 3")
    monkeypatch.setenv("FLY_LLD", path)
    with pytest.raises(CompileError, match=f"linking with {path} failed: this linker is broken"):
        codegen.link(b"")


find_lld = codegen._find_lld.__wrapped__  # without the memory of earlier answers


@pytest.fixture
def no_lld(monkeypatch, tmp_path):
    """An environment without any linker."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setattr(codegen.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_no_linker_at_all_says_what_to_install(no_lld):
    with pytest.raises(
        DeviceError, match=r"no ld\.lld found.* ziglang: pip install 'fly-attention\[amd\]', or set FLY_LLD"
    ):
        find_lld("")


def test_without_the_program_of_the_wheel_its_module_runs_it(monkeypatch, tmp_path):
    empty = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(codegen.importlib.util, "find_spec", lambda name: empty)
    assert codegen.zig() == (sys.executable, "-m", "ziglang")


def test_linkers_are_tried_in_order(no_lld, monkeypatch):
    monkeypatch.setattr(codegen.importlib.util, "find_spec", find_spec)
    command = find_lld("")
    assert command == (*codegen.zig(), "ld.lld")
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("LLD")
    for name in ("ld.lld", "ld.lld-9", "ld.lld-18"):  # the newest version on PATH, then ROCm's
        path = script(no_lld / "bin" / name, "")
        assert find_lld("") == (path,)
    path = script(no_lld / "rocm" / "llvm" / "bin" / "ld.lld", "")
    assert find_lld("") == (path,)
    path = script(no_lld / "mine", "")
    assert find_lld(path) == (path,)
