"""LLVM IR text to linked AMDGPU code objects, for tests of the emulator alone."""

from __future__ import annotations

import functools

import llvmlite.binding as llvm

from fly.backends.rocdl.codegen import link


@functools.cache
def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def emit(ir: str, arch: str, kind: str = "object", opt: int = 3) -> bytes | str:
    """Optimise LLVM IR for `arch` and emit an object, or assembly text with kind="asm"."""
    _initialise()
    machine = llvm.Target.from_triple("amdgcn-amd-amdhsa").create_target_machine(cpu=arch, opt=opt, reloc="pic")
    module = llvm.parse_assembly(ir)
    module.triple = "amdgcn-amd-amdhsa"
    module.data_layout = str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=opt))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_assembly(module) if kind == "asm" else machine.emit_object(module)


@functools.lru_cache(maxsize=256)
def build(ir: str, arch: str, opt: int = 3) -> bytes:
    """Linked code object of LLVM IR text."""
    return link(emit(ir, arch, "object", opt))
