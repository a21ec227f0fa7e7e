"""What the timing model knows about the two chips: every figure with its unit and where it comes from.

Where sources disagree, or where there is none, the other values that one might believe stand beside the one in use;
`Parameters.of(arch, name=value)` computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fly.errors import ArgumentError

ARCHS = ("gfx942", "gfx950")

_PROFILER = "ROCm Compute Profiler, pipeline descriptions"
_ISA3, _ISA4 = "CDNA3 ISA guide", "CDNA4 ISA guide"
_SPEC = "AMD data sheet"
_PHASES = "HipKittens, measured phases and banks on MI355X (arXiv 2511.08083)"
_COISSUE = "pyhip co-issue microbenchmark on MI308X"
_LATENCY = "pyhip load microbenchmark on MI308X"
_ASSUMED = "assumed: no public figure"


@dataclass(frozen=True)
class Figure:
    """One constant of the model.

    Attributes:
        value: in `unit`.
        source: who says so; starts with "assumed" where nobody does.
        alternatives: other values with their sources, for a figure that is in dispute.
    """

    value: float
    unit: str
    source: str
    alternatives: tuple[tuple[float, str], ...] = ()


def _both(value: float, unit: str, source: str, *alternatives: tuple[float, str]) -> dict[str, Figure]:
    return dict.fromkeys(ARCHS, Figure(value, unit, source, alternatives))


def _each(gfx942: Figure, gfx950: Figure) -> dict[str, Figure]:
    return {"gfx942": gfx942, "gfx950": gfx950}


FIGURES: Mapping[str, Mapping[str, Figure]] = {
    # ---- the chip ----
    "compute_units": _each(Figure(304, "", f"{_SPEC}, MI300X"), Figure(256, "", f"{_SPEC}, MI355X")),
    "dies": _both(8, "XCDs; workgroups go to them in turn", f"{_SPEC}; dispatch order: HipKittens"),
    "clock": _each(
        Figure(2.1, "GHz, the highest", f"{_SPEC}, MI300X"), Figure(2.4, "GHz, the highest", f"{_SPEC}, MI355X")
    ),
    "sustained_clock": _each(
        Figure(
            1.04,
            "GHz while attention runs",
            "our fit: FlyDSL generic, MI325X, 347 TFLOP/s, causal, S=8192; its kernel's losses are in it",
            ((2.1, "ignored: the highest"),),
        ),
        Figure(
            1.45,
            "GHz while attention runs",
            "our fit: FlyDSL dual-wave, MI355X, 1318 TFLOP/s, S=16384",
            ((2.4, "ignored: the highest"),),
        ),
    ),
    "lds_bytes": _each(Figure(65536, "bytes a CU", _ISA3), Figure(163840, "bytes a CU", _ISA4)),
    "lds_granule": _each(
        Figure(512, "bytes that LDS is given out in", "LLVM, AMDGPUBaseInfo"),
        Figure(1280, "bytes that LDS is given out in", "LLVM, AMDGPUBaseInfo"),
    ),
    "wave_slots": _both(8, "waves a SIMD", _PROFILER),
    "registers": _both(512, "vector registers a lane and SIMD", f"{_ISA3}; {_ISA4}"),
    "launch_microseconds": _both(
        4.0, "µs from the first packet to the last signal", _ASSUMED, (2.0, _ASSUMED), (8.0, _ASSUMED)
    ),
    "workgroup_start": _both(400, "cycles from a free slot to a wave's first instruction", _ASSUMED),
    # ---- issue ----
    "turn": _both(4, "cycles between two turns of a SIMD; one instruction a wave and a class each", _PROFILER),
    "branch_taken": _both(16, "cycles to the first instruction at the target", _ASSUMED, (32, _ASSUMED)),
    "branch_not_taken": _both(8, "cycles to the next instruction", _ASSUMED, (4, _ASSUMED)),
    "barrier_release": _both(8, "cycles from the last arrival to the next instruction", _ASSUMED, (32, _ASSUMED)),
    "straddle": _both(
        4,
        "cycles for an instruction that crosses 32 bytes of code, in an unbroken stream of 8-byte ones",
        f"{_COISSUE}: 5.01 cycles for unaligned 8-byte instructions, 4.02 for aligned ones",
        (0, "ignored"),
    ),
    # ---- vector ALU ----
    "valu": _both(4, "cycles a wave instruction holds the port: 64 lanes over 16", f"{_PROFILER}; {_COISSUE}: 4.01"),
    "transcendental": _each(
        Figure(16, "cycles of the port", f"{_COISSUE}: v_exp_f32, v_rcp_f32 16.00"),
        Figure(
            8,
            "cycles of the port",
            "AMD CDNA4 white paper: twice the rate of CDNA3",
            ((16, "LLVM's schedule, which does not tell the generations apart"),),
        ),
    ),
    "quarter_rate": _both(16, "cycles of the port: 32-bit integer products", "LLVM, SISchedule: quarter rate"),
    "valu_latency": _each(
        Figure(4, "cycles to a dependent vector instruction", "LLVM, SISchedule", ((8, "as on gfx950"),)),
        Figure(
            8,
            "cycles to a dependent vector instruction",
            "published microbenchmark, dependent v_fma",
            ((4, "LLVM, SISchedule"),),
        ),
    ),
    "packed_drain": _both(
        8,
        "cycles behind a matrix instruction's passes before packed f32 arithmetic can start",
        f"{_COISSUE}: 28.01 cycles for MFMA (16) and one v_pk_mul_f32 (4), 4 for each more; never together on gfx950 "
        "either (co-executing cycles 0); LLVM, SIPreEmitPeephole, unpacks them for that reason",
        (-1000, "overlaps like any vector instruction"),
    ),
    # ---- LDS ----
    "read_banks": _each(Figure(32, "banks of 4 bytes", f"{_ISA3}; pyhip"), Figure(64, "banks of 4 bytes", _PHASES)),
    "write_banks": _both(32, "banks of 4 bytes", f"{_ISA3}; {_PHASES}"),
    "read_port": _each(
        Figure(64, "bytes a cycle to a pair of SIMDs", f"{_PROFILER}; {_LATENCY}: ds_read_b128 every 16 cycles"),
        Figure(
            128,
            "bytes a cycle to a pair of SIMDs",
            "AMD CDNA4 white paper: read bandwidth doubled",
            ((64, "as on gfx942"),),
        ),
    ),
    "write_port": _both(64, "bytes a cycle from a pair of SIMDs", _PROFILER),
    "lds_latency": _each(
        Figure(48, "cycles before the data moves", f"{_LATENCY}: 52 for b32 (4 cycles of data), 64 for b128 (16)"),
        Figure(61, "cycles before the data moves", "published microbenchmark: ds_read_b32 69, to the next turn"),
    ),
    "lds_direct_write": _both(128, "bytes a cycle that loads to LDS write", f"{_PROFILER}: LDS bandwidth"),
    "lgkm_limit": _both(15, "LDS and scalar operations a wave has outstanding", f"{_ISA3}; {_ISA4}"),
    "conflicts": _both(
        1, "whether bank conflicts cost time", f"{_LATENCY}; {_PHASES}", (0, "what a layout without any would give")
    ),
    # ---- memory ----
    "address_rate": _both(
        64,
        "bytes a cycle a CU that vector memory instructions pass",
        f"{_PROFILER}; pyhip thread trace on MI308X: dwordx4 every 16 cycles",
    ),
    "memory_queue": _both(
        16, "vector memory instructions that a CU takes before the issue waits", "pyhip thread trace on MI308X"
    ),
    "vm_limit": _both(63, "vector memory operations a wave has outstanding", f"{_ISA3}; {_ISA4}"),
    "l1_bytes": _both(32768, "bytes a CU", _SPEC),
    "l1_latency": _both(120, "cycles of a hit", _ASSUMED),
    "l2_latency": _both(300, "cycles of a hit", _ASSUMED, (500, _ASSUMED)),
    "memory_latency": _both(700, "cycles", f"{_LATENCY}: 500 to 800", (500, _LATENCY), (1000, _ASSUMED)),
    "fill_rate": _each(
        Figure(54, "bytes a cycle a CU from L2: 16 channels of 128 bytes over 38 CUs", "AMD CDNA3 white paper"),
        Figure(64, "bytes a cycle a CU from L2: 16 channels of 128 bytes over 32 CUs", "AMD CDNA3 white paper"),
    ),
    "atomic_rate": _each(
        Figure(
            27,
            "bytes of lines a cycle a CU that atomics pass in L2",
            "assumed as for stores: 16 channels of 64 bytes over 38 CUs (AMD CDNA3 white paper)",
            ((54, "as fills"), (7, "assumed: 16 bytes a channel")),
        ),
        Figure(
            32,
            "bytes of lines a cycle a CU that atomics pass in L2",
            "assumed as for stores: 16 channels of 64 bytes over 32 CUs (AMD CDNA3 white paper)",
            ((64, "as fills"), (8, "assumed: 16 bytes a channel")),
        ),
    ),
    "memory_bandwidth": _each(Figure(5300, "GB/s", f"{_SPEC}, MI300X"), Figure(8000, "GB/s", f"{_SPEC}, MI355X")),
    "scalar_latency": _both(160, "cycles of a scalar load", _ASSUMED),
}


@dataclass(frozen=True)
class Parameters:
    """The figures of one chip as numbers; attributes are named as in `FIGURES`."""

    arch: str
    compute_units: int
    dies: int
    clock: float
    sustained_clock: float
    lds_bytes: int
    lds_granule: int
    wave_slots: int
    registers: int
    launch_microseconds: float
    workgroup_start: int
    turn: int
    branch_taken: int
    branch_not_taken: int
    barrier_release: int
    straddle: int
    valu: int
    transcendental: int
    quarter_rate: int
    valu_latency: int
    packed_drain: int
    read_banks: int
    write_banks: int
    read_port: int
    write_port: int
    lds_latency: int
    lds_direct_write: int
    conflicts: int
    lgkm_limit: int
    address_rate: int
    memory_queue: int
    vm_limit: int
    l1_bytes: int
    l1_latency: int
    l2_latency: int
    memory_latency: int
    fill_rate: int
    atomic_rate: int
    memory_bandwidth: float
    scalar_latency: int

    @classmethod
    def of(cls, arch: str, **overrides: float) -> Parameters:
        """The figures of `arch`, some of them replaced.

        Raises:
            ArgumentError: an architecture without figures, or a figure that does not exist.
        """
        if arch not in ARCHS:
            raise ArgumentError(f"the timing model has no figures for {arch!r}; accepted: {', '.join(ARCHS)}")
        for name in overrides:
            if name not in FIGURES:
                raise ArgumentError(f"the timing model has no figure {name!r}; accepted: {', '.join(FIGURES)}")
        values = {name: overrides.get(name, figure[arch].value) for name, figure in FIGURES.items()}
        kinds = {field.name: field.type for field in fields(cls)}
        typed: dict[str, Any] = {n: float(v) if kinds[n] == "float" else int(v) for n, v in values.items()}
        return cls(arch, **typed)


def disputed(arch: str) -> dict[str, Figure]:
    """The figures of `arch` that have alternatives."""
    return {name: figure[arch] for name, figure in FIGURES.items() if figure[arch].alternatives}
