"""One traced module to one artefact: passes, LLVM, linker or PTX."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlir import ir

from fly import config
from fly.backends.artefact import Artefact, Resources
from fly.backends.target import Target
from fly.ir.context import LOCK, context
from fly.lang.signature import Field
from fly.passes import pipeline
from fly.passes.walk import integer, kernel_function
from fly.passes.written import written_arguments

Observer = Callable[[str, str], None]


def passes(target: Target) -> list[pipeline.Pass]:
    """The target's passes, in order."""
    from fly.backends.nvvm import pipeline as nvvm_pipeline
    from fly.backends.rocdl import pipeline as rocdl_pipeline

    return {"rocdl": rocdl_pipeline.passes, "nvvm": nvvm_pipeline.passes}[target.backend](target)


def compile_module(
    module: ir.Module,
    kernel: str,
    target: Target,
    fields: tuple[Field, ...],
    block: tuple[int, int, int],
    *,
    observe: Observer | None = None,
    assembly: bool = True,
) -> Artefact:
    """Compile a traced module (which the passes change).

    `observe(stage, text)` is called for the stages "trace", every pass, "llvm", "llvm-optimised" and "isa".
    The artefact's metadata tells the seconds that each stage took. Without `assembly` its `isa` is empty where the
    text takes a code generation of its own: on AMD, two fifths of LLVM's time.

    Raises:
        CompileError: a pass, LLVM or the linker failed.
        SharedMemoryError: more shared memory than the target has.
    """
    observer = None if observe is None else lambda stage, m: observe(stage, str(m))
    label = f"{kernel}.{target.arch}"
    with LOCK, context():
        function = kernel_function(module)
        options = tuple(
            ir.StringAttr(o).value
            for o in (
                ir.ArrayAttr(function.attributes["fly.options"]) if "fly.options" in function.attributes else ()
            )
        )
        written = tuple(fields[i].name for i in written_arguments(module) if fields[i].kind == "ptr")
        shared: dict[str, int] = {}

        def watch(stage: str, m: ir.Module) -> None:
            if stage == "plan-shared-memory":
                shared["bytes"] = integer(kernel_function(m), "fly.shared_bytes")
            if observer is not None:
                observer(stage, m)

        seconds = pipeline.run(module, passes(target), label=label, observe=watch)
        start = time.perf_counter()
        text = _translate(module)
        seconds["translate"] = time.perf_counter() - start
    _show(observe, label, "llvm", "ll", text)
    start = time.perf_counter()
    if target.backend == "rocdl":
        from fly.backends.rocdl import codegen as rocdl_codegen

        emitted, binary = rocdl_codegen.generate(text, target.arch, options, assembly)
        resources = rocdl_codegen.resources(rocdl_codegen.counts(emitted.object), target)
        dynamic = 0
    else:
        from fly.backends.nvvm import codegen as nvvm_codegen

        emitted = nvvm_codegen.generate(text, target.arch, options)
        binary = emitted.assembly.encode()
        resources = Resources(shared_bytes=shared["bytes"])
        dynamic = shared["bytes"]
    seconds["code generation"] = time.perf_counter() - start
    _show(observe, label, "llvm-optimised", "ll", emitted.llvm_ir)
    _show(observe, label, "isa", "s", emitted.assembly)
    return Artefact(
        kernel=kernel,
        target=target.arch,
        binary=binary,
        isa=emitted.assembly,
        fields=fields,
        block=block,
        dynamic_shared=dynamic,
        resources=resources,
        written=written,
        metadata={f"seconds: {stage}": f"{value:.4f}" for stage, value in seconds.items()},
    )


def _translate(module: ir.Module) -> str:
    from mlir.dialects import llvm

    text: str = llvm.translate_module_to_llvmir(module.operation)
    return text


def _show(observe: Observer | None, label: str, stage: str, suffix: str, text: Any) -> None:
    if observe is not None:
        observe(stage, text)
    wanted = "all" if config.DUMP_IR.get() else config.DUMP.get()
    if wanted in ("all", stage):
        directory = config.DUMP_DIR.get()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{label}.{stage}.{suffix}").write_text(text)
