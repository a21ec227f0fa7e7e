"""`python -m fly profile`: cycles of a kernel on an AMD GPU, from the timing model."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly import config
from fly.errors import ArgumentError, DeviceError
from fly.runtime.emulate_arguments import HELP
from fly.runtime.library import ProfiledCall
from fly.runtime.object_files import (
    add_launch_options,
    author_code,
    file_launch,
    imported,
    kernel_of,
    literal,
    numbers,
    program_of,
    read_object,
)

if TYPE_CHECKING:
    from fly.emulator.timing import Launch, Parameters, Session

_MOST_RESIDENT = 64  # workgroups on a compute unit: more than waves fit
_NO_CYCLES = ("launch_microseconds", "sustained_clock")  # figures that change times, not cycles
_DESCRIPTION = """\
Predict what a kernel costs on an AMD GPU: the emulator executes one workgroup, and a model of a compute unit replays
what its waves did. Prints cycles, how busy the units were, what each wave waited for, and where."""
_EPILOG = f"""\
KERNEL is a code object (.hsaco, .co), assembly (.s), an artefact of fly.compile, module:function of a Python function
that launches kernels on CPU tensors (the first launch counts), or a name with settings:
{{names}}

examples:
  python -m fly profile flash_attn --arch gfx950 --set seq=4096 causal=True
  python -m fly profile flash_attn --launch --set batch=16 seq=8192 heads=16 causal=True
  python -m fly profile k.hsaco --grid 8 --block 512 --args random:f32[4096] out:-:f32[4096] --trace k.json
  python -m fly profile old.s --compare new.s --grid 1 --block 512 --args …

