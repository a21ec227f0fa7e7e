"""Matrix instructions as data: layouts against the vendors' formulas, products against matmul, chains."""

from __future__ import annotations

import numpy as np
import pytest

import fly
from fly.backends.target import target, targets
from fly.errors import AtomError, TargetError
from fly.lang.atoms import MmaAtom
from fly.layout import Layout
from tests.host import NUMPY
from tests.simulated import Machine, Program, flat
from tests.tracing import ARCHS, matrix, trace

ATOMS = [pytest.param(t.arch, atom, id=f"{t.arch}-{atom.name}") for t in targets() for atom in t.mma_atoms]
BYTES = [pytest.param("gfx942", atom, id=f"gfx942-{atom.name}") for atom in target("gfx942").byte_atoms]
BOTH_SIDES = pytest.mark.parametrize("rows_on", ["m", "n"])


def element(atom: MmaAtom, operand: str, lane: int, value: int) -> tuple[int, int]:
    """(outer, k) of an A or B value, (row, column) of a C value."""
    extent = {"a": atom.m, "b": atom.n, "c": atom.m}[operand]
    index = getattr(atom, operand)((lane, value))
    return index % extent, index // extent


def test_every_target_is_covered():
    assert tuple(t.arch for t in targets()) == ARCHS


@pytest.mark.parametrize(("arch", "atom"), ATOMS + BYTES)
def test_layouts_are_bijections(arch, atom):
    assert atom.lanes == fly.backends.target.target(arch).wave_size
    for operand in "abc":
        layout = getattr(atom, operand)
        assert layout.is_bijective
        assert atom.values(operand) * atom.lanes == layout.size


