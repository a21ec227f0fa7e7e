"""`python -m fly prebuild`: from a spec, which describes calls, to the builds that they take and a folder of them.

A spec is a TOML or a JSON file:

    targets = ["sm_90a"]                  # of every entry that names none

    [[call]]                              # a call of flash attention, as `python -m fly inspect` takes it
    head_dim = [64, 128]                  # a list: each of its values
    dtype = "bf16"
    causal = true
    batch = [1, 16]
    seq_len = 4095
    feature = ["window", "sink"]          # what is asked for together; a list of lists for several such sets
    lse = true                            # with a log-sum-exp
    backward = true                       # and the same call with gradients

    [[kernel]]                            # any other kernel
    kernel = "package.module:kernel"
    arguments = "bf16[4] bf16[4] f32 none"
    block = 256
    set = {vector = 4}                    # static parameters

    [[program]]                           # whatever a function launches on CPU tensors, none of which is computed
    function = "package.module:function"
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fly import config
from fly.errors import ArgumentError, CompileError, UnsupportedError
from fly.runtime.compile import toolchain
from fly.runtime.launch import bindings
from fly.runtime.packing import check_block, dim3
from fly.runtime.planned import planning
from fly.runtime.prebuild import compiled, fill, progress_bar, settings_of, unique
from fly.runtime.prebuilt import Build, Folder, source_digest

from .call_flags import BYTES, CALL_FLAGS, FLAGS, RANGES, SIZES, call
from .dispatch import AMD, BACKWARD, FORWARD, NVIDIA
from .problem.contract import DQ_SUMS
from .receipts import RECEIPTS

TARGETS = AMD + NVIDIA
_NAMED = {"dtype": tuple(BYTES), "dq_accumulate": DQ_SUMS}  # whose values are some words
_SETS = ("feature", "tuning")  # whose values are lists
_SWITCHES = ("causal", "packed", "debug_counts", "lse", "backward")
_DEFAULTS = {**{name: default for name, default, _ in SIZES}, "dtype": "bf16", "dq_accumulate": DQ_SUMS[0]}
_OF_CALL = (*CALL_FLAGS, "lse", "backward", "targets", "compute_units")
_OF_KERNEL = ("kernel", "arguments", "block", "set", "targets")
_OF_PROGRAM = ("function", "targets", "compute_units")
_OF_SPEC = ("targets", "call", "kernel", "program")


@dataclass(frozen=True)
class Planned:
    """What a spec comes to: builds, each once, and the calls that no kernel serves, with the reason."""

    builds: tuple[Build, ...]
    unserved: tuple[str, ...]


def read_spec(path: Path) -> Mapping[str, Any]:
    """A spec file, TOML or JSON by its suffix.

    Raises:
        ArgumentError: it cannot be read, or is neither.
    """
    if path.suffix not in (".toml", ".json"):
        raise ArgumentError(f"--spec {path}; accepted: a file whose name ends in .toml or .json")
    try:
        text = path.read_bytes().decode()
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ArgumentError(f"--spec {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--spec {path}: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"--spec {path} holds a {type(found).__name__}; accepted: a table")
    return found


def plan(spec: Mapping[str, Any], targets: Sequence[str] = (), only: Mapping[str, Any] | None = None) -> Planned:
    """The builds of a spec; nothing is compiled.

    `targets`: architectures in the place of the spec's own; `only`: values of `head_dim` and `dtype`, of which calls
    keep these.

    Raises:
        ArgumentError: the spec is not as the module says; the message names the entry.
        UnsupportedError: an entry of which no kernel serves any call.
    """
    _check_names("the spec", spec, _OF_SPEC)
    general = targets or _targets("the spec", spec)
    builds: list[Build] = []
    unserved: list[str] = []
    for kind, names in (("call", _OF_CALL), ("kernel", _OF_KERNEL), ("program", _OF_PROGRAM)):
        for number, entry in enumerate(_entries(spec, kind), 1):
            what = f"{kind} {number}"
            _check_names(what, entry, names)
            archs = targets or _targets(what, entry) or general
            if not archs:
                raise ArgumentError(f"{what} has no targets; accepted: some of {', '.join(TARGETS)}, or --arch")
            if kind != "call":
                of = _of_kernel if kind == "kernel" else _of_program
                builds += itertools.chain.from_iterable(of(what, entry, arch) for arch in archs)
                continue
            found, refused = _of_calls(what, entry, archs, only or {})
            builds += found
            unserved += refused
            if refused and not found:
                raise UnsupportedError(refused[0])
    if not builds:
        raise ArgumentError(
            "the spec describes nothing to build; accepted: [[call]], [[kernel]] and [[program]] entries"
        )
    return Planned(unique(builds), tuple(unserved))


def _check_names(what: str, given: Any, accepted: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{what} is {given!r}; accepted: a table")
    for name in given:
        if name not in accepted:
            raise ArgumentError(f"{what} has {name!r}; accepted: {', '.join(accepted)}")


def _entries(spec: Mapping[str, Any], kind: str) -> Sequence[Any]:
    entries = spec.get(kind, ())
    if not isinstance(entries, list | tuple):
        raise ArgumentError(f"{kind} is {entries!r}; accepted: a list of tables ([[{kind}]])")
    return entries


def _targets(what: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    named = given.get("targets", ())
    if not isinstance(named, list | tuple) or not all(name in TARGETS for name in named):
        raise ArgumentError(f"{what}: targets is {named!r}; accepted: a list of {', '.join(TARGETS)}")
    return tuple(named)


def _of_kernel(what: str, entry: Mapping[str, Any], arch: str) -> list[Build]:
    from fly.runtime.cli import kernel_at, parse_spec

    name, arguments, block = entry.get("kernel"), entry.get("arguments", ""), entry.get("block", 256)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ArgumentError(
            f"{what}: kernel is {name!r}, arguments {arguments!r}; accepted: 'module:kernel', and text"
        )
    statics = entry.get("set", {})
    if not isinstance(statics, Mapping):
        raise ArgumentError(f"{what}: set is {statics!r}; accepted: a table of static parameters")
    kernel = kernel_at(name)
    threads = dim3(tuple(block) if isinstance(block, list) else block, f"{what}: block")
    check_block(threads)
    specs = tuple(parse_spec(text) for text in arguments.split())
    kernel.signature.flatten(specs)
    return [Build(kernel, specs, kernel.bind_statics(statics), arch, threads)]


def _of_program(what: str, entry: Mapping[str, Any], arch: str) -> list[Build]:
    """What a function launches, in a process where it has not run before: calls that were planned stay so."""
    from fly.runtime.object_files import author_code, imported

    name = entry.get("function")
    if not isinstance(name, str) or ":" not in name:
        raise ArgumentError(f"{what}: function is {name!r}; accepted: 'module:function'")
    module, _, attribute = name.partition(":")
    function = getattr(imported(what, module), attribute, None)
    if not callable(function):
        raise ArgumentError(f"{what}: {module} has no function {attribute!r}")
    units = _units(what, entry)
    with planning(arch, units), bindings() as found, config.CHECK_INPUTS.set_to("0"), author_code(f"{what} ({name})"):
        function()
    if not found:
        raise ArgumentError(f"{what}: {name} launches nothing on CPU tensors")
    return [Build.of(binding, arch) for binding in found]


def _units(what: str, entry: Mapping[str, Any]) -> int | None:
    units = entry.get("compute_units")
    if units is not None and (type(units) is not int or units < 1):
        raise ArgumentError(f"{what}: compute_units is {units!r}; accepted: a whole number from 1 on")
    return units


def _of_calls(
    what: str, entry: Mapping[str, Any], archs: Sequence[str], only: Mapping[str, Any]
) -> tuple[list[Build], list[str]]:
    """(builds, why calls are not served) of all combinations of an entry's values."""
    from . import described

    units = _units(what, entry)
    builds: list[Build] = []
    unserved: list[str] = []
    for one in _combinations(what, entry, only):
        lse, backward = one.pop("lse", False), one.pop("backward", False)
        shown = ", ".join(f"{name}={value!r}" for name, value in one.items())
        try:
            passes = [(FORWARD, *described.call_of(call(one), return_lse=lse))]
            if backward:
                passes.append((FORWARD, *described.call_of(call(one), return_lse=True)))
                passes.append((BACKWARD, *described.of_backward(*passes[-1][1:])))
        except ArgumentError as error:
            raise ArgumentError(f"{what} ({shown}): {error}") from None
        for arch in archs:
            for of, asked, given in passes:
                try:
                    found = described.bindings_of(arch, asked, given, of, units)
                except UnsupportedError as error:
                    unserved.append(f"{what} ({shown}) on {arch}, {of.name}: {error}")
                    continue
                builds += (Build.of(binding, arch) for binding in found)
    return builds, unserved


