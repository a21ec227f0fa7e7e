"""Memory instructions: transposing LDS reads, buffers at their bounds, direct-to-LDS loads, atomics, scratch."""

from __future__ import annotations

import numpy as np
import pytest

from fly.errors import EmulatorError
from tests.emulator.kernels import Patch, run
from tests.emulator.toolchain import build

ARCHES = ("gfx942", "gfx950")
HEAD = """
declare i32 @llvm.amdgcn.workitem.id.x()
declare void @llvm.amdgcn.s.barrier()
declare ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p1(ptr addrspace(1), i16, i64, i32)
attributes #0 = { "amdgpu-flat-work-group-size"="64,64" }
"""


def names(code: bytes, kernel: str) -> set[str]:
    return {i.name for i in Patch(code, kernel).instructions}


TRANSPOSE = (
    """
@lds = internal addrspace(3) global [256 x i16] poison, align 16
define amdgpu_kernel void @transpose(ptr addrspace(1) %in, ptr addrspace(1) %out) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %pa = getelementptr <4 x i16>, ptr addrspace(1) %in, i64 %t64
  %v = load <4 x i16>, ptr addrspace(1) %pa
  %mine = getelementptr <4 x i16>, ptr addrspace(3) @lds, i32 %t
  store <4 x i16> %v, ptr addrspace(3) %mine
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %r = call <4 x i16> @llvm.amdgcn.ds.read.tr16.b64.v4i16(ptr addrspace(3) %mine)
  %po = getelementptr <4 x i16>, ptr addrspace(1) %out, i64 %t64
  store <4 x i16> %r, ptr addrspace(1) %po
  ret void
}
declare <4 x i16> @llvm.amdgcn.ds.read.tr16.b64.v4i16(ptr addrspace(3))
"""
    + HEAD
)


