"""LLVM code generation through llvmlite: LLVM IR text in, assembly and object code out."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly.errors import CompileError
from fly.locks import lock_of_process

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True)
class Machine:
    """An LLVM target machine: triple, processor, features, and LLVM command-line options."""

    triple: str
    cpu: str
    features: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Emitted:
    """What code generation gave: optimised LLVM IR, assembly text, and object bytes (each empty if not asked for)."""

    llvm_ir: str
    assembly: str
    object: bytes


# llvmlite has one of its own, which a child would find taken if it was forked meanwhile
_LOCK = lock_of_process()


@functools.cache
def _binding() -> ModuleType:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    binding: ModuleType = llvm
    return binding


def emit(text: str, machine: Machine, *, want_object: bool, want_assembly: bool = True) -> Emitted:
    """Optimise LLVM IR at O3 with the current pass manager and generate code, once for each form that is wanted.

    LLVM's command-line options are global to a process, so a kernel that sets some is compiled in a process of
    its own and no other compile sees them.

    Raises:
        CompileError: LLVM rejected the IR, or an option.
    """
    if machine.options:
        return _emit_apart(text, machine, want_object, want_assembly)
    with _LOCK:
        return _emit_here(text, machine, want_object, want_assembly)


def _emit_here(text: str, machine: Machine, want_object: bool, want_assembly: bool) -> Emitted:
    llvm = _binding()
    try:
        module = llvm.parse_assembly(text)
        target = llvm.Target.from_triple(machine.triple).create_target_machine(
            cpu=machine.cpu, features=machine.features, opt=3, reloc="pic"
        )
        module.triple = machine.triple
        module.data_layout = str(target.target_data)
        module.verify()
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        llvm_ir = str(module)
        # code generation rewrites the module: each form needs its own copy
        object_code = target.emit_object(module.clone() if want_assembly else module) if want_object else b""
        return Emitted(llvm_ir, target.emit_assembly(module) if want_assembly else "", object_code)
    except RuntimeError as error:
        raise CompileError(f"LLVM rejected the kernel for {machine.cpu}: {error}") from None


def _python(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with this package in reach, wherever the caller found it."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@functools.cache
def _known_options() -> frozenset[str]:
    """The names of LLVM's options. LLVM lists them and exits, and ignores unknown ones when set as a library."""
    list_and_exit = "from fly.backends import llvm; llvm._set_options(['--help-hidden'])"
    return frozenset(re.findall(r"^ +--?([\w.-]+)", _python("-c", list_and_exit).stdout, re.M))


def _emit_apart(text: str, machine: Machine, want_object: bool, want_assembly: bool) -> Emitted:
    def fail(reason: str) -> CompileError:
        return CompileError(
            f"LLVM with options {' '.join(machine.options)} failed for {machine.cpu}: {reason[-2000:]}"
        )

    for option in machine.options:
        name = option.lstrip("-").partition("=")[0]
        if name not in _known_options():
            close = difflib.get_close_matches(name, _known_options())
            raise fail(f"unknown option {option}" + (f"; did you mean --{close[0]}?" if close else ""))
    request = json.dumps(
        {
            "text": text,
            "triple": machine.triple,
            "cpu": machine.cpu,
            "features": machine.features,
            "options": machine.options,
            "object": want_object,
            "assembly": want_assembly,
        }
    )
    done = _python("-m", "fly.backends.llvm", given=request)
    bad_value = re.search(r"^fly: (for the .*)$", done.stderr, re.M)
    if done.returncode != 0 or bad_value:
        raise fail(bad_value.group(1) if bad_value else done.stderr.strip())
    answer = json.loads(done.stdout)
    return Emitted(answer["llvm_ir"], answer["assembly"], bytes.fromhex(answer["object"]))


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    _set_options(request["options"])
    machine = Machine(request["triple"], request["cpu"], request["features"])
    emitted = _emit_here(request["text"], machine, request["object"], request["assembly"])
    return {"llvm_ir": emitted.llvm_ir, "assembly": emitted.assembly, "object": emitted.object.hex()}


def _set_options(options: Sequence[str]) -> None:
    llvm = _binding()
    for option in options:
        llvm.set_option("fly", option)


if __name__ == "__main__":
    json.dump(_serve(json.load(sys.stdin)), sys.stdout)
