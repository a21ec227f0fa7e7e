"""What `python -m fly` knows of these kernels: `paths`, and what `inspect` shows of a call or by a short name.

Imports nothing heavy: every command of fly's command line loads this module.
"""

from __future__ import annotations

import argparse
import importlib
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from fly import config
from fly.errors import ArgumentError, UnsupportedError

from . import inspection, prebuild
from .call_flags import CALL_FLAGS, add_call_flags, call, request_of
from .dispatch import AMD, BACKWARD, FORWARD, NVIDIA, Kernel, Pass, as_backward, choose, head_dims, refusal
from .problem.contract import HEAD_DIMS, Request
from .profiled import CALLS

if TYPE_CHECKING:
    from fly.lang.signature import Spec

WIDTH = 118  # of a line
TARGETS = AMD + NVIDIA
__all__ = [
    "CALLS",
    "CALL_FLAGS",
    "KERNELS",
    "add_call_flags",
    "add_commands",
    "chosen_for",
]  # see `fly.runtime.library.Library`
FLASH_ATTN = "flash_attn"
# what `inspect flash_attn --set` takes, and the values of each
SETTINGS: dict[str, Sequence[Any]] = {
    "head_dim": HEAD_DIMS,
    "causal": (False, True),
    "dtype": ("bf16", "f16"),
    "packed": (False, True),
    "split": (False, True),
}


def _accepted(values: Sequence[Any]) -> str:
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]} in steps of {values.step}"
    return ", ".join(map(str, values))


def flash_attn(arch: str, settings: dict[str, Any]) -> tuple[Any, tuple[Spec, ...], dict[str, Any], int]:
    """The generic flash-attention kernel as its wrapper builds it, for aligned tensors and with log-sum-exp.

    `settings` are Python values by the names of `SETTINGS`. Returns (kernel, argument specs, static parameters,
    threads of a block).

    Raises:
        ArgumentError: a setting that it does not have.
    """
    from fly.backends.target import target
    from fly.lang.signature import ScalarSpec, TensorSpec

    for name, value in settings.items():
        if name not in SETTINGS:
            raise ArgumentError(f"{FLASH_ATTN} has no setting {name!r}; expected {', '.join(SETTINGS)}")
        accepted = SETTINGS[name]
        if type(value) is not type(accepted[0]) or value not in accepted:
            raise ArgumentError(f"setting {name}={value!r}; accepted: {_accepted(accepted)}")
    generic = importlib.import_module(".flash_attn_generic", __package__)
    dtype, packed, split = settings.get("dtype", "bf16"), settings.get("packed", False), settings.get("split", False)
    description = target(arch)
    options = generic.options_for(description, settings.get("head_dim", 128), settings.get("causal", False), 16)

    def tensor(element: str, rank: int) -> TensorSpec:
        return TensorSpec(element, rank, 16, True)

    rank = 3 if packed else 4
    results = tensor("f32" if split else dtype, rank + split), tensor("f32", rank - 1 + split)
    offsets = (tensor("i32", 1) if packed else None,) * 2
    specs = (*[tensor(dtype, rank)] * 3, *results, ScalarSpec("f32"), *offsets)
    return generic.flash_attn_generic, specs, {"options": options}, options.waves * description.wave_size


KERNELS = {FLASH_ATTN: flash_attn}


def chosen_for(
    arch: str, options: argparse.Namespace
) -> tuple[str, tuple[Any, tuple[Spec, ...], dict[str, Any], Any]]:
    """What `inspect` shows of a call on a target: which kernel serves it and why others do not, in words, and
    (kernel, argument specs, static parameters, block) of its build.

    Raises:
        ArgumentError: such a call is a mistake.
        UnsupportedError: no kernel serves it.
    """
    if arch not in TARGETS:
        raise ArgumentError(f"--arch {arch!r}; accepted where a call is described: {', '.join(TARGETS)}")
    described = importlib.import_module(".described", __package__)
    request, tensors = described.call_of(request_of(options) or call({}))
    first, *others = described.attention_first(described.bindings_of(arch, request, tensors))
    lines = [verdicts(arch, request), "", f"{first.kernel.name}, grid {' x '.join(map(str, first.grid))}"]
    lines += textwrap.wrap(_statics(first.statics), WIDTH, initial_indent="    ", subsequent_indent="    ")
    lines += [f"and {other.kernel.name}, grid {' x '.join(map(str, other.grid))}" for other in others]
    return "\n".join(lines), (first.kernel, first.specs, dict(first.statics), first.block)


