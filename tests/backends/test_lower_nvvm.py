"""`lower-to-nvvm`: what each `fly` operation becomes on NVIDIA."""

from __future__ import annotations

import contextlib
import re

import pytest

import fly
from fly.backends.target import target
from fly.errors import CompileError
from fly.lang.signature import ScalarSpec
from tests.backends.lowering import lowered
from tests.filecheck import filecheck
from tests.tracing import matrix


def check(body: str, checks: str) -> None:
    filecheck(lowered(body, "sm_80"), checks + "\nCHECK-NOT: fly.")


@pytest.mark.parametrize("axis", "xyz")
def test_ids(axis):
    check(
        "\n".join(
            f'%{k} = "fly.id"() {{name = "{k}.{axis}"}} : () -> i32' for k in ("thread_id", "block_id", "grid_dim")
        ),
        f"""
        CHECK: "llvm.nvvm.read.ptx.sreg.tid.{axis}"
        CHECK: "llvm.nvvm.read.ptx.sreg.ctaid.{axis}"
        CHECK: "llvm.nvvm.read.ptx.sreg.nctaid.{axis}"
        """,
    )


def test_barrier():
    check(
        "barrier",
        """
        CHECK: %[[ZERO:.*]] = llvm.mlir.constant(0 : i32)
        CHECK: "llvm.nvvm.barrier.cta.sync.aligned.all"(%[[ZERO]])
        """,
    )


@pytest.mark.parametrize(("mode", "name"), [("xor", "bfly"), ("idx", "idx")])
def test_shuffles_are_of_the_whole_warp(mode, name):
    check(
        f'%x = llvm.mlir.poison : f32\n%s = "fly.shuffle"(%x, %i) {{mode = "{mode}"}} : (f32, i32) -> f32',
        f"""
        CHECK: %[[ALL:.*]] = llvm.mlir.constant(-1 : i32)
        CHECK: %[[WORD:.*]] = llvm.bitcast %{{{{.*}}}} : f32 to i32
        CHECK: %[[CLAMP:.*]] = llvm.mlir.constant(31 : i32)
        CHECK: "llvm.nvvm.shfl.sync.{name}.i32"(%[[ALL]], %[[WORD]], %{{{{.*}}}}, %[[CLAMP]])
        CHECK: llvm.bitcast %{{{{.*}}}} : i32 to f32
        """,
    )


@pytest.mark.parametrize(
    ("dtype", "register", "intrinsic"),
    [("bf16", "i32", "m16n8k16.row.col.bf16"), ("f16", "vector<2xf16>", "m16n8k16.row.col.f32.f32")],
)
def test_mma_takes_registers_and_gives_a_structure(dtype, register, intrinsic):
    types = f"vector<8x{dtype}>, vector<4x{dtype}>, vector<4xf32>"
    operands = ", ".join([register] * 6 + ["f32"] * 4)
    check(
        f"""
        %a = llvm.mlir.poison : vector<8x{dtype}>
        %b = llvm.mlir.poison : vector<4x{dtype}>
        %acc = llvm.mlir.poison : vector<4xf32>
        %d = "fly.mma"(%a, %b, %acc) {{atom = "mma_m16n8k16_{dtype}"}} : ({types}) -> vector<4xf32>
        """,
        f"""
        CHECK: "llvm.nvvm.mma.{intrinsic}"({{{{.*}}}}) : ({operands}) -> !llvm.struct<(f32, f32, f32, f32)>
        CHECK: llvm.extractvalue %{{{{.*}}}}[0]
        CHECK: llvm.extractvalue %{{{{.*}}}}[3]
        CHECK: llvm.insertelement
        """,
    )


@pytest.mark.parametrize("name", [load.name for load in target("sm_80").matrix_loads if load.intrinsic])
def test_matrix_loads(name):
    load = target("sm_80").matrix_load(name)
    check(
        f'%l = "fly.load_matrix"(%dst) {{atom = "{name}"}} : (!llvm.ptr<3>) -> vector<8xbf16>',
        f"""
        CHECK: "{load.intrinsic}.p3"(%{{{{.*}}}}) : (!llvm.ptr<3>) -> !llvm.struct<(i32, i32, i32, i32)>
        CHECK: llvm.bitcast %{{{{.*}}}} : vector<4xi32> to vector<8xbf16>
        """,
    )


