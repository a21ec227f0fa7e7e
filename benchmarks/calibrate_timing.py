"""What the timing model says about rates that were measured, and about attention kernels with published speeds.

    python benchmarks/calibrate_timing.py            # everything, some ten minutes
    python benchmarks/calibrate_timing.py rates      # only the rates of single instructions

Rates are clock cycles, so nothing can be fitted: the model's constants either give them or do not. Attention adds one
unknown for each chip, the clock that it sustains under this load; it is fitted to the first figure of a chip, the
others are predictions. The kernels are this project's, the figures are other projects', of the same structure: block
and tile sizes, waves, workgroups on a compute unit, and order of the grid are taken from theirs where they are known
(FlyDSL's generic kernel has blocks of 256 rows and 8 waves from 32 heads on, else of 128 rows and 4 waves). The
dual-wave kernel stands in without `ahead`, which was found with the model and is nobody else's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.modelled_builds import Shape, generic_options
from benchmarks.modelled_builds import build as built
from fly.backends.rocdl.assemble import assemble, kernel_source
from fly.emulator import Program
from fly.emulator.timing import Launch, Parameters, Session, whole_launch
from fly.emulator.timing.launch import schedule
from kernels.flash_attn_generic import GenericOptions
from kernels.gfx950.options import DualWaveOptions

# ---- rates ----

_ADD, _FMA8 = "v_add_f32 v{r}, v{r}, v40", "v_fma_f32 v{r}, v{r}, v40, v41"
_EXP, _PACKED = "v_exp_f32 v{r}, v{r}", "v_pk_mul_f32 v[{p}:{q}], v[{p}:{q}], v[40:41]"
_MFMA = "v_mfma_f32_16x16x16_bf16 a[{a}:{b}], v[50:51], v[52:53], a[{a}:{b}]"
_MFMA32 = "v_mfma_f32_32x32x8_bf16 a[{c}:{d}], v[50:51], v[52:53], a[{c}:{d}]"
_WIDE = "v_mfma_f32_32x32x16_bf16 a[{c}:{d}], v[50:53], v[54:57], a[{c}:{d}]"
_BYTES = "v_mfma_f32_32x32x64_f8f6f4 a[{c}:{d}], v[50:57], v[50:57], a[{c}:{d}]"
_READ = {4: "ds_read_b32 v{r}, v60", 16: "ds_read_b128 v[{x}:{y}], v60"}
_MI308, _MI355 = "pyhip, MI308X", "published, MI355X"


def _instance(text: str, i: int) -> str:
    """The i-th copy of an instruction, on one of several sets of registers so that copies are independent."""
    r, c, x = 10 + i % 8, 16 * (i % 4), 64 + 4 * (i % 8)
    return text.format(r=r, p=2 * (5 + i % 8), q=2 * (5 + i % 8) + 1, a=4 * (i % 8), b=4 * (i % 8) + 3, c=c, d=c + 15,
                       x=x, y=x + 3)  # fmt: skip


def launch_of(body: str, arch: str, waves: int) -> Launch:
    """One workgroup of a kernel in assembly."""
    source = kernel_source(body, lds=32768, registers=128).replace(
        "next_free_vgpr 128", "next_free_vgpr 256"
    )  # and 128 AGPRs
    return Launch(Program(assemble(source, arch)), "k", (1, 1, 1), (64 * waves, 1, 1), bytes(64), [])


def cycles_of(body: str, arch: str, waves: int = 1) -> int:
    """Cycles of a workgroup of `waves` waves that execute a body."""
    session = Session(launch_of(body, arch, waves), Parameters.of(arch), [0])
    return session.replay(resident=1, keep=False).cycles


def per_group(group: tuple[str, ...], arch: str, waves: int = 1, before: str = "") -> float:
    """Steady-state cycles of a group of instructions in an unrolled stream."""
    few, many = 40, 120

    def body(count: int) -> str:
        texts = [_instance(text, i * len(group) + j) for i in range(count) for j, text in enumerate(group)]
        return "\n".join([before, *texts, "s_endpgm"])

    return (cycles_of(body(many), arch, waves) - cycles_of(body(few), arch, waves)) / (many - few)


def lds_read(stride: int, size: int, arch: str, waves: int = 1) -> float:
    """Cycles a read of `size` bytes a lane, lanes `stride` bytes apart."""
    return per_group((_READ[size],), arch, waves, f"v_and_b32 v1, 63, v0\nv_mul_u32_u24 v60, {stride}, v1")


def latency(size: int, arch: str) -> int:
    """Cycles from one LDS read without conflicts until a wait for it has passed."""
    text = _instance(_READ[size], 0)
    address = f"v_and_b32 v1, 63, v0\nv_mul_u32_u24 v60, {size}, v1\n"
    with_wait = cycles_of(f"{address}{text}\ns_waitcnt lgkmcnt(0)\ns_endpgm", arch)
    return with_wait - cycles_of(f"{address}s_endpgm", arch) - 8


@dataclass(frozen=True)
class Rate:
    """One measured rate: cycles, who measured them, and the model's value."""

    what: str
    arch: str
    measured: float
    source: str
    model: Callable[[], float]


