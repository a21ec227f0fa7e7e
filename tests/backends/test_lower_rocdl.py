"""`lower-to-rocdl`: what each `fly` operation becomes on AMD."""

from __future__ import annotations

import re

import pytest

from fly.backends.llvm import Machine, emit
from fly.backends.rocdl.codegen import TRIPLE
from fly.backends.target import target
from fly.errors import CompileError
from tests.backends.lowering import lowered
from tests.filecheck import filecheck


def check(body: str, checks: str, arch: str = "gfx950") -> None:
    filecheck(lowered(body, arch), checks + "\nCHECK-NOT: fly.")


@pytest.mark.parametrize("axis", "xyz")
def test_ids(axis):
    check(
        f"""
        %t = "fly.id"() {{name = "thread_id.{axis}"}} : () -> i32
        %b = "fly.id"() {{name = "block_id.{axis}"}} : () -> i32
        """,
        f"""
        CHECK: llvm.call_intrinsic "llvm.amdgcn.workitem.id.{axis}"() : () -> i32
        CHECK: llvm.call_intrinsic "llvm.amdgcn.workgroup.id.{axis}"() : () -> i32
        """,
    )


@pytest.mark.parametrize(("axis", "offset", "block"), [("x", 12, 64), ("y", 16, 1), ("z", 20, 1)])
def test_grid_is_the_packets_threads_over_the_blocks(axis, offset, block):
    check(
        f'%g = "fly.id"() {{name = "grid_dim.{axis}"}} : () -> i32',
        f"""
        CHECK: %[[PACKET:.*]] = llvm.call_intrinsic "llvm.amdgcn.dispatch.ptr"() : () -> !llvm.ptr<4>
        CHECK: %[[OFFSET:.*]] = llvm.mlir.constant({offset} : i32)
        CHECK: %[[AT:.*]] = llvm.getelementptr %[[PACKET]][%[[OFFSET]]] {{{{.*}}}} i8
        CHECK: %[[THREADS:.*]] = llvm.load %[[AT]] {{alignment = 4 : i64}} : !llvm.ptr<4> -> i32
        CHECK: %[[BLOCK:.*]] = llvm.mlir.constant({block} : i32)
        CHECK: llvm.udiv %[[THREADS]], %[[BLOCK]] : i32
        """,
    )


def test_barrier_orders_shared_memory_only():
    check(
        "barrier",
        """
        CHECK: #[[LOCAL:.*]] = #llvm.mmra_tag<"amdgpu-synchronize-as":"local">
        CHECK: llvm.fence syncscope("workgroup") release {llvm.mmra = #[[LOCAL]]}
        CHECK-NEXT: llvm.call_intrinsic "llvm.amdgcn.s.barrier"
        CHECK-NEXT: llvm.fence syncscope("workgroup") acquire {llvm.mmra = #[[LOCAL]]}
        """,
    )


def _shuffle(mode: str, lane: str, type_: str = "i32") -> str:
    return f"""
    %k = arith.constant {lane} : i32
    %value = llvm.mlir.poison : {type_}
    %s = "fly.shuffle"(%value, %k) {{mode = "{mode}"}} : ({type_}, i32) -> {type_}
    """


def test_first_lane_is_a_scalar_read():
    check(_shuffle("idx", "0"), 'CHECK: "llvm.amdgcn.readfirstlane.i32"(%{{.*}}) : (i32) -> i32')


def test_any_lane_is_a_permute_by_four_times_the_lane():
    check(
        '%s = "fly.shuffle"(%i, %i) {mode = "idx"} : (i32, i32) -> i32',
        """
        CHECK: %[[TWO:.*]] = llvm.mlir.constant(2 : i32)
        CHECK: %[[ADDRESS:.*]] = llvm.shl %[[LANE:.*]], %[[TWO]]
        CHECK: "llvm.amdgcn.ds.bpermute"(%[[ADDRESS]], %[[LANE]])
        """,
    )


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 31])
def test_exchange_within_32_lanes_is_a_swizzle(mask):
    check(
        _shuffle("xor", str(mask)),
        f"""
        CHECK: %[[PATTERN:.*]] = llvm.mlir.constant({mask << 10 | 0x1F} : i32)
        CHECK: "llvm.amdgcn.ds.swizzle"(%{{{{.*}}}}, %[[PATTERN]])
        """,
    )


