"""Kernels: signatures, the flattened function that is traced, static parameters, attributes of the function."""

from __future__ import annotations

import threading
from typing import Optional

import pytest

import fly
from fly.backends.nvvm.inline import ptx
from fly.backends.target import target
from fly.errors import ArgumentError, ArgumentTypeError, KernelDefinitionError, ShapeError, TraceError
from fly.lang.signature import Parameter, TensorMapSpec
from tests.filecheck import filecheck
from tests.tracing import matrix, trace


@fly.kernel
def example(
    q: fly.Tensor,
    scale: fly.f32,
    lse: fly.Tensor | None,
    mask: Optional[fly.Tensor],  # noqa: UP045
    n: fly.i64,
    *,
    causal: bool,
    tile: int = 64,
):
    """Does nothing."""
    seen.update(q=q, scale=scale, lse=lse, mask=mask, n=n, causal=causal, tile=tile)


seen: dict = {}


def test_signature():
    assert example.name == "example" and example.__doc__ == "Does nothing."
    assert example.signature.parameters == (
        Parameter("q", "tensor"),
        Parameter("scale", "scalar", False, "f32"),
        Parameter("lse", "tensor", True),
        Parameter("mask", "tensor", True),
        Parameter("n", "scalar", False, "i64"),
    )
    assert list(example.signature.statics) == ["causal", "tile"]
    assert example.signature.statics["tile"] == 64
    assert repr(example) == "<kernel example>"


def test_flattened_arguments():
    module = trace(example, matrix("bf16", 3), "f32", None, matrix("i8", 2, unit_stride=False), "i64", causal=True)
    filecheck(
        module,
        """
        CHECK: func.func @example(
        CHECK-SAME: %arg0: !llvm.ptr<1>, %arg1: i32, %arg2: i32, %arg3: i32, %arg4: i64, %arg5: i64,
        CHECK-SAME: %arg6: f32,
        CHECK-SAME: %arg7: !llvm.ptr<1>, %arg8: i32, %arg9: i32, %arg10: i64, %arg11: i64,
        CHECK-SAME: %arg12: i64)
        CHECK-SAME: fly.block = array<i32: 64, 1, 1>
        CHECK-NEXT: return
        """,
    )
    q, mask = seen["q"], seen["mask"]
    assert (q.rank, q.dtype, q.alignment, q.stride[-1]) == (3, fly.bf16, 16, 1)
    assert [s.dtype for s in q.shape] == [fly.i32] * 3 and [s.dtype for s in q.stride[:2]] == [fly.i64] * 2
    assert mask.dtype is fly.i8 and isinstance(mask.stride[-1], fly.Value)
    assert seen["lse"] is None and seen["scale"].dtype is fly.f32 and seen["n"].dtype is fly.i64
    assert seen["causal"] is True and seen["tile"] == 64


@fly.kernel
def mapped(scale: fly.f32, k: fly.TensorMap, out: fly.Tensor, v: fly.TensorMap | None):
    seen.update(k=k, v=v)
    with fly.when(scale > 0.0):
        ptx("prefetch.tensormap [$0];", "l", [k.pointer])


BOX = TensorMapSpec("bf16", (1, 16, 64), 128)


