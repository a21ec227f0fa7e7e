"""Pages whose rows are looked up one by one: of any number of keys, with padding at the left, and rows of the table.

As in `tests.kernels.cache.test_paged`, unused rows of pages hold NaN, unused entries of the table name no page, and
the emulator's checks are on.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

from fly.errors import UnsupportedError
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.cache.test_paged import (
    FEATURES,
    HEADS,
    KEYS,
    KV_HEADS,
    TUNED,
    dense_failure,
    emulated,  # noqa: F401
    failure,
    queries_of,
)
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged

archs = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


@pytest.mark.sample(2)
@archs
@pytest.mark.parametrize("page_size", [1, 8, 24, None])
def test_pages_of_any_number_of_keys(arch, page_size, seed):
    page_size = page_size or seed % 200 + 1
    wrong = dense_failure(page_size, 3, True, seed, dtype=torch.float16 if page_size % 2 else torch.bfloat16)
    assert wrong is None, f"seed {seed}, pages of {page_size}: {wrong}"


@pytest.mark.parametrize(
    ("arch", "page_size", "dims", "seq_len", "options"),
    [
        ("gfx942", 48, (128, 128), 70, {}),
        ("gfx950", 5, (40, 72), 3, {"num_kv_splits": 3}),
        ("gfx950", 768, (96, 96), 40, {}),
        ("gfx942", 20, (192, 128), 2, {"num_kv_splits": 0}),
    ],
    ids=str,
)
def test_head_dims_and_split_keys(arch, page_size, dims, seq_len, options, seed):
    wrong = dense_failure(page_size, seq_len, True, seed, keys=[150, 0, 33], dims=dims, **options)
    assert wrong is None, f"seed {seed}: {wrong}"


def hidden(paged: Paged, skipped: list[int]) -> Paged:
    """The sequences without their first keys, which are NaN in the pages."""
    size, keep, first = paged.k.shape[1], [], 0
    for b, (count, length) in enumerate(zip(skipped, paged.lengths.tolist())):
        for row in range(min(count, length)):
            paged.k[paged.table[b, row // size], row % size] = math.nan
            paged.v[paged.table[b, row // size], row % size] = math.nan
        keep.append(torch.arange(first + min(count, length), first + length))
        first += length
    rows = torch.cat(keep)
    lengths = torch.tensor([len(own) for own in keep], dtype=torch.int32)
    return Paged(paged.k, paged.v, paged.table, lengths, paged.packed_k[rows], paged.packed_v[rows])


@pytest.mark.parametrize(
    ("arch", "page_size", "splits"), [("gfx942", 16, 1), ("gfx950", 64, 3), ("gfx950", 24, 1), ("gfx942", 1, 2)]
)
@pytest.mark.usefixtures("unchecked")
def test_padding_at_the_left_of_pages(arch, page_size, splits, seed):
    whole = Paged.of([130, 40, 64, 5], page_size, KV_HEADS, (64, 64), torch.bfloat16, seed)
    skipped = [17, 0, 63, 9]  # more than a page, nothing, all but one, more than there are
    seen = hidden(whole, skipped)
    q = queries_of((4, 3, HEADS, 64), torch.bfloat16, seed)
    options = whole.options | {"cache_leftpad": torch.tensor(skipped, dtype=torch.int32), "num_kv_splits": splits}
    out, lse = flydsl_flash_attn_func(q, whole.k, whole.v, True, return_lse=True, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), seen, [3] * 4, out, lse, True) is None, f"seed {seed}"


@pytest.mark.parametrize(
    ("arch", "page_size"), [("gfx942", 16), ("gfx950", 64), ("gfx950", 24), (TUNED, 16), (TUNED, 128)]
)
def test_rows_of_a_table(arch, page_size, seed):
    """`kv_batch_idx` names the row of the table that a sequence has; the table may have any number of rows."""
    paged = Paged.of(KEYS, page_size, KV_HEADS, (64, 64), torch.bfloat16, seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:4]
    table = torch.full((7, paged.table.shape[1]), 2**30, dtype=torch.int32)
    table[order] = paged.table
    q = queries_of((4, 2, HEADS, 64), torch.bfloat16, seed)
    options = {"block_table": table, "kv_batch_idx": order.to(torch.int32), "seqused_kv": paged.lengths}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), paged, [2] * 4, out, lse, True) is None, f"seed {seed}"


@pytest.mark.parametrize("arch", ["gfx942", TUNED])
def test_packed_queries_and_rows_of_a_table(arch, seed):
    queries, page_size = [20, 0, 1, 7], 64
    paged = Paged.of(KEYS, page_size, KV_HEADS, (64, 64), torch.bfloat16, seed)
    q = queries_of((sum(queries), HEADS, 64), torch.bfloat16, seed)
    options = {"cu_seqlens_q": offsets(queries), "max_seqlen_q": 20, "seqused_kv": paged.lengths}
    options |= {"block_table": paged.table.flip(0), "kv_batch_idx": torch.arange(3, -1, -1, dtype=torch.int32)}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **options)
    assert failure(q, paged, queries, out, lse, True) is None, f"seed {seed}"


@archs
def test_packed_queries_with_everything(arch, seed):
    queries, skipped = [20, 0, 1, 7], [3, 1, 40, 0]
    whole = Paged.of([130, 1, 64, 9], 24, KV_HEADS, (64, 64), torch.float16, seed)
    seen = hidden(whole, skipped)
    q = queries_of((sum(queries), HEADS, 64), torch.float16, seed)
    options = {"cu_seqlens_q": offsets(queries), "max_seqlen_q": 20, "seqused_kv": whole.lengths}
    options |= {"block_table": whole.table.flip(0), "kv_batch_idx": torch.arange(3, -1, -1, dtype=torch.int32)}
    options |= {"cache_leftpad": torch.tensor(skipped, dtype=torch.int32), "return_lse": True}
    out, lse = flydsl_flash_attn_func(q, whole.k, whole.v, True, **options)
    assert failure(q, seen, queries, out, lse, True) is None, f"seed {seed}"


@pytest.mark.parametrize(("feature", "arch"), [("window", "gfx942"), ("bias", "gfx950"), ("seqused_q", "gfx950")])
@pytest.mark.usefixtures("unchecked")
def test_features_give_what_contiguous_keys_give(arch, feature, seed):
    """Bit by bit: only where rows come from differs."""
    keys, page_size = [230, 0, 65], 20
    paged = Paged.of(keys, page_size, KV_HEADS, (64, 64), torch.float16, seed, spare_entries=0)
    most = paged.table.shape[1] * page_size
    q = queries_of((len(keys), 12, HEADS, 64), torch.float16, seed)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, most - x.shape[1])) for x in paged.padded())
    options = {"causal": False, "return_lse": True, **FEATURES[feature]}
    options["cache_leftpad"] = torch.tensor([33, 4, 2], dtype=torch.int32)
    if feature == "bias":
        options["bias"] = options["bias"][..., :most]
    found = flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options, **options)
    wanted = flydsl_flash_attn_func(q, k, v, seqused_kv=paged.lengths, **options)
    used = [12, 3, 0] if feature == "seqused_q" else [12] * 3  # the others' results have no meaning
    for (a, a_lse), (b, b_lse), count in zip(zip(*found), zip(*wanted), used, strict=True):
        assert torch.equal(a[:count], b[:count]) and torch.equal(a_lse[:, :count], b_lse[:, :count]), f"seed {seed}"


@archs
@pytest.mark.parametrize("page_size", [20, 32])
@pytest.mark.usefixtures("unchecked")
def test_wrong_tables_lengths_and_padding_stay_inside(arch, page_size, seed):
    """The emulator faults on any access outside of the tensors."""
    paged = Paged.of([64, 64], page_size, KV_HEADS, (64, 64), torch.bfloat16, seed, spare_pages=0, spare_entries=0)
    q = queries_of((2, 3, HEADS, 64), torch.bfloat16, seed)
    wild = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    table = torch.randint(-(2**31), 2**31 - 1, paged.table.shape, generator=torch.Generator().manual_seed(seed))
    options = {"cache_leftpad": torch.tensor([3, 5], dtype=torch.int32), "kv_batch_idx": wild}
    flydsl_flash_attn_func(q, paged.k, paged.v, block_table=table.int(), seqused_kv=paged.lengths, **options)
    options["cache_leftpad"] = wild
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options, **options, return_lse=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    options = {"cache_leftpad": torch.zeros(2, dtype=torch.int32), "block_table": paged.table}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, seqused_kv=wild, return_lse=True, **options)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


REFUSED = {
    "page size": (24, {}, "takes pages of a power of two of at least 16 keys, not of 24"),
    "small pages": (8, {}, "takes pages of a power of two of at least 16 keys, not of 8"),
    "left padding": (16, {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, "does not do padding at the left of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_tuned_kernel_leaves_them_to_the_generic_one(case, seed, monkeypatch):
    page_size, options, message = REFUSED[case]
    paged = Paged.of([40, 20], page_size, KV_HEADS, (64, 64), torch.bfloat16, seed)
    q = queries_of((2, 3, HEADS, 64), torch.bfloat16, seed)
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options, **options)
    monkeypatch.delenv("FLY_KERNEL")
    out = flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options, **options)
    assert failure(q.flatten(0, 1), paged, [3, 3], out.flatten(0, 1), None, True) is None, f"seed {seed}"