def test_exchange_across_halves_is_a_permute():
    check(
        _shuffle("xor", "32", "f32"),
        """
        CHECK: %[[WORD:.*]] = llvm.bitcast %{{.*}} : f32 to i32
        CHECK: %[[LOW:.*]] = llvm.call_intrinsic "llvm.amdgcn.mbcnt.lo"
        CHECK: %[[OWN:.*]] = llvm.call_intrinsic "llvm.amdgcn.mbcnt.hi"(%{{.*}}, %[[LOW]])
        CHECK: llvm.xor %[[OWN]], %
        CHECK: %[[GOT:.*]] = llvm.call_intrinsic "llvm.amdgcn.ds.bpermute"(%{{.*}}, %[[WORD]])
        CHECK: llvm.bitcast %[[GOT]] : i32 to f32
        """,
    )


@pytest.mark.parametrize(("mask", "name"), [(32, "permlane32"), (16, "permlane16")])
def test_pairs_across_halves_are_a_swap(mask, name):
    check(
        f"""
        %x = llvm.mlir.poison : f32
        %first, %second = "fly.pair"(%x) {{mask = {mask}}} : (f32) -> (f32, f32)
        %sum = arith.addf %first, %second : f32
        """,
        f"""
        CHECK: %[[WORD:.*]] = llvm.bitcast %{{{{.*}}}} : f32 to i32
        CHECK: %[[BOTH:.*]] = llvm.call_intrinsic "llvm.amdgcn.{name}.swap"(%[[WORD]], %[[WORD]], %
        CHECK: llvm.extractvalue %[[BOTH]][0]
        CHECK: llvm.extractvalue %[[BOTH]][1]
        CHECK: arith.addf
        """,
    )


@pytest.mark.parametrize(("arch", "mask"), [("gfx950", 8), ("gfx942", 16), ("gfx942", 32)])
def test_other_pairs_are_the_value_and_its_exchange(arch, mask):
    check(
        f"""
        %x = llvm.mlir.poison : i32
        %own, %partner = "fly.pair"(%x) {{mask = {mask}}} : (i32) -> (i32, i32)
        %sum = arith.addi %own, %partner : i32
        """,
        f"""
        CHECK: %[[X:.*]] = llvm.mlir.poison : i32
        CHECK: %[[PARTNER:.*]] = llvm.call_intrinsic "llvm.amdgcn.ds.{"swizzle" if mask < 32 else "bpermute"}"
        CHECK: arith.addi %[[X]], %[[PARTNER]]
        """,
        arch,
    )


def test_votes_are_ballots():
    check(
        '%any = "fly.any_lane"(%c) : (i1) -> i1',
        """
        CHECK: %[[LANES:.*]] = llvm.call_intrinsic "llvm.amdgcn.ballot.i64"(%{{.*}}) : (i1) -> i64
        CHECK: %[[NONE:.*]] = llvm.mlir.constant(0 : i64)
        CHECK: llvm.icmp "ne" %[[LANES]], %[[NONE]] : i64
        """,
    )


def test_direct_copies_are_loads_into_shared_memory():
    check(
        """
        %t = "fly.copy_direct"(%dst, %src, %i, %i) {bytes = 16, shift = 1040}
          : (!llvm.ptr<3>, !llvm.ptr<1>, i32, i32) -> !fly.token
        """,
        """
        CHECK: func.func @kernel(%[[BASE:.*]]: !llvm.ptr<1>, %[[TO:.*]]: !llvm.ptr<3>, %[[I:.*]]: i32,
        CHECK: %[[ADDRESS:.*]] = llvm.ptrtoint %[[BASE]]
        CHECK: llvm.bitcast %[[ADDRESS]] : i64 to vector<2xi32>
        CHECK: %[[SIZE:.*]] = llvm.mlir.constant(16 : i32)
        CHECK: %[[SHIFT:.*]] = llvm.mlir.constant(1040 : i32)
        CHECK: "llvm.amdgcn.raw.buffer.load.lds"(%{{.*}}, %[[TO]], %[[SIZE]], %[[I]], %{{.*}}, %[[SHIFT]], %
        """,
    )


