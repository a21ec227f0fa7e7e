"""`fly.print` and `fly.check` on emulated GPUs, and on an NVIDIA GPU where there is one."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fly
from fly.errors import ArtefactError, CheckError, EmulatorError, MessageError, UnsupportedError
from fly.lang.messages import LOG_FIELD, Logged, Message, ShownFloat, from_text, to_text
from tests.tracing import matrix, trace

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no NVIDIA GPU"),
)


@pytest.fixture(params=["gfx942", "gfx950", pytest.param("cuda", marks=GPU)])
def device(request, monkeypatch) -> str:
    """The torch device to run on."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setenv("FLY_ARCH", request.param)
    return "cpu"


@fly.kernel
def greetings(x: fly.Tensor, n: fly.i32):
    thread = fly.thread_id.x
    fly.print("{} of {}: {:.2f} and {}", thread, n, x.load(thread), "text", when=thread % 50 == 1)
    with fly.when(thread == 3):
        for j in fly.range(2):
            fly.print("turn {}", j)
        fly.print(thread, 1.5)


def test_lines_come_in_the_order_of_blocks_threads_and_time(device, capsys):
    greetings[3, 64](torch.arange(64.0, device=device) / 3, 7)
    wanted = [
        line
        for block in range(3)
        for line in (
            f"block {block}, thread 1: 1 of 7: 0.33 and text",
            f"block {block}, thread 3: turn 0",
            f"block {block}, thread 3: turn 1",
            f"block {block}, thread 3: 3 1.5",
            f"block {block}, thread 51: 51 of 7: 17.00 and text",
        )
    ]
    assert capsys.readouterr().out.splitlines() == wanted


@fly.kernel
def every_type(ints: fly.Tensor, floats: fly.Tensor):
    a, b = ints.load(0, length=2), floats.load(0, length=4)
    with fly.when(fly.thread_id.x == 0):
        fly.print("{} {} {} {} {}", a.to(fly.i8), a.to(fly.i16), a, a.to(fly.i64) * (1 << 40), a > 0)
        fly.print("{} {} {} {}", b.to(fly.f16), b.to(fly.bf16), b, b.to(fly.f64)[1])
        fly.print("{1}|{0:.3f}", b[1], a[0])
        fly.print("{} {}", a[0].to(fly.i8).bitcast(fly.f8e4m3), (a[:1].bitcast(fly.i8)).bitcast(fly.f8e5m2))


def test_every_type_shows_its_value(device, capsys):
    ints = torch.tensor([-3, 100000], dtype=torch.int32, device=device)
    every_type[1, 64](ints, torch.tensor([0.1, 1 / 3, 1e30, -0.0], device=device))
    assert capsys.readouterr().out.splitlines() == [
        "block 0, thread 0: [-3, -96] [-3, -31072] [-3, 100000] [-3298534883328, 109951162777600000] [False, True]",
        "block 0, thread 0: [0.1, 0.3333, inf, -0.0] [0.1, 0.334, 1e+30, -0.0] [0.1, 0.33333334, 1e+30, -0.0] "
        "0.3333333432674408",
        "block 0, thread 0: -3|0.333",
        "block 0, thread 0: -416.0 [nan, nan, nan, nan]",
    ]


@fly.kernel
def places(x: fly.Tensor):
    fly.print("here", when=x.load(fly.thread_id.x + 8 * fly.thread_id.y) == 1)


def test_indices_have_as_many_coordinates_as_there_are(device, capsys):
    x = torch.zeros(64, dtype=torch.int32, device=device)
    x[11] = 1
    places[(1, 2), (8, 8)](x)
    wanted = ["block (0, 0), thread (3, 1): here", "block (0, 1), thread (3, 1): here"]
    assert capsys.readouterr().out.splitlines() == wanted


@fly.kernel
def many(x: fly.Tensor):
    for j in fly.range(x.shape[0]):
        fly.print("{}", j)


