"""What FlashAttention's functions refuse, and what the message says."""

from __future__ import annotations

import re

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels import flash_attn_api as api
from kernels.api.options import OF_PACKED_CACHE, UNAVAILABLE
from kernels.integrations import vllm

VALUE, TYPE, UNSUPPORTED = ArgumentError, ArgumentTypeError, UnsupportedError


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def e4m3(*shape):
    return tensor(*shape, dtype=torch.float8_e4m3fn)


Q, K, CACHE = tensor(2, 3, 4, 32), tensor(2, 5, 2, 32), tensor(2, 8, 2, 32)
PAGES, TABLE, OFFSETS = tensor(4, 16, 2, 32), int32(0, 1, 2, 3).view(2, 2), int32(0, 3, 6)


def dense(**changes):
    return api.flash_attn_func(**({"q": Q, "k": K, "v": K} | changes))


def varlen(**changes):
    lengths = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 3, "max_seqlen_k": 3}
    tensors = {"q": Q.flatten(0, 1), "k": tensor(6, 2, 32), "v": tensor(6, 2, 32)}
    return api.flash_attn_varlen_func(**(tensors | lengths | changes))


def cached(**changes):
    return api.flash_attn_with_kvcache(**({"q": Q, "k_cache": CACHE, "v_cache": CACHE} | changes))


def paged(**changes):
    call = {"q": Q.flatten(0, 1), "k": PAGES, "v": PAGES, "max_seqlen_q": 3, "cu_seqlens_q": OFFSETS}
    call |= {"max_seqlen_k": 20, "seqused_k": int32(20, 3), "block_table": TABLE}
    return vllm.flash_attn_varlen_func(**(call | changes))