@pytest.mark.parametrize("newer", [0, 3, 20, 62])
def test_waits_count_loads_from_memory(newer):
    """The constant is the instruction's encoding, which the assembler takes apart again."""
    lowered_text = lowered(f'"fly.wait_count"() {{newer = {newer}}} : () -> ()', "gfx950")
    encoding = re.search(r"llvm.mlir.constant\((\d+) : i32\)", lowered_text).group(1)
    assert '"llvm.amdgcn.s.waitcnt"' in lowered_text
    ir = f"""
    declare void @llvm.amdgcn.s.waitcnt(i32 immarg)
    define amdgpu_kernel void @k() {{
      call void @llvm.amdgcn.s.waitcnt(i32 {encoding})
      ret void
    }}
    """
    assembly = emit(ir, Machine(TRIPLE, "gfx950"), want_object=False).assembly
    assert [line.strip() for line in assembly.splitlines() if "s_waitcnt" in line] == [f"s_waitcnt vmcnt({newer})"]


def _mma(name: str, arch: str) -> str:
    atom = target(arch).atom(name)
    a, b, c = (atom.values(x) for x in "abc")
    types = f"vector<{a}x{atom.dtype}>, vector<{b}x{atom.dtype}>, vector<{c}xf32>"
    return f"""
    %a = llvm.mlir.poison : vector<{a}x{atom.dtype}>
    %b = llvm.mlir.poison : vector<{b}x{atom.dtype}>
    %acc = llvm.mlir.poison : vector<{c}xf32>
    %d = "fly.mma"(%a, %b, %acc) {{atom = "{name}"}} : ({types}) -> vector<{c}xf32>
    """


def test_mma_of_one_instruction():
    check(
        _mma("mfma_32x32x16_bf16", "gfx950"),
        """
        CHECK: %[[A:.*]] = llvm.mlir.poison : vector<8xbf16>
        CHECK: %[[B:.*]] = llvm.mlir.poison : vector<8xbf16>
        CHECK: %[[C:.*]] = llvm.mlir.poison : vector<16xf32>
        CHECK: "llvm.amdgcn.mfma.f32.32x32x16.bf16"(%[[A]], %[[B]], %[[C]], %
        CHECK-NOT: mfma
        """,
    )


def test_mma_of_two_instructions_chains_the_accumulator():
    check(
        _mma("mfma_32x32x8_bf16", "gfx942"),
        """
        CHECK: %[[C:.*]] = llvm.mlir.poison : vector<16xf32>
        CHECK: llvm.shufflevector %[[A:.*]], %[[A]] [0, 1, 2, 3]
        CHECK: llvm.shufflevector %[[A]], %[[A]] [4, 5, 6, 7]
        CHECK: llvm.bitcast %{{.*}} : vector<4xbf16> to vector<4xi16>
        CHECK: %[[HALF:.*]] = llvm.call_intrinsic "llvm.amdgcn.mfma.f32.32x32x8bf16.1k"(%{{.*}}, %{{.*}}, %[[C]], %
        CHECK: "llvm.amdgcn.mfma.f32.32x32x8bf16.1k"(%{{.*}}, %{{.*}}, %[[HALF]], %
        """,
        "gfx942",
    )


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, atom.name) for arch in ("gfx942", "gfx950") for atom in target(arch).mma_atoms]
)
def test_every_mma_is_issued_as_often_as_its_row_says(arch, name):
    atom = target(arch).atom(name)
    assert lowered(_mma(name, arch), arch).count(f'"{atom.intrinsic}"') == atom.issues


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_transposing_load(dtype):
    check(
        f'%l = "fly.load_matrix"(%dst) {{atom = "ds_read_b64_tr_b16"}} : (!llvm.ptr<3>) -> vector<4x{dtype}>',
        f'CHECK: "llvm.amdgcn.ds.read.tr16.b64.v4{dtype}"(%{{{{.*}}}}) : (!llvm.ptr<3>) -> vector<4x{dtype}>',
    )


