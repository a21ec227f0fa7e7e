"""From a kernel and what its arguments are to an artefact: traced, looked up in the disk cache, or compiled."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fly
from fly import config
from fly.backends.artefact import Artefact
from fly.backends.target import target as find_target
from fly.errors import ArgumentError
from fly.lang.messages import LOG_FIELD, METADATA_KEY
from fly.lang.signature import Field, ScalarSpec, Spec, TensorMapSpec, TensorSpec
from fly.runtime.arguments import describe_all
from fly.runtime.cache import cache_key, get_or_build
from fly.runtime.device import Dim3, device_for, is_planned, is_traced
from fly.runtime.exported import export_metadata
from fly.runtime.packing import check_block, dim3
from fly.runtime.prebuilt import Build, folder_in_use

STAGE, TRACED = "stage", "traced"  # in an artefact's metadata: what its binary is, if no machine code
# what else decides the generated code; the first of each group that is installed counts
_TOOLCHAIN = (("xtc-mlir-python-bindings", "mlir-python-bindings"), ("llvmlite",), ("ziglang",))
_COMPILER = ("passes", "backends")


@functools.cache
def toolchain() -> str:
    """Versions of fly, MLIR, LLVM and LLD, and a digest of the compiler's own source."""
    versions = [fly.__version__]
    for names in _TOOLCHAIN:
        for name in names:
            try:
                versions.append(f"{name} {importlib.metadata.version(name)}")
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    digest = hashlib.sha256()
    root = Path(fly.__file__).parent
    for part in _COMPILER:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return "\n".join([*versions, digest.hexdigest()])


def compile_kernel(
    kernel: Any,
    specs: tuple[Spec, ...],
    statics: Mapping[str, Any],
    target: str,
    block: Dim3,
    observe: Callable[[str, str], None] | None = None,
    assembly: bool = True,
) -> Artefact:
    """The artefact of one configuration.

    `target`: a device's `build`. The kernel is always traced: the disk cache is keyed by what was traced, so it
    cannot be stale. A hit runs no pass. With `observe` (see `fly.backends.compile`) or a dump flag the cache is left
    alone. Without `assembly` the artefact may have none: see `compile_to_launch`.

    Raises:
        AuthorError: a mistake in the kernel.
        CompileError, SharedMemoryError: see `fly.backends.compile.compile_module`.
    """
    from fly.ir.context import LOCK
    from fly.lang.debug import messages_of

    arch, only_traced = is_traced(target)
    description = find_target(arch)
    module = kernel.trace(specs, statics, description, block)
    fields = kernel.signature.flatten(specs)
    extra = export_metadata(kernel.signature, specs)
    messages = messages_of(module)
    if messages is not None:
        fields, extra = (*fields, LOG_FIELD), {**extra, METADATA_KEY: messages}
    if only_traced:
        return _as_traced(module, kernel.name, arch, fields, block, {**extra, STAGE: TRACED})

    shown = observe is not None or bool(config.DUMP.get()) or config.DUMP_IR.get()

    def build() -> Artefact:
        from fly.backends.compile import compile_module

        artefact = compile_module(
            module, kernel.name, description, fields, block, observe=observe, assembly=assembly or shown
        )
        return replace(artefact, metadata={**artefact.metadata, **extra})

    if shown:
        return build()

    def fits(artefact: Artefact) -> bool:
        """Whether an entry says of itself that it is what is asked for."""
        said = (artefact.kernel, artefact.target, artefact.fields, artefact.block)
        whole = bool(artefact.isa) or not assembly
        return whole and said == (kernel.name, target, fields, block) and extra.items() <= artefact.metadata.items()

    traced = io.BytesIO()
    with LOCK:
        module.operation.write_bytecode(traced)
    key = cache_key(
        {
            "ir": traced.getvalue(),
            "target": target,
            "toolchain": toolchain(),
            "linker": config.LLD.get(),
            "arguments": extra["arguments"],
        }
    )
    return get_or_build(key, build, fits)


def compile_to_launch(
    kernel: Any, specs: tuple[Spec, ...], statics: Mapping[str, Any], target: str, block: Dim3
) -> Artefact:
    """What launches compile with: `compile_kernel`, or with `FLY_PREBUILT`, what was compiled before.

    There may be no assembly, which nobody reads: to write it takes AMD's code generator as long as the machine code
    does. A device that runs what is traced always has it traced.

    Raises:
        MissingBuildError: the folder has no such build.
        ConfigError: it was made from other sources.
    """
    if (arch := is_planned(target)) is not None:
        return Artefact(kernel.name, arch, b"", "", kernel.signature.flatten(specs), block)
    folder = folder_in_use()
    if folder is None or is_traced(target)[1]:
        return compile_kernel(kernel, specs, statics, target, block, assembly=False)
    return folder.find(Build(kernel, specs, kernel.bind_statics(statics), target, block))


def _as_traced(
    module: Any, name: str, arch: str, fields: tuple[Field, ...], block: Dim3, metadata: dict[str, str]
) -> Artefact:
    """An artefact of a traced module itself: what the simulator runs, and what takes no compiler."""
    from fly.ir.context import LOCK, context
    from fly.passes.written import written_arguments

    bytecode = io.BytesIO()
    with LOCK, context():
        written = tuple(fields[i].name for i in written_arguments(module) if fields[i].kind == "ptr")
        module.operation.write_bytecode(bytecode)
    return Artefact(name, arch, bytecode.getvalue(), "", fields, block, metadata=metadata, written=written)


def compile(
    kernel: Any, *arguments: Any, block: int | tuple[int, ...], target: str | None = None, **statics: Any
) -> Artefact:
    """Compile a kernel ahead of time; `.save(path)` it, and `fly.load(path)[grid, block](...)` launches it.

    `arguments` are, in the kernel's order, tensors, numbers, None, or descriptions (`fly.TensorSpec`,
    `fly.ScalarSpec`, `fly.TensorMapSpec`). `target` is an architecture such as "gfx950"; by
    default that of the tensors' device.

    Raises:
        ArgumentError: wrong arguments, or no target and no tensor to take it from.
        AuthorError, CompileError, SharedMemoryError: the kernel does not compile.
    """
    block = dim3(block, "block")
    check_block(block)
    described = [a is None or isinstance(a, TensorSpec | ScalarSpec | TensorMapSpec) for a in arguments]
    if all(described):
        specs = arguments
        if target is None:
            raise ArgumentError("compile: target is missing; descriptions of arguments do not say where they are")
    elif any(described[i] and arguments[i] is not None for i in range(len(arguments))):
        raise ArgumentError("compile: arguments mix values and descriptions; give one kind")
    else:
        bound, place = describe_all(kernel.signature, arguments)
        specs = tuple(argument.spec for argument in bound)
        target = target or device_for(place).target
    return compile_kernel(kernel, specs, kernel.bind_statics(statics), target, block)
