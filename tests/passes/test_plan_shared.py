"""`plan-shared-memory`: places, lifetimes, the global, and the error when a kernel needs too much."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.errors import SharedMemoryError
from fly.passes.plan_shared import Buffer, PlanSharedMemory, _overlapping, place
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse


def plan(body: str, *, limit: int = 65536, dynamic: bool = False) -> str:
    return apply(PlanSharedMemory(limit, "gfx942", dynamic), parse(body))


def places(body: str, *, limit: int = 65536, dynamic: bool = False) -> list[tuple[str, int]]:
    """The buffers' globals, and the offsets into them, in the order of the allocations."""
    text = plan(body, limit=limit, dynamic=dynamic)
    found = re.findall(r"addressof @(\w+) .*\n.*getelementptr %\w+\[(\d+)\] : \(!llvm.ptr<3>\)", text)
    assert len(found) == body.count("alloc")
    return [(symbol, int(offset)) for symbol, offset in found]


def offsets(body: str) -> list[int]:
    """The planned offsets of the buffers, in the order of their allocations."""
    return [offset for _, offset in places(body, dynamic=True)]


SIDE_BY_SIDE = "%a = alloc a 64 16\n%b = alloc b 4096 16\ntouch %a\ntouch %b\ntouch %a"


def test_buffers_that_share_no_bytes_are_globals_of_their_own():
    filecheck(
        plan(SIDE_BY_SIDE),
        """
        CHECK-DAG: llvm.mlir.global internal @fly_shared_0() {{.*}} alignment = 16 : i64} : !llvm.array<4096 x i8>
        CHECK-DAG: llvm.mlir.global internal @fly_shared_1() {{.*}} alignment = 16 : i64} : !llvm.array<64 x i8>
        CHECK: func.func @kernel({{.*}}fly.shared_bytes = 4160 : i64
        CHECK: llvm.mlir.addressof @fly_shared_1
        CHECK: llvm.mlir.addressof @fly_shared_0
        CHECK-NOT: fly.alloc_shared
        """,
    )


def test_a_tight_fit_is_one_global_as_planned():
    """Left to itself, LLVM may need more for several globals; it pads their sizes to 16 bytes."""
    body = "%a = alloc a 100 4\n%b = alloc b 4000 4\ntouch %a\ntouch %b\ntouch %a"
    assert places(body, limit=4112 + 15) == [("fly_shared_1", 0), ("fly_shared_0", 0)]
    assert places(body, limit=4111) == [("fly_shared", 4000), ("fly_shared", 0)]


def test_buffers_that_share_bytes_share_a_global():
    body = (
        "%a = alloc a 64 16\n%b = alloc b 32 16\n%d = alloc d 64 16\ntouch %a\ntouch %d\nbarrier\ntouch %b\ntouch %d"
    )
    assert places(body) == [("fly_shared_0", 0), ("fly_shared_0", 0), ("fly_shared_1", 0)]


def test_one_external_global_holds_all():
    text = plan(SIDE_BY_SIDE, limit=4160, dynamic=True)
    filecheck(
        text,
        """
        CHECK: llvm.mlir.global external @fly_shared() {addr_space = 3 : i32, alignment = 16 : i64}
        CHECK-SAME: : !llvm.array<0 x i8>
        CHECK: func.func @kernel({{.*}}fly.shared_bytes = 4160 : i64
        CHECK: %[[BASE:.*]] = llvm.mlir.addressof @fly_shared : !llvm.ptr<3>
        CHECK-NEXT: llvm.getelementptr %[[BASE]][4096] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
        CHECK: llvm.getelementptr %{{.*}}[0] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
        CHECK-NOT: fly.alloc_shared
        """,
    )


def test_dynamic_memory_is_an_external_global_of_unknown_size():
    filecheck(
        plan("%a = alloc a 1000 128\ntouch %a", dynamic=True),
        """
        CHECK: llvm.mlir.global external @fly_shared() {{{.*}}alignment = 128 : i64} : !llvm.array<0 x i8>
        CHECK-NOT: llvm.mlir.undef
        CHECK: fly.shared_bytes = 1000 : i64
        """,
    )


def test_kernels_without_buffers_have_no_global():
    text = plan("barrier")
    assert "fly_shared" not in text
    assert "fly.shared_bytes = 0 : i64" in text


