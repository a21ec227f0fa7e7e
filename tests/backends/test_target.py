"""The target registry, and the atoms that targets offer."""

from __future__ import annotations

import pytest

from fly.backends.target import arch_for_capability, target, targets
from fly.errors import AtomError, TargetError
from fly.layout import Layout


def test_targets_are_found_by_name():
    assert [t.arch for t in targets()] == ["gfx942", "gfx950", "sm_80", "sm_86", "sm_89", "sm_90a"]
    assert all(target(t.arch) is t for t in targets())


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(TargetError, match=r"unknown target 'gfx90a'; expected one of gfx942, gfx950, sm_80"):
        target("gfx90a")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_80"),
        ((12, 1), "sm_80"),
    ],
)
def test_architecture_for_a_device(capability, arch):
    """Newer devices than the registry knows run the oldest code, which their driver compiles."""
    assert arch_for_capability(*capability) == arch
    assert target(arch).backend == "nvvm"


@pytest.mark.parametrize("capability", [(7, 5), (5, 2)])
def test_old_devices_are_refused(capability):
    with pytest.raises(TargetError, match=r"compute capability \d\.\d is not supported; 8\.0 or newer"):
        arch_for_capability(*capability)


@pytest.mark.parametrize("arch", [t.arch for t in targets()])
def test_every_target_multiplies_both_16_bit_types(arch):
    for dtype in ("f16", "bf16"):
        atom = target(arch).mma(dtype)
        assert (atom.dtype, atom.accumulator, atom.lanes) == (dtype, "f32", target(arch).wave_size)
        assert target(arch).mma(dtype, (atom.m, atom.n, atom.k)) is atom
        assert target(arch).atom(atom.name) is atom


def test_missing_instruction_lists_what_there_is():
    with pytest.raises(AtomError, match=r"gfx950 has no matrix instruction for f64; it has 32x32x16 bf16, "):
        target("gfx950").mma("f64")
    with pytest.raises(AtomError, match=r"sm_80 has no matrix instruction for 32x32x16 bf16; it has 16x8x16 bf16"):
        target("sm_80").mma("bf16", (32, 32, 16))


ATOMS = {f"{t.arch} {a.name}": a for t in targets() for a in (*t.mma_atoms, *t.byte_atoms)}


@pytest.mark.parametrize("name", ATOMS)
@pytest.mark.parametrize("operand", "abc")
def test_atom_layouts_are_bijections(name, operand):
    atom = ATOMS[name]
    layout = getattr(atom, operand)
    size = {"a": atom.m * atom.k, "b": atom.n * atom.k, "c": atom.m * atom.n}[operand]
    assert Layout(layout.shape[0]).size == atom.lanes
    held = [layout((lane, value)) for lane in range(atom.lanes) for value in range(atom.values(operand))]
    assert sorted(held) == list(range(size))


LOADS = {f"{t.arch} {load.name}": load for t in targets() for load in (*t.matrix_loads, *t.byte_loads)}


@pytest.mark.parametrize("name", LOADS)
def test_loads_give_every_element_of_every_run_once(name):
    load = LOADS[name]
    given = [load.table((lane, value)) for lane in range(load.lanes) for value in range(load.values)]
    assert sorted(given) == list(range(load.lanes * load.run))