def _combinations(what: str, entry: Mapping[str, Any], only: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each name; those that are False or empty are left out."""
    entry = {**{name: _DEFAULTS[name] for name in only}, **entry}
    names = [name for name in entry if name not in ("targets", "compute_units")]
    alternatives = []
    for name in names:
        values = _alternatives(name, entry[name])
        for value in values:
            _check_value(what, name, value)
        kept = [value for value in values if value in only.get(name, values)]
        alternatives.append(kept)
    for chosen in itertools.product(*alternatives):
        one = dict(zip(names, chosen))
        yield {name: value for name, value in one.items() if value or name == "causal" or name in RANGES}


def _alternatives(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return (value,)
    if name in _SETS:
        return [tuple(one) for one in value] if value and isinstance(value[0], list | tuple) else (tuple(value),)
    return value


def _check_value(what: str, name: str, value: Any) -> None:
    accepted: str | None = None
    if name in _SWITCHES:
        accepted = None if isinstance(value, bool) else "true or false"
    elif name in _NAMED:
        accepted = None if value in _NAMED[name] else ", ".join(_NAMED[name])
    elif name == "feature":
        fits = isinstance(value, tuple) and all(isinstance(one, str) and one in FLAGS for one in value)
        accepted = None if fits else f"a list of {', '.join(FLAGS)}"
    elif name == "tuning":
        fits = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        accepted = None if fits else "a list of tuning options"
    elif name in {size for size, *_ in SIZES}:
        least, most = RANGES.get(name, (1, 2**31 - 1))
        fits = type(value) is int and least <= value <= most
        accepted = None if fits else f"a whole number from {least} to {most}"
    if accepted is not None:
        raise ArgumentError(f"{what}: {name} is {value!r}; accepted: {accepted}")


def add_command(commands: Any) -> None:
    """Add `prebuild` to an argparse subparsers object."""
    parser = commands.add_parser(
        "prebuild",
        help="compile the builds of a set of calls into a folder, from which programs run without a compiler",
        description="Set FLY_PREBUILT to the folder afterwards. Any number of these commands may fill one folder.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--spec", type=Path, metavar="FILE", help="calls, in TOML or JSON (docs/prebuilding.md)")
    what.add_argument("--receipt", choices=tuple(RECEIPTS), help="a named set of calls")
    parser.add_argument("--arch", action="append", choices=TARGETS, help="targets in the place of the spec's")
    parser.add_argument("--head-dim", action="append", type=int, metavar="N", help="of calls with these only")
    parser.add_argument("--dtype", action="append", choices=tuple(BYTES), help="of calls with these only")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="(prebuilt, in the cache's directory)")
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="processes (one a CPU, 8 at most)")
    parser.add_argument("--cubin", action="store_true", help="NVIDIA machine code by ptxas, not PTX for the driver")
    parser.add_argument("--list", action="store_true", help="print the builds as JSON and compile nothing")
    parser.set_defaults(run=run)


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        from argparse import ArgumentTypeError

        raise ArgumentTypeError(f"expected a whole number from 1 to 1024, got {text!r}")
    return int(text)


def run(options: Namespace) -> None:
    """`python -m fly prebuild`.

    Raises:
        CompileError: builds failed; names each.
    """
    spec = read_spec(options.spec) if options.spec is not None else RECEIPTS[options.receipt]
    only = {name: values for name in ("head_dim", "dtype") if (values := getattr(options, name))}
    planned = plan(spec, options.arch or (), only)
    for line in planned.unserved:
        print(f"not served: {line}", file=sys.stderr)
    if options.list:
        print(json.dumps([settings_of(build) for build in planned.builds], indent=2))
        return
    into = (options.into or config.CACHE_DIR.get() / "prebuilt").absolute()
    folder = Folder(into)
    arguments = _arguments(options, into)
    code = f"{toolchain()}\n{'cubin' if options.cubin else 'PTX'}"
    sources = {name: source_digest(name) for name in {"fly", *(build.package for build in planned.builds)}}
    folder.begin(sources, code, f"python -m fly {shlex.join(arguments)}")
    missing = [build for build in planned.builds if not folder.has(build)]
    jobs = min(options.jobs or min(os.cpu_count() or 1, 8), len(missing))
    # the others do the same, and say nothing
    quiet = [sys.executable, "-m", "fly", *arguments, "--jobs", "1"]
    others = [subprocess.Popen(quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(jobs - 1)]
    try:
        with progress_bar(folder, planned.builds) as advance:
            failed = fill(folder, planned.builds, lambda build: compiled(build, cubin=options.cubin), advance)
    finally:
        for other in others:
            other.terminate()
            other.wait()
    if failed:
        raise CompileError("\n".join(f"{failure.build}: {failure.error}" for failure in failed))
    print(f"{len(planned.builds)} builds in {into}, {len(missing)} of them were missing\nFLY_PREBUILT={into}")


def _arguments(options: Namespace, into: Path) -> list[str]:
    """The command line that asks for the same."""
    found = ["prebuild", "--into", str(into)]
    if options.spec is not None:
        found += ["--spec", str(options.spec.absolute())]
    else:
        found += ["--receipt", options.receipt]
    for name in ("arch", "head_dim", "dtype"):
        for value in getattr(options, name) or ():
            found += [f"--{name.replace('_', '-')}", str(value)]
    return [*found, "--cubin"] if options.cubin else found
