"""What surrounds a kernel: plans, results, streams and kernel choice, on a stand-in kernel."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from kernels import dispatch, flash_attn_interface
from kernels.call import plan
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels import stub as stubs
from tests.kernels.packed import offsets, packed_attention
from tests.kernels.reference import attention


@pytest.fixture
def stub(monkeypatch):
    return stubs.install(monkeypatch)


def inputs(batch=2, seq_len=5, seq_len_kv=5, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16):
    shapes = ((seq_len, heads), (seq_len_kv, kv_heads), (seq_len_kv, kv_heads))
    return [torch.empty(batch, s, h, head_dim, dtype=dtype).uniform_(-1, 1) for s, h in shapes]


def settings(stub):
    """What a kernel was prepared with, once: scale, causal, cross, tuning."""
    (request,) = stub.prepared
    return request.softmax_scale, request.causal, request.cross_seqlen, request.tuning


def test_default_is_causal_with_the_usual_scale(stub):
    q, k, v = inputs()
    out = flydsl_flash_attn_func(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert settings(stub) == (0.125, True, False, {})
    torch.testing.assert_close(out, attention(q, k, v, causal=True)[0].to(q.dtype))


def test_options_reach_the_kernel(stub):
    q, k, v = inputs(seq_len_kv=9)
    out, lse = flydsl_flash_attn_func(
        q, k, v, False, softmax_scale=0.5, num_kv_heads=2, return_lse=True, waves_per_eu=2, daz=True
    )
    assert settings(stub) == (0.5, False, True, {"waves_per_eu": 2, "daz": True})
    expected, expected_lse = attention(q, k, v, causal=False, softmax_scale=0.5)
    torch.testing.assert_close(out, expected.to(q.dtype))
    torch.testing.assert_close(lse, expected_lse)
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_cross_length_can_be_asked_for(stub):
    flydsl_flash_attn_func(*inputs(), cross_seqlen=True)
    assert stub.prepared[0].cross_seqlen is True


def test_the_same_kind_of_call_is_prepared_once(stub):
    for _ in range(3):
        q, k, v = inputs()
        torch.testing.assert_close(flydsl_flash_attn_func(q, k, v), attention(q, k, v, causal=True)[0].to(q.dtype))
    assert len(stub.prepared) == 1 and len(stub.launches) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q[:, 1:], k, v), {}),
        lambda q, k, v: ((q[:, :, :, :].transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        lambda q, k, v: ((q, k[..., :1, :], v[..., :1, :]), {}),
        lambda q, k, v: ((q.half(), k.half(), v.half()), {}),
        lambda q, k, v: ((torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), k, v), {}),
        lambda q, k, v: ((q, k, v, False), {}),
        lambda q, k, v: ((q, k, v), {"softmax_scale": 1.0}),
        lambda q, k, v: ((q, k, v), {"return_lse": True}),
        lambda q, k, v: ((q, k, v), {"out": torch.empty(2, 5, 8, 64, dtype=q.dtype)[:, :, ::2]}),
        lambda q, k, v: ((q, k, v), {"daz": True}),
        lambda q, k, v: ((q, k, v), {"num_kv_splits": 2}),
    ],
    ids=["shape", "strides", "heads", "dtype", "alignment", "causal", "scale", "lse", "out", "tuning", "splits"],
)
def test_another_kind_of_call_is_prepared_again(stub, change):
    tensors = inputs()
    args, options = change(*tensors)
    for _ in range(2):
        flydsl_flash_attn_func(*tensors)
        flydsl_flash_attn_func(*args, **options)
    assert len(stub.prepared) == 2


@pytest.mark.parametrize(
    "variable, value",
    [("FLYDSL_DISABLE_DUALWAVE_SWP", "1"), ("FLY_KERNEL", "generic"), ("FLY_ARCH", "gfx942")],
)
def test_environment_is_part_of_the_plan(stub, monkeypatch, variable, value):
    flydsl_flash_attn_func(*inputs())
    monkeypatch.setenv(variable, value)
    flydsl_flash_attn_func(*inputs())
    assert len(stub.prepared) == 2


def test_plans_are_bounded_and_the_oldest_goes(stub, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    monkeypatch.setattr(flash_attn_interface, "_plans", plan.Plans())
    for seq_len in (1, 2, 3, 4, 4, 3, 2, 1):
        flydsl_flash_attn_func(*inputs(seq_len=seq_len, seq_len_kv=4))
        assert len(flash_attn_interface._plans) <= 3
    assert len(stub.prepared) == 5


def test_plans_keep_no_tensor_alive(stub):
    q, k, v = inputs()
    out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    watched = [weakref.ref(t) for t in (q, k, v, out, lse)]
    del q, k, v, out, lse
    gc.collect()
    assert [w() for w in watched] == [None] * 5


def test_out_is_written_and_returned(stub):
    q, k, v = inputs()
    out = torch.empty(2, 5, 8, 64, dtype=q.dtype)[:, :, ::2]
    assert flydsl_flash_attn_func(q, k, v, out=out) is out
    torch.testing.assert_close(out, attention(q, k, v, causal=True)[0].to(q.dtype))


def test_out_interleaved_with_an_input_is_fine_in_place_is_not_even_when_warm(stub):
    packed = torch.empty(2, 5, 2, 4, 64, dtype=torch.bfloat16).uniform_(-1, 1)
    q, out = packed.unbind(2)
    _, k, v = inputs()
    expected = attention(q, k, v, causal=True)[0].to(q.dtype)
    torch.testing.assert_close(flydsl_flash_attn_func(q, k, v, out=out), expected)
    with pytest.raises(ArgumentError, match="out must not share memory with q"):
        flydsl_flash_attn_func(q, k, v, out=q)
    assert len(stub.launches) == 1


def test_result_is_contiguous_whatever_the_strides(stub):
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs())
    out = flydsl_flash_attn_func(q, k, v)
    assert out.is_contiguous()
    torch.testing.assert_close(out, attention(q, k, v, causal=True)[0].to(q.dtype))


def test_every_call_has_memory_of_its_own(stub):
    """Warm calls too, which allocate in another way; inference mode of the first call is not theirs."""
    stub.workspace_bytes = 100
    q, k, v = inputs(head_dim=128)
    with torch.inference_mode():
        results = [flydsl_flash_attn_func(q, k, v, return_lse=True)]
    results += [flydsl_flash_attn_func(q, k, v, return_lse=True) for _ in range(2)]
    assert len(stub.prepared) == 1
    tensors = [*(t for result in results for t in result), *stub.workspaces]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors) == 9
    for result, workspace in zip(results, stub.workspaces):
        out, lse = result
        assert out.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype)
        assert lse.is_contiguous() and (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
        assert workspace.is_contiguous() and (workspace.shape, workspace.dtype) == ((100,), torch.uint8)
    assert [t.is_inference() for t in tensors[:6]] == [True, True, False, False, False, False]


def test_expanded_keys_are_fine(stub):
    q, k, v = inputs()
    k, v = (t[:1, :, :1].expand(2, 5, 4, 64) for t in (k, v))
    out = flydsl_flash_attn_func(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v, causal=True)[0].to(q.dtype))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_len": 0}, {"seq_len": 0, "seq_len_kv": 0}])
def test_empty_calls_launch_nothing(stub, sizes):
    q, k, v = inputs(**sizes)
    for _ in range(2):
        out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == (q.shape[0], 4, q.shape[1])
    assert not stub.prepared and not stub.launches


def test_no_keys_gives_zeros_without_a_kernel(stub):
    q, k, v = inputs(seq_len_kv=0)
    for _ in range(2):
        out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()
        assert (flydsl_flash_attn_func(q, k, v, out=torch.ones_like(q)) == 0).all()
    assert not stub.prepared


def test_results_have_a_history_also_when_warm_but_only_in_grad_mode(stub):
    q, k, v = inputs()
    flydsl_flash_attn_func(q, k, v)
    k.requires_grad_()
    with torch.no_grad():
        assert not flydsl_flash_attn_func(q, k, v).requires_grad
    assert not flydsl_flash_attn_func(q, k.detach(), v).requires_grad
    assert len(stub.prepared) == 1
    for _ in range(2):
        assert flydsl_flash_attn_func(q, k, v).requires_grad
    assert len(stub.prepared) == 2  # such calls have an lse
    assert all(x.requires_grad for x in flydsl_flash_attn_func(q, k, v, return_lse=True))


def packed_inputs(queries=(3, 0, 4), keys=(2, 5, 0), **shape):
    """A call on packed sequences of these lengths."""
    q, k, v = (x[0] for x in inputs(1, sum(queries), sum(keys), **shape))
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": offsets(queries),
        "cu_seqlens_kv": offsets(keys),
        "max_seqlen_q": max(queries, default=0),
        "max_seqlen_kv": max(keys, default=0),
    }


def test_packed_sequences(stub):
    call = packed_inputs()
    out, lse = flydsl_flash_attn_func(**call, return_lse=True)
    at = call["cu_seqlens_q"], call["cu_seqlens_kv"]
    expected, expected_lse = packed_attention(call["q"], call["k"], call["v"], *at, causal=True)
    torch.testing.assert_close(out, expected.to(out.dtype))
    torch.testing.assert_close(lse, expected_lse)
    assert out.shape == (7, 4, 64) and lse.shape == (4, 7)
    (request,) = stub.prepared
    assert (request.features, request.cross_seqlen) == (("packed",), True)
    assert (request.batch, request.seq_len, request.seq_len_kv) == (3, 4, 5)


def test_lengths_of_packed_sequences_are_not_part_of_the_plan(stub):
    for queries, keys in (((3, 0, 4), (2, 5, 0)), ((4, 2, 1), (0, 2, 5)), ((0, 3, 4), (5, 1, 1))):
        call = packed_inputs(queries, keys)
        at = call["cu_seqlens_q"], call["cu_seqlens_kv"]
        expected, _ = packed_attention(call["q"], call["k"], call["v"], *at, causal=True)
        torch.testing.assert_close(flydsl_flash_attn_func(**call), expected.to(torch.bfloat16))
    assert len(stub.prepared) == 1 and len(stub.launches) == 3


@pytest.mark.parametrize("change", [{"max_seqlen_q": 5}, {"max_seqlen_kv": 9}, {"cu_seqlens_kv": None}])
def test_what_shapes_a_packed_launch_is_part_of_the_plan(stub, change):
    call = packed_inputs((3, 4), (3, 4))
    flydsl_flash_attn_func(**call)
    if None in change.values():  # the same offsets for both: lengths do not differ
        change = {"cu_seqlens_kv": call["cu_seqlens_q"]}
    flydsl_flash_attn_func(**(call | change))
    assert len(stub.prepared) == 2


def test_one_tensor_of_offsets_means_equal_lengths(stub):
    call = packed_inputs((3, 4), (3, 4))
    flydsl_flash_attn_func(**(call | {"cu_seqlens_kv": call["cu_seqlens_q"]}))
    flydsl_flash_attn_func(**call)
    flydsl_flash_attn_func(**call, cross_seqlen=False)
    assert [request.cross_seqlen for request in stub.prepared] == [False, True, False]


@pytest.mark.parametrize(
    "call",
    [
        packed_inputs((), ()),
        packed_inputs((0, 0), (3, 4)),
        packed_inputs((3, 4), (0, 0)),
    ],
    ids=["no sequence", "no query", "no key"],
)
def test_empty_packed_calls_launch_nothing(stub, call):
    for _ in range(2):
        out, lse = flydsl_flash_attn_func(**call, return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()
        assert out.shape == call["q"].shape and lse.shape == (4, len(call["q"]))
    assert not stub.prepared and not stub.launches


def test_requests_carry_what_kernels_need(stub):
    q, k, v = inputs(seq_len_kv=9)
    wide = torch.empty(2, 9, 2, 72, dtype=torch.bfloat16).uniform_(-1, 1)[..., 4:68]
    flydsl_flash_attn_func(q, k, v, num_kv_splits=0)
    flydsl_flash_attn_func(q, wide, v, num_kv_splits=3)
    flydsl_flash_attn_func(q, k, v, out=torch.empty(2, 5, 4, 65, dtype=q.dtype)[..., :64])
    facts = [(r.alignment, r.kv_alignment, r.q_pitch, r.kv_pitch, r.num_kv_splits) for r in stub.prepared]
    assert facts == [(16, 16, 512, 256, 0), (8, 8, 512, 288, 3), (2, 16, 520, 256, 1)]
    assert [r.features for r in stub.prepared] == [(), ("split_kv",), ()]


def test_parameters_are_tensors(stub):
    q, k, v = inputs()
    with torch.no_grad():
        flydsl_flash_attn_func(torch.nn.Parameter(q), k, v)
    assert len(stub.launches) == 1


def test_a_failed_preparation_is_not_kept(stub, monkeypatch):
    def broken(*args, **options):
        raise UnsupportedError("no")

    working = stub.prepare
    tensors = inputs()
    monkeypatch.setattr(dispatch, "prepare_function", lambda kernel: broken)
    with pytest.raises(UnsupportedError):
        flydsl_flash_attn_func(*tensors)
    monkeypatch.setattr(dispatch, "prepare_function", lambda kernel: working)
    flydsl_flash_attn_func(*tensors)
    assert len(stub.launches) == 1
