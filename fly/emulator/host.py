"""Machine code for the host's CPU, at one of a few fixed levels of its instruction set.

Not for the CPU that the host happens to have: with that, every new CPU would be another compiler to trust. A level is
the same machine code everywhere. LLVM's target needs nothing beyond it, only functions for what a level has no
instruction for; they come along.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from typing import Any

from fly.errors import EmulatorError

# What LLVM calls to convert float16 where the CPU cannot: not every process has a library with these symbols.
_HALF = """
define float @__extendhfsf2(half %x) {
  %bits = bitcast half %x to i16
  %wide = zext i16 %bits to i32
  %size = and i32 %wide, 32767
  %negative = and i32 %wide, 32768
  %sign = shl i32 %negative, 16
  %moved = shl i32 %size, 13
  %scaled = bitcast i32 %moved to float
  ; the exponents' biases differ by 112; the product is exact, subnormal or not
  %product = fmul float %scaled, 0x46F0000000000000
  %finite = bitcast float %product to i32
  %other = or i32 %moved, 2139095040
  %special = icmp uge i32 %size, 31744
  %value = select i1 %special, i32 %other, i32 %finite
  %signed = or i32 %value, %sign
  %result = bitcast i32 %signed to float
  ret float %result
}
define half @__truncsfhf2(float %x) {
  %bits = bitcast float %x to i32
  %size = and i32 %bits, 2147483647
  %high = lshr i32 %bits, 16
  %sign = and i32 %high, 32768
  ; half of the last kept bit, less one where it is even
  %cut = lshr i32 %size, 13
  %odd = and i32 %cut, 1
  %near = add i32 %size, 4095
  %up = add i32 %near, %odd
  %rounded = lshr i32 %up, 13
  %normal = sub i32 %rounded, 114688
  ; beside 0.5 the last bit of a float is that of a subnormal float16
  %magnitude = bitcast i32 %size to float
  %sum = fadd float %magnitude, 0.5
  %sum.bits = bitcast float %sum to i32
  %subnormal = sub i32 %sum.bits, 1056964608
  %small = icmp ult i32 %size, 947912704
  %finite = select i1 %small, i32 %subnormal, i32 %normal
  %large = icmp uge i32 %size, 1199570944
  %number = select i1 %large, i32 31744, i32 %finite
  %nan = icmp ugt i32 %size, 2139095040
  %value = select i1 %nan, i32 32256, i32 %number
  %signed = or i32 %value, %sign
  %low = trunc i32 %signed to i16
  %result = bitcast i16 %low to half
  ret half %result
}
"""


@dataclass(frozen=True)
class Level:
    """LLVM's name of a CPU, the features (LLVM's names) that tell whether a host is one, IR that modules need."""

    cpu: str
    needs: frozenset[str] = frozenset()
    functions: str = ""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"})
_X86 = {
    "baseline": Level("x86-64-v2", functions=_HALF),
    "avx2": Level("x86-64-v3", _AVX2),
    "avx512": Level("x86-64-v4", _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
# Lowest first. Other CPUs have one level, which fused multiply-add and float16 are part of.
LEVELS = _X86 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": Level("generic")}


@functools.cache
def available() -> tuple[str, ...]:
    """The levels that this host can run, lowest first."""
    import llvmlite.binding as llvm

    host = {name for name, there in llvm.get_host_cpu_features().items() if there}
    return tuple(name for name, level in LEVELS.items() if level.needs <= host)


@functools.cache
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # where a level has no fused multiply-add, LLVM calls C's, which rounds once everywhere
    process = ctypes.CDLL(None)
    for name in ("fma", "fmaf"):
        llvm.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)


def compiled(text: str, level: str, opt: int = 1, passes: bool = False) -> Any:
    """LLVM IR as machine code: an llvmlite execution engine, which owns it.

    `opt` is the optimization level of the code generator, and with `passes` of LLVM's passes before it. The caller
    keeps other threads out.

    Raises:
        EmulatorError: this host cannot run `level`.
    """
    import llvmlite.binding as llvm

    if level not in available():
        raise EmulatorError(f"this CPU cannot run code for {level!r}; it can for {', '.join(available())}")
    _initialize()

    def machine() -> Any:
        return llvm.Target.from_default_triple().create_target_machine(cpu=LEVELS[level].cpu, opt=opt)

    target = machine()
    module = llvm.parse_assembly(text + LEVELS[level].functions)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    module.verify()
    if passes:
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=opt))
        builder.getModulePassManager().run(module, builder)
    # MCJIT takes its target machine over
    engine = llvm.create_mcjit_compiler(module, machine())
    engine.finalize_object()
    return engine
