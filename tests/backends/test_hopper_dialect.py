"""The `hopper` dialect: what each operation becomes, what is refused, and what authors' calls make of it."""

from __future__ import annotations

import re

import pytest
from mlir import ir

import fly
from fly.backends.lowering import Lower
from fly.backends.nvvm import dialect, intrinsics, lower_hopper, tma, wgmma
from fly.backends.nvvm.mbarrier import Mbarriers
from fly.backends.nvvm.wgmma import Operand, PanelTile, WarpgroupAtom
from fly.backends.target import target
from fly.errors import CompileError, ShapeError, TargetError
from fly.lang.signature import TensorMapSpec
from fly.passes.written import written_arguments
from tests.backends.lowering import instructions, lowered
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse
from tests.tracing import matrix, trace

dialect.load()

VALUES = """
%j = llvm.mlir.poison : i32
%map = llvm.mlir.poison : !llvm.ptr
%d = llvm.mlir.poison : i64
%s = llvm.mlir.poison : f32
%acc = llvm.mlir.poison : vector<4xf32>
%wide = llvm.mlir.poison : vector<8xf32>
%a = llvm.mlir.poison : vector<8xbf16>
"""
WORDS = "i32, i32, i32, i32"


def wgmma_attributes(groups: str, **changes: str) -> str:
    """Those of a product with n = 8 over two steps."""
    given = {
        "n": "8",
        "dtype": '"bf16"',
        "accumulates": "0 : i64",
        "a_registers": "0 : i64",
        "a_transposed": "0 : i64",
        "b_transposed": "1 : i64",
        "a_steps": "array<i64: 0, 2>",
        "b_steps": "array<i64: 0, 32>",
        "operandSegmentSizes": f"array<i32: {groups}>",
    } | changes
    return "{" + ", ".join(f"{name} = {value}" for name, value in given.items()) + "}"


def waits(accumulators: int, after: int, newer: int = 0) -> str:
    there = ", ".join(str(int(i < accumulators)) for i in range(dialect.MOST_WAITED))
    return (
        f"{{newer = {newer}, accumulators = {accumulators}, operandSegmentSizes = array<i32: {there}, {after}>, "
        f"resultSegmentSizes = array<i32: {there}>}}"
    )


ONTO = wgmma_attributes(
    "1, 1, 2", accumulates="1 : i64", a_registers="1 : i64", b_transposed="0 : i64", a_steps="array<i64>"
)

PURE = ("anew",)  # no side effects: moved and left out as arithmetic is