def test_tensor_maps_are_arguments_that_are_read_in_place():
    assert [(p.kind, p.optional) for p in mapped.signature.parameters[1::2]] == [("map", False), ("map", True)]
    module = trace(mapped, "f32", BOX, matrix(), BOX, arch="sm_90a")
    filecheck(
        module,
        """
        CHECK: func.func @mapped(%arg0: f32,
        CHECK-SAME: %arg1: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>},
        CHECK-SAME: %arg2: !llvm.ptr<1>, %arg3: i32,
        CHECK-SAME: %arg4: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>})
        CHECK: llvm.inline_asm {{.*}} "prefetch.tensormap [$0];", "l,~{memory}" %arg1 : (!llvm.ptr) -> ()
        """,
    )
    assert seen["k"].spec == BOX
    assert repr(seen["v"]) == "<tensor map of bf16, box 1 x 16 x 64, swizzle 128>"
    kinds = [field.kind for field in mapped.signature.flatten((fly.ScalarSpec("f32"), BOX, matrix(), None))]
    assert kinds == ["f32", "map", "ptr", "i32"]
    trace(mapped, "f32", BOX, matrix(), None, arch="sm_90a")
    assert seen["v"] is None


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        (("f32", None, matrix(), None), ArgumentError, "argument 'k' is None; accepted: a map"),
        (("f32", matrix(), matrix(), None), ArgumentTypeError, "argument 'k' is TensorSpec.*; accepted: a map"),
        (("f32", BOX, BOX, None), ArgumentTypeError, "argument 'out' is TensorMapSpec.*; accepted: a tensor"),
        (
            (BOX, BOX, matrix(), None),
            ArgumentTypeError,
            "argument 'scale' is TensorMapSpec.*; accepted: a scalar f32",
        ),
    ],
)
def test_maps_and_tensors_are_not_mixed_up(specs, error, message):
    with pytest.raises(error, match=message):
        trace(mapped, *specs, arch="sm_90a")


def test_a_map_is_carried_and_chosen_like_a_value():
    def kernel(n: fly.i32, k: fly.TensorMap, v: fly.TensorMap):
        chosen = fly.cond(n > 0, lambda: k, lambda: v)
        assert isinstance(chosen, fly.TensorMap) and chosen.spec == BOX

    trace(kernel, "i32", BOX, BOX, arch="sm_90a")


def test_fields_name_the_flat_arguments():
    specs = (matrix("bf16", 2), fly.ScalarSpec("f32"), matrix("f32", 1), None, fly.ScalarSpec("i64"))
    assert [(f.name, f.kind) for f in example.signature.flatten(specs)] == [
        ("q", "ptr"),
        ("q.shape0", "i32"),
        ("q.shape1", "i32"),
        ("q.stride0", "i64"),
        ("scale", "f32"),
        ("lse", "ptr"),
        ("lse.shape0", "i32"),
        ("n", "i64"),
    ]


def arguments(**changes):
    given = {"q": matrix(), "scale": "f32", "lse": None, "mask": None, "n": "i64"} | changes
    return tuple(given.values())


@pytest.mark.parametrize(
    ("specs", "statics", "error", "message"),
    [
        (arguments(q=None), {"causal": True}, ArgumentError, r"argument 'q' is None; accepted: a tensor"),
        (arguments(q="f32"), {"causal": True}, ArgumentTypeError, r"argument 'q' is .*; accepted: a tensor"),
        (arguments(scale="i32"), {"causal": True}, ArgumentTypeError, r"'scale' is .*; accepted: a scalar f32"),
        (arguments()[:3], {"causal": True}, ArgumentError, r"3 specs for 5 parameters"),
        (arguments(), {}, ArgumentError, r"kernel example misses its static parameter 'causal'"),
        (arguments(), {"casual": 1}, ArgumentError, r"has no static parameter 'casual'; it has causal, tile"),
        (
            arguments(),
            {"causal": []},
            ArgumentError,
            r"'causal' of kernel example is \[\]; expected a hashable value",
        ),
    ],
)
def test_specs_and_statics_are_checked(specs, statics, error, message):
    with pytest.raises(error, match=message):
        trace(example, *specs, **statics)


def test_calling_without_a_launch_configuration():
    with pytest.raises(ArgumentError, match=r"kernel example needs a grid and a block: example\[grid, block\]"):
        example(1)
    with pytest.raises(ArgumentError, match=r"kernel example takes \[grid, block\], not \[3\]"):
        example[3]


# definitions that are refused; each gives the decorated function


def varargs():
    def kernel(*xs): ...

    return kernel


def keywords():
    def kernel(**xs): ...

    return kernel


def unannotated():
    def kernel(x): ...

    return kernel


def python_type():
    def kernel(x: int): ...

    return kernel