def test_alignment_leaves_a_gap():
    assert offsets(
        "%a = alloc a 100 4\n%b = alloc b 64 64\n%d = alloc d 8 256\ntouch %a\ntouch %b\ntouch %d\ntouch %a"
    ) == [
        0,
        128,
        256,
    ]


@pytest.mark.parametrize(("between", "shared"), [("barrier", True), ("", False), ("scf.if %c {\nbarrier\n}", False)])
def test_reuse_needs_a_top_level_barrier(between, shared):
    a, b = offsets(f"%a = alloc a 64 16\n%b = alloc b 64 16\ntouch %a\n{between}\ntouch %b")
    assert (a == b) is shared


def test_a_barrier_before_or_after_both_does_not_separate():
    a, b = offsets("%a = alloc a 64 16\n%b = alloc b 64 16\nbarrier\ntouch %a\ntouch %b\nbarrier")
    assert a != b


def test_a_use_in_a_loop_lasts_for_the_whole_loop():
    body = """
    %a = alloc a 64 16
    %b = alloc b 64 16
    scf.for %j = %c0 to %n step %c1 {
      touch %a
      barrier
      touch %b
    }
    """
    a, b = offsets(body)
    assert a != b


def test_loops_with_a_barrier_between_share():
    loop = "scf.for %j{0} = %c0 to %n step %c1 {{\ntouch %{0}\n}}\n"
    a, b = offsets(f"%a = alloc a 64 16\n%b = alloc b 64 16\n{loop.format('a')}barrier\n{loop.format('b')}")
    assert a == b


CARRIED = {
    "derived address": "%q = gep %a\nbarrier\ntouch %b\ntouch %q",
    "through a loop": """
        %q = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a) -> (!llvm.ptr<3>) {
          %g = gep %p
          scf.yield %g : !llvm.ptr<3>
        }
        barrier
        touch %b
        touch %q""",
    "into a loop's body": """
        barrier
        touch %b
        %q = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a) -> (!llvm.ptr<3>) {
          touch %p
          scf.yield %p : !llvm.ptr<3>
        }""",
    "out of a branch": """
        %q = scf.if %c -> (!llvm.ptr<3>) {
          scf.yield %a : !llvm.ptr<3>
        } else {
          scf.yield %a : !llvm.ptr<3>
        }
        barrier
        touch %b
        touch %q""",
    "copy in flight": "%t = copy %a\nbarrier\ntouch %b\nwait %t",
    "joined copies in flight": "%t = copy %a\n%j = join %t\nbarrier\ntouch %b\nwait %j",
    "copy that nobody waits for": "%t = copy %a\nbarrier\ntouch %b",
    "copies left in flight by a loop": """
        %t = copy %a
        %r = scf.for %j = %c0 to %n step %c1 iter_args(%p = %t) -> (!fly.token) {
          wait %p
          %new = copy %a
          scf.yield %new : !fly.token
        }
        barrier
        touch %b""",
    "copy in a loop that carries the place": """
        %q = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a) -> (!llvm.ptr<3>) {
          %t = copy %p
          scf.yield %a : !llvm.ptr<3>
        }
        barrier
        touch %b""",
    "direct copy that nobody waits for": """
        %t = "fly.copy_direct"(%a, %src, %i, %i) {bytes = 4, shift = 0}
          : (!llvm.ptr<3>, !llvm.ptr<1>, i32, i32) -> !fly.token
        barrier
        touch %b""",
    "copy waited for in one branch only": "%t = copy %a\nscf.if %c {\nwait %t\n}\nbarrier\ntouch %b",
}


@pytest.mark.parametrize("case", CARRIED)
def test_what_is_derived_keeps_a_buffer_alive(case):
    a, b = offsets(f"%a = alloc a 64 16\n%b = alloc b 64 16\ntouch %a\n{CARRIED[case]}")
    assert a != b


def test_a_buffer_within_another_does_not_end_their_group():
    """The third shares bytes with the first alone, the fourth with none."""
    buffers = [Buffer(name, size, 16, 0, 1) for name, size in (("a", 256), ("b", 16), ("c", 64), ("d", 16))]
    assert _overlapping(buffers, [0, 32, 128, 256]) == [[0, 1, 2], [3]]


def test_copies_that_are_waited_for_end_with_the_wait():
    body = """
    %a = alloc a 64 16
    %b = alloc b 64 16
    %t = copy %a
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%p = %t) -> (!fly.token) {
      wait %p
      %x = copy %a
      %y = copy %a
      %new = join %x, %y
      scf.yield %new : !fly.token
    }
    wait %r
    barrier
    touch %b
    """
    a, b = offsets(body)
    assert a == b


