"""Atomic additions, acquire and release: what they become on each target, and that they add."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import fly
from fly.backends.target import target
from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.lang.signature import TensorSpec
from tests.backends.builds import build, needs_ptxas, run_ptxas
from tests.backends.lowering import lowered
from tests.filecheck import filecheck
from tests.tracing import matrix, trace

TYPES = {
    "f32": ("f32", None),
    "f32x2": ("f32", 2),
    "f32x4": ("f32", 4),
    "f32x6": ("f32", 6),
    "f16x2": ("f16", 2),
    "f16x8": ("f16", 8),
    "bf16x2": ("bf16", 2),
    "bf16x4": ("bf16", 4),
    "i32": ("i32", None),
}
every_type = pytest.mark.parametrize("kind", TYPES)
ARCHS = ("gfx942", "gfx950", "sm_80", "sm_90a")


@fly.kernel
def add_at(x: fly.Tensor, place: fly.Tensor, out: fly.Tensor, *, length, bounded, align=None):
    """out[place[i] ...] += x[i ...] for a value of `length` elements a thread; places outside of `out` are left."""
    thread = fly.block_id.x * fly.block_dim()[0] + fly.thread_id.x
    step = length or 1
    at = place.load(thread)
    value = x.load(thread * step, length=length)
    size = x.dtype.bytes
    if bounded:
        fly.atomic_add_bounded(value, out.at(0), at * size, out.shape[0].to(fly.i32) * size, align=align)
    else:
        out.atomic_add(value, at, align=align)


def isa(arch: str, kind: str, bounded: bool, align: int | None = None) -> str:
    dtype, length = TYPES[kind]
    specs = (TensorSpec(dtype, 1, 16, True), TensorSpec("i32", 1, 4, True), TensorSpec(dtype, 1, 16, True))
    return build(add_at, arch, specs=specs, block=64, length=length, bounded=bounded, align=align).isa


def instructions(text: str) -> list[str]:
    """The atomic ones, without operands."""
    return re.findall(r"^\s*((?:global|buffer|flat)_atomic\w+|(?:red|atom)\.[\w.:]+)", text, re.M)


AMD = {
    ("f32", False): ["global_atomic_add_f32"],
    ("f32x4", False): ["global_atomic_add_f32"] * 4,
    ("f16x8", False): ["global_atomic_pk_add_f16"] * 4,
    ("bf16x2", False): ["global_atomic_pk_add_bf16"],
    ("i32", False): ["global_atomic_add"],
    ("f32", True): ["buffer_atomic_add_f32"],
    ("f32x4", True): ["buffer_atomic_add_f32"] * 4,
    ("f16x2", True): ["buffer_atomic_pk_add_f16"],
    ("i32", True): ["global_atomic_add"],
}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("kind", "bounded"), AMD)
def test_what_amd_executes(arch, kind, bounded):
    assert instructions(isa(arch, kind, bounded)) == AMD[kind, bounded]


@pytest.mark.parametrize(
    ("arch", "name"), [("gfx942", "global_atomic_pk_add_bf16"), ("gfx950", "buffer_atomic_pk_add_bf16")]
)
def test_bounded_pairs_of_bf16_go_through_a_buffer_where_there_is_the_instruction(arch, name):
    assert instructions(isa(arch, "bf16x4", True)) == [name] * 2


RED = "red.relaxed.gpu.global.add"


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    ("arch", "kind", "align", "expected"),
    [
        ("sm_80", "f32", None, [f"{RED}.f32"]),
        ("sm_80", "f32x4", 16, [f"{RED}.f32"] * 4),
        ("sm_80", "f16x2", None, [f"{RED}.noftz.f16x2"]),
        ("sm_80", "bf16x2", None, ["atom.relaxed.gpu.global.cas.b32"]),
        ("sm_80", "i32", None, [f"{RED}.u32"]),
        ("sm_90a", "f32", None, [f"{RED}.f32"]),
        ("sm_90a", "f32x2", 8, [f"{RED}.v2.f32"]),
        ("sm_90a", "f32x4", 16, [f"{RED}.v4.f32"]),
        ("sm_90a", "f32x4", 8, [f"{RED}.v2.f32"] * 2),
        ("sm_90a", "f32x4", None, [f"{RED}.f32"] * 4),
        ("sm_90a", "f32x6", 8, [f"{RED}.v2.f32"] * 3),
        ("sm_90a", "bf16x2", None, [f"{RED}.noftz.bf16x2"]),
        ("sm_90a", "bf16x4", 8, [f"{RED}.noftz.v2.bf16x2"]),
        ("sm_90a", "f16x8", 16, [f"{RED}.noftz.v4.f16x2"]),
    ],
)
def test_what_nvidia_executes(arch, kind, align, expected, bounded):
    assert instructions(isa(arch, kind, bounded, align)) == expected


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@every_type
def test_ptxas_accepts_them(arch, kind, tmp_path):
    run_ptxas(isa(arch, kind, True, 16), arch, tmp_path)


@fly.kernel
def counters(count: fly.Tensor, out: fly.Tensor):
    """Everything that orders."""
    seen = fly.load_acquire(count.at(0))
    out.store(seen, 0)
    fly.barrier(publish=True)
    fly.atomic_add(fly.i32(1), count.at(0), order="release")
    out.store(fly.fetch_add(2, count.at(1)), 1)
    out.store(fly.fetch_wrap(3, count.at(2)), 2)


ORDERED = {
    "gfx942": """
        CHECK: global_load_dword {{.*}} sc1
        CHECK-NEXT: s_waitcnt vmcnt(0)
        CHECK-NEXT: buffer_inv sc1
        CHECK: global_store_dword
        CHECK: buffer_wbl2 sc1
        CHECK: s_waitcnt vmcnt(0)
        CHECK: s_barrier
        CHECK: buffer_wbl2 sc1
        CHECK: global_atomic_add
        CHECK: global_atomic_add {{.*}} sc0
        CHECK: buffer_wbl2 sc1
        CHECK: global_atomic_inc {{.*}} sc0
        CHECK: s_waitcnt vmcnt(0)
        CHECK: buffer_inv sc1
    """,
    "sm_90a": """
        CHECK: ld.acquire.gpu.global.b32
        CHECK: st.global
        CHECK: {{bar|barrier}}
        CHECK: red.release.gpu.global.add.u32
        CHECK: atom.relaxed.gpu.global.add.u32
        CHECK: atom.acq_rel.gpu.global.inc.u32
    """,
}
ORDERED["gfx950"], ORDERED["sm_80"] = ORDERED["gfx942"], ORDERED["sm_90a"]


@pytest.mark.parametrize("arch", ORDERED)
def test_orders(arch):
    text = build(counters, arch, specs=(TensorSpec("i32", 1, 4, True),) * 2, block=128).isa
    filecheck(text, ORDERED[arch])


# what they compute


def whole_numbers(generator: np.random.Generator, count: int) -> np.ndarray:
    """Whose sums are exact in every dtype and order."""
    return generator.integers(-2, 3, count)


@pytest.mark.parametrize("bounded", [False, True])
@every_type
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
def test_every_element_is_added_and_none_outside(arch, kind, bounded, monkeypatch):
    """In the emulator or the simulator: places repeat, some are past the end, and what follows it stays."""
    monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    dtype, length = TYPES[kind]
    step, threads, blocks, whole = length or 1, 64, 3, 24 * (length or 1)
    seed = np.random.SeedSequence().entropy
    generator = np.random.default_rng(seed)
    values = whole_numbers(generator, threads * blocks * step)
    places = generator.integers(0 if bounded else -4, 30, threads * blocks) * step
    expected = np.full(whole + 8, 3.0)
    for i, place in enumerate(places):
        if 0 <= place <= whole - step:
            expected[place : place + step] += values[i * step : (i + 1) * step]
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}
    out = torch.full((whole + 8,), 3, dtype=kinds[dtype])
    add_at[blocks, threads](
        torch.tensor(values).to(kinds[dtype]), torch.tensor(places, dtype=torch.int32), out[:whole],
        length=length, bounded=bounded, align=4 if step == 6 else step * kinds[dtype].itemsize,
    )  # fmt: skip
    np.testing.assert_array_equal(out.double().numpy(), expected, err_msg=f"seed {seed}")


@fly.kernel
def add_rows(x: fly.Tensor, out: fly.Tensor, *, columns, first):
    """Every wave adds its row of x to rows first, first + 1 and so on of out: 4 columns a lane."""
    lane = fly.lane_id()
    window = out.rows(columns).window(first, None)
    with fly.when(lane * 4 < columns):
        for row in range(4):
            window.atomic_add(x.load(row, lane * 4, length=4), row, lane * 4)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
def test_windows_leave_rows_that_do_not_exist(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    x, out = torch.randn(4, 64), torch.zeros(5, 64)
    add_rows[1, 64](x, out, columns=64, first=3)
    waves = 64 // target(arch).wave_size
    assert torch.equal(out[3:], x[:2] * waves) and not out[:3].any()


@fly.kernel
def in_turn(turn: fly.Tensor, total: fly.Tensor, out: fly.Tensor):
    """Block b waits for its turn, reads what those before it made of `total`, doubles it and adds b."""
    thread, block = fly.thread_id.x, fly.block_id.x
    with fly.when(thread == 0):
        look = lambda: fly.load_acquire(turn.at(0))  # noqa: E731  # twice the same
        for _ in (spin := fly.while_((look(),), lambda c: c[0] < block)):
            spin.next(look())
    fly.barrier()
    before = total.load(thread)
    out.store(before, block, thread)
    total.store(before * 2 + block, thread)
    fly.barrier(publish=True)
    with fly.when(thread == 0):
        fly.atomic_add(fly.i32(1), turn.at(0), order="release")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90a"])
def test_blocks_take_turns(arch, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    blocks, threads = 7, 128
    turn, total, out = (torch.zeros(n, dtype=torch.int32) for n in ((1,), (threads,), (blocks, threads)))
    in_turn[blocks, threads](turn, total, out)
    expected = [0]
    for block in range(blocks):
        expected.append(2 * expected[-1] + block)
    assert turn.item() == blocks and (total == expected[-1]).all()
    assert (out == torch.tensor(expected[:-1])[:, None]).all()


# what is refused


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda x: fly.atomic_add(fly.f64(1.0), x.at(0)), DTypeError, "atomic_add of <f64>; expected f32 (also"),
        (lambda x: fly.atomic_add(fly.broadcast(fly.f16(1.0), 3), x.at(0)), DTypeError, "atomic_add of <3 x f16>"),
        (lambda x: fly.atomic_add(1.0, x.at(0)), DTypeError, "atomic_add of 1.0"),
        (lambda x: fly.atomic_add(fly.f32(1.0), fly.alloc_shared("s", 64)), DTypeError, "expected a pointer to"),
        (lambda x: fly.atomic_add(fly.f32(1.0), x.at(0), order="release"), StaticValueError, "'release' of an"),
        (lambda x: fly.atomic_add(fly.i32(1), x.at(0), order="acquire"), StaticValueError, "expected relaxed or"),
        (lambda x: fly.atomic_add(fly.f32(1.0), x.at(0), align=2), ShapeError, "alignment 2 of an atomic_add"),
        (lambda x: fly.atomic_add_bounded(fly.f32(1.0), x.at(0), 0.5, 4), DTypeError, "offset of a bounded access"),
        (lambda x: x.atomic_add(fly.i32(1), 0), DTypeError, "cannot add <i32> to <tensor of rank 1, f32>; convert"),
        (lambda x: fly.fetch_add(fly.f32(1.0), x.at(0)), DTypeError, "operand of an atomic is <f32>"),
        (lambda x: fly.fetch_add(1, x.at(0), order="weak"), StaticValueError, "order 'weak' of an atomic; expected"),
        (lambda x: fly.load_acquire(x), DTypeError, "load_acquire of <tensor of rank 1, f32>"),
    ],
)  # fmt: skip
def test_mistakes(mistake, error, message):
    with pytest.raises(error) as caught:
        trace(mistake_in, matrix("f32"), mistake=mistake)
    assert message in str(caught.value)


def mistake_in(x: fly.Tensor, *, mistake):
    mistake(x)


# lowering


def test_a_vector_of_floats_is_four_words_of_amd():
    body = """
    %p = llvm.mlir.poison : vector<4xf32>
    "fly.atomic_add"(%p, %src) {align = 4 : i64, order = "relaxed"} : (vector<4xf32>, !llvm.ptr<1>) -> ()
    """
    filecheck(
        lowered(body, "gfx942"),
        """
        CHECK-COUNT-4: llvm.atomicrmw fadd {{.*}} syncscope("agent") monotonic {{.*}} : !llvm.ptr<1>, f32
        CHECK-NOT: fly.atomic
        """,
    )


def test_a_branch_bounds_what_has_no_buffer_instruction():
    body = """
    %p = llvm.mlir.poison : vector<2xbf16>
    "fly.atomic_add_bounded"(%p, %src, %i, %i) {align = 4 : i64} : (vector<2xbf16>, !llvm.ptr<1>, i32, i32) -> ()
    """
    filecheck(
        lowered(body, "gfx942"),
        """
        CHECK: %[[INSIDE:.*]] = llvm.icmp "ult"
        CHECK: scf.if %[[INSIDE]]
        CHECK: llvm.atomicrmw fadd {{.*}} : !llvm.ptr<1>, vector<2xbf16>
        """,
    )
    filecheck(lowered(body, "gfx950"), 'CHECK: "llvm.amdgcn.raw.ptr.buffer.atomic.fadd.v2bf16"')
    filecheck(lowered(body, "sm_80"), 'CHECK: llvm.atomicrmw fadd {{.*}} syncscope("device") monotonic')
    filecheck(lowered(body, "sm_90a"), 'CHECK: "red.relaxed.gpu.global.add.noftz.bf16x2 [$0], $1;", "l,r,~{memory}"')


def test_acquire_and_publish():
    body = """
    %a = "fly.load_acquire"(%src) : (!llvm.ptr<1>) -> i32
    "fly.publish"() : () -> ()
    """
    filecheck(
        lowered(body, "gfx950"),
        """
        CHECK: llvm.load %{{.*}} atomic syncscope("agent") acquire {alignment = 4 : i64} : !llvm.ptr<1> -> i32
        CHECK-NEXT: llvm.fence syncscope("agent") release
        """,
    )
    filecheck(
        lowered(body, "sm_90a"), 'CHECK: llvm.load %{{.*}} atomic syncscope("device") acquire\nCHECK-NOT: fence'
    )
