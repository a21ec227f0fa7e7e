"""Hopper's barriers, copies and registers: what each intrinsic emits, what is refused, and what ptxas says."""

from __future__ import annotations

import re

import numpy as np
import pytest
from mlir import ir

import fly
from fly.backends.nvvm import cluster, intrinsics, tma
from fly.backends.nvvm.codegen import convergent
from fly.backends.nvvm.inline import ptx
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring, init_all
from fly.backends.target import target
from fly.errors import DTypeError, ShapeError, TargetError
from fly.lang.signature import ScalarSpec, TensorMapSpec
from tests.backends.builds import build, needs_ptxas, run_ptxas
from tests.backends.hopper import SMALL, artefact
from tests.backends.lowering import instructions
from tests.filecheck import filecheck
from tests.simulated import Machine, Program, flat
from tests.tracing import ARCHS, matrix, trace

MAP = TensorMapSpec("f16", (1, 8, 64), 128)


def emitted(body, arch: str = "sm_90a", block: int = 256) -> ir.Module:
    """The trace of `body(map, tensor, n)`."""

    def kernel(box: fly.TensorMap, x: fly.Tensor, n: fly.i32):
        body(box, x, n)

    return trace(kernel, MAP, matrix("i32"), "i32", arch=arch, block=block)


def shared() -> fly.Pointer:
    return fly.alloc_shared("box", 1024, 128)


# what is emitted


EMITTED = {
    "barrier_sync": (
        lambda box, x, n: intrinsics.barrier_sync(3, 256),
        '"barrier.cta.sync.aligned $0, $1;", "r,r,~{memory}" %c3_i32, %c256_i32 : (i32, i32) -> ()',
    ),
    "barrier_arrive": (
        lambda box, x, n: intrinsics.barrier_arrive(n, 128),
        '"barrier.cta.arrive.aligned $0, $1;", "r,r,~{memory}" %arg3, %c128_i32 : (i32, i32) -> ()',
    ),
    "barrier_any": (
        lambda box, x, n: intrinsics.barrier_any(3, 256, n == 0),
        "barrier.cta.red.or.pred.aligned q, $1, $2, p;",
    ),
    "setmaxnreg_inc": (
        lambda box, x, n: intrinsics.setmaxnreg_inc(240),
        '"setmaxnreg.inc.sync.aligned.u32 240;", "~{memory}" : () -> ()',
    ),
    "setmaxnreg_dec": (
        lambda box, x, n: intrinsics.setmaxnreg_dec(24),
        '"setmaxnreg.dec.sync.aligned.u32 24;", "~{memory}" : () -> ()',
    ),
    "elect_one": (
        lambda box, x, n: intrinsics.elect_one(),
        r'elect.sync _|p, 0xffffffff;\0Aselp.u32 $0, 1, 0, p;\0A}", "=r,~{memory}" : () -> i32',
    ),
    "fetch_add": (
        lambda box, x, n: fly.fetch_add(5, x.at(n)),
        '"atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r,~{memory}" %{{.*}}, %c5_i32 : '
        "(!llvm.ptr<1>, i32) -> i32",
    ),
    "fetch_wrap": (
        lambda box, x, n: fly.fetch_wrap(n, x.at(0)),
        '"atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r,~{memory}" %{{.*}}, %arg3 : '
        "(!llvm.ptr<1>, i32) -> i32",
    ),
    "load_matrices_transposed": (
        lambda box, x, n: intrinsics.load_matrices_transposed(shared()),
        '"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}" '
        "%{{.*}} : (i32) -> !llvm.struct<(i32, i32, i32, i32)>",
    ),
    "store_matrices": (
        lambda box, x, n: intrinsics.store_matrices(shared(), [n] * 4),
        '"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}" '
        "%{{.*}}, %arg3, %arg3, %arg3, %arg3 : ",
    ),
    "permute_bytes": (
        lambda box, x, n: intrinsics.permute_bytes(n, n, 0x6420),
        '"prmt.b32 $0, $1, $2, $3;", "=r,r,r,r,~{memory}" %arg3, %arg3, %c25632_i32 : (i32, i32, i32) -> i32',
    ),
    "sync_warp": (
        lambda box, x, n: intrinsics.sync_warp(),
        '"bar.warp.sync 0xffffffff;", "~{memory}" : () -> ()',
    ),
    "fence_async_shared": (
        lambda box, x, n: intrinsics.fence_async_shared(),
        '"fence.proxy.async.shared::cta;", "~{memory}" : () -> ()',
    ),
    "fence_mbarrier_init": (
        lambda box, x, n: intrinsics.fence_mbarrier_init(),
        '"fence.mbarrier_init.release.cluster;", "~{memory}" : () -> ()',
    ),
    "prefetch": (
        lambda box, x, n: tma.prefetch(box),
        '"prefetch.tensormap [$0];", "l,~{memory}" %arg0 : (!llvm.ptr)',
    ),
    "load": (
        lambda box, x, n: tma.load(box, shared(), (1, n, 64), n),
        '"cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes '
        '[$0], [$1, {$3, $4, $5}], [$2];", '
        '"r,l,r,r,r,r,~{memory}" %{{.*}}, %arg0, %arg3, %c64_i32, %arg3, %c1_i32 : '
        "(i32, !llvm.ptr, i32, i32, i32, i32)",
    ),
    "store": (
        lambda box, x, n: tma.store(box, shared(), (1, 0, n)),
        '"cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$1, {$2, $3, $4}], [$0];", '
        '"r,l,r,r,r,~{memory}" %{{.*}}, %arg0, %arg3, %c0_i32, %c1_i32 : (i32, !llvm.ptr, i32, i32, i32)',
    ),
    "commit": (lambda box, x, n: tma.commit(), '"cp.async.bulk.commit_group;"'),
    "wait_read": (lambda box, x, n: tma.wait_read(2), '"cp.async.bulk.wait_group.read 2;"'),
    "two results": (
        lambda box, x, n: ptx("mov.b64 {$0, $1}, $2;", "=r,=r,l", [x.pointer], [fly.i32.mlir] * 2),
        '"=r,=r,l,~{memory}" %arg1 : (!llvm.ptr<1>) -> !llvm.struct<(i32, i32)>\n'
        "CHECK-NEXT: llvm.extractvalue %{{.*}}[0] : !llvm.struct<(i32, i32)>\n"
        "CHECK-NEXT: llvm.extractvalue %{{.*}}[1] : !llvm.struct<(i32, i32)>",
    ),
}