def test_too_much_memory_is_an_error_with_a_table():
    body = "%a = alloc keys 1024 16\n%b = alloc values 3000 1024\ntouch %a\ntouch %b"
    with pytest.raises(SharedMemoryError) as error:
        plan(body, limit=4000)
    assert str(error.value).splitlines() == [
        "kernel kernel needs 4032 bytes of shared memory; gfx942 offers 4000. Allocations:",
        "         0 .. 3000         3000 bytes  values",
        "      3008 .. 4032         1024 bytes  keys",
    ]


def test_exactly_the_limit_is_accepted():
    assert "fly.shared_bytes = 4000 : i64" in plan("%a = alloc a 4000 16\ntouch %a", limit=4000)


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    result = []
    for index in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, 20))
        align = 1 << draw(st.integers(0, 8))
        result.append(Buffer(f"b{index}", draw(st.integers(1, 500)), align, first, first + draw(st.integers(0, 8))))
    return result


@settings(deadline=None)
@given(buffers(), st.sets(st.integers(0, 28)))
def test_place_separates_live_buffers(buffers, barriers):
    places = place(buffers, sorted(barriers))
    for buffer, offset in zip(buffers, places, strict=True):
        assert offset >= 0
        assert offset % buffer.align == 0
    for (a, at_a), (b, at_b) in itertools.combinations(zip(buffers, places, strict=True), 2):
        overlap = at_a < at_b + b.bytes and at_b < at_a + a.bytes
        separated = any(a.last < x < b.first or b.last < x < a.first for x in barriers)
        assert separated or not overlap


@settings(deadline=None)
@given(buffers())
def test_place_wastes_no_more_than_alignment(buffers):
    places = place(buffers, [])
    padded = sum(-(-b.bytes // b.align) * b.align + b.align for b in buffers)
    assert max(at + b.bytes for at, b in zip(places, buffers, strict=True)) <= padded


@settings(deadline=None)
@given(buffers())
def test_place_reuses_where_everything_is_separated(buffers):
    """One after the other with barriers between: all start at 0."""
    apart = [Buffer(b.name, b.bytes, b.align, 2 * i, 2 * i) for i, b in enumerate(buffers)]
    assert place(apart, [2 * i + 1 for i in range(len(apart))]) == [0] * len(apart)


@st.composite
def kernels(draw: st.DrawFn) -> str:
    """Buffers, and a sequence of uses and barriers."""
    count = draw(st.integers(1, 6))
    lines = [f"%b{i} = alloc b{i} {draw(st.integers(1, 300))} {1 << draw(st.integers(0, 8))}" for i in range(count)]
    uses = [f"touch %b{i}" for i in range(count)]
    return "\n".join([*lines, *draw(st.lists(st.sampled_from([*uses, "barrier", "barrier"]), max_size=12))])


@settings(deadline=None)
@given(kernels(), st.integers(1200, 3000))
def test_globals_hold_their_buffers(body, limit):
    """Each lies inside its global, as aligned as it asked for, and apart from those in use at the same time."""
    try:
        text = plan(body, limit=limit)
    except SharedMemoryError:
        return
    found = re.findall(r"@(\w+)\(\) {addr_space = 3 : i32, alignment = (\d+) : i64} : !llvm.array<(\d+) x", text)
    globals_ = {symbol: (int(align), int(size)) for symbol, align, size in found}
    sizes = [tuple(map(int, m)) for m in re.findall(r"alloc \w+ (\d+) (\d+)", body)]
    lines = [line for line in body.splitlines() if "alloc" not in line]
    spans = []
    for i, ((symbol, offset), (size, align)) in enumerate(zip(places(body, limit=limit), sizes, strict=True)):
        align_of_global, size_of_global = globals_[symbol]
        assert offset % align == 0
        assert align_of_global % align == 0
        assert offset + size <= size_of_global
        used = [at for at, line in enumerate(lines) if line == f"touch %b{i}"]
        spans.append((symbol, offset, offset + size, used))
    for (symbol_a, start_a, end_a, used_a), (symbol_b, start_b, end_b, used_b) in itertools.combinations(spans, 2):
        if symbol_a == symbol_b and start_a < end_b and start_b < end_a and used_a and used_b:
            first, second = sorted([used_a, used_b])
            assert "barrier" in lines[first[-1] + 1 : second[0]]
