"""Block-sparse masks on the Hopper kernel, on a GPU, against the float32 reference."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import BlockMask, create_block_mask
from tests.kernels.feature_cases import Inputs, by_sequence_and_head, document_mask, everything
from tests.kernels.feature_reference import check_used, feature_reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
DEVICE = "cuda"
# queries and keys: ends inside of blocks, one query, more queries than keys
SHAPES = [(200, 333), (513, 400), (130, 2050), (1000, 1000), (1, 700), (257, 64)]


def causal(b, h, q, k):
    return k <= q


def sliding(b, h, q, k):
    return (k <= q + 90) & (k > q - 170)


def checkerboard(b, h, q, k):
    return (q // 128 + k // 128) % 2 == 0


def prefix(b, h, q, k):
    return (k <= q) | (k < 200)


def nothing_for_some(b, h, q, k):
    """Queries 128 to 255 see nothing."""
    return ((q < 128) | (q >= 256)) & ((k < 130) | (k >= 250)) & (k != 3)


def nothing(b, h, q, k):
    return k < 0


MASKS = [causal, sliding, checkerboard, prefix, nothing_for_some, by_sequence_and_head, nothing, everything]


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    """This kernel, or an error."""
    monkeypatch.setenv(config.KERNEL.name, "sm90")


def wrong(inputs, mask_mod, size, is_causal, splits=1, entries=None, aux=(), **options) -> str | None:
    """What is wrong with a call's results."""
    q, k, v = inputs.tensors(entries)
    leading = (2, inputs.heads) if mask_mod is by_sequence_and_head else (None, None)
    mask = create_block_mask(mask_mod, *leading, inputs.queries[0], inputs.keys[0], DEVICE, size, aux)
    lists = {"block_mask": mask, "num_kv_splits": splits, "aux_tensors": aux}
    out, lse = flydsl_flash_attn_func(q, k, v, is_causal, return_lse=True, **lists, **options)
    ref = feature_reference(q, k, v, is_causal, mask_mod=mask_mod, aux_tensors=aux, **options)
    report = check_used(out, ref, lse)
    return None if report.ok else str(report)


def inputs_of(shape, heads, dims, seed) -> Inputs:
    queries, keys = shape
    return Inputs([queries] * 2, [keys] * 2, *heads, dims[0], "bf16", False, dims[1], seed, DEVICE)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mask_mod", MASKS)
def test_masks(mask_mod, is_causal, dims, seed):
    for shape in SHAPES:
        found = wrong(inputs_of(shape, (4, 2), dims, seed), mask_mod, 128, is_causal)
        assert found is None, f"seed {seed}, {shape}: {found}"


@pytest.mark.parametrize(
    "size", [(64, 64), (256, 128), (128, 64), (64, 256), (192, 192), (128, 112), (33, 7)], ids=str
)
@pytest.mark.parametrize("mask_mod", [sliding, by_sequence_and_head])
def test_block_sizes(mask_mod, size, seed):
    for shape in SHAPES:
        found = wrong(inputs_of(shape, (8, 1), (128, 128), seed), mask_mod, size, False)
        assert found is None, f"seed {seed}, {shape}: {found}"


@pytest.mark.parametrize("splits", [0, 2, 5])
@pytest.mark.parametrize("mask_mod", [sliding, nothing_for_some, nothing])
def test_split_keys(mask_mod, splits, seed):
    for shape in SHAPES:
        found = wrong(inputs_of(shape, (4, 4), (128, 128), seed), mask_mod, 128, False, splits)
        assert found is None, f"seed {seed}, {shape}: {found}"


OPTIONS = {
    "window sink": lambda x: {"window_size": (333, 20), "sink": x.floats(x.heads)},
    "softcap alibi": lambda x: {"softcap": 2.0, "alibi_slopes": x.floats(x.heads).abs()},
    "bias": lambda x: {"bias": x.floats(x.batch, 1, x.queries[0], x.keys[0])},
    "lengths": lambda x: {
        "seqused_q": x.ints(0, x.queries[0], x.batch),
        "seqused_kv": x.ints(0, x.keys[0], x.batch),
        "cache_leftpad": x.ints(0, x.keys[0] // 2, x.batch),
        "kv_batch_idx": x.ints(0, x.batch, x.batch),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("is_causal", "splits"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("mask_mod", [sliding, by_sequence_and_head])
def test_with_other_features(mask_mod, is_causal, splits, name, seed):
    for shape in SHAPES:
        inputs = inputs_of(shape, (4, 2), (128, 128), seed)
        options = OPTIONS[name](inputs)
        entries = 3 if "kv_batch_idx" in options else None
        found = wrong(inputs, mask_mod, 128, is_causal, splits, entries, **options)
        assert found is None, f"seed {seed}, {shape}: {found}"


def test_documents(seed):
    documents = torch.arange(1000, dtype=torch.int32, device=DEVICE) // 170
    found = wrong(inputs_of((1000, 1000), (4, 2), (128, 128), seed), document_mask, 128, True, aux=(documents,))
    assert found is None, f"seed {seed}: {found}"


def test_blocks_that_are_not_listed_are_not_read(seed):
    """NaN in keys that nobody sees changes nothing; queries whose blocks list nothing get zeros."""
    q, k, v = inputs_of((513, 640), (4, 2), (128, 128), seed).tensors()
    k[:, 256:384] = v[:, 256:384] = math.nan

    def holed(b, h, q, k):
        return ((q < 128) | (q >= 256)) & ((k < 256) | (k >= 384))

    mask = create_block_mask(holed, None, None, 513, 640, DEVICE)
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_mask=mask, return_lse=True)
    assert not out.isnan().any()
    assert (out[:, 128:256] == 0).all() and (lse[..., 128:256] == -math.inf).all()


@pytest.mark.parametrize("separate", [True, False])
def test_flex_attentions_masks_are_taken(separate, seed):
    from torch.nn.attention import flex_attention

    q, k, v = inputs_of((500, 700), (4, 4), (128, 128), seed).tensors()
    options = {} if separate else {"separate_full_blocks": False}
    if not options.keys() <= inspect.signature(flex_attention.create_block_mask).parameters.keys():
        pytest.skip("this torch always lists whole blocks apart")
    flex = flex_attention.create_block_mask(sliding, None, None, 500, 700, device=DEVICE, **options)
    out = flydsl_flash_attn_func(q, k, v, False, block_mask=BlockMask.of(flex))
    exact = flex_attention.flex_attention(*(x.transpose(1, 2).float() for x in (q, k, v)), block_mask=flex)
    torch.testing.assert_close(out.float(), exact.transpose(1, 2), atol=2e-2, rtol=0)