@pytest.mark.parametrize("name", EMITTED)
def test_an_intrinsic_is_this_instruction(name):
    body, wanted = EMITTED[name]
    filecheck(
        instructions(emitted(body)),
        f"CHECK: llvm.inline_asm has_side_effects asm_dialect = att\nCHECK-SAME: {wanted}",
    )


def test_mbarriers():
    def body(box, x, n):
        barriers = Mbarriers.allocate("full", 2, 4)
        barriers.init()
        barriers.arrive(n)
        barriers.arrive_expecting(1, 4096)
        barriers.wait(1, n)

    module = emitted(body)
    filecheck(str(module), "CHECK: fly.alloc_shared\nCHECK-SAME: align = 8\nCHECK-SAME: bytes = 16")
    filecheck(
        instructions(module),
        r"""
        CHECK: "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}" %{{.*}}, %c4_i32
        CHECK: "mbarrier.init.shared::cta.b64 [$0], $1;"
        CHECK-NOT: mbarrier.init
        CHECK: mbarrier.arrive.shared::cta.b64 s, [$0];
        CHECK: mbarrier.arrive.expect_tx.shared::cta.b64 s, [$0], $1;
        CHECK-SAME: %c4096_i32
        CHECK: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
        CHECK-SAME: @p bra done;
        CHECK-SAME: bra again;
        CHECK-SAME: "r,r,~{memory}" %{{.*}}, %arg3 : (i32, i32) -> ()
        """,
    )


