"""Code objects on the command line: files, their kernels, and launches described by options."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly.errors import ArgumentError, ArtefactError
from fly.runtime.emulate_arguments import Argument, pack, parse

if TYPE_CHECKING:
    from fly.emulator import Program
    from fly.emulator.timing import Launch


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a launch of a file's kernel."""
    parser.add_argument("--kernel", metavar="NAME", help="which kernel of a file; may be left out where there is one")
    parser.add_argument("--grid", default="1", metavar="X[,Y,Z]", help="workgroups (default: 1)")
    parser.add_argument(
        "--block", metavar="X[,Y,Z]", help="work-items of a workgroup (default: what the file says, or 64)"
    )
    parser.add_argument("--args", nargs="*", default=[], metavar="ARG", help="the kernel's arguments, see below")
    parser.add_argument("--lds", type=int, metavar="BYTES", help="dynamic LDS of a workgroup, in addition to static")


def read_object(path: str, arch: str | None = None) -> tuple[bytes, Any]:
    """(code object, artefact or None) of a file: a code object, an artefact, or assembly (`.s`).

    Raises:
        ArgumentError: no such file, or none of these. CompileError: assembly that does not assemble.
    """
    from fly.backends.artefact import Artefact

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"FILE {path!r}: {error.strerror}") from None
    if data[:4] == b"\x7fELF":
        return data, None
    if path.endswith(".s"):
        from fly.backends.rocdl.assemble import assemble

        return assemble(data.decode(errors="replace"), arch), None
    try:
        artefact = Artefact.from_bytes(data)
    except ArtefactError:
        raise ArgumentError(
            f"FILE {path!r} is neither a code object (ELF), nor assembly (.s), nor an artefact that fly.compile saved"
        ) from None
    return artefact.binary, artefact


def kernel_of(program: Program, name: str | None) -> str:
    """The kernel with this name, or the only one.

    Raises:
        ArgumentError: there is no such kernel, or more than one to choose from.
    """
    kernels = program.kernels
    if name is None and len(kernels) == 1:
        return kernels[0]
    if name not in kernels:
        raise ArgumentError(f"--kernel {name!r}; the file has {', '.join(kernels) or 'none'}")
    return name


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them.

    Raises:
        ArgumentError: something else; names the option.
    """
    try:
        return tuple(int(part, 0) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"{option} {text!r}; expected whole numbers with commas between them") from None


def literal(option: str, text: str) -> tuple[str, Any]:
    """`NAME=VALUE` with a Python literal, or text that is none.

    Raises:
        ArgumentError: no `=`; names the option.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(f"{option} {text!r}; expected NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def file_launch(path: str, options: argparse.Namespace) -> tuple[Launch, list[Argument]]:
    """The launch of a file's kernel that options describe, and its arguments.

    Raises:
        ArgumentError: options or arguments that do not fit the kernel.
        EmulatorError: a code object for another architecture than `options.arch`.
    """
    from fly.emulator import Program, Region
    from fly.emulator.timing import Launch
    from fly.runtime.packing import dim3

    code, artefact = read_object(path, options.arch)
    program = Program(code, options.arch)
    name = kernel_of(program, options.kernel or (artefact and artefact.kernel))
    default_block = artefact.block if artefact else (64,)
    grid = dim3(numbers("--grid", options.grid), "--grid")
    block = dim3(numbers("--block", options.block) if options.block else default_block, "--block")
    kernel = program.code.kernels[name]
    arguments = [parse(text) for text in options.args]
    packed = pack(arguments, kernel.explicit, kernel.kernarg_bytes, name)
    lds = options.lds if options.lds is not None else artefact.dynamic_shared if artefact else 0
    regions = [
        Region(a.array.ctypes.data, a.array.nbytes, a.text, a.defined) for a in arguments if a.array is not None
    ]
    return Launch(program, name, grid, block, packed, regions, lds, tuple(arguments)), arguments
