"""The pass runner: order, verification, observers, and dumps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from mlir import ir

from fly.errors import CompileError, ConfigError
from fly.ir.context import LOCK, context
from fly.passes import pipeline
from fly.passes.fast_math import FastMath
from fly.passes.plan_shared import PlanSharedMemory
from fly.passes.upstream import Upstream
from fly.passes.walk import kernel_function
from tests.passes.modules import parse

PASSES = (PlanSharedMemory(65536, "gfx942", dynamic=False), FastMath(), Upstream("tidy", "cse"))
NAMES = ["trace", "plan-shared-memory", "fast-math", "tidy"]


@pytest.fixture(autouse=True)
def no_dumps(monkeypatch, tmp_path):
    """Tests ask for the dumps that they want, and write them to a directory of their own."""
    for name in ("FLY_DUMP", "FLYDSL_DUMP_IR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLY_DUMP_DIR", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def run(passes=PASSES, **kwargs) -> dict[str, float]:
    return pipeline.run(parse("%a = alloc a 64 16\ntouch %a"), passes, label="kernel.gfx942", **kwargs)


@dataclass(frozen=True)
class EraseReturn:
    """A pass with a bug: it leaves a block without terminator."""

    name: str = "erase-return"

    def run(self, module: ir.Module) -> None:
        list(kernel_function(module).regions[0].blocks[0].operations)[-1].operation.erase()


@dataclass(frozen=True)
class Recorder:
    name: str
    log: list[str] = field(default_factory=list)

    def run(self, module: ir.Module) -> None:
        self.log.append(self.name)


def test_passes_run_in_order_and_are_timed():
    log: list[str] = []
    seconds = run([Recorder(name, log) for name in ("b", "a", "c")])
    assert log == list(seconds) == ["b", "a", "c"]
    assert all(value >= 0 for value in seconds.values())


def test_observer_sees_the_trace_and_what_each_pass_leaves():
    seen: dict[str, str] = {}
    run(observe=lambda stage, module: seen.setdefault(stage, str(module)))
    assert list(seen) == NAMES
    assert "fly.alloc_shared" in seen["trace"]
    assert "fly.alloc_shared" not in seen["plan-shared-memory"]
    assert "llvm.mlir.addressof" in seen["tidy"]


def test_invalid_ir_names_the_pass_and_stops():
    after = Recorder("after")
    with pytest.raises(CompileError, match=r"(?s)^pass erase-return failed on kernel\.gfx942: .*no terminator"):
        run([EraseReturn(), after])
    assert after.log == []


def test_a_failing_upstream_pass_is_named():
    failing = Upstream("layout", "set-llvm-module-datalayout{data-layout=junk}")
    with pytest.raises(CompileError, match=r"^pass layout failed on kernel\.gfx942: .*\n.*unknown specifier 'j'"):
        run([failing])


def test_nothing_is_written_unless_asked_for(no_dumps):
    run()
    assert not no_dumps.exists()


@pytest.mark.parametrize(("variable", "value"), [("FLY_DUMP", "all"), ("FLYDSL_DUMP_IR", "1")])
def test_dump_of_every_stage(monkeypatch, no_dumps, variable, value):
    monkeypatch.setenv(variable, value)
    run()
    assert sorted(p.name for p in no_dumps.iterdir()) == [
        f"kernel.gfx942.{index:02}.{name}.mlir" for index, name in enumerate(NAMES)
    ]
    first = (no_dumps / "kernel.gfx942.00.trace.mlir").read_text()
    assert "fly.alloc_shared" in first
    assert "loc(" not in first


def test_dump_of_one_stage(monkeypatch, no_dumps):
    monkeypatch.setenv("FLY_DUMP", "plan-shared-memory")
    run()
    (path,) = no_dumps.iterdir()
    assert path.name == "kernel.gfx942.01.plan-shared-memory.mlir"
    assert "@fly_shared" in path.read_text()


def test_unknown_stage_is_an_error_that_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("FLY_DUMP", "fastmath")
    log: list[str] = []
    with pytest.raises(CompileError, match="FLY_DUMP='fastmath' names no stage") as error:
        run([Recorder("first", log)])
    assert "'all' or one of trace, first, llvm, llvm-optimised, isa" in str(error.value)
    assert log == []


def test_stages_after_the_passes_are_known(monkeypatch, no_dumps):
    monkeypatch.setenv("FLY_DUMP", "isa")
    run()
    assert not no_dumps.exists()


def test_bad_switch_is_an_error(monkeypatch):
    monkeypatch.setenv("FLYDSL_DUMP_IR", "yes")
    with pytest.raises(ConfigError, match="FLYDSL_DUMP_IR='yes'"):
        run()


def test_a_module_without_a_kernel_is_refused():
    with LOCK, context():
        empty = ir.Module.parse("")
    with pytest.raises(ValueError, match="no kernel function"):
        kernel_function(empty)