def rates() -> list[Rate]:
    """The rates that the model must give."""
    old, new = "gfx942", "gfx950"
    three, four = (_ADD,) * 3, (_ADD,) * 4
    group = per_group
    return [
        Rate("v_add_f32", old, 4.01, _MI308, partial(group, (_ADD,), old)),
        Rate("v_exp_f32", old, 16.00, _MI308, partial(group, (_EXP,), old)),
        Rate("v_pk_mul_f32", old, 4.01, _MI308, partial(group, (_PACKED,), old)),
        Rate("v_fma_f32 (8 bytes) unaligned", old, 5.01, _MI308, partial(group, (_FMA8,), old, before="s_nop 0")),
        Rate("MFMA 16x16x16", old, 16.03, _MI308, partial(group, (_MFMA,), old)),
        Rate("MFMA + 3 v_add_f32", old, 16.03, _MI308, partial(group, (_MFMA, *three), old)),
        Rate("MFMA + 4 v_add_f32", old, 20.03, _MI308, partial(group, (_MFMA, *four), old)),
        Rate("MFMA + v_exp_f32", old, 20.06, _MI308, partial(group, (_MFMA, _EXP), old)),
        Rate("MFMA + 2 v_exp_f32", old, 36.05, _MI308, partial(group, (_MFMA, _EXP, _EXP), old)),
        Rate("MFMA + v_pk_mul_f32", old, 28.04, _MI308, partial(group, (_MFMA, _PACKED), old)),
        Rate("MFMA + 4 v_pk_mul_f32", old, 40.04, _MI308, partial(group, (_MFMA, *[_PACKED] * 4), old)),
        Rate("v_exp_f32 + v_add_f32", old, 20.04, _MI308, partial(group, (_EXP, _ADD), old)),
        Rate("MFMA, 3 add, MFMA, exp", old, 36.05, _MI308, partial(group, (_MFMA, *three, _MFMA, _EXP), old)),
        Rate("MFMA, MFMA, 3 add, exp", old, 48.05, _MI308, partial(group, (_MFMA, _MFMA, *three, _EXP), old)),
        Rate("ds_read_b128, one wave", old, 16, _MI308, partial(lds_read, 16, 16, old)),
        Rate("ds_read_b32, one wave", old, 4, _MI308, partial(lds_read, 4, 4, old)),
        Rate("ds_read_b32, 8 dwords apart", old, 16, _MI308, partial(lds_read, 32, 4, old)),
        Rate("ds_read_b32, 32 dwords apart", old, 64, _MI308, partial(lds_read, 128, 4, old)),
        Rate("ds_read_b128 latency", old, 64, _MI308, partial(latency, 16, old)),
        Rate("ds_read_b32 latency", old, 52, _MI308, partial(latency, 4, old)),
        Rate("LDS: 4 waves of ds_read_b128", old, 4 * 1024 / 128, "128 B/clk", partial(lds_read, 16, 16, old, 4)),
        Rate("MFMA 32x32x8: 512 FLOP/clk", old, 32, "data sheet", partial(group, (_MFMA32,), old)),
        Rate("MFMA 32x32x16: 1024 FLOP/clk", new, 32, "data sheet", partial(group, (_WIDE,), new)),
        Rate("MFMA 32x32x64 e4m3: 2048 FLOP/clk", new, 64, "data sheet", partial(group, (_BYTES,), new)),
        Rate("v_exp_f32: twice gfx942's rate", new, 8, "white paper", partial(group, (_EXP,), new)),
        Rate("v_fma_f32, each needs the last", new, 8, _MI355, partial(group, (_FMA8.replace("{r}", "10"),), new)),
        Rate("ds_read_b32 latency", new, 69, _MI355, partial(latency, 4, new)),
        Rate("LDS: 4 waves of ds_read_b128", new, 4 * 1024 / 256, "256 B/clk", partial(lds_read, 16, 16, new, 4)),
    ]  # fmt: skip


