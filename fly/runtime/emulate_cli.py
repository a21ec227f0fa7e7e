"""`python -m fly emulate`: run a code object, whoever compiled it, on the emulated AMD GPU."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from fly.errors import ArgumentError
from fly.runtime.emulate_arguments import HELP, Argument, describe, save
from fly.runtime.object_files import add_launch_options, file_launch, numbers, program_of, read_object

if TYPE_CHECKING:
    from fly.emulator import Program, RunResult

_DESCRIPTION = """\
Run a kernel of a linked AMDGPU code object (or of an artefact that fly.compile saved) instruction by instruction, on
the CPU. The checks find out-of-bounds accesses, missing waits, LDS races, reads of what nothing has written,
diverging barriers and matrix hazards; findings go to stderr and the exit status is 1; it is
2 where options do not fit."""
_EXAMPLE = """\
example:
  python -m fly emulate add.hsaco --list
  python -m fly emulate add.hsaco --grid 4 --block 256 --args a.npy b.npy out:c.npy:f32[1024] i32:1024
  python -m fly emulate add.hsaco --grid 4 --block 256 --args a.npy b.npy out:-:f32[1024] i32:1024 \\
      --trace --trace-wave 3:1 --trace-lanes 0,63"""


def add_command(commands: Any) -> None:
    """Add `emulate` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "emulate",
        help="run an AMD code object on the CPU, with checks and a trace",
        description=_DESCRIPTION,
        epilog=f"{HELP}\n\n{_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", help="code object (.hsaco, .co), assembly (.s) or artefact of fly.compile"
    )
    parser.add_argument("--list", action="store_true", help="show the kernels and their arguments, and run nothing")
    parser.add_argument("--arch", help="required architecture (default: what the file was compiled for)")
    add_launch_options(parser)
    parser.add_argument("--no-checks", action="store_true", help="only faults stop the run; several times faster")
    parser.add_argument("--budget", type=int, metavar="N", help="instructions a wave may execute (endless loops)")
    parser.add_argument("--trace", action="store_true", help="print what one wave executes, with operand values")
    parser.add_argument(
        "--trace-wave", default="0:0", metavar="X[,Y,Z]:WAVE", help="workgroup and wave to follow (default: 0:0)"
    )
    parser.add_argument(
        "--trace-lanes", default="0,1,2,3", metavar="LANES", help="lanes whose values are shown (default: 0,1,2,3)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """The command.

    Raises:
        ArgumentError: options or arguments that do not fit the kernel.
        EmulatorError: a fault; EmulatorReportError: findings of the checks.
    """
    from fly.runtime.emulated import Progress

    if options.budget is not None and not 1 <= options.budget < 2**63:
        raise ArgumentError(f"--budget {options.budget}; expected 1 or more")
    if options.list:
        program = program_of(options.file, read_object(options.file, options.arch)[0], options.arch)
        print("\n\n".join(_listing(program, name) for name in program.kernels))
        return
    launch, arguments = file_launch(options.file, options)
    program, name, grid, block = launch.program, launch.kernel, launch.grid, launch.block
    tracer = _tracer(options, program.machine(name), grid, block) if options.trace else None
    budget = {} if options.budget is None else {"budget": options.budget}
    try:
        with Progress(grid[0] * grid[1] * grid[2], name) as progress:
            result = program.launch(
                name, grid, block, launch.kernarg, launch.regions, dynamic_lds=launch.dynamic_lds,
                checks=not options.no_checks, progress=progress, trace=tracer, **budget,
            )  # fmt: skip
    finally:
        if tracer is not None:
            tracer.finish()
        # after findings, or up to a fault, the memory is worth a look too
        _save(arguments)
    print(summary(result, program.arch, name))


def _listing(program: Program, name: str) -> str:
    kernel = program.code.kernels[name]
    vectors = min(kernel.accum_offset, kernel.vgprs)
    lines = [
        f"{name} ({program.arch}): {vectors} VGPRs, {kernel.vgprs - vectors} AGPRs, {kernel.lds_bytes} bytes of "
        f"static LDS, {kernel.scratch_bytes} bytes of scratch a lane, {kernel.kernarg_bytes} bytes of arguments"
    ]
    lines += [f"  {i:>2} at byte {place['.offset']:>3}: {describe(place)}" for i, place in enumerate(kernel.explicit)]
    return "\n".join(lines)


def _tracer(options: argparse.Namespace, machine: Any, grid: tuple[int, ...], block: tuple[int, ...]) -> Any:
    from fly.emulator.trace import Place, Tracer

    try:
        place = Place.parse(options.trace_wave, numbers("--trace-lanes", options.trace_lanes))
    except ValueError as error:
        raise ArgumentError(f"--trace-wave, --trace-lanes: {error}") from None
    if not place.inside(grid, block):
        raise ArgumentError(f"--trace-wave {options.trace_wave!r} is outside the grid {grid} of blocks {block}")
    return Tracer(machine, place, lambda line: print(line, flush=True))


def _save(arguments: list[Argument]) -> None:
    for argument in arguments:
        line = save(argument)
        if line:
            print(line)


def summary(result: RunResult, arch: str, kernel: str, rows: int = 12) -> str:
    """What a run executed, as text: the total, and tables of instructions by class and by name."""
    from fly.emulator.scheduler import describe_mix

    total = result.executed
    head = f"{kernel} on emulated {arch}: {total:,} wave-instructions in {result.seconds:.2f} s"
    head += f" ({result.rate / 1e6:.2f} million a second)"
    classes = Counter(describe_mix(result.mix)).most_common()
    names = result.mix.most_common(rows)
    left = [f"{name:<8}{count:>12,}{100 * count / total:>6.1f}%" for name, count in classes]
    right = [f"{name:<28}{count:>12,}{100 * count / total:>6.1f}%" for name, count in names]
    more = len(result.mix) - len(names)
    if more > 0:
        rest = total - sum(count for _, count in names)
        right.append(f"{f'{more} others':<28}{rest:>12,}{100 * rest / total:>6.1f}%")
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    return "\n".join([head, *(f"  {a:<27}    {b}".rstrip() for a, b in zip(left, right))])
