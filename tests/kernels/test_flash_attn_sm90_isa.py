"""The Hopper kernel as ptxas sees it, at every row of its table of builds: registers, spills, the products.

ptxas serialises warpgroup products when it cannot see that their registers are left alone, or has too few of them. It
says so in a note (C7510, C7511) and nothing else: the kernel stays right, at a fraction of its speed.
"""

from __future__ import annotations

import functools
import re

import pytest

from fly.backends.artefact import Artefact
from fly.backends.nvvm import wgmma
from fly.lang.signature import ScalarSpec, TensorMapSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.flash_attn_sm90_tiles import TILES
from kernels.sm90_builds import Key, Sm90Options, options_of
from tests.backends.builds import needs_ptxas, run_ptxas

IDS = [f"{d}x{dv}-{'causal' if causal else 'full'}-{n}x64-{longest or 'any'}" for d, dv, causal, n, longest in TILES]
every_row = pytest.mark.parametrize("row", TILES, ids=IDS)
FORM_ROW = next(row for row in TILES if row[:3] == (128, 128, True))  # forms change the walk, not the products


def specs(options: Sm90Options, form: str, dtype: str) -> list:
    """What the library passes: see `prepare`."""
    offsets = TensorSpec("i32", 1, 16, True) if form == "packed" else None
    out = {"dense": (dtype, 4), "packed": (dtype, 3), "split": ("f32", 5)}[form]
    by_name = {
        "out": TensorSpec(*out, 16, True),
        "lse": TensorSpec("f32", out[1] - 1, 4, True),
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "counters": TensorSpec("i32", 1, 16, True),
    }
    maps = iter([TensorMapSpec(dtype, (1, t.rows, 1, t.panel_columns), t.swizzle) for t in options.tiles])
    return [
        next(maps) if p.kind == "map" else ScalarSpec(p.dtype) if p.kind == "scalar" else by_name[p.name]
        for p in flash_attn_sm90.signature.parameters
    ]


@functools.cache
def compiled(row: Key, form: str = "dense", dtype: str = "bf16") -> Artefact:
    """One build; test processes share the cache."""
    options = options_of(row)
    arguments = tuple(specs(options, form, dtype))
    return compile_kernel(flash_attn_sm90, arguments, {"options": options}, "sm_90a", (options.threads, 1, 1))


def accept(artefact: Artefact, options: Sm90Options, directory) -> None:
    """ptxas takes the kernel without a note, spills or scratch, and finds room for a block."""
    report = run_ptxas(artefact.isa, "sm_90a", directory)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert not re.search(r"\(C\d+\)|warning|Potential", report), report
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    producer, consumer = options.registers
    # what the block is launched with covers what its warpgroups take in the end
    assert registers * options.threads <= 65536
    assert 128 * (producer + options.consumers * consumer) <= registers * options.threads


@needs_ptxas
@every_row
def test_every_build_is_accepted_as_it_is_meant(row, tmp_path):
    accept(compiled(row), options_of(row), tmp_path)


@needs_ptxas
@pytest.mark.parametrize(("form", "dtype"), [("packed", "bf16"), ("split", "bf16"), ("dense", "f16")])
def test_other_forms_are_accepted_too(form, dtype, tmp_path):
    accept(compiled(FORM_ROW, form, dtype), options_of(FORM_ROW), tmp_path)


@every_row
def test_products_are_no_more_than_the_mathematics_needs(row):
    """Wherever scores or output are started, all of their k is multiplied, by instructions of full width."""
    options, isa = options_of(row), compiled(row).isa
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", isa)
    assert {int(n) for n in found} <= {options.block_n, options.head_dim_v}
    starts = len(re.findall(r"wgmma\.fence\.sync\.aligned", isa))
    assert starts == isa.count("wgmma.commit_group.sync.aligned")
    scores, output = options.head_dim // wgmma.K, options.block_n // wgmma.K
    # scores: first tile, main loops, next tile; output: main loops, next tile, last tile
    loops = 2 if options.causal else 1
    assert len(found) == (loops + 2) * (scores + output)
    assert starts == 2 * (loops + 2)


@every_row
def test_shared_memory_holds_the_rings(row):
    options = options_of(row)
    dynamic = compiled(row).dynamic_shared
    assert options.tile_bytes < dynamic <= min(options.tile_bytes + 2048, 227 << 10)
