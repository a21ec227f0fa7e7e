"""The Hopper kernel as ptxas sees it, at every row of its table of builds: registers, spills, the products.

ptxas serialises warpgroup products when it cannot see that their registers are left alone, or has too few of them. It
says so in a note (C7510, C7511) and nothing else: the kernel stays right, at a fraction of its speed.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from fly.backends.artefact import Artefact
from fly.backends.nvvm import wgmma
from fly.lang.signature import ScalarSpec, TensorMapSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.sm90.builds import Key, Sm90Options, decode_options, options_of, rows_for
from kernels.sm90.tiles import TILES
from tests.backends.builds import needs_ptxas, run_ptxas

IDS = [f"{d}x{dv}-{'causal' if causal else 'full'}-{n}x64-{longest or 'any'}" for d, dv, causal, n, longest in TILES]
every_row = pytest.mark.parametrize("row", TILES, ids=IDS)
FORM_ROW = next(row for row in TILES if row[:4] == (128, 128, True, 2))  # forms change the walk, not the products


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
        "whole_out": TensorSpec(dtype, out[1] - 1, 16, True) if options.combines else None,
        "whole_lse": TensorSpec("f32", out[1] - 2, 4, True) if options.combines else None,
    }
    maps = iter([TensorMapSpec(dtype, box, t.swizzle) for box, t in zip(options.boxes, options.tiles, strict=True)])
    return [
        next(maps) if p.kind == "map" else ScalarSpec(p.dtype) if p.kind == "scalar" else by_name[p.name]
        for p in flash_attn_sm90.signature.parameters
    ]


def compiled(row: Key, form: str = "dense", dtype: str = "bf16") -> Artefact:
    """A row's build."""
    return build(options_of(row), form, dtype)


@functools.cache
def build(options: Sm90Options, form: str = "dense", dtype: str = "bf16") -> Artefact:
    """One build; test processes share the cache."""
    arguments = tuple(specs(options, form, dtype))
    return compile_kernel(flash_attn_sm90, arguments, {"options": options}, "sm_90a", (options.threads, 1, 1))


def accept(artefact: Artefact, options: Sm90Options, directory, stack: int = 0) -> None:
    """ptxas takes the kernel without a note or more than `stack` bytes of spills, and finds room for a block."""
    report = run_ptxas(artefact.isa, "sm_90a", directory)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert frames and all(int(x) <= stack for frame in frames for x in frame), report
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


# head dimensions between those of rows: odd numbers of 8, lines that are not filled, V's own
BETWEEN = [(8, 8), (40, 64), (72, 72), (80, 80), (120, 104), (136, 136), (160, 160), (224, 224)]


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", BETWEEN, ids=str)
def test_head_dimensions_between_rows_are_accepted_too(dims, causal, tmp_path):
    """In the build with most rows, whose consumers have fewest registers."""
    row = max(rows_for(*dims, causal), key=lambda row: row[3])
    options = replace(options_of(row), head_dim=dims[0], head_dim_v=dims[1])
    accept(build(options), options, tmp_path)


@needs_ptxas
@pytest.mark.parametrize(("form", "dtype"), [("packed", "bf16"), ("split", "bf16"), ("dense", "f16")])
def test_other_forms_are_accepted_too(form, dtype, tmp_path):
    accept(compiled(FORM_ROW, form, dtype), options_of(FORM_ROW), tmp_path)


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize("form", ["packed", "split"])
@pytest.mark.parametrize("row", [row for row in TILES if row[3] == 3], ids=str)
def test_three_consumers_take_other_forms_too(row, form, tmp_path):
    """The producer beside them has 32 registers, and of split causal keys it spills some."""
    accept(compiled(row, form), options_of(row), tmp_path, 16)


@every_row
def test_products_are_no_more_than_the_mathematics_needs(row):
    """Wherever scores or output are started, all of their k is multiplied, by instructions of full width."""
    options, isa = options_of(row), compiled(row).isa
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", isa)
    assert {int(n) for n in found} <= {options.block_n, options.head_dim_v}
    starts = len(re.findall(r"wgmma\.fence\.sync\.aligned", isa))
    assert starts == isa.count("wgmma.commit_group.sync.aligned")
    scores, output = -(-options.head_dim // wgmma.K), options.block_n // wgmma.K
    # scores: first tile, main loops, next tile; output: main loops, next tile, last tile
    loops = 2 if options.causal else 1
    assert len(found) == (loops + 2) * (scores + output)
    assert starts == 2 * (loops + 2)


# head dimensions, causal, heads a tile, form
DECODE = [
    (64, 64, True, 4, "dense"),
    (40, 40, False, 8, "packed"),
    (96, 96, False, 8, "dense"),
    (128, 128, False, 1, "dense"),
    (128, 128, False, 8, "split"),
    (128, 128, True, 16, "packed"),
    (192, 128, True, 64, "split"),
    (192, 192, False, 2, "packed"),
    (256, 256, True, 8, "split"),
]


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(("head_dim", "head_dim_v", "causal", "pack", "form"), DECODE)
def test_decode_builds_are_accepted_too(head_dim, head_dim_v, causal, pack, form, tmp_path):
    options = replace(decode_options(head_dim, head_dim_v, causal, pack), combines=form == "split")
    accept(build(options, form), options, tmp_path)


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize("form", ["dense", "packed", "split"])
@pytest.mark.parametrize("row", [FORM_ROW, (64, 64, False, 3, None)], ids=str)
def test_packed_heads_are_accepted_too(row, form, tmp_path):
    options = replace(options_of(row), pack_gqa=8)
    accept(build(options, form), options, tmp_path)


def test_packed_heads_are_loaded_by_boxes_of_five_dimensions():
    row = (128, 128, False, 2, None)
    plain, packed = compiled(row).isa, build(replace(options_of(row), pack_gqa=4)).isa
    assert "tensor.5d" not in plain
    queries = re.findall(r"cp\.async\.bulk\.tensor\.5d", packed)
    # a panel of 64 columns each, before the loop over tiles and in it
    assert len(queries) == 2 * 2
    assert packed.count("tensor.4d") == plain.count("tensor.4d") - len(queries)


@every_row
def test_shared_memory_holds_the_rings(row):
    options = options_of(row)
    dynamic = compiled(row).dynamic_shared
    assert options.tile_bytes < dynamic <= min(options.tile_bytes + 2048, 227 << 10)