# the operation, and its assembly: text, constraints and operands
OPERATIONS = {
    "barrier_sync": (
        '"hopper.barrier_sync"(%i, %j) : (i32, i32) -> ()',
        '"barrier.cta.sync.aligned $0, $1;", "r,r,~{memory}" %arg2, %{{.*}} : (i32, i32) -> ()',
    ),
    "barrier_arrive": (
        '"hopper.barrier_arrive"(%i, %j) : (i32, i32) -> ()',
        '"barrier.cta.arrive.aligned $0, $1;", "r,r,~{memory}" %arg2, %{{.*}} : (i32, i32) -> ()',
    ),
    "barrier_any": (
        '%r = "hopper.barrier_any"(%i, %j, %j) : (i32, i32, i32) -> i32',
        r'"{\0A.reg .pred p, q;\0Asetp.ne.u32 p, $3, 0;\0Abarrier.cta.red.or.pred.aligned q, $1, $2, p;\0A'
        r'selp.u32 $0, 1, 0, q;\0A}", "=r,r,r,r,~{memory}" %arg2, %{{.*}}, %{{.*}} : (i32, i32, i32) -> i32',
    ),
    "setmaxnreg": (
        '"hopper.setmaxnreg"() {action = "dec", registers = 40} : () -> ()',
        '"setmaxnreg.dec.sync.aligned.u32 40;", "~{memory}" : () -> ()',
    ),
    "elect": (
        '%r = "hopper.elect"() : () -> i32',
        r'"{\0A.reg .pred p;\0Aelect.sync _|p, 0xffffffff;\0Aselp.u32 $0, 1, 0, p;\0A}", "=r,~{memory}" : () -> i32',
    ),
    "ldmatrix_turned": (
        f'%r:4 = "hopper.ldmatrix_turned"(%i) : (i32) -> ({WORDS})',
        '"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}" %arg2 '
        f": (i32) -> !llvm.struct<({WORDS})>",
    ),
    "stmatrix": (
        f'"hopper.stmatrix"(%i, %j, %j, %i, %j) : (i32, {WORDS}) -> ()',
        '"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}" %arg2, %[[J:.*]], '
        "%[[J]], %arg2, %[[J]] :",
    ),
    "prmt": (
        '%r = "hopper.prmt"(%i, %j, %i) : (i32, i32, i32) -> i32',
        '"prmt.b32 $0, $1, $2, $3;", "=r,r,r,r,~{memory}" %arg2, %{{.*}}, %arg2 : (i32, i32, i32) -> i32',
    ),
    "anew": (
        '%r = "hopper.anew"(%i, %j) : (i32, i32) -> i32',
        '"mov.b32 $0, $1;", "=r,r,r" %arg2, %{{.*}} : (i32, i32) -> i32',
    ),
    "sync_warp": ('"hopper.sync_warp"() : () -> ()', '"bar.warp.sync 0xffffffff;", "~{memory}" : () -> ()'),
    "fence_async_shared": (
        '"hopper.fence_async_shared"() : () -> ()',
        '"fence.proxy.async.shared::cta;", "~{memory}" : () -> ()',
    ),
    "fence_async_global": (
        '"hopper.fence_async_global"() : () -> ()',
        '"fence.proxy.async.global;", "~{memory}" : () -> ()',
    ),
    "fence_mbarrier_init": (
        '"hopper.fence_mbarrier_init"() : () -> ()',
        '"fence.mbarrier_init.release.cluster;", "~{memory}" : () -> ()',
    ),
    "mbarrier_init": (
        '"hopper.mbarrier_init"(%i, %j) : (i32, i32) -> ()',
        '"mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}" %arg2, %{{.*}} : (i32, i32) -> ()',
    ),
    "mbarrier_arrive": (
        '"hopper.mbarrier_arrive"(%i) : (i32) -> ()',
        r'"{\0A.reg .b64 s;\0Ambarrier.arrive.shared::cta.b64 s, [$0];\0A}", "r,~{memory}" %arg2 : (i32) -> ()',
    ),
    "mbarrier_arrive_expect": (
        '"hopper.mbarrier_arrive_expect"(%i, %j) : (i32, i32) -> ()',
        r'"{\0A.reg .b64 s;\0Ambarrier.arrive.expect_tx.shared::cta.b64 s, [$0], $1;\0A}", "r,r,~{memory}" %arg2, ',
    ),
    "mbarrier_wait": (
        '"hopper.mbarrier_wait"(%i, %j) : (i32, i32) -> ()',
        r'"{\0A.reg .pred p;\0Aagain:\0Ambarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\0A@p bra done;\0A'
        r'bra again;\0Adone:\0A}", "r,r,~{memory}" %arg2, %{{.*}} : (i32, i32) -> ()',
    ),
    "mbarrier_arrive_at": (
        '"hopper.mbarrier_arrive_at"(%i, %j) : (i32, i32) -> ()',
        r'"{\0A.reg .b32 there;\0Amapa.shared::cluster.u32 there, $0, $1;\0A'
        r'mbarrier.arrive.shared::cluster.b64 _, [there];\0A}", "r,r,~{memory}" %arg2, ',
    ),
    "mbarrier_arrive_expect_at": (
        '"hopper.mbarrier_arrive_expect_at"(%i, %j, %i) : (i32, i32, i32) -> ()',
        r'"{\0A.reg .b32 there;\0Amapa.shared::cluster.u32 there, $0, $2;\0A'
        r"mbarrier.arrive.expect_tx.shared::cluster.b64 _, [there], $1;\0A}"
        r'", "r,r,r,~{memory}" %arg2, ',
    ),
    "cluster_sync": (
        '"hopper.cluster_sync"() : () -> ()',
        r'"barrier.cluster.arrive.release;\0Abarrier.cluster.wait.acquire;", "~{memory}" : () -> ()',
    ),
    "copy_at": (
        '"hopper.copy_at"(%i, %j, %i, %j, %i) : (i32, i32, i32, i32, i32) -> ()',
        r'"{\0A.reg .b32 there, done;\0Amapa.shared::cluster.u32 there, $0, $4;\0A'
        r"mapa.shared::cluster.u32 done, $3, $4;\0A"
        r"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [$1], $2, [done];\0A}"
        r'", "r,r,r,r,r,~{memory}" %arg2, %[[J:.*]], %arg2, %[[J]], %arg2',
    ),
    "tma_prefetch": (
        '"hopper.tma_prefetch"(%map) : (!llvm.ptr) -> ()',
        '"prefetch.tensormap [$0];", "l,~{memory}" %{{.*}} : (!llvm.ptr) -> ()',
    ),
    "tma_load": (
        '"hopper.tma_load"(%i, %map, %j, %i, %j) : (i32, !llvm.ptr, i32, i32, i32) -> ()',
        '"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];", '
        '"r,l,r,r,r,~{memory}" %arg2, %{{.*}}, %[[J:.*]], %arg2, %[[J]] : (i32, !llvm.ptr, i32, i32, i32) -> ()',
    ),
    "tma_load_to_all": (
        '"hopper.tma_load_to_all"(%i, %map, %j, %i, %j) {blocks = 2} : (i32, !llvm.ptr, i32, i32, i32) -> ()',
        r'"{\0A.reg .b16 all;\0Amov.b16 all, 3;\0A'
        r"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        r'[$0], [$1, {$3, $4}], [$2], all;\0A}", '
        '"r,l,r,r,r,~{memory}" %arg2, %{{.*}}, %[[J:.*]], %arg2, %[[J]] : (i32, !llvm.ptr, i32, i32, i32) -> ()',
    ),
    "tma_store": (
        '"hopper.tma_store"(%i, %map, %j) : (i32, !llvm.ptr, i32) -> ()',
        '"cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [$1, {$2}], [$0];", "r,l,r,~{memory}" %arg2, %{{.*}}',
    ),
    "tma_commit": ('"hopper.tma_commit"() : () -> ()', '"cp.async.bulk.commit_group;", "~{memory}" : () -> ()'),
    "tma_wait": (
        '"hopper.tma_wait"() {newer = 3} : () -> ()',
        '"cp.async.bulk.wait_group 3;", "~{memory}" : () -> ()',
    ),
    "tma_wait_read": (
        '"hopper.tma_wait_read"() {newer = 3} : () -> ()',
        '"cp.async.bulk.wait_group.read 3;", "~{memory}" : () -> ()',
    ),
    "wgmma": (
        f'%r = "hopper.wgmma"(%d, %d) {wgmma_attributes("0, 1, 1")} : (i64, i64) -> vector<4xf32>',
        r'"{\0A.reg .pred first;\0A.reg .b64 da, db;\0Asetp.ne.b32 first, 0, 0;\0Awgmma.fence.sync.aligned;\0A'
        r"add.s64 db, $4, 0;\0Aadd.s64 da, $5, 0;\0A"
        r"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, da, db, first, 1, 1, 0, 1;\0A"
        r"add.s64 db, $4, 32;\0Aadd.s64 da, $5, 2;\0A"
        r"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, da, db, 1, 1, 1, 0, 1;\0A"
        r'wgmma.commit_group.sync.aligned;\0A}", "=&f,=&f,=&f,=&f,l,l,~{memory}" %[[D:.*]], %[[D]] : (i64, i64)',
    ),
    "wgmma onto": (
        f'%r = "hopper.wgmma"(%acc, %d, %a, %a) {ONTO} : '
        "(vector<4xf32>, i64, vector<8xbf16>, vector<8xbf16>) -> vector<4xf32>",
        r'"{\0A.reg .pred first;\0A.reg .b64 da, db;\0Asetp.eq.b32 first, 0, 0;\0Awgmma.fence.sync.aligned;\0A'
        r"add.s64 db, $8, 0;\0A"
        r"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, {$9, $10, $11, $12}, db, first, 1, "
        r"1, 0;\0Aadd.s64 db, $8, 32;\0A"
        r"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {$0, $1, $2, $3}, {$13, $14, $15, $16}, db, 1, 1, 1, "
        r'0;\0Awgmma.commit_group.sync.aligned;\0A}", "=f,=f,=f,=f,0,1,2,3,l,r,r,r,r,r,r,r,r,~{memory}"',
    ),
    "computed": (
        '"hopper.computed"(%s) : (f32) -> ()',
        r'"{\0A.reg .pred p;\0Asetp.ne.b32 p, 0, 0;\0Asetp.lt.or.f32 p, $0, 0fBF800000, p;\0A'
        r'vote.sync.any.pred p, p, -1;\0A@p trap;\0A}", "f,~{memory}" %{{.*}} : (f32) -> ()',
    ),
    "wgmma_wait": (
        f'%r:2 = "hopper.wgmma_wait"(%wide, %acc, %s) {waits(2, 1, 3)} : '
        "(vector<8xf32>, vector<4xf32>, f32) -> (vector<8xf32>, vector<4xf32>)",
        r'"{\0A.reg .pred p;\0Asetp.ne.b32 p, 0, 0;\0Asetp.lt.or.f32 p, $24, 0fBF800000, p;\0A'
        r'vote.sync.any.pred p, p, -1;\0A@p trap;\0Awgmma.wait_group.sync.aligned 3;\0A}", '
        r'"=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,6,7,8,9,10,11,f,~{memory}"',
    ),
    "wgmma_wait for nothing": (
        f'"hopper.wgmma_wait"() {waits(0, 0)} : () -> ()',
        '"wgmma.wait_group.sync.aligned 0;", "~{memory}" : () -> ()',
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_this_assembly(name):
    operation, wanted = OPERATIONS[name]
    effects = "" if name in PURE else "has_side_effects "
    checks = f"CHECK: llvm.inline_asm {effects}asm_dialect = att\nCHECK-SAME: {wanted}\nCHECK-NOT: hopper."
    filecheck(lowered(VALUES + operation, "sm_90a"), checks)


def test_results_are_the_assemblys_in_order():
    load = f'%r:4 = "hopper.ldmatrix_turned"(%i) : (i32) -> ({WORDS})'
    body = f'{load}\n"hopper.barrier_sync"(%r#2, %r#0) : (i32, i32) -> ()'
    filecheck(
        lowered(body, "sm_90a"),
        """
        CHECK: %[[FIRST:.*]] = llvm.extractvalue %{{.*}}[0]
        CHECK: %[[THIRD:.*]] = llvm.extractvalue %{{.*}}[2]
        CHECK: barrier.cta.sync
        CHECK-SAME: %[[THIRD]], %[[FIRST]] :
        """,
    )


def test_a_products_operands_are_elements_of_its_vectors():
    """A's words step by step, then the accumulator's elements, as in the assembly's list."""
    operation, _ = OPERATIONS["wgmma onto"]
    filecheck(
        lowered(VALUES + operation + '\n"hopper.sync_warp"() : () -> ()', "sm_90a"),
        """
        CHECK: vector.bitcast %{{.*}} : vector<8xbf16> to vector<4xi32>
        CHECK-COUNT-4: vector.extract %{{.*}} : i32 from vector<4xi32>
        CHECK: vector.bitcast %{{.*}} : vector<8xbf16> to vector<4xi32>
        CHECK-COUNT-4: vector.extract %{{.*}} : i32 from vector<4xi32>
        CHECK-COUNT-4: vector.extract %{{.*}} : f32 from vector<4xf32>
        CHECK: llvm.inline_asm
        CHECK-COUNT-4: llvm.extractvalue
        CHECK: vector.from_elements %{{.*}}, %{{.*}}, %{{.*}}, %{{.*}} : vector<4xf32>
        CHECK: bar.warp.sync
        """,
    )


def test_accumulators_come_out_of_a_wait_as_they_went_in():
    body = (
        f'%r:2 = "hopper.wgmma_wait"(%wide, %acc) {waits(2, 0)} : '
        "(vector<8xf32>, vector<4xf32>) -> (vector<8xf32>, vector<4xf32>)"
    )
    filecheck(
        lowered(VALUES + body, "sm_90a"),
        """
        CHECK-COUNT-8: vector.extract %{{.*}} : f32 from vector<8xf32>
        CHECK-COUNT-4: vector.extract %{{.*}} : f32 from vector<4xf32>
        CHECK: llvm.inline_asm
        CHECK-COUNT-12: llvm.extractvalue
        CHECK: vector.from_elements {{.*}} : vector<8xf32>
        CHECK: vector.from_elements {{.*}} : vector<4xf32>
        """,
    )


def test_every_operation_is_documented_and_has_a_rule_and_a_case():
    declared = set(re.findall(r"irdl\.operation @(\w+)", dialect._IRDL))
    assert declared == {name.removeprefix("hopper.") for name in lower_hopper.RULES}
    assert declared == {name.split()[0] for name in OPERATIONS}
    assert declared == set(re.findall(r"^\| `hopper\.(\w+)` \|", dialect.__doc__, re.M))


# what is refused

PRODUCT = '%r = "hopper.wgmma"({}) {} : {} -> vector<4xf32>'
MALFORMED = {
    "barrier of i64": ('"hopper.barrier_sync"(%d, %i) : (i64, i32) -> ()', "expected 'i32' but got 'i64'"),
    "one operand": ('"hopper.barrier_sync"(%i) : (i32) -> ()', "expects exactly 2 operands, but got 1"),
    "a result": ('%r = "hopper.sync_warp"() : () -> i32', "expects exactly 0 results, but got 1"),
    "no action": ('"hopper.setmaxnreg"() {registers = 40} : () -> ()', "attribute \"?'?action"),
    "an unknown action": (
        '"hopper.setmaxnreg"() {action = "keep", registers = 40} : () -> ()',
        "'\"keep\"' does not satisfy the constraint",
    ),
    "an address for a map": ('"hopper.tma_prefetch"(%i) : (i32) -> ()', "expected base type 'llvm.ptr'"),
    "coordinates of i64": (
        '"hopper.tma_load"(%i, %map, %i, %i, %d) : (i32, !llvm.ptr, i32, i32, i64) -> ()',
        "expected 'i32' but got 'i64'",
    ),
    "newer is text": (
        '"hopper.tma_wait_read"() {newer = "1"} : () -> ()',
        "expected base attribute 'builtin.integer'",
    ),
    "an unknown dtype": (
        PRODUCT.format("%d, %d", wgmma_attributes("0, 1, 1", dtype='"f32"'), "(i64, i64)"),
        "'\"f32\"' does not satisfy the constraint",
    ),
    "a flag of 2": (
        PRODUCT.format("%d, %d", wgmma_attributes("0, 1, 1", accumulates="2 : i64"), "(i64, i64)"),
        "'2 : i64' does not satisfy the constraint",
    ),
    "a step that is no array": (
        PRODUCT.format("%d, %d", wgmma_attributes("0, 1, 1", b_steps="0 : i64"), "(i64, i64)"),
        "expected base attribute 'builtin.dense_array'",
    ),
    "another result than the accumulator": (
        PRODUCT.format("%wide, %d, %d", wgmma_attributes("1, 1, 1"), "(vector<8xf32>, i64, i64)"),
        r"expected 'vector<8xf32>' but got 'vector<4xf32>'",
    ),
    "other results than accumulators": (
        f'%r = "hopper.wgmma_wait"(%wide) {waits(1, 0)} : (vector<8xf32>) -> vector<4xf32>',
        r"expected 'vector<8xf32>' but got 'vector<4xf32>'",
    ),
    "work before a wait that is no f32": (
        f'"hopper.wgmma_wait"(%i) {waits(0, 1)} : (i32) -> ()',
        "expected 'f32' but got 'i32'",
    ),
    "no such operation": ('"hopper.cluster"() : () -> ()', "unregistered operation 'hopper.cluster'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_verifier_refuses(name):
    operation, text = MALFORMED[name]
    with pytest.raises(ir.MLIRError, match=text):
        parse(VALUES + operation)


@pytest.mark.parametrize("arch", ["gfx950", "sm_90a"])
def test_a_lowering_without_a_rule_refuses(arch):
    module = parse('%r = "hopper.elect"() : () -> i32')
    with pytest.raises(CompileError, match=r"lower-to-none: no rule for hopper\.elect"):
        apply(Lower("lower-to-none", target(arch), {}), module)


def test_no_other_target_lowers_them():
    with pytest.raises(CompileError, match=r"lower-to-rocdl: no rule for hopper\.sync_warp"):
        lowered('"hopper.sync_warp"() : () -> ()', "gfx950")


# what authors' calls become

MAP = TensorMapSpec("f16", (1, 8, 64), 128)


def shared(name: str, rows: int, columns: int, element_bytes: int = 2) -> Operand:
    tile = PanelTile.widest(rows, columns, element_bytes)
    return Operand(fly.alloc_shared(name, tile.bytes, 1024), tile)


def box() -> fly.Pointer:
    return fly.alloc_shared("box", 1024, 128)


def started(n: int) -> fly.Value:
    return wgmma.issue(WarpgroupAtom(n, "bf16"), shared(f"a {n}", 64, 32), shared(f"b {n}", n, 32), 2)


def product_of_registers() -> None:
    registers = fly.broadcast(fly.i32(0), 4).bitcast(fly.f8e4m3)
    sums = fly.broadcast(fly.f32(0.0), 4)
    wgmma.issue(WarpgroupAtom(8, "f8e4m3"), (registers,) * 2, shared("b", 8, 64, 1), 2, sums)


MEMORY = "{a_registers = 0 : i64, a_steps = array<i64: 0, 2>, a_transposed = 0 : i64, accumulates = 0 : i64, "
REGISTERS = "{a_registers = 1 : i64, a_steps = array<i64>, a_transposed = 0 : i64, accumulates = 1 : i64, "
STEPS = "b_steps = array<i64: 0, 2>, b_transposed = 0 : i64, "
CALLS = {
    "barrier_sync": (lambda m, x, n: intrinsics.barrier_sync(n, 256), '"hopper.barrier_sync"(%arg3, %c256_i32)'),
    "barrier_arrive": (
        lambda m, x, n: intrinsics.barrier_arrive(3, 256),
        '"hopper.barrier_arrive"(%c3_i32, %c256_i32)',
    ),
    "barrier_any": (
        lambda m, x, n: intrinsics.barrier_any(n, 256, n == 0),
        '"hopper.barrier_any"(%arg3, %c256_i32, %{{.*}}) : (i32, i32, i32) -> i32',
    ),
    "setmaxnreg": (
        lambda m, x, n: intrinsics.setmaxnreg_inc(240),
        '"hopper.setmaxnreg"() {action = "inc", registers = 240 : i64}',
    ),
    "elect": (lambda m, x, n: intrinsics.elect_one(), '"hopper.elect"() : () -> i32'),
    "ldmatrix_turned": (
        lambda m, x, n: intrinsics.load_matrices_transposed(box()),
        f'"hopper.ldmatrix_turned"(%{{{{.*}}}}) : (i32) -> ({WORDS})',
    ),
    "stmatrix": (
        lambda m, x, n: intrinsics.store_matrices(box(), [n] * 4),
        '"hopper.stmatrix"(%{{.*}}, %arg3, %arg3, %arg3, %arg3)',
    ),
    "prmt": (lambda m, x, n: intrinsics.permute_bytes(n, n, n), '"hopper.prmt"(%arg3, %arg3, %arg3)'),
    "anew": (lambda m, x, n: intrinsics.anew(n, n), '"hopper.anew"(%arg3, %arg3)'),
    "sync_warp": (lambda m, x, n: intrinsics.sync_warp(), '"hopper.sync_warp"() : () -> ()'),
    "fence_async_shared": (lambda m, x, n: intrinsics.fence_async_shared(), '"hopper.fence_async_shared"()'),
    "fence_async_global": (lambda m, x, n: intrinsics.fence_async_global(), '"hopper.fence_async_global"()'),
    "fence_mbarrier_init": (lambda m, x, n: intrinsics.fence_mbarrier_init(), '"hopper.fence_mbarrier_init"()'),
    "mbarrier_init": (
        lambda m, x, n: Mbarriers.allocate("x", 1, 4).init(),
        '"hopper.mbarrier_init"(%{{.*}}, %c4_i32)',
    ),
    "mbarrier_arrive": (
        lambda m, x, n: Mbarriers.allocate("x", 1, 4).arrive(n),
        '"hopper.mbarrier_arrive"(%{{.*}}) : (i32)',
    ),
    "mbarrier_arrive_expect": (
        lambda m, x, n: Mbarriers.allocate("x", 1, 4).arrive_expecting(0, n),
        '"hopper.mbarrier_arrive_expect"(%{{.*}}, %arg3)',
    ),
    "mbarrier_wait": (
        lambda m, x, n: Mbarriers.allocate("x", 1, 4).wait(0, n),
        '"hopper.mbarrier_wait"(%{{.*}}, %arg3)',
    ),
    "tma_prefetch": (lambda m, x, n: tma.prefetch(m), '"hopper.tma_prefetch"(%arg0)'),
    "tma_load": (
        lambda m, x, n: tma.load(m, box(), (1, n, 64), n),
        '"hopper.tma_load"(%{{.*}}, %arg0, %arg3, %c64_i32, %arg3, %c1_i32)',
    ),
    "tma_store": (
        lambda m, x, n: tma.store(m, box(), (1, n, 64)),
        '"hopper.tma_store"(%{{.*}}, %arg0, %c64_i32, %arg3, %c1_i32)',
    ),
    "tma_commit": (lambda m, x, n: tma.commit(), '"hopper.tma_commit"()'),
    "tma_wait": (lambda m, x, n: tma.wait(2), '"hopper.tma_wait"() {newer = 2 : i64}'),
    "tma_wait_read": (lambda m, x, n: tma.wait_read(2), '"hopper.tma_wait_read"() {newer = 2 : i64}'),
    "wgmma": (
        lambda m, x, n: started(8),
        f'"hopper.wgmma"(%{{{{.*}}}}, %{{{{.*}}}}) {MEMORY}{STEPS}dtype = "bf16", n = 8 : i64, '
        "operandSegmentSizes = array<i32: 0, 1, 1>} : (i64, i64) -> vector<4xf32>",
    ),
    "wgmma of registers": (
        lambda m, x, n: product_of_registers(),
        f'"hopper.wgmma"(%{{{{.*}}}}, %{{{{.*}}}}, %[[A:.*]], %[[A]]) {REGISTERS}{STEPS}dtype = "f8e4m3", '
        "n = 8 : i64, operandSegmentSizes = array<i32: 1, 1, 2>} : "
        "(vector<4xf32>, i64, vector<16xi8>, vector<16xi8>) -> vector<4xf32>",
    ),
    "computed": (lambda m, x, n: wgmma.computed(fly.f32(1.0)), '"hopper.computed"('),
    "wgmma_wait": (
        lambda m, x, n: wgmma.wait(1, started(8), started(16), after=[fly.f32(1.0)]),
        '"hopper.wgmma_wait"(%{{.*}}, %{{.*}}, %{{.*}}) {accumulators = 2 : i64, newer = 1 : i64, {{.*}}} : '
        "(vector<4xf32>, vector<8xf32>, f32) -> (vector<4xf32>, vector<8xf32>)",
    ),
}


def called(body) -> ir.Module:
    """The trace of `body(map, tensor, n)`."""

    def kernel(m: fly.TensorMap, x: fly.Tensor, n: fly.i32):
        body(m, x, n)

    return trace(kernel, MAP, matrix("i32"), "i32", arch="sm_90a", block=256)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_this_operation(name):
    body, wanted = CALLS[name]
    module = called(body)
    filecheck(str(module), f"CHECK: {wanted}")
    assert "llvm.inline_asm" not in str(module)
    assert "hopper." not in instructions(module)


@pytest.mark.parametrize("name", CALLS)
def test_targets_without_the_instructions_refuse(name):
    body, _ = CALLS[name]

    def kernel(x: fly.Tensor, n: fly.i32):
        body(fly.TensorMap(x.pointer.ir, MAP), x, n)  # a map as an argument is refused before

    with pytest.raises(
        TargetError, match="sm_80 has no TMA, mbarriers, WGMMA or named barriers of fly's; sm_90a has"
    ):
        trace(kernel, matrix("i32"), "i32", arch="sm_80", block=256)


def test_a_wait_has_room_for_so_many_accumulators():
    def wait_for(count: int) -> ir.Module:
        return called(lambda m, x, n: wgmma.wait(0, *[started(8)] * count))

    assert "accumulators = 8 : i64" in str(wait_for(8))
    with pytest.raises(ShapeError, match="a wait for 9 accumulators of WGMMA; expected at most 8"):
        wait_for(9)


# what the passes make of them


def test_what_an_atomic_changes_is_written():
    assert written_arguments(called(lambda m, x, n: fly.fetch_add(1, x.at(n)))) == (1,)
    assert written_arguments(called(lambda m, x, n: intrinsics.sync_warp())) == ()


def test_buffers_that_units_are_given_the_address_of_are_in_use():
    """The first one's address goes to a copy behind the barrier, or before it only."""

    def body(again: bool):
        def copies(m, x, n):
            first, second = (fly.alloc_shared(name, 1024, 1024) for name in ("first", "second"))
            tma.store(m, first, (0, 0, 0))
            fly.barrier()
            tma.store(m, second, (0, 0, 0))
            if again:
                tma.store(m, first, (0, 0, 0))

        return copies

    assert "fly.shared_bytes = 2048" in instructions(called(body(True)))
    assert "fly.shared_bytes = 1024" in instructions(called(body(False)))