def test_lines_that_do_not_fit_are_counted(device, capsys, monkeypatch):
    monkeypatch.setenv("FLY_PRINT_SIZE_MB", "1")
    many[2, 64](torch.zeros(500, device=device))  # 64000 records of 6 words
    *lines, last = capsys.readouterr().out.splitlines()
    kept = ((1 << 20) - 32) // 24
    assert len(lines) == kept
    dropped = f"many: {64000 - kept} more lines were dropped; the log holds 1 MiB (FLY_PRINT_SIZE_MB)"
    assert last == dropped


@fly.kernel
def guarded(x: fly.Tensor, n: fly.i32):
    i = fly.block_id.x * 64 + fly.thread_id.x
    fly.print("seen", when=i == 65)
    fly.check(i < n, "index {} is not below {}", i, n)
    x.store(1.0, i)


def line_of(function: fly.Kernel, text: str) -> str:
    lines, first = inspect.getsourcelines(function.function)
    (at,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{at}"


def test_a_failed_check_names_line_block_thread_and_values(device, capsys):
    x = torch.zeros(128, device=device)
    at = line_of(guarded, "fly.check(")
    with pytest.raises(CheckError) as caught:
        guarded[2, 64](x, 126)
    assert str(caught.value).splitlines() == [
        f"{at}: fly.check failed in guarded, block 1, thread 62: index 126 is not below 126",
        f"{at}: fly.check failed in guarded, block 1, thread 63: index 127 is not below 126",
    ]
    assert capsys.readouterr().out == "block 1, thread 1: seen\n"
    assert x.sum() == 128  # the threads went on
    with pytest.raises(CheckError, match=r"thread 7: index 7 is not below 0\nand 120 more$"):
        guarded[2, 64](x, 0)
    guarded[2, 64](x, 128)


@fly.kernel
def finite(x: fly.Tensor):
    values = x.load(fly.thread_id.x * 4, length=4)
    fly.check(values == values)


def test_every_element_of_a_vector_is_checked(device):
    x = torch.zeros(256, device=device)
    finite[1, 64](x)
    x[42] = torch.nan
    with pytest.raises(CheckError, match=r":\d+: fly.check failed in finite, block 0, thread 10$"):
        finite[1, 64](x)


@fly.kernel
def out_of_bounds(x: fly.Tensor, n: fly.i32):
    fly.print("before", when=fly.thread_id.x == 0)
    fly.check(n < 1000, "n is {}", n)
    x.store(1.0, n)


def test_what_was_logged_before_a_fault_is_reported(capsys):
    with pytest.raises(CheckError, match="n is 100000") as caught:
        out_of_bounds[1, 64](np.zeros(64, np.float32), 100_000)
    assert isinstance(caught.value.__cause__, EmulatorError)
    assert capsys.readouterr().out == "block 0, thread 0: before\n"


def test_an_exported_kernel_prints(device, capsys, tmp_path):
    x = torch.ones(64, device=device)
    built = fly.compile(greetings, x, 7, block=64)
    assert built.fields[-1] == LOG_FIELD
    built.save(tmp_path / "greetings.fly")
    fly.load(tmp_path / "greetings.fly")[1, 64](x, 9)
    assert capsys.readouterr().out.startswith("block 0, thread 1: 1 of 9: 1.00 and text\n")


@fly.kernel
def silent(x: fly.Tensor):
    x.store(x.load(0), 1)


@fly.kernel
def one_line(x: fly.Tensor):
    fly.print("{}", x.load(0))


def test_kernels_without_messages_have_no_log():
    built = fly.compile(silent, matrix(), block=64, target="gfx950")
    assert LOG_FIELD not in built.fields and "messages" not in built.metadata
    assert "atomic" not in built.isa


@pytest.mark.parametrize(
    ("arch", "add"),
    [
        ("gfx942", "global_atomic_add_x2"),
        ("gfx950", "global_atomic_add_x2"),
        ("sm_80", r"atom\S*\.global\S*\.add\.u64"),
    ],
)
def test_a_line_is_one_record_of_a_log(arch, add):
    built = fly.compile(one_line, matrix(), block=64, target=arch)
    assert len(re.findall(add, built.isa)) == 2  # one for the place, one for what has none
    assert [f.name for f in built.fields] == ["x", "x.shape0", "fly.log"]


def test_a_bound_launch_prints(capsys):
    from fly.runtime.compile import compile_kernel
    from fly.runtime.prepared import bind

    x = np.ones(64, np.float32)
    launch = bind(greetings, 1, 64, (x, 7), {}, compile_kernel)
    launch(x.ctypes.data)
    assert capsys.readouterr().out.startswith("block 0, thread 1: 1 of 7: 1.00 and text\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no NVIDIA GPU")
def test_a_graph_capture_is_refused(capsys):
    x = torch.zeros(64, device="cuda")
    greetings[1, 64](x, 1)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(UnsupportedError, match=r"greetings: a kernel with fly.print or fly.check is waited for"),
        torch.cuda.graph(graph),
    ):
        greetings[1, 64](x, 1)