def test_bounded_load_checks_in_the_descriptor():
    check(
        '%l = "fly.load_bounded"(%src, %i, %i) {align = 16} : (!llvm.ptr<1>, i32, i32) -> vector<8xbf16>',
        """
        CHECK: func.func @kernel(%[[BASE:.*]]: !llvm.ptr<1>, %{{.*}}: !llvm.ptr<3>, %[[I:.*]]: i32,
        CHECK: %[[BYTES:.*]] = llvm.zext %[[I]] : i32 to i64
        CHECK: %[[STRIDE:.*]] = llvm.mlir.constant(0 : i16)
        CHECK: %[[FLAGS:.*]] = llvm.mlir.constant(159744 : i32)
        CHECK: "llvm.amdgcn.make.buffer.rsrc.p8.p1"(%[[BASE]], %[[STRIDE]], %[[BYTES]], %[[FLAGS]])
        CHECK: "llvm.amdgcn.raw.ptr.buffer.load.v4i32"(%{{.*}}, %[[I]], %
        CHECK: llvm.bitcast %{{.*}} : vector<4xi32> to vector<8xbf16>
        """,
    )


PIECES = [
    ("i8", 1, ["i8"]),
    ("bf16", 2, ["i16"]),
    ("f32", 4, ["i32"]),
    ("f64", 8, ["v2i32"]),
    ("vector<3xf32>", 16, ["v3i32"]),
    ("vector<8xbf16>", 16, ["v4i32"]),
    ("vector<8xbf16>", 4, ["v4i32"]),
    ("vector<4xbf16>", 2, ["i16"] * 4),
    ("vector<2xf32>", 1, ["i8"] * 8),
    ("vector<3xf16>", 4, ["i16"] * 3),
    ("vector<6xf32>", 16, ["v4i32", "v2i32"]),
    ("vector<16xbf16>", 16, ["v4i32"] * 2),
    ("vector<5xf32>", 4, ["v4i32", "i32"]),
]


@pytest.mark.parametrize(("type_", "align", "suffixes"), PIECES)
def test_pieces_of_bounded_accesses(type_, align, suffixes):
    """At most 16 bytes an instruction; whole words where the alignment allows, else smaller ones."""
    text = lowered(
        f"""
        %l = "fly.load_bounded"(%src, %i, %i) {{align = {align}}} : (!llvm.ptr<1>, i32, i32) -> {type_}
        "fly.store_bounded"(%l, %src, %i, %i) {{align = {align}}} : ({type_}, !llvm.ptr<1>, i32, i32) -> ()
        """,
        "gfx950",
    )
    for kind in ("load", "store"):
        assert re.findall(rf'raw\.ptr\.buffer\.{kind}\.(\w+)"', text) == suffixes
    steps = {"i8": 1, "i16": 2, "i32": 4, "v2i32": 8, "v3i32": 12, "v4i32": 16}
    offsets = [sum(steps[s] for s in suffixes[:k]) for k in range(1, len(suffixes))]
    added = dict(re.findall(r"(%\d+) = llvm.mlir.constant\((\d+) : i32\)", text))
    found = [int(added[x]) for x in re.findall(r"llvm.add %\w+, (%\d+) : i32", text)]
    assert found == offsets * 2


NARROW = '%v = llvm.mlir.poison : vector<{0}xf32>\n%w = "fly.narrow"(%v) : (vector<{0}xf32>) -> vector<{0}x{1}>'


@pytest.mark.parametrize(
    ("arch", "dtype", "length"), [("gfx950", "bf16", 4), ("gfx942", "f16", 4), ("gfx942", "bf16", 3)]
)
def test_narrowing_is_a_conversion(arch, dtype, length):
    check(
        NARROW.format(length, dtype),
        f"CHECK: llvm.fptrunc %{{{{.*}}}} : vector<{length}xf32> to vector<{length}x{dtype}>",
        arch,
    )


