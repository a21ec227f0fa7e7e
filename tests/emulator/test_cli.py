"""`python -m fly emulate`: arguments in and out, listing, checks, trace, mistakes."""

import numpy as np
import pytest

import fly
from fly.__main__ import main
from fly.emulator.trace import Place
from fly.runtime.emulate_arguments import parse
from tests.emulator.assembly import assemble
from tests.emulator.toolchain import build

ARCHS = ("gfx942", "gfx950")
ADD = """
define amdgpu_kernel void @add(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %c, i32 %n, float %scale) {
  %group = call i32 @llvm.amdgcn.workgroup.id.x()
  %lane = call i32 @llvm.amdgcn.workitem.id.x()
  %start = mul i32 %group, 128
  %i = add i32 %start, %lane
  %inside = icmp slt i32 %i, %n
  br i1 %inside, label %body, label %end
body:
  %pa = getelementptr float, ptr addrspace(1) %a, i32 %i
  %pb = getelementptr float, ptr addrspace(1) %b, i32 %i
  %pc = getelementptr float, ptr addrspace(1) %c, i32 %i
  %x = load float, ptr addrspace(1) %pa
  %y = load float, ptr addrspace(1) %pb
  %y.scaled = fmul float %y, %scale
  %sum = fadd float %x, %y.scaled
  store float %sum, ptr addrspace(1) %pc
  br label %end
end:
  ret void
}
declare i32 @llvm.amdgcn.workgroup.id.x()
declare i32 @llvm.amdgcn.workitem.id.x()
"""