def print_rates() -> float:
    """The table of rates; returns the largest error."""
    print(f"{'cycles of':<34} {'chip':<7} {'measured':>9} {'model':>9} {'error':>7}  source")
    worst = 0.0
    for rate in rates():
        value = rate.model()
        error = value / rate.measured - 1
        worst = max(worst, abs(error))
        print(
            f"{rate.what:<34} {rate.arch:<7} {rate.measured:>9.2f} {value:>9.2f} {100 * error:>+6.1f}%  {rate.source}"
        )
    print(f"largest error {100 * worst:.1f}%\n")
    return worst


# ---- attention ----


@dataclass(frozen=True)
class Published:
    """A published attention speed (TFLOP/s), and the build of ours that is set against it.

    `build` takes the head dimension and `causal`. `figures` replace the model's where the other kernel is known to
    differ from ours; `resident` are its workgroups on a compute unit, where they differ.
    """

    who: str
    arch: str
    build: Callable[[int, bool], GenericOptions | DualWaveOptions]
    shape: Shape
    causal: bool
    tflops: float
    figures: tuple[tuple[str, float], ...] = ()
    resident: int | None = None

    @property
    def flop(self) -> float:
        """Of the two matrix products; half of them for causal attention, as all of these projects count."""
        batch, length, heads, head_dim = self.shape
        return 4 * batch * heads * length**2 * head_dim / (2 if self.causal else 1)


