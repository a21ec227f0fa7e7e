"""FlashAttention's functions: their signatures, what they hand on, and what comes out in the emulator."""

from __future__ import annotations

import inspect
import secrets

import pytest
import torch

from kernels import flash_attn_api as api
from kernels.api import torch_ops
from kernels.arguments.stacked import leaves_of, unstacked
from kernels.problem.catalogue import DESCALES
from tests.kernels import fp8_reference
from tests.kernels.api.api_reference import dense, packed
from tests.kernels.reference import check

NONE = inspect.Parameter.empty
SCORES = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NONE)
# FlashAttention 2.8's parameters in their order with their defaults, from its flash_attn_interface.py
FLASH_ATTENTION_2 = {
    "flash_attn_func": {"q": NONE, "k": NONE, "v": NONE} | SCORES,
    "flash_attn_kvpacked_func": {"q": NONE, "kv": NONE} | SCORES,
    "flash_attn_qkvpacked_func": {"qkv": NONE} | SCORES,
    "flash_attn_varlen_func": {"q": NONE, "k": NONE, "v": NONE} | LENGTHS | SCORES | {"block_table": None},
    "flash_attn_varlen_kvpacked_func": {"q": NONE, "kv": NONE} | LENGTHS | SCORES,
    "flash_attn_varlen_qkvpacked_func": {"qkv": NONE, "cu_seqlens": NONE, "max_seqlen": NONE} | SCORES,
    "flash_attn_with_kvcache": {
        "q": NONE,
        "k_cache": NONE,
        "v_cache": NONE,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def seed(record_property):
    number = secrets.randbits(31)
    record_property("seed", number)
    torch.manual_seed(number)
    print(f"seed {number}")
    return number


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def right(result, reference):
    """Hold (out, lse) or out against the reference."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    report = check(out, reference, lse)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", FLASH_ATTENTION_2)
def test_signature_is_flash_attention_2s(name):
    parameters = inspect.signature(getattr(api, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(FLASH_ATTENTION_2[name].items())
    assert [p.name for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD] == ["extras"]


@pytest.fixture
def handed_on(monkeypatch):
    """Calls that reach `flydsl_flash_attn_func`: (tensors' shapes, causal, other keywords)."""
    calls = []

    def record(q, k, v, causal, *, out=None, return_lse=False, **options):
        q, k, v = unstacked(leaves_of(q, k, v))
        calls.append(([tuple(t.shape) for t in (q, k, v)], causal, options))
        result = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return (result, torch.zeros(1)) if return_lse else result

    monkeypatch.setattr(torch_ops, "flydsl_flash_attn_func", record)
    return calls


SLOPES = torch.rand(4)
SINK = torch.zeros(4)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({}, {}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"deterministic": False}, {}),
        ({"softmax_scale": 0.5}, {"softmax_scale": 0.5}),
        ({"softcap": 15.0}, {"softcap": 15.0}),
        ({"softcap": -1.0}, {}),
        ({"window_size": (3, 5)}, {"window_size": (3, 5)}),
        ({"window_size": [3, -1]}, {"window_size": (3, -1)}),
        ({"window_size": (None, 2)}, {"window_size": (-1, 2)}),
        ({"window_size": (None, None)}, {}),
        ({"window_size": (3, 5), "causal": True}, {"window_size": (3, -1)}),
        ({"window_size": (-1, 5), "causal": True}, {}),
        ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
        ({"num_splits": 3}, {"num_kv_splits": 3}),
        ({"learnable_sink": SINK}, {"sink": SINK}),
        ({"learnable_sink": None, "qv": None, "pack_gqa": None, "sm_margin": 0, "attention_chunk": 0}, {}),
    ],
)
def test_arguments_become_the_wrappers(handed_on, given, becomes):
    q, k = random(2, 3, 4, 64), random(2, 5, 2, 64)
    api.flash_attn_func(q, k, k, **given)
    ((shapes, causal, options),) = handed_on
    assert shapes == [(2, 3, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64)]
    assert causal == given.get("causal", False)
    assert options == {"num_kv_splits": 0} | becomes