@pytest.fixture(params=ARCHS)
def files(request, tmp_path, monkeypatch):
    """A directory with add.hsaco, a.npy and b.npy, made the current one; gives the architecture."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "add.hsaco").write_bytes(build(ADD, request.param))
    rng = np.random.default_rng()
    for name in "ab":
        np.save(f"{name}.npy", rng.standard_normal(300).astype(np.float32))
    return request.param


def emulate(*arguments: str) -> int:
    return main(["emulate", *arguments])


RUN = ("add.hsaco", "--grid", "3", "--block", "128", "--args")


def test_arrays_go_in_and_out(files, capsys):
    a, b = np.load("a.npy"), np.load("b.npy")
    assert emulate(*RUN, "a.npy", "in:b.npy", "out:c.npy:f32[300]", "i32:300", "f32:0.5") == 0
    printed = capsys.readouterr().out
    assert np.array_equal(np.load("c.npy"), a + b * np.float32(0.5))
    assert np.array_equal(np.load("a.npy"), a) and np.array_equal(np.load("b.npy"), b)
    assert "wrote c.npy: float32[300]" in printed
    assert f"add on emulated {files}" in printed and "wave-instructions" in printed
    assert "valu" in printed and "memory" in printed and " others " in printed


def test_arrays_are_changed_in_place_or_printed(files, capsys):
    a, b = np.load("a.npy"), np.load("b.npy")
    assert emulate(*RUN, "a.npy", "b.npy", "inout:b.npy", "i32:200", "f32:1") == 0
    changed = np.load("b.npy")
    assert np.array_equal(changed[:200], a[:200] + b[:200]) and np.array_equal(changed[200:], b[200:])
    assert emulate(*RUN, "a.npy", "a.npy", "inout:b.npy:d.npy", "i32:300", "f32:1") == 0
    assert np.array_equal(np.load("d.npy"), a + a) and np.array_equal(np.load("b.npy"), changed)
    capsys.readouterr()
    assert emulate(*RUN, "a.npy", "b.npy", "zeros:-:f32[2,150]", "i32:1", "f32:0") == 0
    assert f"[[{str(a[0])[:5]}" in capsys.readouterr().out


def test_new_input(files):
    assert emulate(*RUN, "random:f32[300]", "zeros:b.npy:f32[300]", "out:c.npy:f32[300]", "i32:300", "f32:1") == 0
    c = np.load("c.npy")
    assert (np.abs(c) <= 1).all() and len(np.unique(c)) > 200 and not np.load("b.npy").any()
    for kind, dtype in (("bf16", np.uint16), ("f8", np.uint8), ("i8", np.int8), ("f16", np.float16)):
        assert parse(f"random:{kind}[100]").array.dtype == dtype


def test_reading_what_nothing_has_written(files, capsys):
    assert emulate(*RUN, "a.npy", "out:-:f32[300]", "out:c.npy:f32[300]", "i32:300", "f32:1") == 1
    assert "reads memory that nothing has written: byte 0 of out:-:f32[300]" in capsys.readouterr().err


def test_listing(files, capsys):
    assert emulate("add.hsaco", "--list") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"add ({files}): ") and "0 bytes of static LDS" in printed
    assert " 2 at byte  16: c: a pointer" in printed and " 4 at byte  28: scale: 4 bytes by value" in printed


def test_a_fault_names_the_argument_and_keeps_what_was_stored(files, capsys):
    assert emulate(*RUN, "a.npy", "b.npy", "out:c.npy:f32[256]", "i32:300", "f32:0") == 1
    error = capsys.readouterr().err
    assert "out-of-bounds: add: `global_store_dword" in error and "workgroup (2, 0, 0), wave 0, lane 0" in error
    assert "0 bytes behind out:c.npy:f32[256]" in error
    assert np.load("c.npy").shape == (256,)


def test_trace_of_one_wave(files, capsys):
    arguments = ["a.npy", "b.npy", "out:c.npy:f32[300]", "i32:300", "f32:1"]
    assert emulate(*RUN, *arguments, "--trace", "--trace-wave", "2:0", "--trace-lanes", "0,43") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.lstrip()[:1].isdigit()]
    steps = [line.split()[0] for line in lines]
    mix_free = [line for line in lines if " 0x" in line[:20]]
    assert steps[: len(mix_free)] == [str(i + 1) for i in range(len(mix_free))]
    store = next(line for line in mix_free if "global_store_dword" in line)
    a, b = np.load("a.npy"), np.load("b.npy")
    last = [f"{x:.6g}" for x in (a + b)[[256, 299]]]
    added = next(line for line in mix_free if "v_fmac_f32" in line or "v_fma_f32" in line or "v_add_f32" in line)
    assert added.endswith(f"=[{last[0]} {last[1]} …]")
    assert "exec=0xfffffffffff" in store, "44 lanes are inside"
    assert "s_endpgm" in mix_free[-1]
    assert any("s_cbranch_execz" in line and line.endswith("not taken") for line in mix_free)


def test_checks_can_be_turned_off(tmp_path, capsys):
    path = tmp_path / "k.hsaco"
    path.write_bytes(assemble("s_load_dword s4, s[0:1], 0x0\ns_add_u32 s4, s4, 1\ns_endpgm", "gfx950"))
    assert emulate(str(path), "--args", "i32:1") == 1
    error = capsys.readouterr().err
    assert "missing-wait: k: `s_add_u32 s4, s4, 1`" in error and "lgkmcnt" in error
    assert emulate(str(path), "--args", "i32:1", "--no-checks") == 0


def test_an_endless_loop_ends(tmp_path, capsys):
    path = tmp_path / "k.hsaco"
    path.write_bytes(assemble(".Lhere:\ns_branch .Lhere", "gfx942"))
    assert emulate(str(path), "--budget", "1000") == 1
    assert "endless-loop: k: `s_branch" in capsys.readouterr().err


def test_an_artefact_brings_its_kernel_and_block(tmp_path, capsys):
    @fly.kernel
    def double(x: fly.Tensor):
        i = fly.thread_id.x
        x.store(x.load(i) + x.load(i), i)

    spec = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
    path, array = tmp_path / "double.fly", tmp_path / "x.npy"
    fly.compile(double, spec, block=64, target="gfx950").save(path)
    np.save(array, np.arange(64, dtype=np.float32))
    assert emulate(str(path), "--args", f"inout:{array}", "i32:64") == 0, capsys.readouterr().err
    assert np.load(array).tolist() == [2.0 * i for i in range(64)]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("a.npy",), "takes 5 arguments, --args gives 1; it takes: a: a pointer, b: a pointer"),
        (("a.npy", "b.npy", "b.npy", "i64:3", "f32:1"), "argument 3, 'i64:3': add takes n: 4 bytes by value there"),
        (("a.npy", "i32:3", "b.npy", "i32:3", "f32:1"), "argument 1, 'i32:3': add takes b: a pointer there"),
        (("missing.npy",), "No such file"),
        (("i32:many",), "invalid literal"),
        (("i8:300",), "argument 'i8:300'"),
        (("5",), "argument '5'; accepted:"),
        (("out:c.npy",), "expected out:FILE.npy:TYPE[SIZES]"),
        (("out:c.npy:f31[4]",), "array 'f31[4]'; expected TYPE[SIZES]"),
        (("out:c.npy:f32[]",), "array 'f32[]'; expected TYPE[SIZES]"),
    ],
)
def test_arguments_that_do_not_fit(files, capsys, arguments, complaint):
    assert emulate(*RUN, *arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, complaint",
    [
        (("missing.hsaco",), "FILE 'missing.hsaco': No such file"),
        (("a.npy",), "FILE 'a.npy' is neither a code object"),
        (("add.hsaco", "--kernel", "sub"), "--kernel 'sub'; the file has add"),
        (("add.hsaco", "--grid", "0"), "--grid"),
        (("add.hsaco", "--block", "2048"), "2048"),
        (("add.hsaco", "--grid", "x"), "--grid 'x'; expected whole numbers"),
        (("add.hsaco", "--arch", "gfx90a"), "gfx90a"),
    ],
)
def test_options_that_do_not_fit(files, capsys, options, complaint):
    arguments = ("--args", "a.npy", "b.npy", "b.npy", "i32:3", "f32:1")
    assert emulate(*options, *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_trace_outside_the_grid(files, capsys):
    arguments = ("a.npy", "b.npy", "b.npy", "i32:3", "f32:1")
    assert emulate(*RUN, *arguments, "--trace", "--trace-wave", "0:2") == 2
    assert "'0:2' is outside the grid (3, 1, 1) of blocks (128, 1, 1)" in capsys.readouterr().err
    assert emulate(*RUN, *arguments, "--trace", "--trace-wave", "1,2,3,4:0") == 2
    assert "expected X[,Y,Z]:WAVE" in capsys.readouterr().err
    assert emulate(*RUN, *arguments, "--trace", "--trace-lanes", "0,64") == 2
    assert "expected some of 0 to 63" in capsys.readouterr().err


def test_places():
    assert Place.parse("1,2:3") == Place((1, 2, 0), 3) and Place.parse("4") == Place((4, 0, 0), 0)
    assert Place((1, 2, 0), 3).inside((2, 3, 1), (64, 4, 1)) and not Place((1, 2, 0), 3).inside((2, 3, 1), (64, 3, 1))
    assert not Place((1, 2, 0), 3).inside((2, 2, 1), (64, 4, 1))


@pytest.mark.parametrize("text", ["f16:1.5", "u64:0xffffffffffffffff", "i8:-3", "f64:1e300", "ptr:0x1000", "null"])
def test_numbers_become_bytes(text):
    kind, _, value = text.partition(":")
    expected = {
        "f16": np.float16, "u64": np.uint64, "i8": np.int8, "f64": np.float64, "ptr": np.uint64, "null": np.uint64
    }[kind]  # fmt: skip
    number = float(value) if kind[0] == "f" else int(value or "0", 0)
    assert parse(text).data == expected(number).tobytes()


def test_new_arrays_look_unwritten_and_lie_as_allocations_do():
    out = parse("out:c.npy:bf16[3,5]").array
    assert out.shape == (3, 5) and out.dtype == np.uint16 and (out == 0xA5A5).all() and out.ctypes.data % 256 == 0
    assert not parse("zeros:c.npy:f8[7]").array.any()