def test_bounded_load_is_a_branch_with_zeros():
    check(
        '%l = "fly.load_bounded"(%src, %i, %i) {align = 16} : (!llvm.ptr<1>, i32, i32) -> vector<8xbf16>',
        """
        CHECK: func.func @kernel(%[[BASE:.*]]: !llvm.ptr<1>, %{{.*}}: !llvm.ptr<3>, %[[I:.*]]: i32,
        CHECK: %[[INSIDE:.*]] = llvm.icmp "ult" %[[I]], %[[I]] : i32
        CHECK: scf.if %[[INSIDE]] -> (vector<8xbf16>)
        CHECK: %[[OFFSET:.*]] = llvm.zext %[[I]] : i32 to i64
        CHECK: %[[AT:.*]] = llvm.getelementptr %[[BASE]][%[[OFFSET]]]
        CHECK: llvm.load %[[AT]] {alignment = 16 : i64}
        CHECK: } else {
        CHECK-NEXT: llvm.mlir.zero : vector<8xbf16>
        """,
    )


def test_bounded_store_is_a_branch():
    check(
        '"fly.store_bounded"(%i, %src, %i, %i) {align = 4} : (i32, !llvm.ptr<1>, i32, i32) -> ()',
        """
        CHECK: %[[INSIDE:.*]] = llvm.icmp "ult"
        CHECK-NEXT: scf.if %[[INSIDE]] {
        CHECK: llvm.store %{{.*}}, %{{.*}} {alignment = 4 : i64} : i32, !llvm.ptr<1>
        CHECK-NOT: else
        """,
    )


@pytest.mark.parametrize(("size", "kind"), [(4, "ca"), (8, "ca"), (16, "cg")])
def test_copies_read_nothing_out_of_bounds(size, kind):
    check(
        f"""
        %t = "fly.copy_async"(%dst, %src, %c) {{bytes = {size}}}
          : (!llvm.ptr<3>, !llvm.ptr<1>, i1) -> !fly.token
        """,
        f"""
        CHECK: %[[SIZE:.*]] = llvm.mlir.constant({size} : i32)
        CHECK: %[[NONE:.*]] = llvm.mlir.constant(0 : i32)
        CHECK: %[[GIVEN:.*]] = llvm.select %{{{{.*}}}}, %[[SIZE]], %[[NONE]]
        CHECK: "llvm.nvvm.cp.async.{kind}.shared.global.{size}.s"(%{{{{.*}}}}, %{{{{.*}}}}, %[[GIVEN]])
        """,
    )


def test_groups():
    check(
        '"fly.commit"() : () -> ()\n"fly.wait_count"() {newer = 3} : () -> ()',
        """
        CHECK: "llvm.nvvm.cp.async.commit.group"()
        CHECK: %[[NEWER:.*]] = llvm.mlir.constant(3 : i32)
        CHECK: "llvm.nvvm.cp.async.wait.group"(%[[NEWER]])
        """,
    )


