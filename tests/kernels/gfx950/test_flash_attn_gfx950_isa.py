"""The gfx950 dual-wave kernel's instructions: what a wave executes for a tile, in which order, from which banks.

Counts of a tile are differences of emulated runs that differ in their number of tiles, so prologue, epilogue, masks
and rescales drop out of them. The notebook (docs/notebook.md) says what they are made of.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter

import pytest
import torch

import fly
from fly.emulator import Program
from fly.emulator.banks import MODELS, BankCounter
from fly.runtime.device import device_for
from fly.runtime.inspect import Loop, loops
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.gfx950.options import WAVES, DualWaveOptions

BLOCK = WAVES * 64
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
builds = pytest.mark.parametrize(
    ("head_dim", "dtype", "causal"),
    [(128, "bf16", False), (128, "bf16", True), (128, "f16", False), (64, "bf16", False), (64, "f16", True)],
)


@functools.cache
def compiled(
    head_dim: int, dtype: str, causal: bool, packed: bool = False, split: bool = False, lse: bool = True
) -> fly.Artefact:
    def tensor(dtype: str, rank: int) -> fly.TensorSpec:
        return fly.TensorSpec(dtype, rank, 16, True)

    inputs = (tensor(dtype, 4 - packed),) * 3
    out = tensor("f32" if split else dtype, 4 - packed + split)
    sums = tensor("f32", 3 - packed + split) if lse else None
    offsets = tensor("i32", 1) if packed else None
    specs = (*inputs, out, sums, fly.ScalarSpec("f32"), offsets, offsets, None)
    options = DualWaveOptions(head_dim, causal)
    return fly.compile(flash_attn_gfx950, *specs, block=BLOCK, target="gfx950", options=options)


def run(tiles: int, head_dim: int, dtype: str, causal: bool) -> None:
    """One block against so many key tiles; equal scores, so that one rescale is all there is."""
    q, out = (torch.zeros(1, 256, 1, head_dim, dtype=DTYPES[dtype]) for _ in range(2))
    k = v = torch.zeros(1, 64 * tiles, 1, head_dim, dtype=DTYPES[dtype])
    arguments = (q, k, v, out, torch.empty(1, 1, 256), 1 / math.sqrt(head_dim), None, None, None)
    flash_attn_gfx950[(1, 1, 1), BLOCK](*arguments, options=DualWaveOptions(head_dim, causal))


@pytest.fixture
def emulated(monkeypatch):
    """The emulated gfx950, without checks: those are for the tests of results."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    return device_for(("cpu", 0))


def executed(device, head_dim: int, dtype: str, causal: bool) -> dict[str, float]:
    """Instructions of a wave for one key tile that nothing is masked in, by opcode."""
    few, many, mix = 5, 9, Counter()
    for tiles, sign in ((many, 1), (few, -1)):
        run(tiles, head_dim, dtype, causal)
        for opcode, count in device.last.mix.items():
            mix[opcode] += sign * count
    return {opcode: count / ((many - few) * WAVES) for opcode, count in mix.items() if count}


def total(mix: dict[str, float], pattern: str) -> float:
    return sum(count for opcode, count in mix.items() if re.fullmatch(pattern, opcode))


@builds
def test_instructions_of_a_tile(head_dim, dtype, causal, emulated):
    mix = executed(emulated, head_dim, dtype, causal)
    steps = head_dim // 16
    assert {
        "matrix": total(mix, "v_mfma.*"),
        "exponentials": total(mix, "v_exp_f32"),
        "conversions": total(mix, f"v_cvt_pk_{dtype}_f32"),
        "maxima": total(mix, "v_max3_f32") + total(mix, "v_max_f32"),
        "packed FMAs": total(mix, "v_pk_fma_f32"),
        "additions": 2 * total(mix, "v_pk_add_f32") + total(mix, "v_add_f32"),
        "K": mix["ds_read_b128"],
        "V": mix["ds_read_b64_tr_b16"],
        "copies": mix["buffer_load_dwordx4"],
        "barriers": mix["s_barrier"],
        "waits": mix["s_waitcnt"],
        "LDS stores": total(mix, "ds_write.*"),
        "accumulator moves": total(mix, "v_accvgpr.*"),
        "scratch": total(mix, "(scratch|flat|global)_.*"),
    } == {
        "matrix": 4 * steps,
        "exponentials": 32,
        "conversions": 16,
        "maxima": 16,
        "packed FMAs": 16,
        "additions": 32,
        "K": 2 * steps,
        "V": 4 * steps,
        "copies": head_dim / 32,
        "barriers": 4,
        "waits": 2,
        "LDS stores": 0,
        "accumulator moves": 0,
        "scratch": 0,
    }
    vector = total(mix, "v_.*") - total(mix, "v_mfma.*")
    assert (sum(mix.values()), vector) == {128: (215, 110), 64: (176, 112)}[head_dim]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_rare(head_dim, emulated):
    """A tile with a mask, and one with a rescale, cost no more instructions than these beyond a plain one."""

    def count(keys: int, largest: float) -> float:
        q, k = (torch.zeros(1, n, 1, head_dim, dtype=torch.bfloat16) for n in (256, keys))
        q[..., 0], k[:, 128:, :, 0] = 1.0, largest
        arguments = (q, k, k, torch.empty_like(q), None, 1.0, None, None, None)
        flash_attn_gfx950[(1, 1, 1), BLOCK](*arguments, options=DualWaveOptions(head_dim, False))
        return emulated.last.executed / WAVES

    plain = count(320, 0.0)
    assert 64 < count(319, 0.0) - plain <= 93
    assert head_dim // 4 < count(320, 100.0) - plain <= {64: 46, 128: 65}[head_dim]


