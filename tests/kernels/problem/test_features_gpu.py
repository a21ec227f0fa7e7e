"""Every feature on the Hopper kernel, on a GPU, against the float32 reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fly import config
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_cases import DENSE_ONLY, FEATURES, Inputs, by_head, compare, stripes

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]
DIMS = [(64, 64), (128, 128), (192, 128)]
ENTRIES = 3

# at sizes at which blocks walk tiles with and without masks
WIDE = {
    "window of tiles": lambda x: {"window_size": (500, 200)},
    "window left of tiles": lambda x: {"window_size": (400, -1)},
    "window right": lambda x: {"window_size": (-1, 40)},
    "window sink": lambda x: {"window_size": (127, 0), "sink": x.floats(x.heads)},
    "window of used": lambda x: {"window_size": (64, 64), **FEATURES["seqused"](x)},
    "chunks": lambda x: {"attention_chunk": 150},
    "chunks, window, sink": lambda x: {"attention_chunk": 300, "window_size": (200, 9), "sink": x.floats(x.heads)},
    "modifiers": lambda x: {
        "softcap": 3.0,
        "alibi_slopes": x.floats(x.heads),
        "score_mod": by_head,
        "mask_mod": lambda b, h, q, k, table: stripes(b, h, q, k),
        "aux_tensors": (x.floats(x.heads, max(x.keys)),),
    },
}
CASES = {**FEATURES, **WIDE}


@pytest.fixture(autouse=True)
def sm90(monkeypatch):
    """This kernel, or an error."""
    monkeypatch.setenv(config.KERNEL.name, "sm90")


def wrong(feature, causal, splits, inputs) -> str | None:
    """What is wrong with a call's results."""
    tensors = inputs.tensors(entries=ENTRIES if feature == "kv_batch_idx" else None)
    report = compare(*tensors, causal, splits, **CASES[feature](inputs), **inputs.form())
    return None if report.ok else str(report)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature", CASES)
def test_dense(feature, causal, dims, seed):
    """One head a tile, with few and many queries, and some splits."""
    sizes = [(40, 40), (200, 333), (513, 400), (130, 2050)]
    for (queries, keys), splits in zip(sizes, (1, 2, 1, 3)):
        inputs = Inputs([queries] * 2, [keys] * 2, 4, 4, dims[0], "bf16", False, dims[1], seed, "cuda")
        assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}, {queries} x {keys}"


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature", CASES)
def test_packed_heads(feature, causal, dims, seed):
    """Rows of a tile differ in their heads; the builds for decoding too."""
    sizes = [(1, 700), (5, 1111), (300, 3), (150, 600)]
    for ((queries, keys), splits), heads in zip(zip(sizes, (3, 1, 1, 2)), itertools.cycle([(8, 1), (6, 2)])):
        inputs = Inputs([queries] * 2, [keys] * 2, *heads, dims[0], "f16", False, dims[1], seed, "cuda")
        assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}, {queries} x {keys}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature", [name for name in CASES if name not in DENSE_ONLY])
def test_packed_sequences(feature, causal, seed):
    lengths = [([100, 0, 1, 300, 64], [333, 40, 700, 300, 0]), ([1] * 4, [300, 0, 1025, 64])]
    for ((queries, keys), splits), heads in zip(zip(lengths, (1, 3)), [(4, 4), (8, 1)]):
        inputs = Inputs(queries, keys, *heads, 128, "bf16", True, 128, seed, "cuda")
        assert wrong(feature, causal, splits, inputs) is None, f"seed {seed}, {queries} x {keys}"


@pytest.mark.parametrize(("causal", "splits"), [(True, 1), (False, 3)])
def test_what_is_not_in_use_does_not_matter(causal, splits, seed):
    """NaN before and after the keys in use, and what stands in rows of queries that are not."""
    inputs = Inputs([70, 70], [400, 400], 4, 2, 128, device="cuda", seed=seed)
    q, k, v = inputs.tensors()
    first, end = ([20, 100], [150, 333])
    counts = {"seqused_kv": end, "cache_leftpad": first, "seqused_q": [70, 33]}
    counts = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in counts.items()}
    out = torch.full_like(q, 7.0)
    clean = flydsl_flash_attn_func(q, k, v, causal, num_kv_splits=splits, out=out, **counts).clone()
    assert (clean[1, 33:] == 7.0).all(), f"seed {seed}"
    for b, tensor in itertools.product(range(2), (k, v)):
        tensor[b, : first[b]] = math.nan
        tensor[b, end[b] :] = math.nan
    dirty = flydsl_flash_attn_func(q, k, v, causal, num_kv_splits=splits, out=out, **counts)
    assert torch.equal(clean, dirty), f"seed {seed}"