{HELP}"""


def add_command(commands: Any, calls: Mapping[str, ProfiledCall]) -> None:
    """Add `profile` to the subcommands of an argparse parser; `calls` are what KERNEL may name besides."""
    parser = commands.add_parser(
        "profile",
        help="predict a kernel's cycles on an AMD GPU, and where its waves wait",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(names="\n".join(f"  {name}: {call.settings}" for name, call in calls.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", metavar="KERNEL", help="what to profile, see below")
    parser.add_argument("--arch", help="gfx942 or gfx950 (default: what a file was compiled for, else gfx950)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="settings")
    parser.add_argument("--compare", metavar="OTHER", help="a second object, on the same launch and in the same run")
    parser.add_argument("--workgroup", type=int, default=0, metavar="N", help="which workgroup (default: 0)")
    parser.add_argument("--resident", type=int, metavar="N", help="workgroups on a compute unit (default: what fits)")
    parser.add_argument("--cold", type=int, metavar="N", help="one cache line in N comes from memory, not from L2")
    parser.add_argument("--launch", action="store_true", help="also the time of the whole grid")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of one of the model's figures",
    )
    parser.add_argument(
        "--figures", action="store_true", help="print the model's figures with their sources, and stop"
    )
    parser.add_argument(
        "--alternatives", action="store_true", help="cycles with every other value of a disputed figure"
    )
    parser.add_argument("--trace", metavar="FILE.json", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--plot", metavar="FILE.png", help="write a timeline (needs matplotlib)")
    parser.add_argument("--cycles", metavar="FROM:TO", help="which cycles to draw (default: 12,000 in the middle)")
    add_launch_options(parser)
    parser.set_defaults(run=functools.partial(run, calls=calls))


def run(options: argparse.Namespace, calls: Mapping[str, ProfiledCall]) -> None:
    """The command.

    Raises:
        ArgumentError: options that do not fit. EmulatorError: a fault. UnsupportedError: matplotlib is missing.
    """
    from fly.emulator.timing import Parameters
    from fly.emulator.timing.figures import ARCHS
    from fly.emulator.timing.report import chrome_trace, report, write_trace

    arch = "gfx950" if options.arch is None else options.arch
    if arch not in ARCHS:
        raise ArgumentError(f"--arch {arch!r}; the timing model has {', '.join(ARCHS)}")
    if options.resident is not None and not 1 <= options.resident <= _MOST_RESIDENT:
        raise ArgumentError(f"--resident {options.resident}; expected at least 1 and at most {_MOST_RESIDENT}")
    if options.cold is not None and not 0 <= options.cold < 2**31:
        raise ArgumentError(f"--cold {options.cold}; expected 0 or more, below 2^31")
    if options.figures:
        print(_figures(arch))
        return
    overrides = dict(_figure(text) for text in options.figure)
    Parameters.of(arch, **overrides)  # mistakes before a kernel runs
    window = _window(options.cycles)
    launch = _launch(options, arch, calls)
    parameters = Parameters.of(launch.program.arch, **overrides)
    for title, subject in _subjects(options, launch):
        session = _session(subject, parameters, options)
        result = session.replay(resident=options.resident)
        operations = session.operations()
        print(f"{title}\n{report(session.machine, operations, result)}\n")
        print(_alternatives(session, options, result.cycles))
        if options.launch:
            print(_whole(session))
        suffix = "" if subject is launch else ".other"
        if options.trace:
            trace = chrome_trace(session.machine, operations, result, window)
            print(write_trace(_named(options.trace, suffix), trace))
        if options.plot:
            from fly.emulator.timing.plot import write_plot

            print(write_plot(_named(options.plot, suffix), title, operations, result, window))


def _subjects(options: argparse.Namespace, launch: Launch) -> Iterator[tuple[str, Launch]]:
    yield options.subject, launch
    if options.compare:
        yield options.compare, _other(options.compare, launch)


def _named(path: str, suffix: str) -> str:
    return str(Path(path).with_suffix(suffix + Path(path).suffix)) if suffix else path


def _session(launch: Launch, parameters: Parameters, options: argparse.Namespace) -> Session:
    from fly.emulator.timing import Session, whole_launch

    if options.launch:
        if options.workgroup:
            raise ArgumentError(f"--workgroup {options.workgroup}: --launch chooses workgroups itself")
        return whole_launch(launch, parameters, options.cold)
    return Session(launch, parameters, [options.workgroup], options.cold)


# ---- what to profile ----


def _launch(options: argparse.Namespace, arch: str, calls: Mapping[str, ProfiledCall]) -> Launch:
    settings = dict(literal("--set", text) for text in options.set)
    named = calls.get(options.subject)
    function = _function(options.subject) if named is None else named.function
    if function is not None:
        accepted = inspect.signature(function).parameters
        for name in settings:
            if name not in accepted and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
                raise ArgumentError(
                    f"--set: {options.subject} has no setting {name!r}; accepted: {', '.join(accepted)}"
                )
        if named is not None:
            named.check(**settings)
        try:
            inspect.signature(function).bind(**settings)
        except TypeError as error:
            raise ArgumentError(f"--set: {options.subject}: {error}") from None
        with author_code(f"KERNEL {options.subject!r}"):
            launch = captured(arch, lambda: function(**settings))
        return launch if named is None else named.placed(launch, **settings)
    if settings:
        raise ArgumentError(f"--set {options.set[0]!r}: a file has no settings; --args gives its arguments")
    return file_launch(options.subject, options)[0]


def captured(arch: str, call: Callable[[], Any]) -> Launch:
    """The first launch of a function that runs kernels on CPU tensors; nothing is executed.

    Raises:
        ArgumentError: it launches nothing.
    """
    from fly.runtime.device import CPU, device_for
    from fly.runtime.emulated import EmulatedDevice

    launches: list[Launch] = []
    with config.ARCH.set_to(arch):
        device = device_for(CPU)
        if not isinstance(device, EmulatedDevice):
            raise DeviceError("the timing model needs the emulated device for CPU tensors")
        device.intercept = launches.append
        try:
            kept = call()
        finally:
            device.intercept = None
    if not launches:
        raise ArgumentError("KERNEL launches nothing on CPU tensors")
    return replace(launches[0], keep=(kept,))


def _function(name: str) -> Callable[..., Any] | None:
    """What KERNEL names if it is no file: module:function."""
    if ":" not in name or Path(name).exists():
        return None
    module_name, _, attribute = name.partition(":")
    found: Callable[..., Any] | None = getattr(imported(f"KERNEL {name!r}", module_name), attribute, None)
    if not callable(found):
        raise ArgumentError(f"KERNEL {name!r}: {module_name} has no function {attribute!r}")
    return found


def _other(path: str, launch: Launch) -> Launch:
    """The same launch with another code object."""
    code, artefact = read_object(path, launch.program.arch)
    program = program_of(path, code, launch.program.arch)
    name = launch.kernel if launch.kernel in program.kernels else kernel_of(program, artefact and artefact.kernel)
    return replace(launch, program=program, kernel=name)


# ---- the model's figures ----


def _figure(text: str) -> tuple[str, float]:
    name, value = literal("--figure", text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"--figure {text!r}; expected NAME=NUMBER")
    return name, value


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    places = (*numbers("--cycles", first), *numbers("--cycles", last))
    if len(places) != 2 or not 0 <= places[0] < places[1]:
        raise ArgumentError(f"--cycles {text!r}; expected FROM:TO, from 0 on")
    return places


def _figures(arch: str) -> str:
    from fly.emulator.timing import FIGURES

    lines = []
    for name, by_arch in FIGURES.items():
        figure = by_arch[arch]
        lines.append(f"{name} = {figure.value:g}  {figure.unit}\n    {figure.source}")
        lines += [f"    or {value:g}: {source}" for value, source in figure.alternatives]
    return "\n".join(lines)


def _alternatives(session: Session, options: argparse.Namespace, cycles: int) -> str:
    """Cycles with other values of figures that published sources disagree on, or of all that are in dispute."""
    from fly.emulator.timing.figures import disputed

    lines = ["with other figures:"]
    for name, figure in disputed(session.parameters.arch).items():
        for value, source in figure.alternatives:
            guess = figure.source.startswith("assumed") or source.startswith(("assumed", "ignored"))
            if name in _NO_CYCLES or (guess and not options.alternatives):
                continue
            other = replace(session.parameters, **{name: type(getattr(session.parameters, name))(value)})
            result = session.replay(other, options.resident, keep=False)
            change = 100 * (result.cycles / cycles - 1)
            lines.append(f"  {name} = {value:g}: {result.cycles:,} cycles ({change:+.1f}%), {source}")
    return "\n".join(lines)


def _whole(session: Session) -> str:
    time, launch = session.time(), session.launch
    return (
        f"whole launch: {launch.workgroups:,} workgroups, {session.resident} on each of "
        f"{session.parameters.compute_units} compute units: {time.cycles:,.0f} cycles, {time.microseconds:,.1f} µs "
        f"at a sustained {session.parameters.sustained_clock} GHz; slots occupied {100 * time.occupied:.1f}%, "
        f"matrix pipes busy {100 * time.matrix:.1f}%"
    )