def test_mbarriers_keep_their_place():
    """A context switch may write them back, so nothing may lie where one has been initialised."""

    def kernel(x: fly.Tensor):
        init_all([Mbarriers.allocate("never waited for", 2, 4)])
        line = fly.SharedMemory("line", "i32", 128)
        line.store(x.load(fly.thread_id.x), fly.thread_id.x)
        fly.barrier()
        x.store(line.load(127 - fly.thread_id.x), fly.thread_id.x)

    assert fly.compile(fly.kernel(kernel), matrix("i32", 1), target="sm_90a", block=128).dynamic_shared == 512 + 16


def test_a_ring_waits_for_the_other_side():
    def body(box, x, n):
        ring = Ring.allocate("ring", 3, 4)
        note = fly.SharedMemory("note", "i32", 4)
        assert ring.stages == 3
        assert (ring.full.arrivals, ring.empty.arrivals) == (1, 4)
        init_all([ring])
        at = Position(n, n)
        ring.acquire(at, 512, lambda: note.store(n, 2))
        ring.wait(at)
        ring.release(at)

    filecheck(
        instructions(emitted(body)),
        """
        CHECK: scf.if
        CHECK-COUNT-6: mbarrier.init
        CHECK: fence.mbarrier_init.release.cluster;
        CHECK: }
        CHECK: "llvm.nvvm.barrier.cta.sync.aligned.all"
        CHECK: %[[FREE:.*]] = arith.xori %arg3, %{{.*}} : i32
        CHECK: mbarrier.try_wait.parity
        CHECK-SAME: %[[FREE]] :
        CHECK: llvm.store %arg3
        CHECK: mbarrier.arrive.expect_tx
        CHECK-SAME: %c512_i32
        CHECK: mbarrier.try_wait.parity
        CHECK-SAME: %arg3 :
        CHECK: scf.if
        CHECK: mbarrier.arrive.shared
        """,
    )


