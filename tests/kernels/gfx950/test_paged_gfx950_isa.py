"""The gfx950 kernel's builds for keys in pages: what pages add to a tile, registers, waits, and banks.

Results are in `test_paged`; what a tile costs without pages is in `test_flash_attn_gfx950_isa`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter

import pytest
import torch

import fly
from fly.emulator.banks import MODELS, BankCounter
from fly.errors import ShapeError
from fly.runtime.device import device_for
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.gfx950.options import WAVES, DualWaveOptions
from kernels.problem.features import Features
from tests.kernels.gfx950.test_flash_attn_gfx950_isa import main_loop, steady_state, total

BLOCK = WAVES * 64
FEATURES = Features(("seqused_kv", "block_table"))
PAGE_SIZES = (16, 32, 64, 256)
pages = pytest.mark.parametrize("page_size", PAGE_SIZES)
head_dims = pytest.mark.parametrize("head_dim", [64, 128])


@functools.cache
def compiled(head_dim: int, page_size: int, causal: bool = True, packed: bool = False, split: bool = False):
    def tensor(dtype: str, rank: int, alignment: int = 16) -> fly.TensorSpec:
        return fly.TensorSpec(dtype, rank, alignment, True)

    out, lse = tensor("f32" if split else "bf16", 4 - packed + split), tensor("f32", 3 - packed + split)
    offsets = tensor("i32", 1) if packed else None
    inputs = tensor("bf16", 4 - packed), tensor("bf16", 4), tensor("bf16", 4)
    specs = (*inputs, out, lse, fly.ScalarSpec("f32"), offsets, None, None, tensor("i32", 1, 4), tensor("i32", 2, 4))
    options = DualWaveOptions(head_dim, causal, features=FEATURES, page_size=page_size)
    return fly.compile(flash_attn_gfx950, *specs, block=BLOCK, target="gfx950", options=options)


def run(tiles: int, head_dim: int, page_size: int | None) -> None:
    """One block against so many key tiles; equal scores, so that one rescale is all there is. None: contiguous."""
    keys = 64 * tiles
    q, out = (torch.zeros(1, 256, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([keys], dtype=torch.int32)
    if page_size is None:
        features, operands = Features(("seqused_kv",)), (lengths,)
        k = torch.zeros(1, keys, 1, head_dim, dtype=torch.bfloat16)
    else:
        count = -(-keys // page_size)
        table = torch.randperm(count).to(torch.int32)[None]
        features, operands = FEATURES, (lengths, table)
        k = torch.zeros(count, page_size, 1, head_dim, dtype=torch.bfloat16)
    arguments = (q, k, k, out, torch.empty(1, 1, 256), 1 / math.sqrt(head_dim), None, None, None, *operands)
    options = DualWaveOptions(head_dim, False, features=features, page_size=page_size)
    flash_attn_gfx950[(1, 1, 1), BLOCK](*arguments, options=options)


@pytest.fixture
def emulated(monkeypatch):
    """The emulated gfx950, without checks: those are for the tests of results."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    return device_for(("cpu", 0))


def executed(device, head_dim: int, page_size: int | None) -> Counter[str]:
    """Instructions of a wave for one key tile that nothing is masked in, by opcode."""
    few, many, mix = 5, 9, Counter()
    for tiles, sign in ((many, 1), (few, -1)):
        run(tiles, head_dim, page_size)
        for opcode, count in device.last.mix.items():
            mix[opcode] += sign * count / ((many - few) * WAVES)
    return Counter({opcode: count for opcode, count in mix.items() if count})


@pytest.mark.sample(2)
@head_dims
@pages
def test_what_pages_add_to_a_tile(page_size, head_dim, emulated):
    """One load of a table's entry and scalar arithmetic, of which base and bound of contiguous keys need some too."""
    plain, mine = (executed(emulated, head_dim, size) for size in (None, page_size))
    assert plain["s_load_dword"] == 0 and mine["s_load_dword"] == 1
    for pattern in ("v_mfma.*", "v_exp_f32", "v_pk_.*", "ds_.*", "buffer_.*", "s_barrier", "s_waitcnt", "s_setprio"):
        assert total(mine, pattern) == total(plain, pattern) > 0
    assert total(mine, "(global|flat|scratch)_.*") == total(mine, "v_(readlane|writelane|readfirstlane).*") == 0
    assert total(mine, "v_.*") <= total(plain, "v_.*")
    more = sum(mine.values()) - sum(plain.values())
    assert 0 < more <= (41 if page_size > 64 else 31)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", [{}, {"causal": False}, {"packed": True}, {"split": True, "packed": True}], ids=str)
@head_dims
@pages
def test_registers_and_shared_memory(page_size, head_dim, form):
    """Two waves a SIMD, nothing spilled: scalar registers are what is short."""
    resources = compiled(head_dim, page_size, **form).resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= {128: 256, 64: 168}[head_dim]
    lines = {128: (67072, 68608), 64: (33664, 35328)}[head_dim]
    assert resources.shared_bytes == lines[page_size < 64]


@head_dims
@pages
def test_waits_are_those_without_pages(page_size, head_dim):
    """Nothing waits for a table's entry alone: its load stands behind one wait and is over at the next."""
    artefact = compiled(head_dim, page_size)
    body = artefact.isa.partition(f"\n{main_loop(artefact).label}:")[2]
    waits = re.findall(r"s_waitcnt (.*)", body.partition("s_endpgm")[0])[:4]
    assert waits == [f"vmcnt({head_dim // 64}) lgkmcnt(0)"] * 4
    loading = [cluster for cluster in steady_state(artefact) if "s_load_dword" in cluster]
    assert len(loading) == 2
    for cluster in loading:
        after = cluster[cluster.index("s_waitcnt") :]
        assert after.index("s_load_dword") > 0
        assert not [opcode for opcode in after if not opcode.startswith("s_")]
        assert "ds_read_b128" in cluster  # K's: the next wait is V's, a compute cluster later


@pytest.mark.parametrize("model", MODELS)
@head_dims
@pytest.mark.parametrize("page_size", [16, 64])
def test_no_bank_conflicts(page_size, head_dim, model, emulated):
    """Every LDS access of a launch, with 32 banks and with 64."""
    emulated.lds_observer = counter = BankCounter(model)
    try:
        run(5, head_dim, page_size)
    finally:
        emulated.lds_observer = None
    assert set(counter.accesses) == {"buffer_load_dwordx4", "ds_read_b128", "ds_read_b64_tr_b16"}
    assert +counter.extra == {}


def test_a_page_size_comes_with_a_table():
    with pytest.raises(ShapeError, match="page_size is None; expected one with block_table"):
        DualWaveOptions(64, True, features=FEATURES)
    with pytest.raises(ShapeError, match="page_size is 16; expected one with block_table and only then"):
        DualWaveOptions(64, True, page_size=16)