def half_scalar():
    def kernel(x: fly.bf16): ...

    return kernel


def positional_default():
    def kernel(x: fly.Tensor, n: fly.i32 = 4): ...

    return kernel


def unknown_name():
    def kernel(x: Tensr): ...  # noqa: F821

    return kernel


def unknown_attribute():
    def kernel(x: fly.Tensr): ...

    return kernel


def optional_scalar():
    def kernel(x: Optional[fly.Value]): ...  # noqa: UP045

    return kernel


def not_a_function():
    return 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (varargs, r"kernel kernel takes \*xs; every parameter needs a name"),
        (keywords, r"kernel kernel takes \*xs; every parameter needs a name"),
        (
            unannotated,
            r"parameter 'x' of kernel kernel has annotation None; expected fly\.Tensor, fly\.TensorMap, one of these",
        ),
        (python_type, r"has annotation <class 'int'>; expected .* \(static parameters come after \*\)"),
        (half_scalar, r"has annotation DType\(name='bf16'"),
        (positional_default, r"parameter 'n' of kernel kernel has a default; make it keyword-only \(static\)"),
        (unknown_name, r"kernel kernel: name 'Tensr' is not defined in an annotation"),
        (unknown_attribute, r"kernel kernel: module 'fly' has no attribute 'Tensr' in an annotation"),
        (optional_scalar, r"parameter 'x' of kernel kernel has annotation typing\.Optional"),
        (not_a_function, r"@fly\.kernel takes a function, not 3"),
    ],
)
def test_definitions_that_are_refused(make, message):
    function = make()
    with pytest.raises(KernelDefinitionError, match=message) as caught:
        fly.kernel(function)
    if callable(function):
        assert str(caught.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}: ")


def test_hints_to_the_code_generator():
    def kernel(n: fly.i32):
        fly.occupancy(waves_per_eu=2, max_registers=128)
        fly.compiler_options("--enable-post-misched=false", "-x=1")
        fly.flush_denormals()
        fly.sched_barrier()
        fly.set_priority(2)
        with pytest.raises(ShapeError, match=r"occupancy: waves_per_eu is 9; expected 1 to 8"):
            fly.occupancy(waves_per_eu=9)
        with pytest.raises(ShapeError, match=r"compiler option 'fast' is no string that starts with '-'"):
            fly.compiler_options("fast")

    filecheck(
        trace(kernel, "i32"),
        """
        CHECK: func.func @kernel
        CHECK-SAME: fly.daz
        CHECK-SAME: fly.max_registers = 128 : i64
        CHECK-SAME: fly.options = ["--enable-post-misched=false", "-x=1"]
        CHECK-SAME: fly.waves_per_eu = 2 : i64
        CHECK: "fly.sched"() {kind = "barrier", value = 0 : i64}
        CHECK-NEXT: "fly.sched"() {kind = "priority", value = 2 : i64}
        """,
    )


def test_what_the_target_says_is_static():
    def kernel(*, wave: int):
        assert fly.wave_size() == wave == fly.target().wave_size
        assert fly.block_dim() == (wave, 1, 1)

    for arch in ("gfx950", "sm_80"):
        trace(kernel, arch=arch, wave=target(arch).wave_size)


def test_operations_need_a_trace():
    with pytest.raises(TraceError, match=r"can only be used inside a function decorated with @fly\.kernel"):
        fly.lane_id()


def test_a_failed_trace_leaves_nothing_behind():
    def broken(n: fly.i32):
        for _, s in (loop := fly.range(n, carry=n)):
            with fly.when(s > 0):
                raise ZeroDivisionError
            loop.next(s)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trace(broken, "i32")
        with pytest.raises(TraceError):
            fly.lane_id()
    trace(example, *arguments(), causal=True)


def test_traces_are_the_same_each_time_and_on_every_thread():
    texts: list[str] = []

    def work():
        texts.append(str(trace(example, *arguments(), causal=False)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(texts) == 4 and len(set(texts)) == 1
