"""Head dimensions other than 64 and 128 on the gfx950 kernel: results with all checks on, and what builds need.

Rows get columns of zeros up to a tile's width, or lie in several panels; waves of wide heads read operands beside
their matrix instructions, or have a SIMD to themselves.
"""

from __future__ import annotations

import math

import pytest
import torch

import fly
from fly.errors import ShapeError, UnsupportedError
from kernels.dispatch import choose
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.interleaving import PAIRS, spread
from kernels.gfx950.options import WAVES, DualWaveOptions
from kernels.problem.block_mask import create_block_mask
from kernels.problem.contract import Request
from kernels.problem.features import Features
from tests.kernels.feature_cases import FEATURES, Inputs, compare
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.gfx950.test_features_gfx950 import OPERANDS
from tests.kernels.gfx950.test_flash_attn_gfx950 import REQUEST
from tests.kernels.gfx950.test_flash_attn_gfx950_isa import main_loop
from tests.kernels.paged import Paged
from tests.kernels.reference import check, reference


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950")


CASES = [
    ((40, 40), "bf16", True, 1, {}),
    ((72, 72), "f16", False, 1, {}),
    ((96, 96), "bf16", True, 2, {}),
    ((104, 24), "bf16", False, 1, {"packed": True}),
    ((192, 128), "f16", True, 1, {"packed": True}),
    ((192, 192), "bf16", False, 1, {}),
    ((8, 200), "bf16", True, 1, {}),
    ((80, 224), "bf16", True, 1, {}),
    ((256, 256), "bf16", True, 1, {}),
]


@pytest.mark.parametrize(("dims", "dtype", "causal", "splits", "form"), CASES, ids=lambda x: str(x).replace(" ", ""))
def test_results(dims, dtype, causal, splits, form, seed):
    lengths = ([70, 3], [140, 5]) if form else ([70], [210])
    inputs = Inputs(*lengths, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, seed=seed, **form)
    report = compare(*inputs.tensors(), causal, splits, **inputs.form())
    assert report.ok, f"seed {seed}: {report}"


FEATURED = [
    (("bias",), (104, 104)),
    (("window both",), (192, 192)),
    (("window left", "softcap"), (192, 192)),
    (("alibi heads",), (168, 168)),
    (("dropout",), (24, 24)),
    (("dropout",), (192, 192)),
    (("dropout", "softcap"), (128, 128)),
]


@pytest.mark.parametrize(("features", "dims"), FEATURED, ids=lambda x: "-".join(map(str, x)))
def test_features(features, dims, seed):
    inputs = Inputs([40], [210], head_dim=dims[0], head_dim_v=dims[1], seed=seed)
    options = {name: value for feature in features for name, value in FEATURES[feature](inputs).items()}
    report = compare(*inputs.tensors(), True, 1, **options)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.parametrize(("size", "dims"), [(16, (72, 72)), (64, (192, 128)), (32, (256, 256))])
def test_pages(size, dims, seed):
    paged = Paged.of([130, 5], size, 2, dims, torch.bfloat16, seed)
    q = torch.rand(2, 33, 4, dims[0], generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **paged.options)
    wanted = reference(q.flatten(0, 1), paged.packed_k, paged.packed_v, causal=True, lengths=[(33, 130), (33, 5)])
    report = check(out.flatten(0, 1), wanted, lse.transpose(0, 1).flatten(1))
    assert report.ok, f"seed {seed}: {report}"


def sees_some(batch, head, query, key):
    return (key <= query + 60) & (key > query - 70)


def test_a_block_mask(seed):
    inputs = Inputs([140], [210], head_dim=136, seed=seed)
    listed = create_block_mask(sees_some, None, None, 140, 210, "cpu", 128)
    q, k, v = inputs.tensors()
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=listed, return_lse=True)
    report = check_used(out, feature_reference(q, k, v, False, mask_mod=sees_some), lse)
    assert report.ok, f"seed {seed}: {report}"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("head_dim", [40, 136])
