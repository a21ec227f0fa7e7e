"""Correct kernels in LLVM IR for the planted-bug tests, and a patcher that breaks them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import numpy as np

from fly.emulator import Program, Region, RunResult
from fly.emulator.decode import Instruction

S_NOP = bytes.fromhex("000080bf")

_HEAD = """
declare i32 @llvm.amdgcn.workitem.id.x()
declare i32 @llvm.amdgcn.workgroup.id.x()
declare void @llvm.amdgcn.s.barrier()
declare void @llvm.amdgcn.s.waitcnt(i32)
declare void @llvm.amdgcn.global.load.lds(ptr addrspace(1), ptr addrspace(3), i32, i32, i32)
declare <4 x float> @llvm.amdgcn.mfma.f32.16x16x4f32(float, float, <4 x float>, i32, i32, i32)
declare i32 @llvm.amdgcn.readfirstlane(i32)
attributes #0 = { "amdgpu-flat-work-group-size"="256,256" }
attributes #1 = { "amdgpu-flat-work-group-size"="64,64" }
"""

# out[i] = a[255 - i] of each block of 256, in `n` elements, through LDS, twice over
ADD_ONE = """
define amdgpu_kernel void @add_one(ptr addrspace(1) %out) #1 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %p = getelementptr float, ptr addrspace(1) %out, i32 %t
  %old = atomicrmw fadd ptr addrspace(1) %p, float 1.0 syncscope("agent") monotonic
  ret void
}
declare i32 @llvm.amdgcn.workitem.id.x()
attributes #1 = { "amdgpu-unsafe-fp-atomics"="true" "amdgpu-flat-work-group-size"="64,64" }
"""

REVERSE = (
    """
@lds = internal addrspace(3) global [256 x float] poison, align 16
define amdgpu_kernel void @reverse(ptr addrspace(1) %a, ptr addrspace(1) %out, i32 %n) #0 {
entry:
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %g = call i32 @llvm.amdgcn.workgroup.id.x()
  %g0 = shl i32 %g, 8
  %i = or i32 %g0, %t
  %back = sub i32 255, %t
  %mine = getelementptr float, ptr addrspace(3) @lds, i32 %t
  %theirs = getelementptr float, ptr addrspace(3) @lds, i32 %back
  %i64 = zext i32 %i to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %i64
  %po = getelementptr float, ptr addrspace(1) %out, i64 %i64
  br label %loop
loop:
  %k = phi i32 [ 0, %entry ], [ %k1, %loop.end ]
  %ok = icmp slt i32 %i, %n
  br i1 %ok, label %do.load, label %join
do.load:
  %x = load float, ptr addrspace(1) %pa, align 4
  br label %join
join:
  %v = phi float [ %x, %do.load ], [ 0.0, %loop ]
  store float %v, ptr addrspace(3) %mine, align 4
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %r = load float, ptr addrspace(3) %theirs, align 4
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  br i1 %ok, label %do.store, label %loop.end
do.store:
  store float %r, ptr addrspace(1) %po, align 4
  br label %loop.end
loop.end:
  %k1 = add i32 %k, 1
  %again = icmp slt i32 %k1, 2
  br i1 %again, label %loop, label %done
done:
  ret void
}
"""
    + _HEAD
)

# out = a (16x4) times b (4x16) + the bias of the lane, a and b from memory
MATRIX = (
    """
define amdgpu_kernel void @matrix(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %out) #1 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %t64
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %t64
  %x = load float, ptr addrspace(1) %pa
  %y = load float, ptr addrspace(1) %pb
  %d = call <4 x float> @llvm.amdgcn.mfma.f32.16x16x4f32(
      float %x, float %y, <4 x float> zeroinitializer, i32 0, i32 0, i32 0)
  %e = call <4 x float> @llvm.amdgcn.mfma.f32.16x16x4f32(float %x, float %y, <4 x float> %d, i32 0, i32 0, i32 0)
  %s = fadd <4 x float> %e, splat (float 1.0)
  %po = getelementptr <4 x float>, ptr addrspace(1) %out, i64 %t64
  store <4 x float> %s, ptr addrspace(1) %po
  ret void
}
"""
    + _HEAD
)

# out[i] = a[255 - i], loaded straight into LDS
DIRECT = (
    """
@lds = internal addrspace(3) global [256 x float] poison, align 16
define amdgpu_kernel void @direct(ptr addrspace(1) %a, ptr addrspace(1) %out) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %wave = lshr i32 %t, 6
  %w = call i32 @llvm.amdgcn.readfirstlane(i32 %wave)
  %w64 = shl i32 %w, 6
  %to = getelementptr float, ptr addrspace(3) @lds, i32 %w64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %t64
  call void @llvm.amdgcn.global.load.lds(ptr addrspace(1) %pa, ptr addrspace(3) %to, i32 4, i32 0, i32 0)
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %back = sub i32 255, %t
  %theirs = getelementptr float, ptr addrspace(3) @lds, i32 %back
  %r = load float, ptr addrspace(3) %theirs, align 4
  %po = getelementptr float, ptr addrspace(1) %out, i64 %t64
  store float %r, ptr addrspace(1) %po, align 4
  ret void
}
"""
    + _HEAD
)


class Patch:
    """A code object whose instructions can be overwritten."""

    def __init__(self, code: bytes, kernel: str):
        self.code, self.kernel = bytearray(code), kernel
        program = Program(code)
        self.instructions = program.machine(kernel).instructions
        offset, _, address = program.code.sections[".text"]
        self.shift = offset - address

    def find(self, name: str, where: Callable[[Instruction], bool] = lambda i: True) -> list[Instruction]:
        """Instructions by name and condition, in program order."""
        return [i for i in self.instructions if i.name == name and where(i)]

    def put(self, inst: Instruction, words: bytes) -> Patch:
        """Overwrite an instruction; the rest of it becomes s_nop."""
        assert len(words) <= inst.size
        at = inst.address + self.shift
        self.code[at : at + inst.size] = words + S_NOP * ((inst.size - len(words)) // 4)
        return self

    def drop(self, *instructions: Instruction) -> Patch:
        """Replace instructions by s_nop 0."""
        for inst in instructions:
            self.put(inst, b"")
        return self


def run(
    code: bytes, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: Iterable, **options: object
) -> RunResult:
    """Launch with numpy arrays (passed by address) and integers (i32)."""
    packed, regions = b"", []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            packed += b"\0" * (-len(packed) % 8) + struct.pack("<Q", argument.ctypes.data)
            regions.append(Region(argument.ctypes.data, argument.nbytes, f"argument {len(regions)}"))
        elif isinstance(argument, Region):
            packed += b"\0" * (-len(packed) % 8) + struct.pack("<Q", argument.address)
            regions.append(argument)
        else:
            packed += struct.pack("<i", argument)
    return Program(bytes(code)).launch(kernel, grid, block, packed, regions, **options)  # type: ignore[arg-type]
