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

from . import inspection
from .dispatch import AMD, BACKWARD, FORWARD, NVIDIA, Kernel, Pass, as_backward, choose, head_dims, refusal
from .problem.catalogue import BY_NAME
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
    request, tensors = described.call_of(request_of(options) or _call({}))
    first, *others = described.bindings_of(arch, request, tensors)
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


def _tuning(kernel: Kernel) -> str:
    return _listed(
        name if set(archs) == set(kernel.archs) else f"{name} ({_listed(archs)})"
        for name, archs in kernel.tuning.items()
    )


def _dims(kernel: Kernel) -> str:
    """Head dimensions, and whether v may have another one."""
    return head_dims(kernel) + ("; v's may differ" if kernel.mixed_dims else "")


COLUMNS = (
    Column("kernel", 10, lambda k: k.name if k.module else f"{k.name} (not built)"),
    Column("targets", 8, lambda k: _listed(k.archs)),
    Column("head_dim", 8, _dims),
    Column("dtypes", 6, lambda k: _listed(k.dtypes)),
    Column("features", 14, lambda k: _listed(k.features)),
    Column("tuning", 27, _tuning),
    Column("needs", 16, lambda k: _listed(need.what for need in k.needs)),
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
        text = "chosen" if kernel.name == chosen else "could serve it too" if why is None else f"no: it {why}"
        first, *rest = textwrap.wrap(text, WIDTH - 20)
        lines += [f"{arch:<8}  {kernel.name:<8}  {first}", *(f"{'':20}{line}" for line in rest)]
    if error is not None and of.forced.get():
        lines += textwrap.wrap(str(error), WIDTH)
    elif error is not None:
        lines.append(f"{arch:<8}  {'(none)':<8}  such a call raises an {type(error).__name__}")
    return "\n".join(lines)


FLAGS = tuple(name for name in BY_NAME if name not in ("packed", "split_kv", "debug_counts"))
_BYTES = {"bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1}
# flags that describe a call: (name, default, help)
_SIZES = (
    ("head_dim", 128, "elements of a head"),
    ("head_dim_v", None, "elements of a head of v and out (head_dim)"),
    ("batch", 1, "sequences"),
    ("seq_len", 1024, "queries of the longest sequence"),
    ("seq_len_kv", None, "keys of the longest sequence (seq_len)"),
    ("num_heads", 16, "query heads"),
    ("num_kv_heads", None, "key heads (num_heads)"),
    ("num_kv_splits", 1, "parts of the keys, 0 for automatic"),
    ("alignment", 16, "bytes that divide addresses and strides"),
)
# of those that have another range than 1 to 2^31 - 1
_RANGES = {"num_kv_splits": (0, 64), "alignment": (1, 16)}  # MAX_SPLITS, whose module is heavy


def _size(name: str) -> Callable[[str], int]:
    """Reads a flag of `_SIZES`."""
    least, most = _RANGES.get(name, (1, 2**31 - 1))

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return read


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


def add_call_flags(parser: Any) -> None:
    """Add `CALL_FLAGS`, by which `paths` and `inspect` are told of a call, to an argparse parser or group."""
    for name, default, meaning in _SIZES:
        shown = meaning if default is None else f"{meaning} ({default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=_size(name), metavar="N", help=shown)
    parser.add_argument("--dtype", choices=tuple(_BYTES), help="(bf16)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="(causal)")
    parser.add_argument("--packed", action="store_true", default=None, help="packed sequences (cu_seqlens)")
    parser.add_argument("--debug-counts", action="store_true", default=None, help="count rescales")
    parser.add_argument("--feature", action="append", choices=FLAGS, help="what else the call asks for")
    parser.add_argument("--tuning", action="append", metavar="NAME", help="a tuning option, such as waves_per_eu")


CALL_FLAGS = (*(name for name, *_ in _SIZES), "dtype", "causal", "packed", "debug_counts", "feature", "tuning")


def request_of(options: argparse.Namespace) -> Request | None:
    """The call that the flags describe; None when they describe none."""
    given = {name: value for name, value in vars(options).items() if name in CALL_FLAGS and value is not None}
    return _call(given) if given else None


def _call(given: Mapping[str, Any]) -> Request:
    """The call that these of `CALL_FLAGS` describe; what is not given has its default."""
    size: dict[str, Any] = {name: default for name, default, _ in _SIZES} | dict(given)
    heads = size["num_heads"]
    kv_heads = heads if size["num_kv_heads"] is None else size["num_kv_heads"]
    keys = size["seq_len"] if size["seq_len_kv"] is None else size["seq_len_kv"]
    dtype = given.get("dtype", "bf16")
    wanted = {
        "packed": "packed" in given,
        "split_kv": size["num_kv_splits"] > 1,
        "debug_counts": "debug_counts" in given,
        **{name: name in given.get("feature", ()) for name in FLAGS},
    }
    if heads % kv_heads:
        raise ArgumentError(f"--num-heads {heads} with --num-kv-heads {kv_heads}; accepted: a multiple of it")
    row = size["head_dim"] * _BYTES[dtype]
    return Request(
        head_dim=size["head_dim"],
        dtype=dtype,
        causal=given.get("causal", True),
        cross_seqlen=wanted["packed"] or keys != size["seq_len"],
        return_lse=False,
        batch=size["batch"],
        seq_len=size["seq_len"],
        seq_len_kv=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        softmax_scale=1.0,
        num_kv_splits=size["num_kv_splits"],
        alignment=size["alignment"],
        kv_alignment=size["alignment"],
        q_pitch=heads * row,
        kv_pitch=kv_heads * row,
        features=tuple(name for name in BY_NAME if wanted[name]),
        tuning=dict.fromkeys(given.get("tuning", ()), True),
        head_dim_v=size["head_dim_v"],
    )


def paths(options: argparse.Namespace) -> None:
    """`python -m fly paths`."""
    of, request = (BACKWARD if options.backward else FORWARD), request_of(options)
    archs = TARGETS if options.arch is None else (options.arch,)
    if options.json:
        print(json.dumps(inspection.report(of, archs, request), indent=2))
        return
    if request is None:
        print(table(k for k in of.table() if set(archs) & set(k.archs)))
        print("A call takes the first row that serves it.")
    else:
        asked = as_backward(request) if options.backward else request
        print("\n".join(verdicts(arch, asked, of) for arch in archs))
    for variable in (of.forced, config.DISABLE_DUALWAVE_SWP):
        if variable.get():
            print(f"{variable.name}={variable.get()} is set")