# texts


def refused(body) -> str:
    with pytest.raises(MessageError) as caught:
        trace(lambda: body())
    return str(caught.value).split(": ", 1)[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{} {}", "IndexError: Replacement index 1 out of range for positional args tuple"),
        ("none", "0 places for 1 values"),
        ("{:.2q}", "ValueError: .*format.*"),
        ("{name}", "KeyError: 'name'"),
        ("{", "ValueError: Single '{' encountered in format string"),
    ],
)
def test_a_text_that_does_not_fit_is_an_error_of_the_author(text, problem):
    message = refused(lambda: fly.print(text, fly.thread_id.x))
    assert re.fullmatch(f"the text {re.escape(repr(text))} of fly.print does not fit its values: {problem}", message)


def test_nothing_to_say_is_an_error():
    assert refused(fly.print) == "fly.print has nothing to say; give it a text or values"


def test_floats_show_as_few_digits_as_their_type_needs():
    rng = np.random.default_rng()
    for x in rng.integers(0, 1 << 32, 300, dtype=np.uint32).view(np.float32):
        assert str(ShownFloat.of(float(x), "f32")) == repr(float(str(x)))
    for x in rng.integers(0, 1 << 16, 300, dtype=np.uint16).view(np.float16):
        assert np.float16(str(ShownFloat.of(float(x), "f16"))) == x or np.isnan(x)
    assert format(ShownFloat.of(1 / 3, "f64"), ".3f") == "0.333"


def test_messages_of_an_artefact_are_checked():
    messages = (Message("print", "a.py:1", "{} {}", (Logged("f32", 4), "x")), Message("check", "a.py:2", "", ()))
    assert from_text(to_text(messages), "k") == messages
    for text in ("", "3", "[3]", '[["print", "a", "{}", []]]', '[["shout", "a", "b", []]]', "[" * 100000):
        with pytest.raises(ArtefactError, match="k: malformed messages"):
            from_text(text, "k")


def test_a_kernel_with_copies_in_flight_can_print(device, capsys, monkeypatch):
    """Records are stores among the loop's asynchronous copies, which waits count."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    example = importlib.import_module("03_matmul")
    multiply = example.multiply

    def loud(link, a, b, total):
        total = multiply(link, a, b, total)
        fly.print("{}", total.tiles[0][0][0], when=(fly.thread_id.x == 0) & (fly.block_id.x == 0))
        return total

    monkeypatch.setattr(example, "multiply", loud)
    a, b = (torch.ones(rows, 128, dtype=torch.bfloat16, device=device) for rows in (16, 136))
    kernel = fly.kernel(example.matmul.function)
    c = torch.zeros(16, 136, dtype=torch.bfloat16, device=device)
    kernel[(2, 1), example.THREADS](a, b, c, tiling=example.Tiling())
    assert (c == 128).all()
    sums = [float(line.split(": ")[1]) for line in capsys.readouterr().out.splitlines()]
    assert sums == sorted(sums) and sums[-1] == 128
