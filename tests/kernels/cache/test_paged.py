"""Keys and values in pages: AMD kernels' machine code, emulated with all checks on, and callers' mistakes.

Unused rows of pages hold NaN and unused entries of the table name no page: using either shows. A finding of the
checks raises, so that a test that passes has had none.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels import dispatch, flash_attn_interface
from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check, reference

TUNED = "gfx950 tuned"  # the gfx950 kernel; else the generic one
archs = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
every_kernel = pytest.mark.parametrize("arch", ["gfx942", "gfx950", TUNED])
KEYS = [130, 0, 64, 5]  # a partial page at the end, none, whole pages, a part of one
HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def emulated(request, emulate):
    """The emulated GPU and the kernel of a test's `arch`, with checks; gfx950 and the generic one if it has none."""
    params = getattr(request.node, "callspec", None)
    arch, _, tuned = (params.params.get("arch", "gfx950") if params else "gfx950").partition(" ")
    emulate(arch, arch if tuned else "generic")


def queries_of(shape, dtype, seed):
    """Queries, uniform in [-1, 1]."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) * 2 - 1).to(dtype)


def failure(q, paged, queries, out, lse, causal) -> str | None:
    """What is wrong with results for packed queries."""
    lengths = list(zip(queries, paged.lengths.tolist()))
    report = check(out, reference(q, paged.packed_k, paged.packed_v, causal=causal, lengths=lengths), lse)
    return None if report.ok else str(report)


def dense_failure(page_size, seq_len, causal, seed, *, keys=KEYS, dims=(64, 64), dtype=torch.bfloat16, **options):
    """What is wrong with a call on (B, Sq, H, D) queries."""
    paged = Paged.of(keys, page_size, KV_HEADS, dims, dtype, seed)
    q = queries_of((len(keys), seq_len, HEADS, dims[0]), dtype, seed)
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, causal, return_lse=True, **paged.options, **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return failure(q.flatten(0, 1), paged, [seq_len] * len(keys), out, lse, causal)


PAGE_SIZES = [("gfx942", 32), ("gfx950", 128), ("gfx942", 256), ("gfx950", 1024)]
PAGE_SIZES += [(TUNED, size) for size in (16, 32, 64, 128, 512)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arch", "page_size"), [*itertools.product(["gfx942", "gfx950"], [16, 64]), *PAGE_SIZES])
def test_page_sizes(arch, page_size, seed):
    dtype = torch.float16 if page_size in (32, 128) else torch.bfloat16
    assert dense_failure(page_size, 1, True, seed, dtype=dtype) is None, f"seed {seed}"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arch", "page_size", "seq_len", "causal", "splits"),
    [
        ("gfx942", 16, 70, True, 1),
        ("gfx950", 16, 5, False, 3),
        ("gfx950", 32, 70, False, 2),
        ("gfx942", 64, 3, True, 0),
        ("gfx950", 128, 70, True, 3),
        ("gfx942", 256, 5, False, 2),
        (TUNED, 16, 270, True, 1),
        (TUNED, 64, 5, False, 3),
        (TUNED, 32, 70, True, 0),
        (TUNED, 256, 70, False, 2),
    ],
)
def test_several_queries_and_split_keys(arch, page_size, seq_len, causal, splits, seed):
    wrong = dense_failure(page_size, seq_len, causal, seed, keys=[300, 0, 70], num_kv_splits=splits)
    assert wrong is None, f"seed {seed}: {wrong}"


HEAD_DIMS = [((32, 32), 16), ((40, 40), 16), ((96, 96), 32), ((72, 104), 16), ((192, 128), 16), ((256, 256), 32)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arch", "dims", "page_size"),
    [
        *((arch, *row) for arch in ("gfx942", "gfx950") for row in HEAD_DIMS),
        *((TUNED, (128, 128), page_size) for page_size in (16, 32, 64, 256)),
    ],
    ids=str,
)
def test_head_dims(arch, dims, page_size, seed):
    wrong = dense_failure(page_size, 3, True, seed, keys=[100, 17], dims=dims)
    assert wrong is None, f"seed {seed}: {wrong}"


@every_kernel
@pytest.mark.parametrize(("page_size", "splits", "told_by"), [(16, 1, "seqused_kv"), (64, 3, "cu_seqlens_kv")])
def test_packed_queries(arch, page_size, splits, told_by, seed):
    queries, keys = [40, 0, 1, 17], [130, 9, 0, 64]
    paged = Paged.of(keys, page_size, KV_HEADS, (64, 64), torch.bfloat16, seed)
    q = queries_of((sum(queries), HEADS, 64), torch.bfloat16, seed)
    lengths = {"seqused_kv": paged.lengths, "cu_seqlens_kv": offsets(keys)}
    options = {"block_table": paged.table, told_by: lengths[told_by], "num_kv_splits": splits}
    options |= {"cu_seqlens_q": offsets(queries), "max_seqlen_q": 40}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, True, return_lse=True, **options)
    assert failure(q, paged, queries, out, lse, True) is None, f"seed {seed}"


FEATURES = {
    "window": {"window_size": (20, 3)},
    "window, causal": {"window_size": (40, -1), "causal": True},
    "softcap": {"softcap": 3.0},
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "bias": {"bias": torch.linspace(-1, 1, 12 * 256).reshape(1, 1, 12, 256)},
    "sink": {"sink": torch.tensor([0.0, 1.0, -1.0, 3.0])},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s * 0.5},
    "mask_mod": {"mask_mod": lambda b, h, q, k: k % 3 != 1},
    "seqused_q": {"seqused_q": torch.tensor([12, 3, 0], dtype=torch.int32)},
}


TUNED_FEATURES = [
    pytest.param(name, TUNED, marks=[] if name in ("window, causal", "sink", "mask_mod") else pytest.mark.exhaustive)
    for name in FEATURES
]


@pytest.mark.parametrize(
    ("feature", "arch"), [*zip(FEATURES, itertools.cycle(["gfx942", "gfx950"])), *TUNED_FEATURES]
)
def test_features_give_what_contiguous_keys_give(arch, feature, seed):
    """Bit by bit: only where rows come from differs."""
    splits = 3 if feature in ("window", "sink", "bias") else 1
    keys, page_size = [230, 0, 65], 16
    paged = Paged.of(keys, page_size, KV_HEADS, (64, 64), torch.float16, seed, spare_entries=1)
    q = queries_of((len(keys), 12, HEADS, 64), torch.float16, seed)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 256 - x.shape[1])) for x in paged.padded())
    options = {"causal": False, "return_lse": True, "num_kv_splits": splits, **FEATURES[feature]}
    found = flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options, **options)
    wanted = flydsl_flash_attn_func(q, k, v, seqused_kv=paged.lengths, **options)
    used = [12, 3, 0] if feature == "seqused_q" else [12] * 3  # the others' results have no meaning
    for (a, a_lse), (b, b_lse), count in zip(zip(*found), zip(*wanted), used, strict=True):
        assert torch.equal(a[:count], b[:count]) and torch.equal(a_lse[:, :count], b_lse[:, :count]), f"seed {seed}"


@every_kernel
@pytest.mark.usefixtures("unchecked")
def test_wrong_tables_and_lengths_stay_inside(arch, seed):
    """The emulator faults on any access outside of the tensors; lengths are cut to what the table has."""
    paged = Paged.of([64, 64], 32, KV_HEADS, (64, 64), torch.bfloat16, seed, spare_pages=0, spare_entries=0)
    q = queries_of((2, 3, HEADS, 64), torch.bfloat16, seed)
    wild = torch.tensor([[-5, 2**31 - 1], [1000, -(2**31)]], dtype=torch.int32)
    flydsl_flash_attn_func(q, paged.k, paged.v, block_table=wild, seqused_kv=paged.lengths)
    lengths = torch.tensor([2**31 - 1, -7], dtype=torch.int32)
    out, lse = flydsl_flash_attn_func(
        q, paged.k, paged.v, block_table=paged.table, seqused_kv=lengths, return_lse=True
    )
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    whole = flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options)
    assert torch.equal(out[0], whole[0])


@every_kernel
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_far_apart(arch, page_size, seed):
    """Pages past 2**31 elements and 4 GiB, in memory that is hardly touched, and rows that are not contiguous."""
    spare = {16: 2, 64: 4}[page_size]
    near = Paged.of([40, 20], page_size, KV_HEADS, (64, 64), torch.bfloat16, seed, spare_pages=spare)
    # the first sequence's first page is the last one, past 2**31 elements
    first = int(near.table[0, 0])
    for pool in (near.k, near.v):
        pool[[first, -1]] = pool[[-1, first]]
    near.table[near.table == len(near.k) - 1] = -1
    near.table[near.table == first] = len(near.k) - 1
    near.table[near.table == -1] = first
    pages, step = len(near.k), 2**29
    memory = torch.empty(pages * step + 2**20, dtype=torch.bfloat16)
    k, v = (
        memory.as_strided((pages, page_size, KV_HEADS, 64), (step, 512, 64, 1), storage_offset=at) for at in (0, 128)
    )
    k.copy_(near.k), v.copy_(near.v)
    assert step * int(near.table[0, 0]) > 2**31
    q = queries_of((2, 4, HEADS, 64), torch.bfloat16, seed)
    found = flydsl_flash_attn_func(q, k, v, return_lse=True, **near.options)
    wanted = flydsl_flash_attn_func(q, near.k, near.v, return_lse=True, **near.options)
    assert all(map(torch.equal, found, wanted)), f"seed {seed}"


def test_a_table_within_a_larger_one_and_a_shared_pool(seed):
    paged = Paged.of([90, 33], 32, KV_HEADS, (64, 64), torch.float16, seed)
    pool = torch.stack([paged.k, paged.v], 1)
    table = torch.full((2, 50), 2**30, dtype=torch.int32)
    table[:, : paged.table.shape[1]] = paged.table
    q = queries_of((2, 2, HEADS, 64), torch.float16, seed)
    options = {"block_table": table[:, :5], "seqused_kv": paged.lengths, "return_lse": True}
    out, lse = flydsl_flash_attn_func(q, *pool.unbind(1), **options)
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert failure(q.flatten(0, 1), paged, [2, 2], out, lse, True) is None, f"seed {seed}"


def test_a_call_of_the_same_kind_takes_the_plan(seed):
    first, second = (
        Paged.of(keys, 16, KV_HEADS, (64, 64), torch.float16, seed + i, spare_entries=spare, spare_pages=pages)
        for i, (keys, spare, pages) in enumerate([([40, 20], 1, 2), ([20, 30], 2, 3)])
    )
    assert first.k.shape == second.k.shape and first.table.shape == second.table.shape
    q = queries_of((2, 1, HEADS, 64), torch.float16, seed)
    flydsl_flash_attn_func(q, first.k, first.v, num_kv_splits=2, **first.options)
    plans = dict(flash_attn_interface._plans)
    out, lse = flydsl_flash_attn_func(q, second.k, second.v, num_kv_splits=2, **second.options), None
    assert dict(flash_attn_interface._plans) == plans
    assert failure(q.flatten(0, 1), second, [1, 1], out.flatten(0, 1), lse, True) is None, f"seed {seed}"


@every_kernel
@pytest.mark.usefixtures("unchecked")
def test_no_pages_at_all_and_a_workspace(arch, seed):
    paged = Paged.of([30], 16, KV_HEADS, (64, 64), torch.float16, seed)
    q = queries_of((1, 2, HEADS, 64), torch.float16, seed)
    options = {"seqused_kv": paged.lengths, "return_lse": True}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, block_table=paged.table[:, :0], **options)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert flydsl_flash_attn_workspace(q, paged.k, paged.v, num_kv_splits=2, **paged.options) > 0


def good():
    """Arguments of a good call."""
    paged = Paged.of([40, 20], 16, KV_HEADS, (64, 64), torch.bfloat16, 0)
    return {"q": torch.zeros(2, 3, HEADS, 64, dtype=torch.bfloat16), "k": paged.k, "v": paged.v, **paged.options}


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


PACKED = {"q": torch.zeros(6, HEADS, 64, dtype=torch.bfloat16), "cu_seqlens_q": offsets([3, 3]), "max_seqlen_q": 3}
PAGES = torch.zeros(4, 24, KV_HEADS, 64, dtype=torch.bfloat16)
MISTAKES = [
    ({"block_table": [[1]]}, ArgumentTypeError, "block_table must be a torch.Tensor, got list"),
    (
        {"block_table": int32(2)},
        ArgumentError,
        "block_table must be (B, pages of a sequence) int32 on cpu, got shape (2,)",
    ),
    ({"block_table": int32(2, 3).long()}, ArgumentError, "got shape (2, 3), dtype torch.int64 on cpu"),
    ({"block_table": int32(3, 2).T}, ArgumentError, "block_table's last dimension must be contiguous"),
    (
        {"block_table": int32(3, 3)},
        ArgumentError,
        "block_table must have a row for each of 2 sequences, got shape (3, 3)",
    ),
    ({"seqused_kv": None}, ArgumentError, "block_table needs the sequences' lengths: pass seqused_kv, (B,) int32"),
    (
        {"seqused_kv": int32(3)},
        ArgumentError,
        "seqused_kv must hold 2 contiguous int32 numbers on cpu, got shape (3,)",
    ),
    (
        {"seqused_kv": None, "cu_seqlens_kv": offsets([40, 20])},
        ArgumentError,
        "packed sequences need max_seqlen_q",
    ),
    (
        {"seqused_kv": None, "cu_seqlens_kv": offsets([40, 20]), "max_seqlen_q": 3},
        ArgumentError,
        "cu_seqlens_kv with block_table is for packed queries (cu_seqlens_q); pass seqused_kv",
    ),
    (
        {"k": PAGES[:, :0], "v": PAGES[:, :0]},
        ArgumentError,
        "pages of k and v must have at least one key, got shape (4, 0, 2, 64)",
    ),
    ({"k": PAGES[0], "v": PAGES[0]}, ArgumentError, "k must have 4 dimensions (pages, page_size, Hkv, D), got shape"),
    ({"max_seqlen_q": 3}, ArgumentError, "max_seqlen_q is only for packed sequences"),
    ({"max_seqlen_kv": -1}, ArgumentError, "max_seqlen_kv must be from 0 to 2147483647, got -1"),
    (PACKED | {"max_seqlen_q": None}, ArgumentError, "packed sequences need max_seqlen_q"),
    (
        PACKED | {"cu_seqlens_q": offsets([6]), "seqused_kv": int32(1)},
        ArgumentError,
        "block_table must have a row for each of 1 sequences",
    ),
    (PACKED | {"cu_seqlens_kv": offsets([6])}, ArgumentError, "must have the same length, got 3 and 2"),
    (
        {"bias": torch.zeros(3, 40)},
        ArgumentError,
        "bias must broadcast to (B, H, Sq, Skv) = (2, 4, 3, 80), got shape (3, 40)",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), MISTAKES, ids=[m[-1][:60] for m in MISTAKES])
def test_mistakes(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        flydsl_flash_attn_func(**good() | changes)


def test_a_kernel_without_such_pages_says_so(monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", "gfx950_fp8")
    wanted = "the gfx950_fp8 kernel takes pages of a power of two of at least 16 keys, not of 24: allocate such pages"
    paged = Paged.of([40, 20], 24, KV_HEADS, (128, 128), torch.float8_e4m3fn, 0)
    q = torch.zeros(2, 3, HEADS, 128).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=re.escape(wanted)):
        flydsl_flash_attn_func(q, paged.k, paged.v, **paged.options)


@pytest.mark.parametrize("page_size", [16, 128])
def test_keys_of_one_row_a_page(page_size, seed, monkeypatch):
    """A stride of zero along the rows of pages on the gfx950 kernel; NaN in them reaches no sequence without keys."""
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    one = Paged.of([3, 0, 2], 1, KV_HEADS, (64, 64), torch.bfloat16, seed, spare_entries=0)
    k, v = (x.expand(-1, page_size, -1, -1) for x in (one.k, one.v))
    lengths = one.lengths * page_size - (one.lengths > 0).to(torch.int32) * 5
    one.table[1] = int(torch.isnan(one.v[:, 0, 0, 0]).nonzero()[0])
    q = queries_of((3, 2, HEADS, 64), torch.bfloat16, seed)
    out, lse = flydsl_flash_attn_func(q, k, v, False, block_table=one.table, seqused_kv=lengths, return_lse=True)
    whole = [x.repeat_interleave(page_size, 0) for x in (one.packed_k, one.packed_v)]
    rows = torch.cat([torch.arange(3 * page_size - 5), 3 * page_size + torch.arange(2 * page_size - 5)])
    wanted = reference(
        q.flatten(0, 1), *(x[rows] for x in whole), causal=False, lengths=[(2, n) for n in lengths.tolist()]
    )
    report = check(out.flatten(0, 1), wanted, lse.transpose(0, 1).flatten(1))
    assert report.ok, f"seed {seed}: {report}"


def test_lengths_are_no_feature_of_their_own(monkeypatch):
    """With pages, a kernel need not know of seqused_kv elsewhere; seqused_q it needs."""
    asked, choose = [], dispatch.choose
    monkeypatch.setattr(
        dispatch, "choose", lambda arch, request, of: asked.append(request) or choose(arch, request, of)
    )
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    flydsl_flash_attn_func(**good())
    flydsl_flash_attn_func(**good(), seqused_q=int32(2))
    assert [request.features for request in asked] == [("paged",), ("seqused", "paged")]


@every_kernel
def test_every_length_around_the_ends_of_pages_and_tiles(arch, seed):
    """Lengths one off a page's or a tile's end, in one call."""
    keys = sorted({n + d for n, d in itertools.product((0, 16, 32, 64, 128), (-1, 0, 1)) if n + d >= 0})
    wrong = dense_failure(16, 1, False, seed, keys=keys)
    assert wrong is None, f"seed {seed}: {wrong}"
