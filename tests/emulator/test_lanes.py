"""Lane exchange against definitions written lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.kernels import run
from tests.emulator.toolchain import build

LANES = range(64)
KERNEL = """
define amdgpu_kernel void @k(ptr addrspace(1) %in, ptr addrspace(1) %out) "amdgpu-flat-work-group-size"="64,64" {{
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %o64 = add i64 %t64, 64
  %pa = getelementptr i32, ptr addrspace(1) %in, i64 %t64
  %pb = getelementptr i32, ptr addrspace(1) %in, i64 %o64
  %qa = getelementptr i32, ptr addrspace(1) %out, i64 %t64
  %qb = getelementptr i32, ptr addrspace(1) %out, i64 %o64
  %a = load i32, ptr addrspace(1) %pa
  %b = load i32, ptr addrspace(1) %pb
  {body}
  store i32 %x, ptr addrspace(1) %qa
  store i32 %y, ptr addrspace(1) %qb
  ret void
}}
declare i32 @llvm.amdgcn.workitem.id.x()
{declare}
"""
ARCHES = ("gfx942", "gfx950")


def evaluate(body: str, declare: str, arch: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of all lanes for the two inputs."""
    source, out = np.concatenate([a, b]).astype(np.uint32), np.zeros(128, np.uint32)
    run(build(KERNEL.format(body=body, declare=declare), arch), "k", (1,), (64,), [source, out])
    return out[:64], out[64:]


def values(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2))


def dpp_source(control: int, lane: int) -> int | None:
    """Lane that a DPP control word reads, None when there is none (CDNA3 ISA, table of DPP controls)."""
    row, at, n = lane // 16, lane % 16, control & 15
    if control <= 0xFF:
        return lane // 4 * 4 + (control >> 2 * (lane % 4) & 3)
    kind = control & ~15
    if kind == 0x100:
        return lane + n if at + n < 16 else None
    if kind == 0x110:
        return lane - n if at >= n else None
    if kind == 0x120:
        return row * 16 + (at - n) % 16
    if kind == 0x150:
        return row * 16 + n
    return {
        0x130: lane + 1 if lane < 63 else None, 0x138: lane - 1 if lane else None,
        0x134: (lane + 1) % 64, 0x13C: (lane - 1) % 64,
        0x140: row * 16 + 15 - at, 0x141: lane // 8 * 8 + 7 - lane % 8,
        0x142: row * 16 - 1 if row else None, 0x143: 31 if lane >= 32 else None,
    }[control]  # fmt: skip


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("masks", [(15, 15), (10, 15), (15, 6)])
@pytest.mark.parametrize("control", [0x1B, 0xB1, 0x101, 0x10F, 0x111, 0x118, 0x121, 0x12C, 0x130, 0x134, 0x138, 0x13C,
                                     0x140, 0x141, 0x142, 0x143, 0x150, 0x157])  # fmt: skip
def test_dpp(control: int, masks: tuple[int, int], bound: bool) -> None:
    a, b = values(control)
    name = "@llvm.amdgcn.update.dpp.i32"
    settings = f"i32 {control}, i32 {masks[0]}, i32 {masks[1]}, i1 {str(bound).lower()}"
    body = f"""%x = call i32 {name}(i32 %b, i32 %a, {settings})
  %y = add i32 %x, 0"""
    x, _ = evaluate(body, f"declare i32 {name}(i32, i32, i32, i32, i32, i1)", "gfx950", a, b)
    for lane in LANES:
        enabled = masks[0] >> lane // 16 & 1 and masks[1] >> lane % 16 // 4 & 1
        source = dpp_source(control, lane)
        want = b[lane] if not enabled else a[source] if source is not None else 0 if bound else b[lane]
        assert x[lane] == want, lane


