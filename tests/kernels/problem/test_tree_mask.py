"""Trees of draft tokens against dense masks, on any kernel: dense, packed with prompts beside them, and in pages."""

from __future__ import annotations

import random
import re

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError
from kernels import flydsl_flash_attn_func, tree_bits, tree_mask
from tests.kernels.acceptance import EMULATED
from tests.kernels.feature_reference import feature_reference
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check

HEADS, KV_HEADS, D = 2, 1, 64


def tree(draw: random.Random, drafts: int) -> torch.Tensor:
    """(drafts, drafts) bool: which draft is on the way from the root to which, for parents drawn at random."""
    seen = torch.eye(drafts, dtype=torch.bool)
    for i in range(1, drafts):
        seen[i] |= seen[draw.randrange(i)]
    return seen


def right(out, lse, q, k, v, hidden) -> bool:
    """Whether one sequence's results are those of a dense mask; out, q (n, H, D), k, v (m, Hkv, D), hidden (n, m)."""
    bias = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, -torch.inf)
    expected = feature_reference(q[None], k[None], v[None], causal=False, bias=bias)
    return check(out[None], expected, lse[None]).ok


@pytest.fixture
def draw(monkeypatch, seed):
    """Random numbers, by which the kernel is chosen too."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    draw.choice(EMULATED).start(monkeypatch)
    return draw


def hidden_of(seen: torch.Tensor, keys: int) -> torch.Tensor:
    """(n, keys): all but the context, and of the drafts what is seen."""
    hidden = torch.zeros(len(seen), keys, dtype=torch.bool)
    hidden[:, keys - len(seen) :] = ~seen
    return hidden


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_drafts_see_the_context_and_their_ancestors(draw, dtype, seed):
    drafts = 32 if dtype is torch.int32 else 40
    seen = torch.stack([tree(draw, drafts) for _ in range(2)])
    keys = torch.tensor([drafts + 7, 90], dtype=torch.int32)
    q = torch.randn(2, drafts, HEADS, D).bfloat16()
    k, v = (torch.randn(2, 90, KV_HEADS, D).bfloat16() for _ in range(2))
    bits = tree_bits(seen).to(dtype)
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True, seqused_kv=keys, **tree_mask(bits, keys - drafts))
    for b, n in enumerate(keys.tolist()):
        assert right(out[b], lse[b], q[b], k[b, :n], v[b, :n], hidden_of(seen[b], n)), f"sequence {b}, seed {seed}"


def test_trees_beside_prompts_in_pages(draw, seed, monkeypatch):
    """A tree, a prompt, one query as in decoding, and another tree; the parts of split keys too."""
    draw.choice([run for run in EMULATED if run.has("paged")]).start(monkeypatch)
    lengths, queries = (150, 40, 33, 12), (9, 20, 1, 12)
    context = torch.tensor([141, 40, 33, 0], dtype=torch.int32)
    masks = [tree(draw, n) for n in queries]
    for i in (1, 2):
        masks[i] = torch.ones(queries[i], queries[i], dtype=torch.bool).tril()
    bits = torch.cat([tree_bits(masks[0]), torch.zeros(21, dtype=torch.int64), tree_bits(masks[3])])
    paged = Paged.of(lengths, 16, KV_HEADS, (D, D), torch.bfloat16, seed)
    q, at = torch.randn(sum(queries), HEADS, D).bfloat16(), offsets(queries)
    given = {"cu_seqlens_q": at, "max_seqlen_q": max(queries), "split_keys": 128, **paged.options}
    out, lse = flydsl_flash_attn_func(q, paged.k, paged.v, return_lse=True, **given, **tree_mask(bits, context, at))
    keys = [x.split(lengths) for x in (paged.packed_k, paged.packed_v)]
    for b, (mine, its_out, its_lse) in enumerate(zip(*(x.split(queries) for x in (q, out)), lse.split(queries, -1))):
        hidden = hidden_of(masks[b], lengths[b])
        assert right(its_out, its_lse, mine, keys[0][b], keys[1][b], hidden), f"sequence {b}, seed {seed}"


def test_bits_of_a_mask():
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    assert tree_bits(seen).tolist() == [1, 3, 5]
    assert tree_bits(torch.ones(64, 64, dtype=torch.bool).tril())[[0, 62, 63]].tolist() == [1, 2**63 - 1, -1]


CONTEXT, BITS = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("bits", "context", "at", "error", "message"),
    [
        (BITS.float(), CONTEXT, None, ArgumentTypeError, "tree_mask: bits has dtype torch.float32; accepted"),
        (BITS, CONTEXT.long(), None, ArgumentTypeError, "tree_mask: context_lens has dtype torch.int64"),
        (BITS[:1], CONTEXT, None, ArgumentError, "bits must have shape (n,) or (2, n), n up to 64"),
        (torch.zeros(33, dtype=torch.int32), CONTEXT, None, ArgumentError, "n up to 32 in torch.int32, got (33,)"),
        (BITS, CONTEXT, offsets([3, 2]), ArgumentError, "bits must have shape (total_q,) with cu_seqlens_q"),
        (BITS[0], CONTEXT, offsets([5]), ArgumentError, "cu_seqlens_q must hold 3 int32 numbers"),
        (BITS[0], CONTEXT.to("meta"), None, ArgumentError, "context_lens is on device 'meta'"),
    ],
)
def test_what_is_wrong_is_named(bits, context, at, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tree_mask(bits, context, at)


def test_a_mask_of_too_many_drafts_is_named():
    with pytest.raises(ArgumentError, match=re.escape("n up to 64, got (65, 65)")):
        tree_bits(torch.ones(65, 65, dtype=torch.bool))
    with pytest.raises(ArgumentTypeError, match=re.escape("seen has dtype torch.int64")):
        tree_bits(torch.ones(2, 2, dtype=torch.int64))
