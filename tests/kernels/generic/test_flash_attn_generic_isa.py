"""What the generic kernel's loops consist of: the instructions that its tiles call for, and no others of their kind.

Both loops (tiles that every row sees whole, and masked ones) are checked. Counts are of one wave and one tile of
keys, derived from the options that the library uses.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from fly.backends.artefact import Artefact
from fly.backends.target import target
from fly.lang.signature import ScalarSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from fly.runtime.inspect import loops
from kernels.commands import flash_attn
from kernels.flash_attn_generic import GenericOptions, flash_attn_generic, options_for
from tests.backends.builds import needs_ptxas, run_ptxas
from tests.isa import count, kinds, opcodes


@functools.cache
def compiled(arch: str, head_dim: int, dtype: str, causal: bool) -> tuple[Artefact, GenericOptions]:
    """The build that the library makes for aligned tensors, with log-sum-exp; test processes share the cache."""
    description = target(arch)
    options = options_for(description, head_dim, causal, 16)
    specs = ((TensorSpec(dtype, 4, 16, True),) * 4) + (TensorSpec("f32", 3, 4, True), ScalarSpec("f32"), None, None)
    threads = options.waves * description.wave_size
    return compile_kernel(flash_attn_generic, specs, {"options": options}, arch, (threads, 1, 1)), options


def cases(*archs: str):
    """One in two combinations, the same for all tests: each three values of three parameters are among them."""
    marks = (
        pytest.mark.sample(2),
        pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"]),
        pytest.mark.parametrize("dtype", ["bf16", "f16"]),
        pytest.mark.parametrize("head_dim", [64, 128]),
        pytest.mark.parametrize("arch", archs),
    )
    return lambda test: functools.reduce(lambda marked, mark: mark(marked), marks, test)


def tile_bytes(options: GenericOptions) -> int:
    """Of K and V together."""
    return 2 * 2 * options.block_n * options.head_dim


def products(options: GenericOptions, arch: str, dtype: str) -> int:
    """Matrix atoms of one wave and tile: scores and output take as many multiplications each."""
    atom = target(arch).mma(dtype)
    rows = options.block_m // options.waves
    return 2 * rows * options.block_n * options.head_dim // (atom.m * atom.n * atom.k)


def exponentials(options: GenericOptions, arch: str, rows_of_lane: int) -> int:
    """One for each score of a lane, and one factor for each row that it owns."""
    scores = options.block_m // options.waves * options.block_n // target(arch).wave_size
    return scores + rows_of_lane


amd = cases("gfx942", "gfx950")
nvidia = cases("sm_80", "sm_90a")


def both_loops(artefact: Artefact) -> list[tuple[str, ...]]:
    found = [loop.opcodes for loop in loops(artefact.isa)]
    assert len(found) == 2
    return found


@amd
def test_registers_without_spills(arch, head_dim, dtype, causal):
    artefact, options = compiled(arch, head_dim, dtype, causal)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= 512 // options.waves_per_eu
    assert resources.occupancy >= options.waves_per_eu
    assert resources.shared_bytes == options.stages * tile_bytes(options)
    assert not kinds(opcodes(artefact.isa), "(flat|scratch)_.*")


def other_head_dims(*archs: str):
    return pytest.mark.parametrize(("arch", "head_dim"), list(itertools.product(archs, (96, 160, 192, 224, 256))))


@pytest.mark.sample(2)
@other_head_dims("gfx942", "gfx950")
def test_other_head_dims_without_spills(arch, head_dim):
    artefact, options = compiled(arch, head_dim, "bf16", True)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= 512 // options.waves_per_eu


@pytest.mark.sample(2)
@needs_ptxas
@other_head_dims("sm_90a")
def test_ptxas_spills_nothing_at_other_head_dims(arch, head_dim, tmp_path):
    report = run_ptxas(compiled(arch, head_dim, "bf16", True)[0].isa, arch, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report


def test_budget_of_a_tile():
    """The unmasked loop of the build that matters most on gfx942: D=128, bf16, full attention.

    With the rescale that most tiles skip; the project's own bound is 430.
    """
    artefact, options = compiled("gfx942", 128, "bf16", False)
    loop = both_loops(artefact)[0]
    assert (options.block_n, count(loop, "v_mfma.*")) == (64, 64)
    assert len(loop) <= 383
    assert artefact.resources.registers + artefact.resources.accum_registers <= 256
    assert artefact.resources.spills == 0


@pytest.mark.parametrize("form", [{"packed": True}, {"split": True}, {"packed": True, "split": True}], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_forms_cost_nothing_in_the_loop(arch, form):
    """Packed sequences and split keys: the same instructions for a tile, but for what addresses it."""
    dense, options = compiled(arch, 128, "bf16", True)
    kernel, specs, statics, block = flash_attn(arch, {"causal": True, **form})
    assert statics == {"options": options}
    artefact = compile_kernel(kernel, specs, statics, arch, (block, 1, 1))
    assert (artefact.resources.spills, artefact.resources.scratch_bytes) == (0, 0)
    assert artefact.resources.occupancy >= options.waves_per_eu
    for loop, plain in zip(both_loops(artefact), both_loops(dense)):
        for kind in ("v_mfma.*", "v_exp_f32.*", "ds_(read|write).*", "buffer_load.*", "s_barrier"):
            assert count(loop, kind) == count(plain, kind)
        assert not kinds(loop, "global_.*|flat_.*|s_load.*")
        assert len(loop) <= len(plain) + 16


@amd
def test_matrix_instructions(arch, head_dim, dtype, causal):
    artefact, options = compiled(arch, head_dim, dtype, causal)
    shape, issues = {"gfx942": ("32x32x8", 2), "gfx950": ("32x32x16", 1)}[arch]
    for loop in both_loops(artefact):
        assert kinds(loop, "v_mfma.*") == {f"v_mfma_f32_{shape}_{dtype}"}
        assert count(loop, "v_mfma.*") == issues * products(options, arch, dtype)
        assert not kinds(loop, "v_accvgpr.*")


@amd
def test_softmax(arch, head_dim, dtype, causal):
    """Each maximum is one instruction: no quieting of NaNs before it. A lane owns one row of each row tile."""
    artefact, options = compiled(arch, head_dim, dtype, causal)
    rows = options.block_m // options.waves // target(arch).mma(dtype).n
    scores = options.block_m // options.waves * options.block_n // 64
    for loop in both_loops(artefact):
        assert count(loop, "v_exp_f32.*") == exponentials(options, arch, rows)
        assert not kinds(loop, "v_cmp_u_f32.*")
        # a tile's scores, the other half's maximum, and the one so far
        pairs = count(loop, "v_max_f32.*") + 2 * count(loop, "v_max3_f32") + 2 * count(loop, "v_pk_max_f32")
        assert pairs == scores + rows
        assert not kinds(loop, "v_(div|rcp|log|sqrt).*")


@amd
def test_global_loads(arch, head_dim, dtype, causal):
    artefact, options = compiled(arch, head_dim, dtype, causal)
    threads = options.waves * 64
    each = tile_bytes(options) // 2 // threads  # bytes that a thread moves of K, and of V
    for loop in both_loops(artefact):
        loads = {16: count(loop, "buffer_load_dwordx4"), 8: count(loop, "buffer_load_dwordx2")}
        if arch == "gfx942" and each // 4 < 16:
            # four rows of V are turned at a time: all threads take part, each with a narrower piece
            assert loads == {16: each // 16, 8: each // 8}
        else:
            assert loads == {16: 2 * each // 16, 8: 0}
        assert count(loop, "(buffer|global|flat|scratch)_.*") == sum(loads.values())


@amd
def test_shared_memory_on_the_way_in_and_out(arch, head_dim, dtype, causal):
    """Sixteen bytes at a time; V is turned by the loads on gfx950, and before the stores on gfx942."""
    artefact, options = compiled(arch, head_dim, dtype, causal)
    one, wave = tile_bytes(options) // 2, 64 * 16
    stored = one // (options.waves * wave)
    for loop in both_loops(artefact):
        if arch == "gfx950":
            reads = {"ds_read_b128": one // wave, "ds_read_b64_tr_b16": 2 * one // wave}
            writes = {"ds_write_b128": 2 * stored}
        else:
            reads = {"ds_read_b128": 2 * one // wave}
            writes = {"ds_write_b128": stored, "ds_write_b64": 2 * stored}
        assert {opcode: loop.count(opcode) for opcode in kinds(loop, "ds_read.*")} == reads
        assert {opcode: loop.count(opcode) for opcode in kinds(loop, "ds_write.*")} == writes
        assert loop.count("s_barrier") == 2
        # the two halves of a wave exchange maxima, and nothing else
        assert count(loop, "ds_(bpermute|swizzle)_b32|v_permlane32_swap_b32.*") == 1


@amd
def test_rounding_to_16_bits(arch, head_dim, dtype, causal):
    artefact, options = compiled(arch, head_dim, dtype, causal)
    pairs = options.block_m // options.waves * options.block_n // 64 // 2
    turned = tile_bytes(options) // 2 // (options.waves * 64 * 4)  # registers of V that a thread turns
    for loop in both_loops(artefact):
        if arch == "gfx950":
            assert count(loop, f"v_cvt_pk_{dtype}_f32.*") == pairs
            assert not kinds(loop, "v_perm_b32")
        elif dtype == "bf16":
            assert count(loop, "v_perm_b32") == pairs + turned
            assert not kinds(loop, "v_(bfe_u32|and_or_b32)")
        else:
            assert count(loop, "v_cvt_f16_f32.*|v_cvt_pkrtz.*") == 2 * pairs
            assert count(loop, "v_perm_b32") == turned


@nvidia
def test_ptx_matrix_instructions_and_loads(arch, head_dim, dtype, causal):
    artefact, options = compiled(arch, head_dim, dtype, causal)
    tiles_of_8x8 = options.block_n * options.head_dim // 64
    wave_rows = options.block_m // options.waves
    of_queries = wave_rows * options.head_dim // 64 if options.queries == "shared" else 0
    for loop in both_loops(artefact):
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        assert {o: loop.count(o) for o in kinds(loop, r"mma\..*")} == {mma: products(options, arch, dtype)}
        # K's operands, V's turned, and those of Q where it does not stay in registers
        loads = {"": tiles_of_8x8 + of_queries, ".trans": tiles_of_8x8}
        for form, tiles in loads.items():
            assert loop.count(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16") == tiles // 4
        assert count(loop, "ldmatrix.*") == sum(loads.values()) // 4
        rows = 2 * (options.block_m // options.waves) // 16
        assert count(loop, r"ex2\.approx\.ftz\.f32") == exponentials(options, arch, rows)
        assert not kinds(loop, r"(ld|st)\..*")
    assert not kinds(opcodes(artefact.isa), r"(ld|st)\.local.*")


@nvidia
def test_ptx_copies(arch, head_dim, dtype, causal):
    """16 bytes a copy past the first-level cache; tiles K and V are a group each, all newer ones may be in flight."""
    artefact, options = compiled(arch, head_dim, dtype, causal)
    copies = tile_bytes(options) // (options.waves * 32 * 16)
    for loop in both_loops(artefact):
        assert {o: loop.count(o) for o in kinds(loop, r"cp\.async.*shared.*")} == {
            "cp.async.cg.shared.global": copies
        }
        assert count(loop, r"cp\.async\.commit_group") == 2
        assert count(loop, r"cp\.async\.wait_group") == count(loop, r"bar(rier)?\..*") == 1
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", artefact.isa)
    # for the queries all tiles stay in flight, for a tile all newer ones
    assert waits == [str(2 * (options.stages - 1)), *[str(2 * (options.stages - 2))] * 2]


@needs_ptxas
@nvidia
def test_ptxas_spills_nothing(arch, head_dim, dtype, causal, tmp_path):
    report = run_ptxas(compiled(arch, head_dim, dtype, causal)[0].isa, arch, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert int(re.search(r"Used (\d+) registers", report).group(1)) <= 255
