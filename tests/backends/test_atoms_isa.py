"""Every matrix instruction of the tables, through LLVM to its mnemonic."""

from __future__ import annotations

import re
import secrets

import pytest
import torch

import fly
from fly.backends.target import target, targets
from fly.lang.signature import TensorSpec
from tests.backends.builds import build, needs_ptxas, run_ptxas

MMAS = [(t.arch, atom.name) for t in targets() for atom in (*t.mma_atoms, *t.byte_atoms)]
# as instructions call elements, where it is not as atoms do
TYPES = {"f8e4m3fnuz": "fp8_fp8", "f8e4m3": "f8f6f4"}


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
        mnemonic = f"v_mfma_f32_{atom.m}x{atom.n}x{atom.k // atom.issues}_{TYPES.get(atom.dtype, atom.dtype)}"
        assert re.findall(r"v_mfma_\w+", isa) == [mnemonic] * atom.issues
    else:
        mnemonic = f"mma.sync.aligned.m{atom.m}n{atom.n}k{atom.k}.row.col.f32.{atom.dtype}.{atom.dtype}.f32"
        assert re.findall(r"mma\.sync[\w.]+", isa) == [mnemonic]


@pytest.mark.parametrize("name", [atom.name for atom in target("gfx942").byte_atoms])
def test_products_of_every_e4m3fnuz_byte(name, monkeypatch):
    """Bytes in random order against what torch takes them for; sums are of float32, and 0x80 is NaN."""
    monkeypatch.setenv("FLY_ARCH", "gfx942")
    atom, seed = target("gfx942").atom(name), secrets.randbits(31)
    generator = torch.Generator().manual_seed(seed)
    held = {operand: getattr(atom, operand).table() for operand in "abc"}  # all lanes of value 0 first
    for nan in (False, True):
        a, b = (
            torch.cat([torch.randperm(256, generator=generator) for _ in range(n * atom.k // 256)]).view(n, -1)
            for n in (atom.m, atom.n)
        )
        if not nan:
            a, b = (x.where(x != 128, 3) for x in (a, b))
        registers, out = [], torch.zeros(64, atom.values("c"))
        for operand, matrix in (("a", a), ("b", b)):
            flat = matrix.T.flatten().to(torch.uint8)[torch.tensor(held[operand])]
            registers.append(flat.view(-1, 64).T.contiguous().view(torch.float8_e4m3fnuz))
        product[1, 64](*registers, out, name=name)
        found = torch.empty(atom.m * atom.n)
        found[torch.tensor(held["c"])] = out.T.flatten()
        exact_a, exact_b = (x.to(torch.uint8).view(torch.float8_e4m3fnuz).double() for x in (a, b))
        wanted = (exact_a @ exact_b.T).T.flatten()
        assert torch.equal(found.isnan(), wanted.isnan()) and bool(found.isnan().any()) is nan, seed
        bound = (exact_a.abs() @ exact_b.abs().T).T.flatten() * (atom.k + 2) * 2.0**-24
        assert bool(((found - wanted).abs() <= bound)[~wanted.isnan()].all()), seed


@needs_ptxas
@pytest.mark.parametrize("arch", [t.arch for t in targets() if t.backend == "nvvm"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_ptxas_accepts_products(arch, dtype, tmp_path):
    run_ptxas(compiled(arch, target(arch).mma(dtype).name), arch, tmp_path)
