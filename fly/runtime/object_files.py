"""Code objects on the command line: files, their kernels, and launches described by options."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import struct
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly.errors import ArgumentError, ArtefactError, FlyError
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
    from fly.runtime.emulated import EMULATED

    if arch is not None and arch not in EMULATED:
        raise ArgumentError(f"--arch {arch!r}; accepted: {', '.join(EMULATED)}")
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # the second: a zero character in the name
        raise ArgumentError(f"FILE {path!r}: {getattr(error, 'strerror', None) or error}") from None
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
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two: nested too deep
        return name, value


def imported(what: str, module: str) -> Any:
    """A module by its dotted name, also of the current directory.

    Raises:
        ArgumentError: there is none, or its code fails; `what` says who asked for it.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise ArgumentError(f"{what}: {module!r} is no module's name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with author_code(what):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"{what}: {error}") from None


@contextlib.contextmanager
def author_code(what: str) -> Iterator[None]:
    """Around code that is not fly's: what it raises becomes one line that says where.

    Raises:
        ArgumentError: the code raised anything but an error of fly's or a missing module.
    """
    try:
        yield
    except (FlyError, ModuleNotFoundError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(f"{what}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})") from error


def program_of(path: str, code: bytes, arch: str | None) -> Program:
    """The code object of a file, decoded.

    Raises:
        ArgumentError: it is damaged. EmulatorError: it is for another architecture.
    """
    from fly.emulator import Program

    try:
        return Program(code, arch)
    except FlyError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
        struct.error,
    ) as error:
        raise ArgumentError(f"FILE {path!r} is a damaged code object: {type(error).__name__}: {error}") from error


def file_launch(path: str, options: argparse.Namespace) -> tuple[Launch, list[Argument]]:
    """The launch of a file's kernel that options describe, and its arguments.

    Raises:
        ArgumentError: options or arguments that do not fit the kernel.
        EmulatorError: a code object for another architecture than `options.arch`.
    """
    from fly.emulator import Region
    from fly.emulator.timing import Launch
    from fly.runtime.limits import amd_limits
    from fly.runtime.packing import dim3

    code, artefact = read_object(path, options.arch)
    program = program_of(path, code, options.arch)
    name = kernel_of(program, (artefact and artefact.kernel) if options.kernel is None else options.kernel)
    default_block = artefact.block if artefact else (64,)
    grid = dim3(numbers("--grid", options.grid), "--grid")
    block = dim3(numbers("--block", options.block) if options.block is not None else default_block, "--block")
    amd_limits("the emulated GPU", program.arch).check(name, grid, block)
    kernel = program.code.kernels[name]
    if options.lds is not None and not 0 <= options.lds < 2**31:
        raise ArgumentError(f"--lds {options.lds}; expected 0 to 2147483647")
    arguments = [parse(text) for text in options.args]
    packed = pack(arguments, kernel.explicit, kernel.kernarg_bytes, name)
    lds = options.lds if options.lds is not None else artefact.dynamic_shared if artefact else 0
    regions = [
        Region(a.array.ctypes.data, a.array.nbytes, a.text, a.defined) for a in arguments if a.array is not None
    ]
    return Launch(program, name, grid, block, packed, regions, lds, tuple(arguments)), arguments
