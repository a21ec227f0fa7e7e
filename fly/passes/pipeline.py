"""Runs a list of passes: verifies after each, times them, and dumps what FLY_DUMP asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mlir import ir

from fly import config
from fly.errors import CompileError
from fly.ir.context import LOCK, context

# what follows the passes, and is dumped by whoever runs it
LATER_STAGES = ("llvm", "llvm-optimised", "isa")


class Pass(Protocol):
    """A named rewrite of a module that leaves it valid."""

    @property
    def name(self) -> str: ...

    def run(self, module: ir.Module) -> None: ...


def run(
    module: ir.Module,
    passes: Sequence[Pass],
    *,
    label: str,
    observe: Callable[[str, ir.Module], None] | None = None,
) -> dict[str, float]:
    """Run `passes` in order; returns seconds per pass.

    `observe(stage, module)` is called with "trace" first and then after every pass. FLY_DUMP=all (or a pass's
    name, or "trace") writes the same stages to FLY_DUMP_DIR as `label.NN.stage.mlir`.

    Raises:
        CompileError: a pass failed or left invalid IR; says which, with MLIR's diagnostics. FLY_DUMP names no
            stage.
    """
    wanted = "all" if config.DUMP_IR.get() else config.DUMP.get()
    known = ["trace", *(p.name for p in passes), *LATER_STAGES]
    if wanted not in ("", "all", *known):
        raise CompileError(f"FLY_DUMP={wanted!r} names no stage; expected 'all' or one of {', '.join(known)}")
    seconds: dict[str, float] = {}

    def show(index: int, stage: str) -> None:
        if observe is not None:
            observe(stage, module)
        if wanted in ("all", stage):
            directory = config.DUMP_DIR.get()
            directory.mkdir(parents=True, exist_ok=True)
            text = module.operation.get_asm(enable_debug_info=False)
            (directory / f"{label}.{index:02}.{stage}.mlir").write_text(text)

    with LOCK, context(), ir.Location.unknown():
        show(0, "trace")
        for index, pass_ in enumerate(passes, start=1):
            start = time.perf_counter()
            try:
                pass_.run(module)
                module.operation.verify()
            except ir.MLIRError as error:
                raise CompileError(f"pass {pass_.name} failed on {label}: {error}") from None
            seconds[pass_.name] = time.perf_counter() - start
            show(index, pass_.name)
    return seconds
