"""Single instructions on the emulator: a table of inline assembly cases becomes one code object per architecture.

Every case is a kernel of one wave. Its inputs are per-lane registers (`v`, or `v2`, `v3`, … for tuples, `a…` for
accumulation registers) or wave-uniform ones (`s`, `s2`, `s4`); its outputs likewise.
"""

from __future__ import annotations

import functools
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fly.backends.llvm import Machine, emit
from fly.backends.rocdl.codegen import TRIPLE, link, zig
from fly.emulator import Program, Region

LANES = 64
ARCHS = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Case:
    """Inline assembly, and the classes of its operands; `$0…` are the outputs, then the inputs.

    `clobbers` names further registers that it writes; `lds` is the size of its static LDS, `archs` where it exists.
    """

    name: str
    asm: str
    outs: str = "v"
    ins: str = "v v"
    clobbers: str = ""
    lds: int = 0
    archs: tuple[str, ...] = ARCHS
    setup: str = ""  # LLVM IR in front of the assembly


def _parse(operand: str) -> tuple[str, int]:
    """("v" | "a" | "s" | "p", number of registers)."""
    return operand[0], int(operand[1:] or 1)


def _type(count: int) -> str:
    return "i32" if count == 1 else f"<{count} x i32>"


def _function(case: Case) -> str:
    """IR of one kernel: loads, the assembly, stores. Registers of an operand lie 256 bytes apart in memory."""
    body = [
        "  %lane = call i32 @llvm.amdgcn.workitem.id.x()",
        "  %lane64 = zext i32 %lane to i64",
    ]
    values, constraints, at = [], [], 0
    for i, operand in enumerate(case.ins.split()):
        bank, count = _parse(operand)
        kind = _type(count)
        if bank == "p":  # the address of the global buffer
            values.append("ptr addrspace(1) %memory")
            constraints.append("v" if operand == "p" else "s")
            continue
        if bank == "s":
            body.append(f"  %p{i} = getelementptr i8, ptr addrspace(4) %uniform, i64 {256 * at}")
            body.append(f"  %x{i} = load {kind}, ptr addrspace(4) %p{i}, align 4")
        else:
            last = "poison"
            for j in range(count):
                body.append(f"  %p{i}.{j} = getelementptr i8, ptr addrspace(1) %in, i64 {256 * (at + j)}")
                body.append(f"  %q{i}.{j} = getelementptr i32, ptr addrspace(1) %p{i}.{j}, i64 %lane64")
                body.append(f"  %l{i}.{j} = load i32, ptr addrspace(1) %q{i}.{j}")
                if count > 1:
                    body.append(f"  %i{i}.{j} = insertelement {kind} {last}, i32 %l{i}.{j}, i32 {j}")
                    last = f"%i{i}.{j}"
            if count == 1:
                body.append(f"  %x{i} = add i32 %l{i}.0, 0")
            else:
                body.append(f"  %x{i} = bitcast {kind} {last} to {kind}")
        values.append(f"{kind} %x{i}")
        constraints.append(bank)
        at += count
    outs = [_parse(o) for o in case.outs.split()]
    kinds = [_type(n) for _, n in outs]
    returned = "void" if not outs else kinds[0] if len(outs) == 1 else "{" + ", ".join(kinds) + "}"
    spec = [f"=&{b}" for b, _ in outs] + constraints + [f"~{{{c}}}" for c in case.clobbers.split()] + ["~{memory}"]
    asm = case.asm.replace("\n", "\\0A")
    body.append(case.setup)
    call = f'call {returned} asm sideeffect "{asm}", "{",".join(spec)}"({", ".join(values)})'
    body.append(f"  %r = {call}" if outs else f"  {call}")
    at = 0
    for i, (_, count) in enumerate(outs):
        body.append(
            f"  %r{i} = extractvalue {returned} %r, {i}" if len(outs) > 1 else f"  %r{i} = freeze {kinds[0]} %r"
        )
        for j in range(count):
            source = f"%r{i}"
            if count > 1:
                body.append(f"  %e{i}.{j} = extractelement {kinds[i]} %r{i}, i32 {j}")
                source = f"%e{i}.{j}"
            body.append(f"  %o{i}.{j} = getelementptr i8, ptr addrspace(1) %out, i64 {256 * (at + j)}")
            body.append(f"  %s{i}.{j} = getelementptr i32, ptr addrspace(1) %o{i}.{j}, i64 %lane64")
            body.append(f"  store i32 {source}, ptr addrspace(1) %s{i}.{j}")
        at += count
    lds = (
        f"@lds.{case.name} = internal addrspace(3) global [{case.lds // 4} x i32] poison, align 16\n"
        if case.lds
        else ""
    )
    # a visible use keeps the allocation
    keep = f"  store volatile i32 0, ptr addrspace(3) @lds.{case.name}\n" if case.lds else ""
    text = "\n".join(body)
    return (
        f"{lds}define amdgpu_kernel void @{case.name}(ptr addrspace(1) %in, ptr addrspace(1) %out,"
        f" ptr addrspace(4) %uniform, ptr addrspace(1) %memory) #0 {{\n{keep}{text}\n  ret void\n}}\n"
    )