Q8, PACKED8, CACHE8 = random(2, 3, 4, 128), random(6, 4, 128), random(2, 5, 2, 128)
OFFSETS8 = int32(0, 3, 6)
FUNCTIONS = {
    "flash_attn_func": (Q8, CACHE8, CACHE8),
    "flash_attn_kvpacked_func": (Q8, torch.stack([CACHE8, CACHE8], 2)),
    "flash_attn_qkvpacked_func": (torch.stack([Q8] * 3, 2),),
    "flash_attn_varlen_func": (*[PACKED8] * 3, OFFSETS8, OFFSETS8, 3, 3),
    "flash_attn_varlen_kvpacked_func": (PACKED8, torch.stack([PACKED8] * 2, 1), OFFSETS8, OFFSETS8, 3, 3),
    "flash_attn_varlen_qkvpacked_func": (torch.stack([PACKED8] * 3, 1), OFFSETS8, 3),
    "flash_attn_with_kvcache": (Q8, CACHE8, CACHE8),
}


@pytest.mark.parametrize("name", FLASH_ATTENTION_2)
def test_every_function_hands_scales_on(handed_on, name):
    scales = {name: torch.ones(2, 2) for name in DESCALES}
    getattr(api, name)(*FUNCTIONS[name], **scales)
    ((_, _, options),) = handed_on
    assert all(options[name] is scale for name, scale in scales.items())


def test_positional_arguments_have_flash_attention_2s_order(handed_on):
    q = random(2, 3, 4, 64)
    result = api.flash_attn_func(q, q, q, 0.0, 0.25, True, (7, 0), 30.0, SLOPES, True, True)
    assert [type(part) for part in result] == [torch.Tensor] * 3
    ((_, causal, options),) = handed_on
    assert causal is True
    assert options == {
        "num_kv_splits": 0,
        "softmax_scale": 0.25,
        "window_size": (7, -1),
        "softcap": 30.0,
        "alibi_slopes": SLOPES,
        "deterministic": True,
    }


def test_lengths_and_pages_become_the_wrappers(handed_on):
    q, k, offsets, keys = random(8, 4, 64), random(5, 16, 2, 64), int32(0, 3, 8), int32(0, 20, 21)
    table, used = int32(0, 1, 2, 3).view(2, 2), int32(4, 5)
    api.flash_attn_varlen_func(q, k[0], k[0], offsets, keys, 5, 20, seqused_q=used, seqused_k=used)
    api.flash_attn_varlen_func(q, k, k, offsets, keys, 5, 20, block_table=table)
    api.flash_attn_varlen_func(q, k, k, offsets, None, 5, 20, page_table=table, seqused_k=used)
    lengths = {"num_kv_splits": 0, "cu_seqlens_q": offsets, "max_seqlen_q": 5, "max_seqlen_kv": 20}
    ragged, by_offsets, by_lengths = (options for _, _, options in handed_on)
    assert ragged == lengths | {"cu_seqlens_kv": keys, "seqused_q": used, "seqused_kv": used}
    assert by_offsets == lengths | {"block_table": table, "cu_seqlens_kv": keys}
    assert by_lengths == lengths | {"block_table": table, "seqused_kv": used}