generic, dual_wave = generic_options, partial(DualWaveOptions, ahead=False)
_WIDE_BLOCKS, _NARROW_BLOCKS = (
    partial(generic_options, block_m=rows, waves=waves, lazy=False) for rows, waves in ((256, 8), (128, 4))
)
_PADDED = (("conflicts", 0.0),)  # the others' LDS layouts have none
_H64, _H16 = (4, 8192, 64, 128), (16, 8192, 16, 128)
FIGURES = (
    Published("FlyDSL dual-wave", "gfx950", dual_wave, (1, 16384, 64, 128), False, 1318, _PADDED),
    Published("FlyDSL dual-wave", "gfx950", dual_wave, _H64, True, 1168, _PADDED),
    Published("FlyDSL dual-wave", "gfx950", dual_wave, _H16, True, 1172, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 1024, 16, 128), False, 953, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 16384, 16, 128), False, 1304, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 1024, 16, 128), True, 634, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 2048, 16, 128), True, 861, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 4096, 16, 128), True, 1048, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, _H16, True, 1146, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 16384, 16, 128), True, 1188, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 1024, 16, 64), False, 739, _PADDED),
    Published("HipKittens", "gfx950", dual_wave, (16, 16384, 16, 64), False, 969, _PADDED),
    Published("CK", "gfx950", generic, (16, 1024, 16, 128), False, 761, _PADDED),
    Published("CK", "gfx950", generic, (16, 16384, 16, 128), False, 908, _PADDED),
    Published("CK", "gfx950", generic, (16, 1024, 16, 128), True, 495, _PADDED),
    Published("CK", "gfx950", generic, (16, 2048, 16, 128), True, 611, _PADDED),
    Published("CK", "gfx950", generic, (16, 4096, 16, 128), True, 755, _PADDED),
    Published("CK", "gfx950", generic, _H16, True, 844, _PADDED),
    Published("CK", "gfx950", generic, (16, 16384, 16, 128), True, 903, _PADDED),
    Published("FlyDSL generic", "gfx942", _WIDE_BLOCKS, _H64, True, 347, resident=1),
    Published("FlyDSL generic", "gfx942", _NARROW_BLOCKS, _H16, True, 268, resident=1),
)
# Figures on which sources disagree: each has a column, with its own fit of the clock.
VARIANTS: tuple[tuple[str, dict[str, float]], ...] = (
    ("model", {}),
    ("exp 16", {"transcendental": 16}),
    ("valu 4", {"valu_latency": 4}),
    ("read 64", {"read_port": 64}),
)


def cycles(figure: Published) -> tuple[list[float], float]:
    """(cycles of the launch for each of `VARIANTS`, share of slots occupied).

    Workgroups start in the order of those projects' grids: batch, query block from the first on, head.
    """
    batch, length, heads, head_dim = figure.shape
    # one head of one batch: every other does the same
    launch = built(figure.arch, figure.build(head_dim, figure.causal), (1, length, 1, head_dim))
    base = dict(figure.figures)
    # on a die, the query blocks of its heads run together and share K and V
    together = Parameters.of(figure.arch).compute_units // heads
    session: Session = whole_launch(
        launch, Parameters.of(figure.arch, **base), cold=max(1, min(launch.grid[0], together))
    )
    resident = figure.resident or session.resident
    found, occupied = [], 0.0
    for _, others in reversed(VARIANTS):
        parameters = Parameters.of(figure.arch, **base, **others)
        row = session.row(parameters, resident)
        time = schedule([one for one in row for _ in range(heads)] * batch, resident, parameters)
        found.insert(0, time.cycles)
        occupied = time.occupied
    return found, occupied


def print_attention() -> None:
    """Fit each chip's clock to its first figure and predict the others, with each variant of the model."""
    names = "".join(f"{name:>9} {'':>6}" for name, _ in VARIANTS)
    print(f"TFLOP/s{'':<12}chip     (B, S, H, D)               published{names}  occupied")
    clocks: dict[str, list[float]] = {}
    for figure in FIGURES:
        counts, occupied = cycles(figure)
        start = Parameters.of(figure.arch).launch_microseconds
        if figure.arch not in clocks:
            clocks[figure.arch] = [n / (figure.flop / figure.tflops / 1e6 - start) / 1e3 for n in counts]
            columns = "".join(f"{figure.tflops:>9.0f} {clock:.2f}GHz" for clock in clocks[figure.arch])
        else:
            columns = ""
            for count, clock in zip(counts, clocks[figure.arch]):
                tflops = figure.flop / (count / clock / 1e3 + start) / 1e6
                columns += f"{tflops:>9.0f} {100 * (tflops / figure.tflops - 1):>+6.0f}%"
        kind = "causal" if figure.causal else "full"
        print(
            f"{figure.who:<18} {figure.arch:<8} {figure.shape!s:<21} {kind:<6}{figure.tflops:>8.0f} {columns}"
            f"{100 * occupied:>8.0f}%",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "rates", "attention"), default="all")
    what = parser.parse_args().what
    if what != "attention":
        print_rates()
    if what != "rates":
        print_attention()


if __name__ == "__main__":
    main()
