"""Block-sparse masks on the gfx950 kernel: its machine code, emulated with checks, and what its builds cost.

A finding of the emulator's checks raises. How lists are made, and what is refused on every kernel, is in
`test_block_mask`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fly
from fly.errors import ShapeError, UnsupportedError
from fly.runtime.device import device_for
from kernels import dispatch
from kernels.flash_attn_gfx950 import flash_attn_gfx950
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.gfx950.options import BLOCK_M, WAVE_ROWS, WAVES, DualWaveOptions
from kernels.problem.block_mask import BlockMask, create_block_mask
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from kernels.work.tile_list import PARTIAL, WHOLE
from tests.kernels.call.test_paths_walk import PLAIN
from tests.kernels.feature_cases import Inputs, by_sequence_and_head, document_mask, everything
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.gfx950.test_features_gfx950 import OPERANDS, VECTOR
from tests.kernels.gfx950.test_flash_attn_gfx950_isa import total


def causal(b, h, q, k):
    return k <= q


def sliding(b, h, q, k, *aux):
    return (k <= q + 60) & (k > q - 70)


def nothing_for_some(b, h, q, k):
    """The second block of queries sees nothing, nor does any query the third block of keys."""
    return ((q < 128) | (q >= 256)) & ((k < 256) | (k >= 384)) & (k != 3)


def nothing(b, h, q, k):
    return k < 0


@pytest.fixture(autouse=True)
def emulated(emulate):
    """The emulated gfx950 with checks, and no other kernel."""
    emulate("gfx950", "gfx950")


# mask, (queries, keys), block, head_dim, heads, options. Lists have odd and even numbers of tiles, partial ones first
# or last; blocks of 128 and 384 rows have four waves, of 256 eight.
CASES = [
    (causal, (200, 330), 128, 64, (2, 1), {}),
    (causal, (300, 300), (256, 64), 128, (2, 2), {}),
    (sliding, (300, 333), (128, 64), 64, (1, 1), {}),
    (sliding, (130, 450), (384, 192), 128, (1, 1), {"num_kv_splits": 3}),
    (by_sequence_and_head, (180, 300), 128, 128, (4, 2), {}),
    (by_sequence_and_head, (257, 64), 256, 64, (2, 1), {"causal": True, "window_size": (100, 50)}),
    (nothing_for_some, (300, 450), 128, 64, (2, 1), {}),
    (nothing_for_some, (300, 450), (128, 64), 128, (1, 1), {"num_kv_splits": 2}),
    (nothing, (130, 70), 128, 64, (1, 1), {"num_kv_splits": 3}),
    (everything, (1, 700), 128, 128, (4, 1), {}),
    (everything, (200, 300), 128, 64, (2, 1), {"causal": True, "window_size": (90, -1), "num_kv_splits": 2}),
    (everything, (130, 512), (128, 64), 64, (1, 1), {"num_kv_splits": 2}),  # 4 tiles each: a turn has one too many
    (everything, (180, 300), 128, 64, (1, 1), {"lengths": True}),
    (sliding, (180, 300), 128, 64, (2, 2), {"softcap": 2.0, "causal": True}),
    (sliding, (260, 400), 128, 128, (2, 1), {"alibi": True}),  # the last rows start at the second block
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mask_mod", "shape", "size", "head_dim", "heads", "options"),
    CASES,
    ids=[f"{mask.__name__}-{size}-{dim}-{'+'.join(o) or 'plain'}" for mask, _, size, dim, _, o in CASES],
)
def test_it_is_the_same_as_its_mask_mod(mask_mod, shape, size, head_dim, heads, options, seed):
    queries, keys = shape
    inputs = Inputs([queries] * 2, [keys] * 2, *heads, head_dim, seed=seed)
    q, k, v = inputs.tensors()
    leading = (2, heads[0]) if mask_mod is by_sequence_and_head else (None, None)
    mask = create_block_mask(mask_mod, *leading, queries, keys, "cpu", size)
    options = {"causal": False, "sink": inputs.floats(heads[0])} | options
    if options.pop("lengths", False):
        options["seqused_q"], options["seqused_kv"] = (
            torch.tensor(x, dtype=torch.int32) for x in ([180, 5], [210, 0])
        )
    if options.pop("alibi", False):
        options["alibi_slopes"] = inputs.floats(heads[0]).abs() * 0.1
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, return_lse=True, **options)
    options.pop("num_kv_splits", None)
    report = check_used(out, feature_reference(q, k, v, mask_mod=mask_mod, **options), lse)
    assert report.ok, f"seed {seed}: {report}"


def test_documents(seed):
    """A mask with an auxiliary tensor, which is loaded in partial blocks alone."""
    inputs = Inputs([300, 300], [300, 300], seed=seed, head_dim=64)
    q, k, v = inputs.tensors()
    documents = torch.arange(300, dtype=torch.int32) // 110
    mask = create_block_mask(document_mask, None, None, 300, 300, "cpu", 128, [documents])
    out, lse = flydsl_flash_attn_func(q, k, v, block_mask=mask, aux_tensors=[documents], return_lse=True)
    ref = feature_reference(q, k, v, mask_mod=document_mask, aux_tensors=[documents])
    report = check_used(out, ref, lse)
    assert report.ok, f"seed {seed}: {report}"


def test_lists_decide_not_the_function(seed):
    """In whole blocks the function is not asked, and blocks that no list has are not seen whatever it says."""
    inputs = Inputs([130], [300], heads=1, kv_heads=1, head_dim=64, seed=seed)
    q, k, v = inputs.tensors()
    number = lambda *x: torch.tensor(x, dtype=torch.int32).view(1, 1, 2, -1)  # noqa: E731
    partial, whole = (number(1, 1)[..., 0], number(1, 2)), (number(1, 1)[..., 0], number(2, 0))
    mask = BlockMask(*partial, *whole, (128, 128), (130, 300), nothing)
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    seen = lambda b, h, q, k: ((q < 128) & (k >= 256)) | ((q >= 128) & (k < 128))  # noqa: E731
    report = check_used(out, feature_reference(q, k, v, False, mask_mod=seen), lse)
    assert report.ok, f"seed {seed}: {report}"
    no_whole = replace(mask, full_kv_num_blocks=None, full_kv_indices=None)
    assert (flydsl_flash_attn_func(q, k, v, False, block_mask=no_whole) == 0).all()


def test_blocks_that_are_not_listed_are_not_read(seed):
    """NaN in keys that nobody sees changes nothing; queries whose blocks list nothing get zeros."""
    q, k, v = Inputs([300], [450], head_dim=64, seed=seed).tensors()
    k[:, 256:384] = v[:, 256:384] = math.nan
    mask = create_block_mask(nothing_for_some, None, None, 300, 450, "cpu", 128)
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    assert not out.isnan().any()
    assert (out[:, 128:256] == 0).all() and (lse[..., 128:256] == -math.inf).all()


@pytest.mark.usefixtures("unchecked")
def test_lists_that_are_wrong_stay_inside(seed):
    """Numbers and indices that no list has are cut; the emulator faults on any access outside of the tensors."""
    q, k, v = Inputs([130], [200], head_dim=64, seed=seed).tensors()
    mask = create_block_mask(causal, None, None, 130, 200, "cpu", 128)
    wrong = torch.full_like(mask.kv_num_blocks, 1000)
    indices = torch.full_like(mask.kv_indices, 2**20)
    indices[..., 0] = -7
    mask = replace(mask, kv_num_blocks=wrong, kv_indices=indices, full_kv_num_blocks=-wrong)
    flydsl_flash_attn_func(q, k, v, block_mask=mask)


def mix_of(device, tiles: int, whole: bool) -> Counter[str]:
    """Instructions of a launch of one block of 128 rows whose list has so many tiles, whole or partial."""
    q, k = (torch.zeros(1, n, 1, 128, dtype=torch.bfloat16) for n in (128, 64 * 16))
    mask = create_block_mask(everything, None, None, 128, 64 * 16, "cpu", (128, 64))
    empty = torch.zeros_like(mask.kv_num_blocks)
    counts = [empty, torch.full_like(empty, tiles)]
    few = replace(
        mask, kv_num_blocks=counts[not whole], full_kv_num_blocks=counts[whole], kv_indices=mask.full_kv_indices
    )
    flydsl_flash_attn_func(q, k, k, False, block_mask=few)
    return Counter(device.last.mix)


def test_what_lists_add_to_a_tile(monkeypatch):
    """Scalar arithmetic and two loads; a tile of a whole block has no mask, nor is the function called."""
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")
    device = device_for(("cpu", 0))
    waves = BLOCK_M // WAVE_ROWS // 2

    def a_tile(whole: bool) -> Counter[str]:
        few, many = (mix_of(device, tiles, whole) for tiles in (5, 9))
        return Counter({name: (many[name] - few[name]) / 4 / waves for name in many})

    tile, masked = a_tile(True), a_tile(False)
    assert total(tile, "v_mfma.*") == total(masked, "v_mfma.*") == 32
    assert tile["v_exp_f32"] == 32 and tile["s_barrier"] == 4 and tile["s_load_dword"] == 2
    assert total(tile, "v_cmp_.*") < 8 and total(tile, "v_cndmask_.*") < 8
    assert total(masked, "v_cndmask_.*") > 32
    assert total(tile, "(global|flat|scratch)_.*") == total(tile, "v_(readlane|writelane).*") == 0


LISTS = (*PARTIAL, *WHOLE)
TABLES = {name: fly.TensorSpec("i32", 3 + name.endswith("indices"), 4, True) for name in LISTS}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("names", "functions", "aux", "split"),
    [
        ((), {}, (), False),
        (("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", "window_left", "sink"), {}, (), True),
        (("softcap",), {}, (), False),
        ((), {"mask_mod": document_mask}, (VECTOR,), False),
    ],
    ids=["alone", "lengths", "softcap", "documents"],
)
@pytest.mark.parametrize("waves", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_spills_and_as_many_blocks_a_compute_unit(names, functions, aux, split, waves, head_dim):
    """Blocks of four waves: two of them at D=128, by registers and LDS, and at 64 three, of modified scores two."""
    functions = {name: Mod.of(function) for name, function in ({"mask_mod": sliding} | functions).items()}
    features = Features((*names, *LISTS), block_size=(waves * WAVE_ROWS, 128), **functions)
    tensor, rank = fly.TensorSpec("bf16", 4, 16, True), 4 + split
    results = fly.TensorSpec("f32" if split else "bf16", rank, 16, True), fly.TensorSpec("f32", rank - 1, 4, True)
    operands = [({**OPERANDS, **TABLES})[name] for name in features.operands]
    specs = (*(tensor,) * 3, *results, fly.ScalarSpec("f32"), None, None, None, *operands, *aux)
    options = DualWaveOptions(head_dim, False, features=features, waves=waves, stagger=waves == WAVES)
    resources = fly.compile(flash_attn_gfx950, *specs, block=waves * 64, target="gfx950", options=options).resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.registers + resources.accum_registers <= (
        168 if head_dim == 64 and not features.modifies else 256
    )
    assert resources.shared_bytes * {128: 2, 64: 3}[head_dim] <= 160 * 1024


def test_waves_and_stagger():
    with pytest.raises(ShapeError, match="waves is 2; the gfx950 kernel has 4 or 8 in a block"):
        DualWaveOptions(64, True, waves=2, stagger=False)
    with pytest.raises(ShapeError, match="stagger with 4 waves; a block needs 8 for two groups: leave it out"):
        DualWaveOptions(64, True, waves=4)


def test_the_paths_of_block_masks(monkeypatch):
    monkeypatch.delenv("FLY_KERNEL")
    asked = replace(PLAIN, features=("mask_mod", "block_mask"))

    def of(size):
        return replace(asked, static_features=Features(LISTS, mask_mod=Mod.of(causal), block_size=size))

    for size, kernel in (
        ((128, 128), "gfx950"),
        ((256, 64), "gfx950"),
        ((64, 64), "generic"),
        ((128, 32), "generic"),
    ):
        assert dispatch.choose("gfx950", of(size)).name == kernel
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    message = (
        r"the gfx950 kernel takes a block_mask whose BLOCK_SIZE is a multiple of \(128, 64\), not \(64, 64\): "
        "build it with such blocks, or pass its mask_mod as mask_mod"
    )
    with pytest.raises(UnsupportedError, match=message):
        dispatch.choose("gfx950", of((64, 64)))