def test_warps_fill_a_ring_by_stores():
    def body(box, x, n):
        ring = Ring.allocate("ring", 2, 4, producer_warps=8)
        assert (ring.full.arrivals, ring.empty.arrivals) == (8, 4)
        at = Position(n, n)
        ring.claim(at)
        ring.publish(at)

    filecheck(
        instructions(emitted(body)),
        """
        CHECK: %[[FREE:.*]] = arith.xori %arg3, %{{.*}} : i32
        CHECK: mbarrier.try_wait.parity
        CHECK-SAME: %[[FREE]] :
        CHECK: fence.proxy.async.shared::cta;
        CHECK: bar.warp.sync 0xffffffff;
        CHECK: scf.if
        CHECK-NOT: expect_tx
        CHECK: mbarrier.arrive.shared
        """,
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_position_goes_round_its_ring(stages):
    """Slots in turn, and a phase that flips with each round; the emitted arithmetic is run."""

    def kernel(x: fly.Tensor):
        at = Position.start()
        for step in range(9):
            x.store(at.index, 2 * step)
            x.store(at.phase, 2 * step + 1)
            at = at.next(stages)
            back = at.before(stages).next(stages)
            x.store(fly.select((back.index == at.index) & (back.phase == at.phase), 1, 0), 18 + step)

    found = np.zeros(27, np.int32)
    Machine(Program.of(trace(kernel, matrix("i32"), arch="sm_90a"), target("sm_90a")))(flat(found))
    assert found[18:].all()
    assert [tuple(pair) for pair in found[:18].reshape(-1, 2)] == [(i % stages, i // stages % 2) for i in range(9)]


def test_a_kernel_declares_its_clusters():
    assert re.search(r"^\.reqnctapercluster 2, 1, 1$", artefact("passed_on").isa, re.M)
    assert "cluster" not in artefact("counted").isa


def test_tensor_maps_stay_where_the_launch_puts_them():
    isa = artefact("copy_box").isa
    assert re.search(r"\.param \.align 64 \.b8 copy_box_param_0\[128\]", isa)
    assert "ld.param" not in "".join(line for line in isa.splitlines() if "copy_box_param_0" in line)
    assert ".local" not in isa  # where a copy would be
    assert "cvta.param" in isa


# what is refused

REFUSED = {
    "a cluster of one": (
        lambda box, x, n: cluster.declare(1),
        ShapeError,
        "a cluster of 1 blocks; expected 2 to 8",
    ),
    "a rank": (
        lambda box, x, n: cluster.arrive(Mbarriers.allocate("x", 1, 1), 0, n.to(fly.i64)),
        DTypeError,
        "rank is <i64>; expected an integer or a traced i32",
    ),
    "barrier 0": (
        lambda box, x, n: intrinsics.barrier_sync(0, 128),
        ShapeError,
        r"named barrier 0 is out of range; expected 1 to 15 \(0 is fly.barrier's\)",
    ),
    "barrier 16": (
        lambda box, x, n: intrinsics.barrier_arrive(16, 128),
        ShapeError,
        "named barrier 16 is out of range",
    ),
    "barrier type": (
        lambda box, x, n: intrinsics.barrier_sync(n.to(fly.i64), 128),
        DTypeError,
        "named barrier is <i64>; expected an integer or a traced i32",
    ),
    "odd threads": (
        lambda box, x, n: intrinsics.barrier_sync(1, 100),
        ShapeError,
        "a named barrier of 100 threads; expected a positive multiple of 32",
    ),
    "no threads": (lambda box, x, n: intrinsics.barrier_arrive(1, 0), ShapeError, "a named barrier of 0 threads"),
    "few registers": (
        lambda box, x, n: intrinsics.setmaxnreg_dec(16),
        ShapeError,
        "setmaxnreg of 16 registers; expected a multiple of 8 from 24 to 256",
    ),
    "many registers": (lambda box, x, n: intrinsics.setmaxnreg_inc(264), ShapeError, "setmaxnreg of 264 registers"),
    "odd registers": (lambda box, x, n: intrinsics.setmaxnreg_inc(100), ShapeError, "setmaxnreg of 100 registers"),
    "three words": (
        lambda box, x, n: intrinsics.store_matrices(shared(), [n] * 3),
        ShapeError,
        "3 words of matrices to store; expected 4",
    ),
    "matrices of global memory": (
        lambda box, x, n: intrinsics.load_matrices_transposed(x.pointer),
        DTypeError,
        "<global pointer> is no pointer to shared memory",
    ),
    "selector": (
        lambda box, x, n: intrinsics.permute_bytes(n, n, fly.f32(1.0)),
        DTypeError,
        "selector of bytes is <f32>; expected an integer or a traced i32",
    ),
    "atomic of shared": (
        lambda box, x, n: fly.fetch_add(1, shared()),
        DTypeError,
        "atomic of <shared pointer>; expected a pointer to global memory",
    ),
    "atomic of a float": (
        lambda box, x, n: fly.fetch_wrap(fly.f32(1.0), x.at(0)),
        DTypeError,
        "operand of an atomic is <f32>; expected an integer or a traced i32",
    ),
    "no mbarriers": (
        lambda box, x, n: Mbarriers.allocate("x", 0, 1),
        ShapeError,
        "0 mbarriers of 1 arrivals; expected positive numbers",
    ),
    "no arrivals": (lambda box, x, n: Ring.allocate("x", 2, 0), ShapeError, "2 mbarriers of 0 arrivals"),
    "index": (
        lambda box, x, n: Mbarriers.allocate("x", 2, 1).arrive(2),
        ShapeError,
        "mbarrier 2 is out of range; expected 0 to 1",
    ),
    "index type": (
        lambda box, x, n: Mbarriers.allocate("x", 2, 1).arrive(fly.f32(0.0)),
        DTypeError,
        "mbarrier index is <f32>; expected an integer or a traced i32",
    ),
    "bytes": (
        lambda box, x, n: Mbarriers.allocate("x", 2, 1).arrive_expecting(0, n.to(fly.i64)),
        DTypeError,
        "byte count is <i64>; expected an integer or a traced i32",
    ),
    "parity": (
        lambda box, x, n: Mbarriers.allocate("x", 2, 1).wait(0, n == 0),
        DTypeError,
        "parity is <i1>; expected an integer or a traced i32",
    ),
    "coordinates": (
        lambda box, x, n: tma.load(box, shared(), (0, 0), n),
        ShapeError,
        "<tensor map of f16, box 1 x 8 x 64, swizzle 128> takes 3 coordinates, not 2",
    ),
    "stored coordinates": (
        lambda box, x, n: tma.store(box, shared(), (0, 0, 0, 0)),
        ShapeError,
        "takes 3 coordinates, not 4",
    ),
    "coordinate type": (
        lambda box, x, n: tma.store(box, shared(), (0, 0, fly.f32(0.0))),
        DTypeError,
        "coordinate is <f32>; expected an integer or a traced i32",
    ),
    "barrier of a copy": (
        lambda box, x, n: tma.load(box, shared(), (0, 0, 0), Mbarriers.allocate("x", 1, 1)),
        DTypeError,
        r"barrier is Mbarriers\(.*\); expected an integer or a traced i32",
    ),
    "destination": (
        lambda box, x, n: tma.load(box, x.pointer, (0, 0, 0), n),
        DTypeError,
        "<global pointer> is no pointer to shared memory",
    ),
    "source": (lambda box, x, n: tma.store(box, n, (0, 0, 0)), DTypeError, "<i32> is no pointer to shared memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name):
    body, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        emitted(body)


def test_warpgroups_need_whole_ones():
    with pytest.raises(ShapeError, match="a block of 192 threads does not divide into warpgroups of 128"):
        emitted(lambda box, x, n: intrinsics.warpgroup_id(), block=192)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_90a"])
def test_other_targets_have_none_of_it(arch):
    def kernel(n: fly.i32):
        intrinsics.barrier_sync(1, 128)

    with pytest.raises(TargetError, match=f"{arch} has no TMA, mbarriers, WGMMA or named barriers"):
        trace(kernel, "i32", arch=arch, block=128)
    with pytest.raises(TargetError, match=rf"{arch} cannot copy through tensor maps; sm_90a can \(kernel kernel\)"):
        emitted(lambda box, x, n: None, arch=arch)


# code generation


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('  call void asm sideeffect "bar.sync 0;", "r"(i32 %a)', " convergent"),
        ('  %1 = tail call { i32, i32 } asm sideeffect "x (y)", "=r,=r"() #3, !dbg !7', " convergent #3, !dbg !7"),
        ('  %1 = call i32 asm sideeffect "mov $0, 1;", "=r"(), !srcloc !7', " convergent, !srcloc !7"),
    ],
)
def test_inline_assembly_is_marked_convergent(line, wanted):
    marked = convergent(f"a\n{line}\nb")
    assert marked.endswith(f"){wanted}\nb")
    assert marked.replace(" convergent", "") == f"a\n{line}\nb"


@pytest.mark.parametrize("line", ["  call void @f(i32 %a)", '  %1 = call i32 asm "mov $0, 1;", "=r"()', "  ret void"])
def test_nothing_else_is_marked(line):
    assert convergent(line) == line


def test_barriers_in_two_branches_stay_in_them():
    def branches(x: fly.Tensor, n: fly.i32):
        with fly.when(n > fly.thread_id.x):
            intrinsics.barrier_sync(1, 256)
        with fly.when(n <= fly.thread_id.x):
            intrinsics.barrier_sync(1, 256)

    stages = {}
    specs = (matrix("i32"), ScalarSpec("i32"))
    built = build(fly.kernel(branches), "sm_90a", specs=specs, observe=stages.__setitem__)
    assert stages["llvm"].count("asm sideeffect") == 2
    optimised = [line for line in stages["llvm-optimised"].splitlines() if "asm sideeffect" in line]
    assert len(optimised) == 2  # neither merged nor moved
    groups = {re.search(r" (#\d+)(, |$)", line).group(1) for line in optimised}
    for group in groups:
        assert re.search(rf"^attributes {group} = {{.*convergent.*}}", stages["llvm-optimised"], re.M)
    assert built.isa.count("barrier.cta.sync.aligned") == 2


@needs_ptxas
@pytest.mark.parametrize("name", SMALL)
def test_ptxas_takes_it_and_warns_of_nothing(name, tmp_path):
    report = run_ptxas(artefact(name).isa, "sm_90a", tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert not re.search(r"\(C\d+\)|warning|Potential", report), report