def test_pairs_and_votes():
    check(
        """
        %x = llvm.mlir.poison : f32
        %own, %partner = "fly.pair"(%x) {mask = 16} : (f32) -> (f32, f32)
        %any = "fly.any_lane"(%c) : (i1) -> i1
        %sum = arith.addf %own, %partner : f32
        """,
        """
        CHECK: %[[X:.*]] = llvm.mlir.poison : f32
        CHECK: llvm.mlir.constant(16 : i32)
        CHECK: "llvm.nvvm.shfl.sync.bfly.i32"
        CHECK: %[[PARTNER:.*]] = llvm.bitcast %{{.*}} : i32 to f32
        CHECK: %[[ALL:.*]] = llvm.mlir.constant(-1 : i32)
        CHECK: "llvm.nvvm.vote.any.sync"(%[[ALL]], %{{.*}}) : (i32, i1) -> i1
        CHECK: arith.addf %[[X]], %[[PARTNER]]
        """,
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrowing_is_a_conversion(dtype):
    check(
        f'%v = llvm.mlir.poison : vector<4xf32>\n%w = "fly.narrow"(%v) : (vector<4xf32>) -> vector<4x{dtype}>',
        f"CHECK: llvm.fptrunc %{{{{.*}}}} : vector<4xf32> to vector<4x{dtype}>",
    )


def test_approximate_functions_go_element_by_element():
    check(
        """
        %x = llvm.mlir.poison : f32
        %v = llvm.mlir.poison : vector<2xf32>
        %r = "fly.rcp"(%x) : (f32) -> f32
        %l = math.log2 %x : f32
        %e = math.exp2 %v : vector<2xf32>
        %q = math.rsqrt %x : f32
        """,
        """
        CHECK: "llvm.nvvm.rcp.approx.ftz.f"
        CHECK: "llvm.nvvm.lg2.approx.ftz.f"
        CHECK: "llvm.nvvm.ex2.approx.ftz.f"
        CHECK: "llvm.nvvm.ex2.approx.ftz.f"
        CHECK-NOT: ex2
        CHECK: "llvm.nvvm.rsqrt.approx.f"
        """,
    )


def test_double_precision_numbers_become_words_by_an_instruction():
    """And nothing else that is only seen as other bits."""
    check(
        """
        %d = llvm.mlir.poison : vector<2xf64>
        %words = vector.bitcast %d : vector<2xf64> to vector<4xi32>
        %f = llvm.mlir.poison : vector<2xf32>
        %bits = vector.bitcast %f : vector<2xf32> to vector<2xi32>
        """,
        """
        CHECK-COUNT-2: "llvm.nvvm.d2i.lo"({{.*}}) {{.*}}
        CHECK: vector.bitcast %{{.*}} : vector<2xf32> to vector<2xi32>
        """,
    )


def test_a_stored_word_of_a_double_is_no_conversion():
    """ptxas takes a 32-bit store of a register that was made as an f64 for a conversion to an integer."""

    def halves(x: fly.Tensor, out: fly.Tensor):
        words = x.load(0).to(fly.f64).bitcast(fly.i32)
        out.store(words[0], 0)
        out.store(words[1], 1)

    ptx = fly.compile(fly.kernel(halves), matrix("f32"), matrix("i32"), block=32, target="sm_80").isa
    assert not re.search(r"st\.global\.b32\s+\[[^]]*\], %rd", ptx)
    assert re.search(r"mov\.b64\s+\{", ptx)


def test_scheduling_hints_vanish():
    check('"fly.sched"() {kind = "priority", value = 3} : () -> ()', "CHECK: arith.constant\nCHECK-NOT: llvm.")


def test_what_has_no_rule_is_an_error():
    with pytest.raises(CompileError, match=r"lower-to-nvvm: no rule for fly\.join"):
        lowered("%t = join", "sm_80")


@pytest.mark.parametrize(("dtype", "name"), [("f8e4m3", "e4m3x2"), ("f8e5m2", "e5m2x2")])
def test_bytes_widen_in_pairs_through_f16(dtype, name):
    check(
        f'%v = llvm.mlir.poison : vector<4xi8>\n%w = "fly.widen_pairs"(%v) {{from = "{dtype}"}} : (vector<4xi8>) -> '
        "vector<4xf32>",
        f"""
        CHECK: llvm.bitcast %{{{{.*}}}} : vector<4xi8> to vector<2xi16>
        CHECK: "llvm.nvvm.{name}.to.f16x2.rn"(%{{{{.*}}}}) : (i16) -> vector<2xf16>
        CHECK: "llvm.nvvm.{name}.to.f16x2.rn"(%{{{{.*}}}}) : (i16) -> vector<2xf16>
        CHECK: llvm.fpext %{{{{.*}}}} : vector<4xf16> to vector<4xf32>
        """,
    )


def test_parameters_are_read_again_where_it_is_asked_for():
    def twice(out: fly.Tensor, factor: fly.i32, *, anew: bool):
        out.store(factor, fly.thread_id.x)
        fly.barrier()
        read = fly.reread if anew else lambda given: given
        read(out).store(read(factor) + 1, fly.thread_id.x + 40)

    nvidia, amd = (
        [
            fly.compile(fly.kernel(twice), matrix("i32", 1), ScalarSpec("i32"), block=32, target=arch, anew=anew).isa
            for anew in (False, True)
        ]
        for arch in ("sm_80", "gfx950")
    )
    assert nvidia[0] == nvidia[1]
    loads = [len(re.findall(r"s_load_dword", isa)) for isa in amd]
    assert loads[1] >= loads[0] + 2


def test_ids_are_read_again_where_it_is_asked_for():
    def twice(out: fly.Tensor, *, anew: bool):
        out.store(fly.thread_id.x, fly.thread_id.x)
        with fly.reread_ids() if anew else contextlib.nullcontext():
            out.store(fly.thread_id.x + 1, fly.block_id.x + 40)

    for anew in (False, True):
        compiled = [
            fly.compile(fly.kernel(twice), matrix("i32", 1), block=32, target=arch, anew=anew).isa
            for arch in ("sm_80", "gfx950")
        ]
        assert compiled[0].count("%tid.x") == 1 + anew and compiled[0].count("%ctaid.x") == 1


def test_lanes_are_counted_again_where_it_is_asked_for():
    def twice(out: fly.Tensor, *, lanes: bool):
        out.store(fly.lane_id(), fly.thread_id.x)
        with fly.reread_ids(lanes=lanes):
            out.store(fly.lane_id(), fly.block_id.x + 40)
            with fly.reread_ids():  # of block and thread alone
                out.store(fly.lane_id(), fly.block_id.x + 41)

    for lanes in (False, True):
        nvidia, amd = (
            fly.compile(fly.kernel(twice), matrix("i32", 1), block=32, target=arch, lanes=lanes).isa
            for arch in ("sm_80", "gfx950")
        )
        assert nvidia.count("%laneid") == lanes and amd.count("v_mbcnt_hi") == lanes
