"""The gfx950 dual-wave kernel: its instructions, and its results on the emulated GPU with all checks on."""

from __future__ import annotations

import math
import re

import pytest
import torch

import fly
from fly.runtime.inspect import loops
from kernels.flash_attn_gfx950 import BLOCK_M, WAVES, DualWaveOptions, flash_attn_gfx950
from tests.kernels.reference import check, reference

BLOCK = WAVES * 64


def compiled(head_dim: int, dtype: str = "bf16", causal: bool = False) -> fly.Artefact:
    tensor = fly.TensorSpec(dtype, 4, 16, True)
    specs = (tensor, tensor, tensor, tensor, fly.TensorSpec("f32", 3, 16, True), fly.ScalarSpec("f32"))
    options = DualWaveOptions(head_dim, causal)
    return fly.compile(flash_attn_gfx950, *specs, block=BLOCK, target="gfx950", options=options)


@pytest.mark.parametrize("head_dim, dtype", [(128, "bf16"), (128, "f16"), (64, "bf16")])
def test_main_loop(head_dim, dtype):
    """Two tiles a turn: exact counts of what the module's table promises, and no wait for all copies."""
    artefact = compiled(head_dim, dtype)
    assert (artefact.resources.spills, artefact.resources.scratch_bytes) == (0, 0)
    assert artefact.resources.registers + artefact.resources.accum_registers <= 256
    (loop,) = [loop for loop in loops(artefact.isa) if loop.mix.get("matrix")]
    count = {
        name: sum(op.startswith(prefix) for op in loop.opcodes)
        for name, prefix in {
            "mfma": "v_mfma_f32_32x32x16",
            "exp": "v_exp_f32",
            "copies": "buffer_load_dwordx4",
            "k": "ds_read_b128",
            "v": "ds_read_b64_tr_b16",
            "stores": "ds_write",
            "barriers": "s_barrier",
        }.items()
    }
    steps = head_dim // 16
    assert count == {
        "mfma": 2 * 4 * steps,
        "exp": 2 * 32 + 2,  # and one in each rescale
        "copies": 2 * 2 * head_dim // 64,
        "k": 2 * 2 * steps,
        "v": 2 * 4 * steps,
        "stores": 0,
        "barriers": 2 * 4,
    }
    body = artefact.isa.partition(f"\n{loop.label}:")[2]
    assert re.findall(r"vmcnt\((\d+)\)", body.partition("s_endpgm")[0])[:4] == [str(head_dim // 64)] * 4


@pytest.mark.parametrize(
    "queries, keys, head_dim, dtype, causal",
    [
        (256, 256, 128, torch.bfloat16, True),
        (300, 333, 64, torch.float16, False),
        (129, 31, 128, torch.float16, True),
        (1, 450, 64, torch.bfloat16, True),
    ],
)
def test_results_on_the_emulated_gpu(queries, keys, head_dim, dtype, causal, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")
    generator = torch.Generator().manual_seed(queries * keys)
    q, k, v = (
        # large scores, so that maxima grow and the rescale is taken
        (torch.rand(1, rows, heads, head_dim, generator=generator) * 8 - 4).to(dtype)
        for rows, heads in ((queries, 2), (keys, 1), (keys, 1))
    )
    out, lse = torch.empty_like(q), torch.empty(1, 2, queries)
    grid = (-(-queries // BLOCK_M), 2, 1)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    flash_attn_gfx950[grid, BLOCK](q, k, v, out, lse, scale, options=DualWaveOptions(head_dim, causal))
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, report
