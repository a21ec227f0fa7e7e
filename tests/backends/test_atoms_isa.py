"""Every matrix instruction of the tables, through LLVM to its mnemonic."""

from __future__ import annotations

import re

import pytest

import fly
from fly.backends.target import target, targets
from fly.lang.signature import TensorSpec
from tests.backends.builds import build, needs_ptxas, run_ptxas

MMAS = [(t.arch, atom.name) for t in targets() for atom in t.mma_atoms]


@fly.kernel
def product(a: fly.Tensor, b: fly.Tensor, out: fly.Tensor, *, name):
    """out[lane] = the accumulators of one product of a[lane] and b[lane]."""
    atom = fly.target().atom(name)
    lane = fly.lane_id()
    accumulator = fly.broadcast(fly.f32(0.0), atom.values("c"))
    result = fly.mma(
        atom, a.load(lane, 0, length=atom.values("a")), b.load(lane, 0, length=atom.values("b")), accumulator
    )
    out.store(result, lane, 0)


def compiled(arch: str, name: str) -> str:
    operand = TensorSpec(target(arch).atom(name).dtype, 2, 16, True)
    specs = (operand, operand, TensorSpec("f32", 2, 16, True))
    return build(product, arch, specs=specs, block=target(arch).wave_size, name=name).isa


@pytest.mark.parametrize(("arch", "name"), MMAS)
def test_mma(arch, name):
    atom, isa = target(arch).atom(name), compiled(arch, name)
    if target(arch).backend == "rocdl":
        mnemonic = f"v_mfma_f32_{atom.m}x{atom.n}x{atom.k // atom.issues}_{atom.dtype}"
        assert re.findall(r"v_mfma_\w+", isa) == [mnemonic] * atom.issues
    else:
        mnemonic = f"mma.sync.aligned.m{atom.m}n{atom.n}k{atom.k}.row.col.f32.{atom.dtype}.{atom.dtype}.f32"
        assert re.findall(r"mma\.sync[\w.]+", isa) == [mnemonic]


@needs_ptxas
@pytest.mark.parametrize("arch", [t.arch for t in targets() if t.backend == "nvvm"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_ptxas_accepts_products(arch, dtype, tmp_path):
    run_ptxas(compiled(arch, target(arch).mma(dtype).name), arch, tmp_path)
