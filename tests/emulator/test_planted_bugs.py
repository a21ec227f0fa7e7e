"""Bugs planted in correct kernels: each is found by the check that is meant for it, the correct kernel gives no
report.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from fly.emulator import Region
from fly.emulator.decode import Instruction
from fly.errors import EmulatorError, EmulatorReportError
from tests.emulator.kernels import ADD_ONE, DIRECT, MATRIX, REVERSE, Patch, run
from tests.emulator.toolchain import build

ARCHES = ("gfx942", "gfx950")
KERNELS = {"reverse": REVERSE, "matrix": MATRIX, "direct": DIRECT}


def launch(patch: Patch) -> None:
    """Run a (patched) kernel on fresh inputs and compare with its definition."""
    rng = np.random.default_rng(0)
    if patch.kernel == "reverse":
        a, out = rng.random(512, np.float32), np.zeros(512, np.float32)
        run(patch.code, "reverse", (2,), (256,), [a, out, 512])
        assert np.array_equal(out.reshape(2, 256), a.reshape(2, 256)[:, ::-1])
    elif patch.kernel == "matrix":
        a, b, out = rng.random(64, np.float32), rng.random(64, np.float32), np.zeros((64, 4), np.float32)
        run(patch.code, "matrix", (1,), (64,), [a, b, out])
        product = 2 * (a.reshape(4, 16).T.astype(np.float64) @ b.reshape(4, 16)) + 1
        got = out.reshape(4, 16, 4).transpose(0, 2, 1).reshape(16, 16)
        assert np.allclose(got, product, rtol=1e-6)
    else:
        a, out = rng.random(256, np.float32), np.zeros(256, np.float32)
        run(patch.code, "direct", (1,), (256,), [a, out])
        assert np.array_equal(out, a[::-1])


def is_wait(vm: bool | None = None, lgkm: bool | None = None) -> Callable[[Instruction], bool]:
    """Predicate of s_waitcnt instructions that wait for zero of the counters asked for."""

    def test(inst: Instruction) -> bool:
        raw = inst.get("simm16")
        return (vm is None or (raw & 15 == 0 and raw >> 14 == 0) == vm) and (
            lgkm is None or (raw >> 8 & 15 == 0) == lgkm
        )

    return test


def before(patch: Patch, inst: Instruction, name: str) -> Instruction:
    """The last instruction of a name in front of another."""
    return [i for i in patch.find(name) if i.address < inst.address][-1]


def waits_before(patch: Patch, name: str, number: int = 0) -> Instruction:
    return before(patch, patch.find(name)[number], "s_waitcnt")


def store_behind_load(patch: Patch) -> Instruction:
    return waits_before(patch, "ds_write_b32")


# name: (kernel, kind of the report, what to break)
PLANTS: dict[str, tuple[str, str, Callable[[Patch], object]]] = {
    "no barrier between write and read": ("reverse", "lds-race", lambda p: p.drop(p.find("s_barrier")[0])),
    "no barrier between read and overwrite": ("reverse", "lds-race", lambda p: p.drop(p.find("s_barrier")[1])),
    "no barrier in the second round": ("reverse", "lds-race", lambda p: p.drop(p.find("s_barrier")[2])),
    "no barrier at all": ("reverse", "lds-race", lambda p: p.drop(*p.find("s_barrier"))),
    "global load not waited for": ("reverse", "missing-wait", lambda p: p.drop(store_behind_load(p))),
    "wait one load too few": (
        "matrix", "missing-wait",
        lambda p: p.put(p.find("s_waitcnt", is_wait(vm=True))[0], struct.pack("<I", 0xBF8C0F71)),
    ),
    "LDS read not waited for": (
        "reverse", "missing-wait", lambda p: p.drop(before(p, p.find("s_barrier")[3], "s_waitcnt")),
    ),
    "LDS write not waited for at the barrier": (
        "reverse", "missing-wait", lambda p: p.drop(waits_before(p, "s_barrier", 0)),
    ),
    "kernel argument not waited for": ("direct", "missing-wait", lambda p: p.drop(p.find("s_waitcnt")[0])),
    "matrix operand not waited for": (
        "matrix", "missing-wait", lambda p: p.drop(p.find("s_waitcnt", is_wait(vm=True))[0]),
    ),
    "direct-to-LDS load not waited for": (
        "direct", "missing-wait", lambda p: p.drop(before(p, p.find("s_barrier")[0], "s_waitcnt")),
    ),
    "no barrier behind a direct-to-LDS load": ("direct", "lds-race", lambda p: p.drop(p.find("s_barrier")[0])),
    "matrix result read too early": (
        "matrix", "matrix-hazard", lambda p: p.drop(p.find("s_nop")[-1]),
    ),
    "matrix result read one state too early": (
        "matrix", "matrix-hazard",
        lambda p: p.put(p.find("s_nop")[-1], struct.pack("<I", p.find("s_nop")[-1].raw - 1)),
    ),
    "LDS never written": ("reverse", "uninitialised-lds", lambda p: p.drop(p.find("ds_write_b32")[0])),
    "register never written": (
        "direct", "uninitialised-register", lambda p: p.drop(before(p, p.find("ds_read_b32")[0], "v_xor_b32")),
    ),
    "LDS offset too large": (
        "direct", "out-of-bounds",
        lambda p: p.put(p.find("ds_read_b32")[0], struct.pack("<Q", p.find("ds_read_b32")[0].raw | 4)),
    ),
    "LDS offset not aligned": (
        "direct", "unaligned",
        lambda p: p.put(p.find("ds_read_b32")[0], struct.pack("<Q", p.find("ds_read_b32")[0].raw | 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_correct_kernels_give_no_report(kernel: str, arch: str) -> None:
    launch(Patch(build(KERNELS[kernel], arch), kernel))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, arch: str) -> None:
    kernel, kind, damage = PLANTS[plant]
    patch = Patch(build(KERNELS[kernel], arch), kernel)
    damage(patch)
    with pytest.raises(EmulatorReportError) as caught:
        launch(patch)
    assert kind in {r.kind for r in caught.value.reports}, str(caught.value)
    report = next(r for r in caught.value.reports if r.kind == kind)
    assert report.kernel == kernel and hex(report.address) in report.text and "wave" in report.text


@pytest.mark.parametrize("arch", ARCHES)
def test_a_missing_bounds_clamp_is_a_fault_that_names_the_allocation(arch: str) -> None:
    a, out = np.zeros(500, np.float32), np.zeros(500, np.float32)
    patch = Patch(build(REVERSE, arch), "reverse")
    run(patch.code, "reverse", (2,), (256,), [a, out, 500])
    for mask in patch.find("s_and_saveexec_b64"):  # every lane takes part: saveexec of EXEC instead of the comparison
        patch.put(mask, struct.pack("<I", mask.raw & ~0xFF | 126))
    with pytest.raises(EmulatorError, match=r"out-of-bounds.*(global_load|global_store).*argument"):
        run(patch.code, "reverse", (2,), (256,), [a, out, 500])


@pytest.mark.parametrize("arch", ARCHES)
def test_additions_to_uninitialised_memory_are_found(arch: str) -> None:
    """As to a gradient that nobody has cleared."""
    out = np.zeros(64, np.float32)
    fresh = Region(out.ctypes.data, out.nbytes, "out", initialised=False)
    with pytest.raises(EmulatorReportError, match=r"uninitialised-memory.*global_atomic_add_f32"):
        run(build(ADD_ONE, arch), "add_one", (1,), (64,), [fresh])
    cleared = np.zeros(64, np.float32)
    run(build(ADD_ONE, arch), "add_one", (1,), (64,), [cleared])
    assert (cleared == 1).all()


@pytest.mark.parametrize("arch", ARCHES)
def test_reads_of_uninitialised_memory_are_found(arch: str) -> None:
    a, out = np.zeros(512, np.float32), np.zeros(512, np.float32)
    fresh = Region(a.ctypes.data, a.nbytes, "a", initialised=False)
    with pytest.raises(EmulatorReportError, match=r"uninitialised-memory.*global_load"):
        run(build(REVERSE, arch), "reverse", (2,), (256,), [fresh, out, 512])


@pytest.mark.parametrize("arch", ARCHES)
def test_unaligned_global_memory_is_found(arch: str) -> None:
    a, out = np.zeros(2052, np.uint8), np.zeros(512, np.float32)
    with pytest.raises(EmulatorReportError, match=r"unaligned.*global_load"):
        run(build(REVERSE, arch), "reverse", (2,), (256,), [a[2:], out, 512], strict_alignment=True)
    run(build(REVERSE, arch), "reverse", (2,), (256,), [a[2:], out, 512])  # which these targets allow


SPACED = """
define amdgpu_kernel void @spaced(ptr addrspace(1) %a, ptr addrspace(1) %out, float %limit) #0 {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %t64 = zext i32 %t to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %t64
  %po = getelementptr float, ptr addrspace(1) %out, i64 %t64
  %x = load float, ptr addrspace(1) %pa
  %low = fcmp olt float %x, %limit
  %y = select i1 %low, float 0.0, float %x
  %z = call float @llvm.amdgcn.exp2.f32(float %y)
  %w = fadd float %z, 1.0
  store float %w, ptr addrspace(1) %po
  ret void
}
declare i32 @llvm.amdgcn.workitem.id.x()
declare float @llvm.amdgcn.exp2.f32(float)
attributes #0 = { "amdgpu-flat-work-group-size"="64,64" }
"""


@pytest.mark.parametrize("arch", ARCHES)
def test_vector_results_read_too_early_are_found(arch: str) -> None:
    code = build(SPACED, arch)
    a, out = np.linspace(-1, 1, 64, dtype=np.float32), np.zeros(64, np.float32)
    run(code, "spaced", (1,), (64,), [a, out, 0])
    assert np.allclose(out, np.exp2(np.maximum(a, 0)) + 1)
    patch = Patch(code, "spaced")
    select, add = patch.find("v_cndmask_b32")[0], patch.find("v_add_f32")[0]
    patch.drop(before(patch, select, "s_nop"))
    with pytest.raises(EmulatorReportError, match=r"vector-hazard.*v_cndmask.*needs 1 more"):
        run(patch.code, "spaced", (1,), (64,), [a, out, 0])
    patch = Patch(code, "spaced")
    spacer = before(patch, add, "s_nop")
    patch.put(spacer, struct.pack("<I", add.raw)).drop(add)  # the addition moves up to the exponential
    with pytest.raises(EmulatorReportError, match=r"vector-hazard.*v_add_f32"):
        run(patch.code, "spaced", (1,), (64,), [a, out, 0])


DIVERGENT = """
define amdgpu_kernel void @divergent(i32 %waves) "amdgpu-flat-work-group-size"="256,256" {
  %t = call i32 @llvm.amdgcn.workitem.id.x()
  %wave = lshr i32 %t, 6
  %w = call i32 @llvm.amdgcn.readfirstlane(i32 %wave)
  %in = icmp slt i32 %w, %waves
  br i1 %in, label %wait, label %done
wait:
  call void @llvm.amdgcn.s.barrier()
  br label %done
done:
  ret void
}
define amdgpu_kernel void @endless(i32 %step) "amdgpu-flat-work-group-size"="256,256" {
entry:
  br label %loop
loop:
  %k = phi i32 [ 0, %entry ], [ %next, %loop ]
  %next = add i32 %k, %step
  call void asm sideeffect "", "s"(i32 %next)
  %more = icmp slt i32 %next, 100
  br i1 %more, label %loop, label %done
done:
  ret void
}
declare i32 @llvm.amdgcn.workitem.id.x()
declare i32 @llvm.amdgcn.readfirstlane(i32)
declare void @llvm.amdgcn.s.barrier()
"""


@pytest.mark.parametrize("arch", ARCHES)
def test_a_barrier_that_some_waves_skip_is_found(arch: str) -> None:
    code = build(DIVERGENT, arch)
    run(code, "divergent", (3,), (256,), [4])
    with pytest.raises(EmulatorReportError, match="barrier-divergence"):
        run(code, "divergent", (3,), (256,), [3])


@pytest.mark.parametrize("arch", ARCHES)
def test_an_endless_loop_stops_at_the_budget(arch: str) -> None:
    code = build(DIVERGENT, arch)
    run(code, "endless", (1,), (256,), [1])
    with pytest.raises(EmulatorError, match=r"endless-loop.*endless.*10000"):
        run(code, "endless", (1,), (256,), [0], budget=10000)


def test_checks_can_be_turned_off() -> None:
    patch = Patch(build(REVERSE, "gfx950"), "reverse")
    patch.drop(*patch.find("s_barrier"))
    a, out = np.zeros(512, np.float32), np.zeros(512, np.float32)
    run(patch.code, "reverse", (2,), (256,), [a, out, 512], checks=False)
