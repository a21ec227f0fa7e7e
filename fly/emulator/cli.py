"""`python -m fly emulate FILE.hsaco`: run a kernel of any gfx942 or gfx950 code object on the CPU."""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fly.emulator.decode import SGPR_BIT, Instruction
from fly.emulator.footprint import footprint
from fly.emulator.memory import Region
from fly.emulator.program import Program
from fly.emulator.scheduler import describe_mix
from fly.emulator.state import Group
from fly.errors import ArgumentError, EmulatorReportError

_TYPES = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<u2", "i8": "i1", "u8": "u1", "i16": "<i2", "u16": "<u2",
          "i32": "<i4", "u32": "<u4", "i64": "<i8", "u64": "<u8"}  # fmt: skip
_SCALARS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "f32": "<f", "f64": "<d", "i16": "<h", "u16": "<H"}
_BUFFER = re.compile(r"(\w+)\[(\d+)\](?:=(.+))?$")
_FILLS = ("zeros", "ones", "arange", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("file", type=Path, help="linked code object (.hsaco)")
    parser.add_argument("--kernel", help="kernel name (default: the only one)")
    parser.add_argument("--grid", default="1", help="workgroups, such as 8 or 8,2")
    parser.add_argument("--block", default="64", help="work-items a workgroup, such as 256")
    parser.add_argument("--lds", type=int, default=0, help="dynamic LDS, bytes")
    parser.add_argument(
        "--args", default="", metavar="SPECS",
        help="arguments in order: f32[1024]=random (zeros, ones, arange, or a .npy file), i32=7",
    )  # fmt: skip
    parser.add_argument("--no-checks", action="store_true", help="do not look for races, missing waits and hazards")
    parser.add_argument(
        "--trace", nargs="?", const="0:0", metavar="WORKGROUP:WAVE", help="print what one wave executes, with values"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write every buffer there as argN.npy afterwards")
    parser.add_argument("--seed", type=int, default=0, help="seed of random buffers")


def _dimensions(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(p.isdigit() and int(p) > 0 for p in parts) or len(parts) > 3:
        raise ArgumentError(f"dimensions {text!r}; expected one to three positive numbers such as 8,2")
    return tuple(int(p) for p in parts)


def make_buffer(kind: str, count: int, fill: str, rng: np.random.Generator) -> np.ndarray:
    """A buffer of `count` elements; bf16 is held as uint16.

    Raises:
        ArgumentError: an unknown type or filling.
    """
    if kind not in _TYPES:
        raise ArgumentError(f"element type {kind!r}; expected one of {', '.join(_TYPES)}")
    dtype = np.dtype(_TYPES[kind])
    if fill.endswith(".npy"):
        loaded = np.ascontiguousarray(np.load(fill)).reshape(-1)
        if loaded.nbytes != count * dtype.itemsize:
            raise ArgumentError(f"{fill} has {loaded.nbytes} bytes; expected {count * dtype.itemsize}")
        return loaded.view(dtype).copy()
    if fill not in _FILLS:
        raise ArgumentError(f"filling {fill!r}; expected {', '.join(_FILLS)} or a .npy file")
    if dtype.kind in "iu" and kind != "bf16":
        random = rng.integers(-100 if dtype.kind == "i" else 0, 100, count)
    else:
        random = rng.uniform(-1, 1, count)
    values = {"zeros": np.zeros(count), "ones": np.ones(count), "arange": np.arange(count), "random": random}[fill]
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype)


def parse_arguments(text: str, seed: int) -> tuple[bytes, list[tuple[int, str, np.ndarray]]]:
    """(packed kernel arguments at natural alignment, buffers as (position, type, array)).

    Raises:
        ArgumentError: a specification that is none of `type[count]=filling` and `type=value`.
    """
    rng, packed, buffers = np.random.default_rng(seed), b"", []
    for position, word in enumerate(text.split()):
        match = _BUFFER.match(word)
        if match is not None:
            array = make_buffer(match[1], int(match[2]), match[3] or "zeros", rng)
            buffers.append((position, match[1], array))
            value, form = array.ctypes.data, "<Q"
        else:
            kind, equals, number = word.partition("=")
            if not equals or kind not in _SCALARS:
                raise ArgumentError(f"argument {word!r}; expected f32[1024]=random, i32=7 and the like")
            form = _SCALARS[kind]
            value = float(number) if kind[0] == "f" else int(number, 0)
        size = struct.calcsize(form)
        packed += b"\0" * (-len(packed) % size) + struct.pack(form, value)
    return packed, buffers


def tracer(workgroup: int, wave: int, show: Callable[[str], None] = print) -> Callable[[Group, Instruction], None]:
    """A trace callback that shows one wave: each instruction with the registers it wrote (lanes 0, 1, 63)."""

    def trace(g: Group, inst: Instruction) -> None:
        mine = np.flatnonzero((g.wg + g.machine.first_group == workgroup) & (g.wave == wave))
        if not mine.size:
            return
        index, bits, parts = int(mine[0]), footprint(inst, g.machine).writes, []
        while bits and len(parts) < 4:
            low = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            if low >= SGPR_BIT + 128:
                continue
            if low >= SGPR_BIT:
                parts.append(f"s{low - SGPR_BIT}={int(g.su[low - SGPR_BIT][index, 0]):#x}")
            else:
                lanes = g.vu[low][index]
                acc = low >= g.machine.accum_offset
                name = f"a{low - g.machine.accum_offset}" if acc else f"v{low}"
                parts.append(f"{name}={int(lanes[0]):#x},{int(lanes[1]):#x}..{int(lanes[63]):#x}")
        active = int(g.mask[index].sum())
        show(f"{inst.address:#8x}  {inst.text:60s} {' '.join(parts)}  [{active} lanes]")

    return trace


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 when the checks found something.

    Raises:
        FlyError: a bad option, a fault, or an instruction that is not implemented.
    """
    program = Program(options.file.read_bytes())
    if options.kernel is None and len(program.kernels) != 1:
        raise ArgumentError(f"--kernel is needed: {options.file} has {', '.join(program.kernels) or 'no kernels'}")
    kernel = options.kernel or program.kernels[0]
    packed, buffers = parse_arguments(options.args, options.seed)
    regions = [Region(a.ctypes.data, a.nbytes, f"argument {i} ({kind})") for i, kind, a in buffers]
    trace = None
    if options.trace:
        parts = options.trace.split(":")
        if len(parts) != 2 or not all(p.isdigit() for p in parts):
            raise ArgumentError(f"--trace {options.trace!r}; expected WORKGROUP:WAVE such as 0:0")
        trace = tracer(int(parts[0]), int(parts[1]))
    status = 0
    try:
        result = program.launch(
            kernel, _dimensions(options.grid), _dimensions(options.block), packed, regions,
            dynamic_lds=options.lds, checks=not options.no_checks, trace=trace,
        )  # fmt: skip
    except EmulatorReportError as error:
        print(error)
        status = 1
    else:
        print(f"{kernel} on {program.arch}: {result.executed} wave-instructions in {result.seconds:.3f} s")
        print("  " + ", ".join(f"{k} {v}" for k, v in sorted(describe_mix(result.mix).items(), key=lambda x: -x[1])))
    for position, kind, array in buffers:
        head = " ".join(str(x) for x in array[:6])
        print(f"  argument {position} {kind}[{len(array)}]: {head}{' …' if len(array) > 6 else ''}")
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
            np.save(options.save / f"arg{position}.npy", array)
    return status