def test_the_next_heads_columns_are_not_read(head_dim, seed):
    """NaN in every other head, beside the columns of the first."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.rand(1, n, 2, head_dim, generator=generator).to(torch.float16) for n in (40, 90, 90))
    wanted = reference(*(x[:, :, :1] for x in (q, k, v)), causal=False)
    for x in (q, k, v):
        x[:, :, 1] = math.nan
    out, lse = flydsl_flash_attn_func(q, k, v, False, return_lse=True)
    report = check(out[:, :, :1], wanted, lse[:, :1])
    assert report.ok, f"seed {seed}: {report}"


def compiled(dims, names=(), waves=WAVES) -> fly.Artefact:
    tensor, lse = fly.TensorSpec("bf16", 4, 16, True), fly.TensorSpec("f32", 3, 4, True)
    specs = (*(tensor,) * 4, lse, fly.ScalarSpec("f32"), None, None, None, *(OPERANDS[name] for name in names))
    options = DualWaveOptions(
        dims[0], False, head_dim_v=dims[1], features=Features(names), waves=waves, stagger=waves == WAVES,
        waves_per_eu=waves // 4,
    )  # fmt: skip
    return fly.compile(flash_attn_gfx950, *specs, block=waves * 64, target="gfx950", options=options)


BUILDS = [
    ((40, 40), (), WAVES, 168),
    ((96, 96), (), WAVES, 208),
    ((104, 104), ("bias",), WAVES, 256),
    ((192, 128), (), WAVES, 256),
    ((192, 128), ("bias",), WAVES // 2, 300),
    ((192, 192), (), WAVES, 256),
    ((256, 256), (), WAVES // 2, 344),
]


@pytest.mark.parametrize(("dims", "names", "waves", "registers"), BUILDS)
def test_products_registers_and_spills(dims, names, waves, registers):
    """As many matrix instructions and operand loads as the mathematics needs, for two tiles; no scratch."""
    artefact = compiled(dims, names, waves)
    resources = artefact.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= registers
    steps, tiles = -(-dims[0] // 16), -(-dims[1] // 32)
    opcodes = main_loop(artefact).opcodes
    assert opcodes.count("v_mfma_f32_32x32x16_bf16") == 2 * (2 * steps + 4 * tiles)
    assert (opcodes.count("ds_read_b128"), opcodes.count("ds_read_b64_tr_b16")) == (4 * steps, 16 * tiles)


def test_operands_of_wide_heads_are_read_between_matrix_instructions():
    """Each at least three matrix instructions before the one that needs it, so that none waits long."""
    names = {"v_mfma_f32_32x32x16_bf16": "M", "ds_read_b128": "k", "ds_read_b64_tr_b16": "v", "s_barrier": "|"}
    text = "".join(names.get(opcode, "") for opcode in main_loop(compiled((192, 192))).opcodes)
    assert text.count("Mk" * 20) == 2 and text.count("Mvv" * 18) == 2


@pytest.mark.parametrize(
    ("dims", "features", "waves"),
    [
        ((128, 128), {}, 8),
        ((192, 128), {}, 8),
        ((192, 128), {"softcap"}, 4),
        ((192, 192), {"sink"}, 8),
        ((200, 200), {}, 4),
        ((256, 64), {}, 8),
    ],
)
def test_waves_of_a_block(dims, features, waves):
    """Eight, two a SIMD, where their registers hold queries and output and what features need, or else four."""
    head_dim, head_dim_v = dims
    request = Request(
        **REQUEST | {"head_dim": head_dim}, head_dim_v=head_dim_v, seq_len_kv=64,
        static_features=Features(tuple(features)),
    )  # fmt: skip
    options = DualWaveOptions.of(request)
    assert (options.waves, options.waves_per_eu, options.stagger) == (waves, waves // 4, waves == WAVES)


@pytest.mark.parametrize("products", range(2, 34, 2))
def test_matrix_instructions_are_spread_over_the_pairs(products):
    counts = spread(products, PAIRS)
    assert sum(counts) == products and len(counts) == PAIRS + 1
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1


def test_rows_with_columns_of_zeros_reach_half_as_far():
    """The offsets of lanes beside them are past any bound, which takes a bit."""
    request = {**REQUEST, "kv_pitch": 1 << 20, "seq_len_kv": 1849}
    assert choose("gfx950", Request(**request)).name == "gfx950"
    with pytest.raises(UnsupportedError, match="reaches 1848 keys whose rows are 1048576 bytes apart, not 1849"):
        choose("gfx950", Request(**request | {"head_dim": 72}))


def test_options_name_the_dimension():
    with pytest.raises(ShapeError, match="head_dim_v is 260; the gfx950 kernel takes multiples of 8 from 8 to 256"):
        DualWaveOptions(128, True, head_dim_v=260)