# (outer, k) of value v in lane l, and (row, column) of accumulator register r
def amd_operand(atom: MmaAtom, lane: int, value: int) -> tuple[int, int]:
    # CDNA3 ISA, 7.1: lanes run over the outer index first; 8 values of k a lane (gfx942: of two instructions)
    return lane % atom.m, value + atom.values("a") * (lane // atom.m)


def amd_accumulator(atom: MmaAtom, lane: int, register: int) -> tuple[int, int]:
    if atom.m == 32:
        return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32
    return 4 * (lane // 16) + register, lane % 16


def ptx_a(lane: int, i: int) -> tuple[int, int]:
    # PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = thread * 2 + (i & 1) + (0 if i < 4 else 8)
    return row, column


def ptx_b(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = thread * 2 + (i & 1) + (0 if i < 2 else 8)
    return group, row  # (column of B, k)


def ptx_c(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


@pytest.mark.parametrize(("arch", "atom"), ATOMS + BYTES)
def test_layouts_are_the_published_ones(arch, atom):
    if arch.startswith("gfx"):
        formulas = {
            "a": lambda lane, v: amd_operand(atom, lane, v),
            "b": lambda lane, v: amd_operand(atom, lane, v),
            "c": lambda lane, v: amd_accumulator(atom, lane, v),
        }
    else:
        formulas = {"a": ptx_a, "b": ptx_b, "c": ptx_c}
    for operand, formula in formulas.items():
        for lane in range(atom.lanes):
            for value in range(atom.values(operand)):
                assert element(atom, operand, lane, value) == formula(lane, value), (operand, lane, value)


def product(a: fly.Tensor, b: fly.Tensor, c: fly.Tensor, *, atom: MmaAtom):
    """Every lane reads its operands from whole matrices A (m, k), B (n, k), C (m, n) and stores its results to C."""
    lane = fly.lane_id()

    def places(operand: str) -> list[tuple[fly.Value, fly.Value]]:
        result = []
        for value in range(atom.values(operand)):
            table = [element(atom, operand, i, value) for i in range(atom.lanes)]
            row, column = (fly.lane_map([entry[d] - table[0][d] for entry in table], lane) for d in (0, 1))
            result.append((row + table[0][0], column + table[0][1]))
        return result

    operands = [fly.from_elements([t.load(*p) for p in places(o)]) for t, o in ((a, "a"), (b, "b"), (c, "c"))]
    result = fly.mma(atom, *operands)
    for value, place in zip(result, places("c"), strict=True):
        c.store(value, *place)


@pytest.mark.parametrize(("arch", "atom"), ATOMS)
def test_a_product_is_matmul(arch, atom):
    random = np.random.default_rng(0)
    module = trace(product, *[matrix(d, 2) for d in (atom.dtype, atom.dtype, "f32")], arch=arch, atom=atom)
    program = Program.of(module, fly.backends.target.target(arch))
    a, b = (random.integers(-4, 5, (n, atom.k)).astype(NUMPY[atom.dtype]) for n in (atom.m, atom.n))
    c = random.integers(-4, 5, (atom.m, atom.n)).astype(np.float32)
    wanted = c + a.astype(np.float32) @ b.astype(np.float32).T
    Machine(program)(flat(a, b, c))
    np.testing.assert_array_equal(c, wanted)


@pytest.mark.parametrize(("arch", "atom"), ATOMS)
def test_accumulators_chain_into_operands(arch, atom):
    """(P V): P's accumulator tiles, taken register by register as operands, multiply the right rows of V."""
    link = fly.chain(atom)
    assert sorted(link.columns) == list(range(atom.k))
    random = np.random.default_rng(1)
    layout, operand = link.layout, link.row_operand
    tiles, values = max(1, atom.k // layout.columns), atom.values(operand)
    scores = random.integers(-4, 5, (layout.rows, tiles * layout.columns)).astype(float)
    outer = atom.m if operand == "a" else atom.n
    for t in range(tiles * layout.columns // atom.k):
        read = np.zeros((outer, atom.k))
        for lane in range(atom.lanes):
            registers = [
                scores[row, column + tile * layout.columns]
                for tile in range(tiles)
                for row, column in (layout.coordinate(lane, v) for v in range(layout.values))
            ]
            for j in range(values):
                read[element(atom, operand, lane, j)] = registers[t * values + j]
        wanted = scores[:, [t * atom.k + link.columns[k] for k in range(atom.k)]]
        np.testing.assert_array_equal(read, wanted)


def test_chained_operands_are_registers_in_order():
    def kernel(n: fly.i32):
        for name, count in (("mfma_32x32x16_bf16", 1), ("mfma_16x16x32_bf16", 4)):
            link = fly.chain(fly.target().atom(name))
            tile = fly.broadcast(fly.bf16(0.0), link.layout.values)
            operands = link.operands([tile] * count)
            assert [len(o) for o in operands] == [link.atom.values(link.row_operand)] * 2
            with pytest.raises(AtomError, match=r"takes bf16 operands, not <\d+ x f32>"):
                link.operands([tile.to(fly.f32)])

    trace(kernel, "i32")


def test_an_atom_whose_accumulators_form_no_operand():
    atom = fly.backends.target.target("gfx950").mma_atoms[0]
    turned = MmaAtom("odd", 32, 32, 16, "bf16", "f32", Layout((64, 8), (8, 1)), Layout((64, 8), (8, 1)), atom.c, "x")
    with pytest.raises(AtomError, match="accumulators of odd do not form an operand in either orientation"):
        fly.chain(turned)


def test_an_atom_must_cover_its_matrices():
    atom = fly.backends.target.target("sm_80").mma_atoms[0]
    with pytest.raises(AtomError, match=r"odd: layout .* of operand a does not cover 512 elements"):
        MmaAtom("odd", 32, 8, 16, "bf16", "f32", atom.a, atom.b, atom.c, "x")


def test_looking_atoms_up():
    target = fly.backends.target.target("gfx950")
    assert target.mma("f16", (16, 16, 32)).name == "mfma_16x16x32_f16"
    with pytest.raises(AtomError, match=r"gfx950 has no matrix instruction for 8x8x4 f16; it has 32x32x16 bf16"):
        target.mma("f16", (8, 8, 4))
    with pytest.raises(AtomError, match=r"gfx950 has no matrix instruction for f64"):
        target.mma("f64")
    with pytest.raises(TargetError, match=r"unknown target 'gfx90a'; expected one of gfx942, gfx950, sm_80"):
        fly.backends.target.target("gfx90a")


def test_ldmatrix_is_the_published_one():
    # PTX ISA, "ldmatrix": thread l gets elements 2 (l % 4), +1 of row l / 4 of each matrix; .trans swaps the roles
    loads = {load.name: load for load in fly.backends.target.target("sm_80").matrix_loads}
    for lane in range(32):
        for value in range(8):
            tile, half = divmod(value, 2)
            row, column = lane // 4, 2 * (lane % 4) + half
            assert divmod(loads["ldmatrix_x4"].table((lane, value)), 8) == (8 * tile + row, column)
            assert divmod(loads["ldmatrix_x4_trans"].table((lane, value)), 8) == (8 * tile + column, row)


def test_the_transposing_load_of_gfx950_is_a_transpose():
    # CDNA4 ISA, DS_READ_B64_TR_B16: 16 lanes read a 16 x 16 tile of which each gets a column's 4 elements
    (load,) = [x for x in fly.backends.target.target("gfx950").matrix_loads if "tr" in x.name]
    for lane in range(64):
        group, inside = lane & ~15, lane % 16
        for value in range(4):
            source, column = divmod(load.table((lane, value)), load.run)
            assert (source, column) == (group + 4 * value + inside // 4, inside % 4)