def test_transposing_read() -> None:
    """Each group of 16 lanes holds a 4 x 16 tile, four lanes a row; lane l gets column l of it."""
    code = build(TRANSPOSE, "gfx950")
    assert "ds_read_b64_tr_b16" in names(code, "transpose")
    source, out = np.arange(256, dtype=np.uint16) * 3, np.zeros((64, 4), np.uint16)
    run(code, "transpose", (1,), (64,), [source, out])
    tiles = source.reshape(4, 4, 16)
    for lane in range(64):
        assert list(out[lane]) == list(tiles[lane // 16, :, lane % 16])


BUFFER = (
    """
define amdgpu_kernel void @buffer(ptr addrspace(1) %in, ptr addrspace(1) %out, i32 %bytes, i32 %start) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %n = zext i32 %bytes to i64
  %r = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p1(ptr addrspace(1) %in, i16 0, i64 %n, i32 159744)
  %w = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p1(ptr addrspace(1) %out, i16 0, i64 %n, i32 159744)
  %o16 = shl i32 %t, 4
  %offset = add i32 %o16, %start
  %x4 = call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %r, i32 %offset, i32 0, i32 0)
  %x3 = call <3 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v3i32(ptr addrspace(8) %r, i32 %offset, i32 4, i32 0)
  %h = call i16 @llvm.amdgcn.raw.ptr.buffer.load.i16(ptr addrspace(8) %r, i32 %offset, i32 2, i32 0)
  %a0 = extractelement <3 x i32> %x3, i32 0
  %a1 = extractelement <3 x i32> %x3, i32 1
  %a2 = extractelement <3 x i32> %x3, i32 2
  %a01 = xor i32 %a0, %a1
  %a = xor i32 %a01, %a2
  %h32 = zext i16 %h to i32
  %x = insertelement <4 x i32> %x4, i32 %a, i32 2
  %y = insertelement <4 x i32> %x, i32 %h32, i32 1
  call void @llvm.amdgcn.raw.ptr.buffer.store.v4i32(<4 x i32> %y, ptr addrspace(8) %w, i32 %offset, i32 0, i32 0)
  ret void
}
declare <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8), i32, i32, i32)
declare <3 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v3i32(ptr addrspace(8), i32, i32, i32)
declare i16 @llvm.amdgcn.raw.ptr.buffer.load.i16(ptr addrspace(8), i32, i32, i32)
declare void @llvm.amdgcn.raw.ptr.buffer.store.v4i32(<4 x i32>, ptr addrspace(8), i32, i32, i32)
"""
    + HEAD
)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("limit", [0, 4, 512, 516, 520, 1024])
def test_buffers_clip_by_component(limit: int, arch: str) -> None:
    code = build(BUFFER, arch)
    assert {"buffer_load_dwordx4", "buffer_load_dwordx3", "buffer_load_ushort"} <= names(code, "buffer")
    source = np.random.default_rng(limit).integers(0, 2**32, 256, dtype=np.uint32)
    out = np.zeros(256, np.uint32)
    run(code, "buffer", (1,), (64,), [source, out, limit, 0])
    raw = np.concatenate([source.view(np.uint8)[:limit], np.zeros(2048, np.uint8)])
    word = lambda at: int(raw[at : at + 4].view(np.uint32)[0]) if at + 4 <= limit else 0  # noqa: E731
    for lane in range(64):
        at = 16 * lane
        half = int(raw[at + 2 : at + 4].view(np.uint16)[0]) if at + 4 <= limit else 0
        want = [word(at), half, word(at + 4) ^ word(at + 8) ^ word(at + 12), word(at + 12)]
        for i in range(4):
            assert out[4 * lane + i] == (want[i] if at + 4 * i + 4 <= limit else 0), (lane, i)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_buffer_larger_than_its_allocation_is_a_fault(arch: str) -> None:
    source, out = np.zeros(64, np.uint32), np.zeros(256, np.uint32)
    with pytest.raises(EmulatorError, match=r"out-of-bounds.*buffer_load.*behind argument 0"):
        run(build(BUFFER, arch), "buffer", (1,), (64,), [source, out, 1024, 0])


DIRECT4 = (
    """
@lds = internal addrspace(3) global [256 x i32] poison, align 16
define amdgpu_kernel void @direct4(ptr addrspace(1) %in, ptr addrspace(1) %out) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %back = sub i64 63, %t64
  %pa = getelementptr <4 x i32>, ptr addrspace(1) %in, i64 %back
  call void @llvm.amdgcn.global.load.lds(ptr addrspace(1) %pa, ptr addrspace(3) @lds, i32 16, i32 0, i32 0)
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %mine = getelementptr <4 x i32>, ptr addrspace(3) @lds, i32 %t
  %r = load <4 x i32>, ptr addrspace(3) %mine
  %po = getelementptr <4 x i32>, ptr addrspace(1) %out, i64 %t64
  store <4 x i32> %r, ptr addrspace(1) %po
  ret void
}
declare void @llvm.amdgcn.global.load.lds(ptr addrspace(1), ptr addrspace(3), i32, i32, i32)
"""
    + HEAD
)


def test_sixteen_byte_direct_to_lds_loads() -> None:
    code = build(DIRECT4, "gfx950")
    assert "global_load_lds_dwordx4" in names(code, "direct4")
    source, out = np.arange(256, dtype=np.uint32), np.zeros((64, 4), np.uint32)
    run(code, "direct4", (1,), (64,), [source, out])
    assert np.array_equal(out, source.reshape(64, 4)[::-1])


ATOMIC = (
    """
define amdgpu_kernel void @atomics(ptr addrspace(1) %p, ptr addrspace(1) %q, ptr addrspace(1) %old) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %slot = and i32 %t, 3
  %s64 = zext i32 %slot to i64
  %pi = getelementptr i32, ptr addrspace(1) %p, i64 %s64
  %pf = getelementptr float, ptr addrspace(1) %q, i64 %s64
  %po = getelementptr i32, ptr addrspace(1) %old, i64 %t64
  %before = atomicrmw add ptr addrspace(1) %pi, i32 1 syncscope("agent") monotonic
  store i32 %before, ptr addrspace(1) %po
  %f = uitofp i32 %t to float
  %x = atomicrmw fadd ptr addrspace(1) %pf, float %f syncscope("agent") monotonic, !amdgpu.no.fine.grained.memory !0
  ret void
}
!0 = !{}
"""
    + HEAD
)


@pytest.mark.parametrize("arch", ARCHES)
def test_atomics_serve_lanes_one_after_another(arch: str) -> None:
    counts, sums, old = np.zeros(4, np.int32), np.zeros(4, np.float32), np.full(64, -1, np.int32)
    run(build(ATOMIC, arch, 1), "atomics", (1,), (64,), [counts, sums, old])
    assert list(counts) == [16] * 4 and list(sums) == [sum(range(i, 64, 4)) for i in range(4)]
    assert [sorted(old[i::4]) for i in range(4)] == [list(range(16))] * 4


SCRATCH = (
    """
define amdgpu_kernel void @scratch(ptr addrspace(1) %in, ptr addrspace(1) %out, i32 %n) #0 {
entry:
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %a = alloca [1000 x i32], addrspace(5)
  br label %fill
fill:
  %k = phi i32 [ 0, %entry ], [ %k1, %fill ]
  %pk = getelementptr i32, ptr addrspace(5) %a, i32 %k
  %v = mul i32 %k, %t
  store i32 %v, ptr addrspace(5) %pk
  %k1 = add i32 %k, 1
  %more = icmp slt i32 %k1, %n
  br i1 %more, label %fill, label %read
read:
  %t64 = zext i32 %t to i64
  %pi = getelementptr i32, ptr addrspace(1) %in, i64 %t64
  %i = load i32, ptr addrspace(1) %pi
  %pr = getelementptr i32, ptr addrspace(5) %a, i32 %i
  %r = load i32, ptr addrspace(5) %pr
  %po = getelementptr i32, ptr addrspace(1) %out, i64 %t64
  store i32 %r, ptr addrspace(1) %po
  ret void
}
"""
    + HEAD
)


@pytest.mark.parametrize("arch", ARCHES)
def test_scratch_belongs_to_the_lane(arch: str) -> None:
    code = build(SCRATCH, arch)
    assert any(n.startswith("scratch_") for n in names(code, "scratch"))
    index, out = np.random.default_rng(1).integers(0, 32, 64).astype(np.int32), np.zeros(64, np.int32)
    run(code, "scratch", (1,), (64,), [index, out, 32])
    assert np.array_equal(out, index * np.arange(64))