def _statics(statics: Mapping[str, Any]) -> str:
    """Static parameters, an options dataclass' one by one, without defaults and what the call's features are."""
    shown = []
    for name, value in statics.items():
        if not is_dataclass(value):
            shown.append(f"{name}={value!r}")
            continue
        chosen = {field.name: getattr(value, field.name) for field in fields(value)}
        defaults = {field.name: field.default for field in fields(value)}
        own = (name for name, of in chosen.items() if of != defaults[name] and not is_dataclass(of))
        shown += [f"{name}={chosen[name]!r}" for name in own]
    return ", ".join(shown)


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, width in characters, and what it shows of a kernel."""

    title: str
    width: int
    show: Callable[[Kernel], str]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "-"


def _by_arch(kernel: Kernel, names: Mapping[str, tuple[str, ...]]) -> str:
    """Names, with their architectures where they are not all of the kernel's."""
    return _listed(
        name if set(archs) == set(kernel.archs) else f"{name} ({_listed(archs)})" for name, archs in names.items()
    )


def _features(kernel: Kernel) -> str:
    return _by_arch(kernel, {name: kernel.partly.get(name, kernel.archs) for name in kernel.features})


def _dims(kernel: Kernel) -> str:
    """Head dimensions, and whether v may have another one."""
    return head_dims(kernel) + ("; v's may differ" if kernel.mixed_dims else "")


def _left(kernel: Kernel) -> tuple[str, ...]:
    """What it leaves to rows below, in words."""
    return () if kernel.leaves is None else (f"leaves to a row below: {kernel.leaves.what}",)


COLUMNS = (
    Column("kernel", 14, lambda k: k.name if k.module else f"{k.name} (not built)"),
    Column("targets", 8, lambda k: _listed(k.archs)),
    Column("head_dim", 8, _dims),
    Column("dtypes", 6, lambda k: _listed(k.dtypes)),
    Column("features", 14, _features),
    Column("tuning", 23, lambda k: _by_arch(k, k.tuning)),
    Column("needs", 16, lambda k: _listed((*(need.what for need in k.needs), *_left(k)))),
    Column("why it is there", 16, lambda k: k.reason),
)


def table(kernels: Iterable[Kernel]) -> str:
    """The dispatch table for people, its cells wrapped so that lines stay below `WIDTH` characters."""
    lines = _row([[column.title] for column in COLUMNS])
    lines.append("-" * WIDTH)
    for kernel in kernels:
        lines += _row([textwrap.wrap(column.show(kernel), column.width) for column in COLUMNS])
        lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[Sequence[str]]) -> list[str]:
    height = max(map(len, cells))
    padded = [
        [line.ljust(column.width) for line in (*cell, *[""] * (height - len(cell)))]
        for cell, column in zip(cells, COLUMNS)
    ]
    return ["  ".join(line).rstrip() for line in zip(*padded)]


def verdicts(arch: str, request: Request, of: Pass = FORWARD) -> str:
    """For one target: which kernel serves a pass of a request, and why those before it do not."""
    try:
        chosen, error = choose(arch, request, of).name, None
    except UnsupportedError as refused:
        chosen, error = "", refused
    lines = []
    for kernel in of.table():
        if arch not in kernel.archs:
            continue
        why = refusal(kernel, arch, request)
        could = "could serve it too"
        if kernel.leaves is not None and kernel.yields(request):
            could += f", and leaves to a row below: {kernel.leaves.what}"
        text = "chosen" if kernel.name == chosen else could if why is None else f"no: it {why}"
        first, *rest = textwrap.wrap(text, WIDTH - 20)
        lines += [f"{arch:<8}  {kernel.name:<8}  {first}", *(f"{'':20}{line}" for line in rest)]
    if error is not None and of.forced.get():
        lines += textwrap.wrap(str(error), WIDTH)
    elif error is not None:
        lines.append(f"{arch:<8}  {'(none)':<8}  such a call raises an {type(error).__name__}")
    return "\n".join(lines)


def add_commands(commands: Any) -> None:
    """Add this library's commands to an argparse subparsers object."""
    parser = commands.add_parser(
        "paths",
        help="show which flash-attention kernel serves which call, and why",
        description="Without a flag that describes a call: the dispatch table, in order of preference. With one: "
        "which kernel serves that call, and why the others do not; the rest of the call has the defaults below.",
    )
    parser.add_argument("--arch", choices=TARGETS, help="for one target only")
    parser.add_argument(
        "--json", action="store_true", help="the same for programs, by a stable schema (docs/targets.md)"
    )
    parser.add_argument("--backward", action="store_true", help="the kernels of the backward pass, for such a call")
    add_call_flags(parser)
    parser.set_defaults(run=paths)
    prebuild.add_command(commands)


def paths(options: argparse.Namespace) -> None:
    """`python -m fly paths`."""
    of, request = (BACKWARD if options.backward else FORWARD), request_of(options)
    archs = TARGETS if options.arch is None else (options.arch,)
    if options.json:
        print(json.dumps(inspection.report(of, archs, request), indent=2))
        return
    if request is None:
        print(table(k for k in of.table() if set(archs) & set(k.archs)))
        print("A call takes the first row that serves it and does not leave it to a row below which does.")
    else:
        asked = as_backward(request) if options.backward else request
        print("\n".join(verdicts(arch, asked, of) for arch in archs))
    for variable in (of.forced, config.DISABLE_DUALWAVE_SWP):
        if variable.get():
            print(f"{variable.name}={variable.get()} is set")