def module(cases: Sequence[Case]) -> str:
    """LLVM IR with one kernel a case."""
    return (
        "declare i32 @llvm.amdgcn.workitem.id.x()\n"
        + "".join(_function(c) for c in cases)
        + 'attributes #0 = { "amdgpu-flat-work-group-size"="64,64" "amdgpu-agpr-alloc"="0,256" }\n'
    )


def assemble(text: str, arch: str) -> bytes:
    """Object code of AMDGPU assembly. llvmlite has no assembler; the clang inside the ziglang wheel has one."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "a.s"), Path(directory, "a.o")
        source.write_text(text)
        command = [*zig(), "clang", "-target", TRIPLE, f"-mcpu={arch}", "-c", str(source)]
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return target.read_bytes()


class Bench:
    """The cases of one architecture, compiled and loaded."""

    def __init__(self, cases: Sequence[Case], arch: str):
        self.cases = {c.name: c for c in cases if arch in c.archs}
        self.arch = arch
        assert len(self.cases) == sum(arch in c.archs for c in cases), "two cases of one name"
        text = emit(module(list(self.cases.values())), Machine(TRIPLE, arch), want_object=False).assembly
        self.program = Program(link(assemble(text, arch)), arch)

    def run(
        self, name: str, *inputs: np.ndarray, memory: np.ndarray | None = None, checks: bool = False
    ) -> list[np.ndarray]:
        """Run one case.

        Args:
            inputs: for each input operand uint32-compatible bits of shape (registers, 64), (64,) or, uniform, (n,).
            memory: the buffer whose address `p` operands hold; changed in place.

        Returns:
            Each output operand as uint32 of shape (64,), or (registers, 64) for tuples.
        """
        case = self.cases[name]
        wanted = [_parse(o) for o in case.ins.split() if o[0] != "p"]
        assert len(inputs) == len(wanted), f"{name}: {len(inputs)} inputs for {case.ins!r}"
        total = max(sum(n for _, n in wanted), 1)
        block = np.zeros((total, LANES), np.uint32)
        at = 0
        for (bank, count), value in zip(wanted, inputs):
            bits = words(value)
            if bank == "s":
                block[at, :count] = bits.reshape(-1)
            else:
                block[at : at + count] = bits.reshape(-1, LANES) if bits.size > 1 else bits
            at += count
        outs = [_parse(o)[1] for o in case.outs.split()]
        out = np.full((max(sum(outs), 1), LANES), 0xDEADBEEF, np.uint32)
        memory = np.zeros(4, np.uint32) if memory is None else memory
        arrays = {"in": block, "out": out, "memory": memory}
        kernarg = struct.pack("<4Q", block.ctypes.data, out.ctypes.data, block.ctypes.data, memory.ctypes.data)
        regions = [Region(a.ctypes.data, a.nbytes, n) for n, a in arrays.items()]
        self.program.launch(name, (1,), (LANES,), kernarg, regions, checks=checks)
        results, at = [], 0
        for count in outs:
            results.append(out[at] if count == 1 else out[at : at + count])
            at += count
        return results


def words(value: np.ndarray) -> np.ndarray:
    """Any 8, 16, 32 or 64-bit array as uint32: 16-bit values zero-extended, 64-bit ones as (2, …) low then high."""
    value = np.ascontiguousarray(value)
    if value.dtype.itemsize == 4:
        return value.view(np.uint32)
    if value.dtype.itemsize == 8:
        bits = value.view(np.uint64)
        return np.stack([bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)])
    return value.view(f"u{value.dtype.itemsize}").astype(np.uint32)


def wide(value: np.ndarray, dtype: type = np.uint64) -> np.ndarray:
    """(2, 64) uint32 registers as 64-bit values."""
    return (value[0] | value[1].astype(np.uint64) << np.uint64(32)).view(dtype)


def half(value: np.ndarray, high: int = 0, dtype: type = np.float16) -> np.ndarray:
    """One 16-bit half of uint32 registers."""
    return (value >> np.uint32(16 * high)).astype(np.uint16).view(dtype)


@functools.cache
def bench(cases: tuple[Case, ...], arch: str) -> Bench:
    """The compiled cases, made once a process."""
    return Bench(cases, arch)