def test_narrowing_to_bf16_without_a_conversion():
    """Half a unit is added to the upper halves, which are then packed in pairs."""
    check(
        NARROW.format(4, "bf16"),
        """
        CHECK: %[[HALF:.*]] = llvm.mlir.constant(dense<32768> : vector<4xi32>)
        CHECK: %[[ROUNDED:.*]] = llvm.add %{{.*}}, %[[HALF]] : vector<4xi32>
        CHECK: %[[LOW:.*]] = llvm.extractelement %[[ROUNDED]]
        CHECK: %[[HIGH:.*]] = llvm.extractelement %[[ROUNDED]]
        CHECK: %[[UPPER:.*]] = llvm.mlir.constant(117834498 : i32)
        CHECK: "llvm.amdgcn.perm"(%[[HIGH]], %[[LOW]], %[[UPPER]])
        CHECK: "llvm.amdgcn.perm"
        CHECK: llvm.bitcast %{{.*}} : vector<2xi32> to vector<4xbf16>
        """,
        "gfx942",
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
        CHECK: "llvm.amdgcn.rcp.f32"(%{{.*}}) : (f32) -> f32
        CHECK: "llvm.amdgcn.log.f32"(%{{.*}}) : (f32) -> f32
        CHECK: "llvm.amdgcn.exp2.f32"(%{{.*}}) : (f32) -> f32
        CHECK: "llvm.amdgcn.exp2.f32"(%{{.*}}) : (f32) -> f32
        CHECK-NOT: exp2
        CHECK: "llvm.amdgcn.rsq.f32"(%{{.*}}) : (f32) -> f32
        """,
    )


def test_scheduling_hints():
    check(
        """
        "fly.sched"() {kind = "barrier", value = 0} : () -> ()
        "fly.sched"() {kind = "priority", value = 3} : () -> ()
        """,
        """
        CHECK: %[[NOTHING:.*]] = llvm.mlir.constant(0 : i32)
        CHECK: "llvm.amdgcn.sched.barrier"(%[[NOTHING]])
        CHECK: %[[LEVEL:.*]] = llvm.mlir.constant(3 : i16)
        CHECK: "llvm.amdgcn.s.setprio"(%[[LEVEL]])
        """,
    )


def test_what_has_no_rule_is_an_error():
    with pytest.raises(CompileError, match=r"lower-to-rocdl: no rule for fly\.copy_async"):
        lowered("%t = copy", "gfx950")


def test_pairs_narrow_into_halves_of_a_register():
    check(
        """
        %v = llvm.mlir.poison : vector<6xf32>
        %w = "fly.narrow_pairs"(%v) {to = "f8e4m3fnuz"} : (vector<6xf32>) -> vector<6xi8>
        """,
        """
        CHECK: %[[LOW:.*]] = llvm.mlir.constant(false)
        CHECK: %[[HALF:.*]] = llvm.call_intrinsic "llvm.amdgcn.cvt.pk.fp8.f32"(%{{.*}}, %{{.*}}, %{{.*}}, %[[LOW]])
        CHECK: %[[HIGH:.*]] = llvm.mlir.constant(true)
        CHECK: "llvm.amdgcn.cvt.pk.fp8.f32"(%{{.*}}, %{{.*}}, %[[HALF]], %[[HIGH]])
        CHECK: "llvm.amdgcn.cvt.pk.fp8.f32"
        CHECK-NOT: "llvm.amdgcn.cvt.pk.fp8.f32"
        CHECK: llvm.bitcast %{{.*}} : vector<2xi32> to vector<8xi8>
        """,
    )


@pytest.mark.parametrize(("dtype", "name"), [("f8e4m3", "fp8"), ("f8e5m2", "bf8"), ("f8e4m3fnuz", "fp8")])
def test_bytes_widen_in_halves_of_a_register(dtype, name):
    check(
        f'%v = llvm.mlir.poison : vector<4xi8>\n%w = "fly.widen_pairs"(%v) {{from = "{dtype}"}} : (vector<4xi8>) -> '
        "vector<4xf32>",
        f"""
        CHECK: %[[WORD:.*]] = llvm.bitcast %{{{{.*}}}} : vector<4xi8> to i32
        CHECK: %[[LOW:.*]] = llvm.mlir.constant(false)
        CHECK: "llvm.amdgcn.cvt.pk.f32.{name}"(%[[WORD]], %[[LOW]]) : (i32, i1) -> vector<2xf32>
        CHECK: %[[HIGH:.*]] = llvm.mlir.constant(true)
        CHECK: "llvm.amdgcn.cvt.pk.f32.{name}"(%[[WORD]], %[[HIGH]]) : (i32, i1) -> vector<2xf32>
        """,
    )