@pytest.mark.parametrize("width", [16, 32])
def test_permlane_swap(width: int) -> None:
    a, b = values(width)
    name = f"@llvm.amdgcn.permlane{width}.swap"
    body = f"""%r = call {{i32, i32}} {name}(i32 %a, i32 %b, i1 false, i1 false)
  %x = extractvalue {{i32, i32}} %r, 0
  %y = extractvalue {{i32, i32}} %r, 1"""
    x, y = evaluate(body, f"declare {{i32, i32}} {name}(i32, i32, i1, i1)", "gfx950", a, b)
    for lane in LANES:  # the upper half of the first operand trades places with the lower half of the second
        upper = lane & width
        assert x[lane] == (b[lane - width] if upper else a[lane])
        assert y[lane] == (b[lane] if upper else a[lane + width])


@pytest.mark.parametrize("arch", ARCHES)
def test_bpermute_takes_any_address(arch: str) -> None:
    a, b = values(5)
    body = """%x = call i32 @llvm.amdgcn.ds.bpermute(i32 %b, i32 %a)
  %y = call i32 @llvm.amdgcn.ds.bpermute(i32 -4, i32 %a)"""
    x, y = evaluate(body, "declare i32 @llvm.amdgcn.ds.bpermute(i32, i32)", arch, a, b)
    assert all(x[lane] == a[(int(b[lane]) >> 2) % 64] and y[lane] == a[63] for lane in LANES)


@pytest.mark.parametrize("arch", ARCHES)
def test_permute_scatters(arch: str) -> None:
    a, _ = values(6)
    order = np.random.default_rng(6).permutation(64)
    body = "%x = call i32 @llvm.amdgcn.ds.permute(i32 %b, i32 %a)\n  %y = add i32 %x, 0"
    x, _ = evaluate(body, "declare i32 @llvm.amdgcn.ds.permute(i32, i32)", arch, a, 4 * order)
    assert all(x[order[lane]] == a[lane] for lane in LANES)


@pytest.mark.parametrize("code", [0x041F, 0x001E, 0x7C1F, 0x83E7 | 0x8000, 0x80E4])
def test_swizzle(code: int) -> None:
    a, b = values(code)
    body = f"%x = call i32 @llvm.amdgcn.ds.swizzle(i32 %a, i32 {code})\n  %y = add i32 %b, 0"
    x, _ = evaluate(body, "declare i32 @llvm.amdgcn.ds.swizzle(i32, i32)", "gfx942", a, b)
    for lane in LANES:
        if code & 0x8000:
            source = lane // 4 * 4 + (code >> 2 * (lane % 4) & 3)
        else:
            source = (lane & 32) | ((lane & 31 & code & 31) | (code >> 5 & 31)) ^ (code >> 10 & 31)
        assert x[lane] == a[source]


@pytest.mark.parametrize("arch", ARCHES)
def test_lane_reads_writes_and_ballot(arch: str) -> None:
    a, b = values(8)
    body = """%first = call i32 @llvm.amdgcn.readlane.i32(i32 %a, i32 37)
  %w = call i32 @llvm.amdgcn.writelane.i32(i32 %first, i32 5, i32 %b)
  %x = add i32 %w, 0
  %odd = and i32 %a, 1
  %is = icmp eq i32 %odd, 1
  %m = call i64 @llvm.amdgcn.ballot.i64(i1 %is)
  %lo = trunc i64 %m to i32
  %up = lshr i64 %m, 32
  %hi = trunc i64 %up to i32
  %c0 = call i32 @llvm.amdgcn.mbcnt.lo(i32 %lo, i32 0)
  %y = call i32 @llvm.amdgcn.mbcnt.hi(i32 %hi, i32 %c0)"""
    declare = """declare i32 @llvm.amdgcn.readlane.i32(i32, i32)
declare i32 @llvm.amdgcn.writelane.i32(i32, i32, i32)
declare i64 @llvm.amdgcn.ballot.i64(i1)
declare i32 @llvm.amdgcn.mbcnt.lo(i32, i32)
declare i32 @llvm.amdgcn.mbcnt.hi(i32, i32)"""
    x, y = evaluate(body, declare, arch, a, b)
    for lane in LANES:
        assert x[lane] == (a[37] if lane == 5 else b[lane])
        assert y[lane] == sum(int(a[i]) & 1 for i in range(lane))