# name: (call, what replaces a good call's arguments, error class, what the message says)
MISTAKES = {
    "dropout": (
        dense,
        {"dropout_p": 0.001},
        VALUE,
        "flash_attn_func: dropout_p must be 0 or from 1/512 up to 511/512, as it is rounded to 256ths, got 0.001",
    ),
    "window of three": (
        dense,
        {"window_size": (1, 2, 3)},
        TYPE,
        "window_size must be two ints (left, right), got (1",
    ),
    "window of floats": (
        dense,
        {"window_size": (1.0, 2)},
        TYPE,
        "window_size must be two ints (left, right), got (1",
    ),
    "window is a number": (dense, {"window_size": 7}, TYPE, "window_size must be two ints (left, right), got 7"),
    "softcap is a string": (dense, {"softcap": "10"}, TYPE, "softcap must be a Python number, got '10' (str)"),
    "softcap is no number": (dense, {"softcap": float("nan")}, VALUE, "softcap must be a finite positive number"),
    "unknown keyword": (
        dense,
        {"windows": 1},
        TYPE,
        "flash_attn_func: unexpected keyword argument 'windows'; beyond FlashAttention-2's, num_splits, split_keys",
    ),
    "pages of dense keys": (dense, {"page_table": TABLE}, TYPE, "unexpected keyword argument 'page_table'"),
    "q is a list": (dense, {"q": [1]}, TYPE, "q must be a torch.Tensor, got list"),
    "v has no dimensions": (dense, {"v": torch.tensor(1.0)}, VALUE, "v must have 4 dimensions"),
    "k of another head_dim": (dense, {"k": tensor(2, 5, 2, 24)}, VALUE, "q and k must have the same head_dim"),
    "head_dim too large": (
        dense,
        {name: tensor(1, 4, 1, 257) for name in "qkv"},
        UNSUPPORTED,
        "takes head_dim 8 to 256 in steps of 8, not 264",
    ),
    "float32": (
        dense,
        {name: tensor(1, 4, 1, 32, dtype=torch.float32) for name in "qkv"},
        TYPE,
        "q has dtype torch.float32; accepted: torch.bfloat16, torch.float16",
    ),
    "8-bit": (
        dense,
        {name: tensor(1, 4, 1, 32, dtype=torch.float8_e4m3fn) for name in "qkv"},
        UNSUPPORTED,
        "takes q of bf16, f16, not f8e4m3: convert with .to(torch.bfloat16)",
    ),
    "scales of 16 bits": (
        dense,
        {"q_descale": torch.ones(2, 2)},
        UNSUPPORTED,
        "does not do scales of 8-bit inputs (q_descale, k_descale, v_descale) yet: softmax_scale takes a factor",
    ),
    "scales by query head": (
        dense,
        {"q": e4m3(2, 3, 4, 128), "k": e4m3(2, 5, 2, 128), "v": e4m3(2, 5, 2, 128), "q_descale": torch.ones(2, 4)},
        VALUE,
        "q_descale must have shape (), (1,), (Hkv,) or (B, Hkv) = (2, 2), got (2, 4)",
    ),
    "scales are numbers": (
        cached,
        {"k_descale": 1.0},
        TYPE,
        "k_descale must be a torch.Tensor, got float",
    ),
    "packed 8-bit": (
        varlen,
        {"q": e4m3(6, 4, 128), "k": e4m3(6, 2, 128), "v": e4m3(6, 2, 128), "dropout_p": 0.5},
        UNSUPPORTED,
        "the gfx950_fp8 kernel does not do dropout (dropout_p) yet",
    ),
    "head dimension of an 8-bit cache": (
        cached,
        {"q": e4m3(2, 3, 4, 96), "k_cache": e4m3(2, 8, 2, 96), "v_cache": e4m3(2, 8, 2, 96), "cache_seqlens": 4},
        UNSUPPORTED,
        "the gfx950_fp8 kernel takes head_dim 64, 128, 256, not 96: pad",
    ),
    "new 8-bit keys": (
        cached,
        {"q": e4m3(2, 3, 4, 32), "k": e4m3(2, 3, 2, 32), "v": e4m3(2, 3, 2, 32), "cache_seqlens": 4},
        UNSUPPORTED,
        "flash_attn_with_kvcache: q has dtype torch.float8_e4m3fn, and only 16-bit keys are appended, to",
    ),
    "gradient of slopes": (
        dense,
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        UNSUPPORTED,
        "alibi_slopes requires a gradient, and has none: pass it detached",
    ),
    "gradient of a cache": (
        cached,
        {"k_cache": CACHE.clone().requires_grad_()},
        UNSUPPORTED,
        "flash_attn_with_kvcache: k_cache requires a gradient, but the backward is not available here",
    ),
    "no offsets of keys": (
        varlen,
        {"cu_seqlens_k": None},
        VALUE,
        "cu_seqlens_q and cu_seqlens_k go together, got only",
    ),
    "pages under two names": (
        varlen,
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "page_table": TABLE},
        VALUE,
        "flash_attn_varlen_func: block_table and page_table are two names of one argument: pass one of them",
    ),
    "pages without lengths": (
        varlen,
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": None},
        VALUE,
        "block_table needs the sequences' lengths: pass seqused_k, (B,) int32",
    ),
    "q of a cache is None": (
        cached,
        {"q": None},
        TYPE,
        "flash_attn_with_kvcache: q must be a torch.Tensor, got None",
    ),
    "a cache of three dimensions": (
        cached,
        {"v_cache": CACHE[0]},
        VALUE,
        "v_cache must have 4 dimensions, got shape",
    ),
    "causal is a number": (cached, {"causal": 1}, TYPE, "causal must be True or False, got 1"),
    "a cache by columns": (
        cached,
        {"k_cache": tensor(2, 8, 32, 2).transpose(2, 3)},
        VALUE,
        "k_cache's last dimension must be contiguous (stride 1), got strides (512, 64, 1, 2)",
    ),
    "negative length": (cached, {"cache_seqlens": -1}, VALUE, "cache_seqlens must be from 0 to 2147483647, got -1"),
    "length is True": (cached, {"cache_seqlens": True}, TYPE, "cache_seqlens must be an int or (B,) int32, got True"),
    "k without v": (cached, {"k": K, "cache_seqlens": 1}, VALUE, "k and v go together, got only k"),
    "new keys without lengths": (cached, {"k": K, "v": K}, VALUE, "k and v need cache_seqlens"),
    "rotary without keys": (
        cached,
        {"rotary_cos": tensor(9, 8), "rotary_sin": tensor(9, 8)},
        VALUE,
        "rotary_cos and rotary_sin need k and v",
    ),
    "pages of no keys": (
        cached,
        {"k_cache": tensor(4, 0, 2, 32), "v_cache": tensor(4, 0, 2, 32), "block_table": TABLE, "cache_seqlens": 1},
        VALUE,
        "pages of k_cache and v_cache must have at least one key",
    ),
    "dropout of a cache": (cached, {"dropout_p": 0.1}, TYPE, "unexpected keyword argument 'dropout_p'"),
    "vllm: no lengths": (
        paged,
        {"seqused_k": None, "block_table": None},
        VALUE,
        "pass either cu_seqlens_k, for packed keys, or seqused_k",
    ),
    "vllm: no lengths of pages": (paged, {"seqused_k": None}, VALUE, "block_table and seqused_k go together"),
    "vllm: two lengths": (paged, {"cu_seqlens_k": OFFSETS}, VALUE, "pass either cu_seqlens_k, for packed keys, or"),
    "vllm: no pages": (paged, {"block_table": None}, VALUE, "block_table and seqused_k go together"),
    "vllm: version": (paged, {"fa_version": 1}, VALUE, "fa_version must be one of (2, 3, 4), got 1"),
    "vllm: metadata": (paged, {"scheduler_metadata": 1}, TYPE, "scheduler_metadata must be a torch.Tensor, got int"),
    "vllm: q_v": (paged, {"q_v": Q}, UNSUPPORTED, "vllm.flash_attn_varlen_func: q_v is not available"),
    "vllm: dropout": (
        paged,
        {"dropout_p": 1.5},
        VALUE,
        "vllm.flash_attn_varlen_func: dropout_p must be a probability from 0 up to 1, got 1.5",
    ),
    "vllm: probabilities": (paged, {"return_attn_probs": True}, UNSUPPORTED, "pass return_softmax_lse for the LSE"),
    "vllm: context parallel": (paged, {"cp_world_size": 2}, ArgumentError, "cp_world_size is for a rank's keys in"),
    "vllm: 8-bit": (
        paged,
        {"q": e4m3(6, 4, 192), "k": e4m3(4, 16, 2, 192), "v": e4m3(4, 16, 2, 192), "k_descale": torch.ones(2, 2)},
        UNSUPPORTED,
        "the gfx950_fp8 kernel takes head_dim 64, 128, 256, not 192: pad",
    ),
    "vllm: 8-bit scales": (
        paged,
        {"q": e4m3(6, 4, 128), "k": e4m3(4, 16, 2, 128), "v": e4m3(4, 16, 2, 128), "k_descale": torch.ones(2, 4)},
        VALUE,
        "k_descale must have shape (), (1,), (Hkv,) or (B, Hkv) = (2, 2), got (2, 4)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(name, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    call, changes, error, message = MISTAKES[name]
    with pytest.raises(error, match=re.escape(message)) as caught:
        call(**changes)
    assert type(caught.value) is error


OWN = {varlen: OF_PACKED_CACHE[:2], cached: OF_PACKED_CACHE}  # arguments that the function has itself
LATER = [(call, name) for call in (dense, varlen, cached) for name in UNAVAILABLE if name not in OWN.get(call, ())]


@pytest.mark.parametrize(("call", "name"), LATER, ids=lambda value: getattr(value, "__name__", value))
def test_what_later_versions_have_is_refused_by_name(call, name):
    default, instead = UNAVAILABLE[name]
    with pytest.raises(UnsupportedError, match=re.escape(f"{name} is not available: {instead}; or leave {name} out")):
        call(**{name: 1 if default == 0 else torch.ones(2)})
    call(**{name: default})


PACKED = {
    "flash_attn_qkvpacked_func": ("qkv", "(B, S, 3, H, D)", lambda f, t: f(t)),
    "flash_attn_kvpacked_func": ("kv", "(B, S, 2, Hkv, D)", lambda f, t: f(Q, t)),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "(total, 3, H, D)", lambda f, t: f(t, OFFSETS, 3)),
    "flash_attn_varlen_kvpacked_func": ("kv", "(total, 2, Hkv, D)", lambda f, t: f(Q[0], t, OFFSETS, OFFSETS, 3, 3)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_tensors_of_another_shape(name):
    argument, layout, call = PACKED[name]
    function = getattr(api, name)
    with pytest.raises(ArgumentError, match=re.escape(f"{name}: {argument} must have shape {layout}, got (2, 3, 4)")):
        call(function, tensor(2, 3, 4))
    with pytest.raises(ArgumentTypeError, match=re.escape(f"{name}: {argument} must be a torch.Tensor, got list")):
        call(function, [1])


@pytest.mark.parametrize(("name", "why"), [("q", "out is given where a gradient is needed"), ("out", "out requires")])
def test_out_of_a_padded_head_dimension_has_no_gradient(name, why):
    call = {"q": tensor(3, 4, 20), "k": tensor(3, 2, 20), "v": tensor(3, 2, 20), "out": tensor(3, 4, 20)}
    call[name].requires_grad_()
    lengths = {"max_seqlen_q": 3, "cu_seqlens_q": int32(0, 3), "max_seqlen_k": 3, "cu_seqlens_k": int32(0, 3)}
    with pytest.raises(UnsupportedError, match=f"vllm.flash_attn_varlen_func: {why}"):
        vllm.flash_attn_varlen_func(**call, **lengths)
