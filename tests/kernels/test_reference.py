"""The reference against torch's own attention, and the tolerance rule against results that must not pass."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import feature_reference as feature_reference_module
from tests.kernels.feature_reference import feature_reference
from tests.kernels.fp8_reference import cut_product
from tests.kernels.reference import LSE_TOLERANCE, attention, check, reference


def inputs(seq_len=5, seq_len_kv=7, heads=6, kv_heads=2, head_dim=8, batch=2, dtype=torch.float64):
    shapes = ((seq_len, heads), (seq_len_kv, kv_heads), (seq_len_kv, kv_heads))
    return [torch.empty(batch, s, h, head_dim, dtype=dtype).uniform_(-1, 1) for s, h in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 7), (1, 9), (4, 1)])
def test_agrees_with_torch(causal, lengths):
    q, k, v = inputs(*lengths)
    seq_len, seq_len_kv = lengths
    mask = torch.ones(seq_len, seq_len_kv, dtype=torch.bool)
    if causal:
        mask = mask.tril(seq_len_kv - seq_len)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, enable_gqa=True, scale=0.3
    ).transpose(1, 2)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=0.3, dtype=torch.float64)
    seen = mask.any(-1)
    torch.testing.assert_close(out[:, seen], expected[:, seen])
    assert (out[:, ~seen] == 0).all() and (lse[:, :, ~seen] == -math.inf).all()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, 2)) * 0.3
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -math.inf).logsumexp(-1))


@pytest.mark.parametrize("max_scores", [1, 7, 20, 70, 1000])
def test_blocking_changes_nothing(max_scores):
    q, k, v = inputs()
    whole = attention(q, k, v, causal=True, dtype=torch.float64)
    parts = attention(q, k, v, causal=True, dtype=torch.float64, max_scores=max_scores)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_apart(causal):
    lengths = ((3, 5), (0, 2), (4, 0), (6, 4))
    q, k, v = inputs(sum(q for q, _ in lengths), sum(kv for _, kv in lengths), batch=1)
    out, lse = attention(q[0], k[0], v[0], causal=causal, dtype=torch.float64, lengths=lengths)
    assert out.shape == q[0].shape and lse.shape == (6, 13)
    row = key = 0
    for queries, keys in lengths:
        alone = q[:, row : row + queries], k[:, key : key + keys], v[:, key : key + keys]
        expected, expected_lse = attention(*alone, causal=causal, dtype=torch.float64)
        assert torch.equal(out[row : row + queries], expected[0])
        assert torch.equal(lse[:, row : row + queries], expected_lse[0])
        row, key = row + queries, key + keys
    ref = reference(q[0], k[0], v[0], causal=causal, lengths=lengths)
    assert check(out, ref, lse).ok and not check(out, ref, lse.roll(1)).ok


def test_no_keys_at_all():
    q, k, v = inputs(seq_len_kv=0)
    out, lse = attention(q, k, v, causal=False)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_plain_attention_passes_and_its_error_is_the_bound():
    q, k, v = inputs(64, 64, dtype=torch.bfloat16, head_dim=64)
    ref = reference(q, k, v, causal=True)
    plain, _ = attention(q, k, v, causal=True, dtype=torch.bfloat16)
    report = check(plain, ref, ref.lse)
    assert report.ok and report.lse_error == 0 and report.cosine > 0.999
    assert 0 < report.error == ref.plain_error < ref.bound


def one_wrong_element(out):
    out[1, 3, 2, 5] += 0.1


def one_nan(out):
    out[0, 0, 0, 0] = math.nan


def shifted_rows(out):
    out.copy_(out.roll(1, dims=1))


@pytest.mark.parametrize("damage", [one_wrong_element, one_nan, shifted_rows])
def test_a_wrong_result_fails(damage):
    q, k, v = inputs(16, 16, dtype=torch.float16)
    ref = reference(q, k, v, causal=True)
    out = ref.out.clone()
    damage(out)
    assert not check(out, ref).ok


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf, -1e30])
def test_a_wrong_lse_fails_where_no_key_is_seen(wrong):
    q, k, v = inputs(4, 2, dtype=torch.float16)
    ref = reference(q, k, v, causal=True)
    assert check(ref.out, ref, ref.lse).ok
    lse = ref.lse.clone()
    lse[0, 0, 0] = wrong
    assert not check(ref.out, ref, lse).ok


def test_a_wrong_lse_fails_where_keys_are_seen():
    q, k, v = inputs(dtype=torch.float16)
    ref = reference(q, k, v, causal=False)
    assert check(ref.out, ref, ref.lse + 5e-4).ok
    assert not check(ref.out, ref, ref.lse + 0.01).ok
    lse = ref.lse.clone()
    lse[1, 2, 3] = -math.inf
    assert not check(ref.out, ref, lse).ok


def test_a_zero_row_counts_as_aligned_only_with_a_zero_row():
    q, k, v = inputs(4, 2, dtype=torch.float16)
    ref = reference(q, k, v, causal=True)
    assert check(ref.out, ref).cosine == pytest.approx(1.0)
    out = ref.out.clone()
    out[0, 0] = 1e-9
    assert check(out, ref).cosine == 0


def test_wrong_shapes_are_named():
    q, k, v = inputs(dtype=torch.float16)
    ref = reference(q, k, v, causal=True)
    with pytest.raises(ValueError, match=r"out has shape \(2, 6, 5, 8\), the reference \(2, 5, 6, 8\)"):
        check(ref.out.transpose(1, 2), ref)
    with pytest.raises(ValueError, match="lse has shape"):
        check(ref.out, ref, ref.lse.transpose(1, 2))


def test_cut_products_lose_what_is_below_2_to_the_minus_13():
    """Of the largest number's power of two among an instruction's products and the sum so far."""
    ones = torch.ones(1, 1, 64)
    small = torch.full((1, 64, 3), 2.0**-12)
    small[0, 0] = torch.tensor([1.0, 0.0, 2.0])  # units: 2^-13, less, 2^-12
    small[0, 1, 2] = 2.0**-13
    exact = (ones @ small)[0, 0]
    found = cut_product(ones, small)[0, 0]
    assert found.tolist() == [exact[0], exact[1], exact[2] - 2.0**-13]


@pytest.mark.parametrize("head_dim", [64, 256])
def test_log_sum_exps_may_be_twice_as_far_off_as_those_of_cut_scores(head_dim, monkeypatch):
    """Where rows see a key each."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 300, 4, head_dim, generator=generator).to(torch.float8_e4m3fn) for _ in range(3))
    options = {"causal": False, "window_size": (0, 0)}
    exact = feature_reference(q, k, v, **options)
    monkeypatch.setattr(feature_reference_module, "cuts", lambda device: True)
    cut = feature_reference(q, k, v, **options)
    assert exact.lse_bound == LSE_TOLERANCE
    assert LSE_TOLERANCE <= cut.lse_bound < (8e-3 if head_dim == 256 else 2e-3)
    size = exact.lse.abs().clamp(min=1.0)
    assert check(exact.out, cut, exact.lse + 0.9 * cut.lse_bound * size).ok
    assert not check(exact.out, cut, exact.lse + 1.1 * cut.lse_bound * size).ok
