"""The command line: `python -m fly env`, `inspect`, `emulate`, and what the kernel library adds."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fly import config
from fly.errors import (
    ArgumentError,
    AuthorError,
    CompileError,
    DeviceError,
    EmulatorError,
    FlyError,
    SharedMemoryError,
    needs_packages,
)
from fly.runtime import emulate_cli, profile_cli, tuned_results
from fly.runtime.library import Library
from fly.runtime.object_files import author_code, imported, literal, numbers

if TYPE_CHECKING:
    from fly.lang.signature import Spec

# errors of a kernel or a machine; all others are mistakes in what was asked for
_FAILED = (AuthorError, CompileError, DeviceError, EmulatorError, SharedMemoryError)


def main(argv: Sequence[str] | None, library: Library) -> int:
    """Run a command of fly's or of `library`'s; returns the exit status.

    It is 2 for bad usage, and 1 after what else failed or was found.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files and variables need not be text
            stream.reconfigure(errors="backslashreplace")
    try:
        with needs_packages("this command"):
            parser = _parser(library)
            for argument in sys.argv[1:] if argv is None else argv:
                if argument.startswith("--") and argument.endswith("=--"):  # argparse would make an empty list of it
                    parser.error(f"argument {argument.removesuffix('=--')}: '--' is no value")
            options = parser.parse_args(argv)
            options.run(options)
    except FlyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, _FAILED) else 2
    return 0


def _parser(library: Library) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fly", description="Look at kernels and at the environment.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    env = commands.add_parser("env", help="print every environment variable, its value and its meaning")
    env.set_defaults(run=_env)

    inspect = commands.add_parser("inspect", help="show any stage of a kernel's compilation")
    inspect.add_argument(
        "kernel",
        nargs="?",
        help=f"module:kernel, such as fly_attention.flash_attn_generic:flash_attn_generic, or {_names(library)}; "
        "without it, the one that would serve the call which the flags below describe",
    )
    inspect.add_argument("--arch", default="gfx950", help="target architecture (default: gfx950)")
    inspect.add_argument(
        "--stage",
        default="resources",
        help="trace, a pass's name, llvm, llvm-optimised, isa, resources (default), or 'list'",
    )
    inspect.add_argument("--args", metavar="SPECS", help="arguments, such as 'bf16[4] bf16[4] f32 none'")
    inspect.add_argument("--block", help="threads of a block, such as 256 or 32,4 (default: 256)")
    inspect.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a static parameter (Python literal)"
    )
    library.add_call_flags(inspect.add_argument_group("a call", "for which a kernel is chosen where none is named"))
    inspect.set_defaults(run=functools.partial(_inspect, library=library))
    emulate_cli.add_command(commands)
    tuned_results.add_command(commands)
    library.add_commands(commands)
    profile_cli.add_command(commands, library.CALLS)
    return parser


def _names(library: Library) -> str:
    return " or ".join(library.KERNELS)


def _env(_: argparse.Namespace) -> None:
    for variable in config.VARIABLES:
        given = os.environ.get(variable.name)
        shown = f"{variable.name}={variable.default}" if given is None else f"{variable.name}={given}  (set)"
        print(f"{shown}\n    {variable.doc}")


def parse_spec(text: str) -> Any:
    """A description of an argument: `bf16[4]` is a tensor of rank 4 (unit last stride, 16-byte aligned), `f32` a
    scalar, `none` a missing optional argument.

    Raises:
        ArgumentError: none of these.
    """
    from fly.lang.signature import ScalarSpec, TensorSpec

    if text == "none":
        return None
    name, bracket, rank = text.partition("[")
    if not bracket:
        return ScalarSpec(name)
    if not re.fullmatch(r"[0-9]{1,2}\]", rank):
        raise ArgumentError(f"argument description {text!r}; expected dtype[rank], rank below 100, dtype, or none")
    return TensorSpec(name, int(rank[:-1]), 16, int(rank[:-1]) > 0)


def kernel_at(name: str, otherwise: str = "") -> Any:
    """The kernel that `module:kernel` names; `otherwise`: what else would have been accepted.

    Raises:
        ArgumentError: there is no such module or kernel.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ArgumentError(f"kernel {name!r}; expected module:kernel{otherwise}")
    found = getattr(imported(f"kernel {name!r}", module_name), attribute, None)
    if not hasattr(found, "trace"):
        raise ArgumentError(f"kernel {name!r}: {module_name} has no kernel {attribute!r}")
    return found


def _check_subject(options: argparse.Namespace, library: Library) -> None:
    """A kernel that is named has settings of its own, and a call describes them."""
    if options.kernel is None:
        given = {"--args": options.args is not None, "--block": options.block is not None, "--set": options.set}
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise ArgumentError(f"{', '.join(wrong)} without a kernel; accepted: flags that describe a call")
        return
    wrong = [f"--{name.replace('_', '-')}" for name in library.CALL_FLAGS if getattr(options, name) is not None]
    if wrong:
        raise ArgumentError(f"{', '.join(wrong)} with a kernel; accepted: --set, or a call without a kernel")


def _inspect(options: argparse.Namespace, library: Library) -> None:
    from fly.backends.compile import passes
    from fly.backends.target import target
    from fly.runtime.compile import compile_kernel
    from fly.runtime.inspect import resources_report
    from fly.runtime.packing import check_block, dim3

    stages = [
        "trace",
        *(p.name for p in passes(target(options.arch))),
        "llvm",
        "llvm-optimised",
        "isa",
        "resources",
    ]
    if options.stage == "list":
        print("\n".join(stages))
        return
    if options.stage not in stages:
        raise ArgumentError(f"--stage {options.stage!r}; expected one of {', '.join(stages)}")
    _check_subject(options, library)
    statics = dict(literal("--set", text) for text in options.set)
    specs: Sequence[Spec]
    block: int | tuple[int, ...]
    if options.kernel is None:
        text, (kernel, specs, statics, block) = library.chosen_for(options.arch, options)
        print(text, end="\n\n")
    elif options.kernel in library.KERNELS:
        kernel, specs, statics, block = library.KERNELS[options.kernel](options.arch, statics)
    else:
        kernel = kernel_at(options.kernel, f" or {_names(library)}")
        specs = [parse_spec(text) for text in (options.args or "").split()]
        block = numbers("--block", "256" if options.block is None else options.block)
    block = dim3(block, "--block")
    check_block(block)
    shown: dict[str, str] = {}
    statics = kernel.bind_statics(statics)
    with author_code(f"kernel {options.kernel or kernel.name!r} with these settings"):
        artefact = compile_kernel(
            kernel,
            tuple(specs),
            statics,
            options.arch,
            block,
            observe=lambda stage, text: shown.__setitem__(stage, text) if stage == options.stage else None,
        )
    if options.stage == "resources":
        print(resources_report(_with_report(artefact)))
    else:
        print(shown[options.stage])


def _with_report(artefact: Any) -> Any:
    """NVIDIA's registers and spills are known only to ptxas: ask it, where it is installed."""
    if artefact.target.startswith("sm_"):
        from fly.backends.nvvm.codegen import resources

        return replace(artefact, resources=resources(artefact.isa, artefact.target, artefact.dynamic_shared))
    return artefact