def test_packed_tensors_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(torch_ops, "flydsl_flash_attn_func", lambda *args, **_: seen.append(leaves_of(*args[:3])))
    qkv, q, kv = random(2, 5, 3, 4, 64), random(2, 5, 4, 64), random(2, 5, 2, 4, 64)
    api.flash_attn_qkvpacked_func(qkv)
    api.flash_attn_kvpacked_func(q, kv)
    api.flash_attn_varlen_qkvpacked_func(qkv[0], int32(0, 5), 5)
    api.flash_attn_varlen_kvpacked_func(q[0], kv[0], int32(0, 5), int32(0, 5), 5, 5)
    wanted = [qkv.unbind(2), (q, *kv.unbind(2)), qkv[0].unbind(1), (q[0], *kv[0].unbind(1))]
    for leaves, views in zip(seen, wanted, strict=True):
        assert [(t.data_ptr(), t.shape, t.stride()) for t in unstacked(leaves)] == [
            (t.data_ptr(), t.shape, t.stride()) for t in views
        ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (40, 40), (21, 21), (8, 8), (35, 50)])
def test_dense(seed, causal, head_dim, value_dim):
    q, k, v = random(2, 9, 4, head_dim), random(2, 20, 2, head_dim), random(2, 20, 2, value_dim)
    out, lse, mask = api.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    right((out, lse), dense(q, k, v, causal=causal))
    assert (mask.shape, mask.dtype) == ((0,), q.dtype)
    right(api.flash_attn_func(q, k, v, causal=causal), dense(q, k, v, causal=causal))


def test_rows_that_are_not_contiguous(seed):
    q, k, v = (random(2, 4, 32, 9).permute(0, 3, 1, 2) for _ in range(3))
    assert q.stride(-1) != 1
    right(api.flash_attn_func(q, k, v), dense(q, k, v))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (4, 2)},
        {"window_size": (4, -1), "causal": True},
        {"window_size": (0, 0)},
        {"window_size": (-1, 1)},
        {"softcap": 5.0},
        {"softmax_scale": 0.3, "causal": True},
    ],
    ids=str,
)
def test_scores(seed, options):
    q, k, v = random(2, 9, 2, 32), random(2, 20, 2, 32), random(2, 20, 2, 32)
    result = api.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    right(result[:2], dense(q, k, v, **options))


@pytest.mark.parametrize("rows", [(), (2,)], ids=["by head", "by sequence and head"])
def test_alibi(seed, rows):
    q, k, v = random(2, 9, 4, 32), random(2, 20, 2, 32), random(2, 20, 2, 32)
    slopes = torch.rand(*rows, 4)
    result = api.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    right(result[:2], dense(q, k, v, causal=True, alibi_slopes=slopes))


def test_sink(seed):
    q, k, v, sink = random(2, 9, 4, 32), random(2, 7, 2, 32), random(2, 7, 2, 32), random(4)
    out, lse, _ = api.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_attn_probs=True)
    right((out, lse), dense(q, k, v, causal=True, sink=sink))
    # two queries see no key, and have the sink alone
    assert not out[:, :2].any()
    torch.testing.assert_close(lse[:, :, :2], sink.float()[:, None].expand(2, 4, 2))


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)], ids=str)
def test_8_bit_inputs_and_their_scales(seed, shape, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    q, k, v = (random(2, n, h, 128, dtype=torch.float8_e4m3fn) for n, h in ((9, 4), (70, 2), (70, 2)))
    scales = {name: torch.rand(shape) + 0.5 for name in DESCALES}
    reference = fp8_reference.reference(q, k, v, causal=True, **scales)
    out, lse, _ = api.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **scales)
    assert out.dtype == torch.bfloat16
    right((out, lse), reference)
    # a cache that is full, without its last entry
    caches = (torch.cat([cache.view(torch.uint8)] * 2)[:3].view(cache.dtype) for cache in (k, v))
    right(api.flash_attn_with_kvcache(q, *caches, causal=True, return_softmax_lse=True, **scales), reference)