@pytest.mark.parametrize("form", [{}, {"packed": True}, {"split": True, "packed": True}, {"lse": False}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_registers_and_shared_memory(head_dim, form):
    """In every form; and the main loop of each is that of the dense one, but for a scalar instruction."""
    artefact = compiled(head_dim, "bf16", True, **form)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= {128: 256, 64: 168}[head_dim]
    assert resources.shared_bytes == {128: 133632, 64: 67456}[head_dim]
    plain, mine = (Counter(main_loop(a).mix) for a in (compiled(head_dim, "bf16", True), artefact))
    assert abs(plain.pop("scalar") - mine.pop("scalar")) <= 1
    # where the loop is the last block of the text, its rare branches have another wait than where it is not
    assert abs(plain.pop("wait") - mine.pop("wait")) <= 1
    assert plain == mine


def main_loop(artefact: fly.Artefact) -> Loop:
    """The one of the most matrix instructions: a branch back to code before it looks like a loop too."""
    return max(loops(artefact.isa), key=lambda loop: loop.mix.get("matrix", 0))


def steady_state(artefact: fly.Artefact) -> list[list[str]]:
    """Opcodes between barriers in the main loop's text."""
    clusters: list[list[str]] = [[]]
    for opcode in main_loop(artefact).opcodes:
        if opcode == "s_barrier":
            clusters.append([])
        clusters[-1].append(opcode)
    return clusters


@builds
def test_vector_instructions_stand_between_matrix_instructions(head_dim, dtype, causal):
    """In the scores' cluster, and in that of the output up to its branch; before the first, at D=128, only packed
    ones of the scores' cluster, 16 FMAs and 3 additions, and at most a move.
    """
    gaps, packed = [], []
    for cluster in steady_state(compiled(head_dim, dtype, causal)):
        if not any(opcode.startswith("v_mfma") for opcode in cluster):
            continue
        end = next((i for i, opcode in enumerate(cluster) if opcode.startswith("s_cbranch")), len(cluster))
        text = "".join("M" if opcode.startswith("v_mfma") else "v" for opcode in cluster[:end] if opcode[0] == "v")
        gaps.append([len(gap) for gap in text.split("M")])
        packed.append([opcode for opcode in cluster[:end] if opcode[0] == "v"][: gaps[-1][0]])
    assert len(gaps) == 4
    kinds = ("v_pk_fma_f32", "v_pk_add_f32")
    counts = [tuple(before.count(kind) for kind in kinds) for before in packed]
    assert counts == {128: [(16, 3), (0, 0)] * 2, 64: [(0, 0)] * 4}[head_dim]
    assert all(len(before) <= sum(count) + (before != []) for before, count in zip(packed, counts, strict=True))
    for gap in gaps:
        _, *between, after = gap
        assert len(between) == head_dim // 8 - 1
        assert min(between) >= 1 and max(between) <= {128: 6, 64: 11}[head_dim]
        assert after <= {128: 6, 64: 7}[head_dim]


@pytest.mark.parametrize(("dtype", "causal"), [("bf16", False), ("bf16", True), ("f16", False)])
def test_packed_instructions_lie_in_lines(dtype, causal):
    """None of the loop's crosses 32 bytes of code, which would cost a turn of both waves.

    Fails where code before the loop has grown by 4 bytes, or shrunk: then `Tiles.nops` is to be 0, or 1 again.
    """
    artefact = compiled(128, dtype, causal)
    kinds = ("v_pk_fma_f32", "v_pk_add_f32")
    loop = [opcode for opcode in main_loop(artefact).opcodes if opcode in kinds]
    program = Program(artefact.binary)
    code = program.machine(program.kernels[0]).instructions
    # none of these is before the loop
    packed = [inst for inst in code if inst.name in kinds][: len(loop)]
    assert [inst.name for inst in packed] == loop and len(loop) == 2 * (16 + 3)
    assert [hex(inst.address) for inst in packed if inst.address // 32 != (inst.next - 1) // 32] == []


@builds
def test_exponentials_of_the_two_compute_clusters(head_dim, dtype, causal):
    """At D=128 three quarters are beside the scores' products, where vector instructions leave more room, and their
    additions are of 4 bytes.
    """
    counts = []
    for cluster in steady_state(compiled(head_dim, dtype, causal)):
        end = next((i for i, opcode in enumerate(cluster) if opcode.startswith("s_cbranch")), len(cluster))
        counts.append(Counter(cluster[:end]))
    exponentials = [count["v_exp_f32_e32"] for count in counts if count["v_exp_f32_e32"]]
    assert exponentials == {128: [24, 8], 64: [16, 16]}[head_dim] * 2
    assert head_dim != 128 or not any(count["v_add_f32_e64"] for count in counts)


@builds
def test_no_wait_for_all_copies(head_dim, dtype, causal):
    """The newest tile stays in flight at each of the steady state's waits."""
    artefact = compiled(head_dim, dtype, causal)
    body = artefact.isa.partition(f"\n{main_loop(artefact).label}:")[2]
    waits = re.findall(r"s_waitcnt (.*)", body.partition("s_endpgm")[0])[:4]
    assert waits == [f"vmcnt({head_dim // 64}) lgkmcnt(0)"] * 4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_bank_conflicts(head_dim, model, emulated):
    """Every LDS access of a launch, with 32 banks and with 64."""
    emulated.lds_observer = counter = BankCounter(model)
    try:
        run(5, head_dim, "bf16", False)
    finally:
        emulated.lds_observer = None
    assert set(counter.accesses) == {"buffer_load_dwordx4", "ds_read_b128", "ds_read_b64_tr_b16"}
    assert +counter.extra == {}