def test_queries_without_keys(seed):
    q, k = random(2, 5, 2, 32), random(2, 3, 2, 32)
    out, lse, _ = api.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    right((out, lse), dense(q, k, k, causal=True))
    assert not out[:, :2].any()
    assert (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()
    out, lse, _ = api.flash_attn_func(q, k[:, :0], k[:, :0], return_attn_probs=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("batch, queries", [(0, 5), (2, 0)])
def test_nothing_to_compute(batch, queries):
    q, k = random(batch, queries, 4, 32), random(batch, 7, 2, 32)
    out, lse, _ = api.flash_attn_func(q, k, k, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (batch, 4, queries))


def test_a_window_wider_than_the_keys_still_hides_them(seed):
    # by the formula the first queries stand too far before the keys; FlashAttention-2 drops such a limit
    q, k = random(1, 10, 2, 32), random(1, 2, 2, 32)
    out, lse, _ = api.flash_attn_func(q, k, k, window_size=(-1, 2), return_attn_probs=True)
    right((out, lse), dense(q, k, k, window_size=(-1, 2)))
    assert (lse[..., :6] == -torch.inf).all() and lse[..., 6:].isfinite().all()


def test_packed_sequences_of_any_length(seed):
    queries, keys = [3, 0, 9, 1], [12, 4, 9, 0]
    q, k, v = random(13, 4, 32), random(25, 2, 32), random(25, 2, 32)
    offsets, key_offsets = int32(0, 3, 3, 12, 13), int32(0, 12, 16, 25, 25)
    out, lse, _ = api.flash_attn_varlen_func(
        q, k, v, offsets, key_offsets, 9, 12, causal=True, return_attn_probs=True
    )
    assert lse.shape == (4, 13)
    right((out, lse), packed(q, k, v, queries, keys, causal=True))
    qkv = random(13, 3, 4, 32)
    right(
        api.flash_attn_varlen_qkvpacked_func(qkv, offsets, 9, causal=True),
        packed(*qkv.unbind(1), queries, queries, causal=True),
    )


def test_tokens_in_use(seed):
    q, k, v = random(2, 6, 4, 32), random(2, 20, 2, 32), random(2, 20, 2, 32)
    out = api.flash_attn_func(q, k, v, causal=True, seqused_k=int32(20, 7))
    right(out, dense(q, k, v, causal=True, keys=[(0, 20), (0, 7)]))
    lengths = int32(0, 6, 12), int32(0, 20, 40), 6, 20
    out = api.flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), *lengths, causal=True, seqused_k=int32(20, 7)
    )
    right(out.view(2, 6, 4, 32), dense(q, k, v, causal=True, keys=[(0, 20), (0, 7)]))


def test_packed_queries_of_pages(seed):
    # (pages, page size, Hkv, D); what the table says past a sequence's last page is not read
    q, pages, values = random(8, 4, 32), random(5, 16, 2, 32), random(5, 16, 2, 32)
    table, lengths, offsets = int32(3, 0, 4, 1, -7, 99).view(2, 3), [37, 5], int32(0, 3, 8)
    rows = [pages[row.clamp(0, 4).long()].flatten(0, 1)[:n] for row, n in zip(table, lengths)]
    value_rows = [values[row.clamp(0, 4).long()].flatten(0, 1)[:n] for row, n in zip(table, lengths)]
    reference = packed(q, torch.cat(rows), torch.cat(value_rows), [3, 5], lengths, causal=True)
    more = {"causal": True, "return_attn_probs": True}
    by_offsets = api.flash_attn_varlen_func(
        q, pages, values, offsets, int32(0, 37, 42), 5, 37, block_table=table, **more
    )
    by_lengths = api.flash_attn_varlen_func(
        q, pages, values, offsets, None, 5, 37, page_table=table, seqused_k=int32(*lengths), **more
    )
    for result in (by_offsets, by_lengths):
        right(result[:2], reference)


def test_the_same_bits_every_time(seed):
    q, k, v = random(1, 4, 2, 32), random(1, 300, 1, 32), random(1, 300, 1, 32)
    first = api.flash_attn_func(q, k, v, num_splits=3, deterministic=True)
    assert torch.equal(first, api.flash_attn_func(q, k, v, num_splits=3))
    right(first, dense(q, k, v))
