"""A good call of every public function in FlashAttention's manner, for tests that change it."""

from __future__ import annotations

import torch

from kernels import flash_attn_api as api
from kernels.cache.kv_cache import append_to_cache
from kernels.integrations import transformers as hub
from kernels.integrations import vllm

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


Q, K, OFFSETS = zeros(2, 3, 4, 32), zeros(2, 8, 2, 32), int32(0, 3, 6)
PAGES, TABLE = zeros(4, 16, 2, 32), int32(0, 1, 2, 3).view(2, 2)
QP, KP = zeros(6, 4, 32), zeros(6, 2, 32)
LENGTHS = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 3, "max_seqlen_k": 3}
# name: (function, a good call's arguments)
CALLS = {
    "flash_attn_func": (api.flash_attn_func, {"q": Q, "k": K, "v": K}),
    "flash_attn_kvpacked_func": (api.flash_attn_kvpacked_func, {"q": Q, "kv": zeros(2, 8, 2, 2, 32)}),
    "flash_attn_qkvpacked_func": (api.flash_attn_qkvpacked_func, {"qkv": zeros(2, 8, 3, 2, 32)}),
    "flash_attn_varlen_func": (api.flash_attn_varlen_func, {"q": QP, "k": KP, "v": KP} | LENGTHS),
    "flash_attn_varlen_kvpacked_func": (
        api.flash_attn_varlen_kvpacked_func,
        {"q": QP, "kv": zeros(6, 2, 2, 32)} | LENGTHS,
    ),
    "flash_attn_varlen_qkvpacked_func": (
        api.flash_attn_varlen_qkvpacked_func,
        {"qkv": zeros(6, 3, 2, 32), "cu_seqlens": OFFSETS, "max_seqlen": 3},
    ),
    "flash_attn_with_kvcache": (api.flash_attn_with_kvcache, {"q": Q, "k_cache": K, "v_cache": K.clone()}),
    "vllm.flash_attn_varlen_func": (vllm.flash_attn_varlen_func, {"q": QP, "k": KP, "v": KP} | LENGTHS),
    "transformers' attention": (
        lambda **given: hub.attention_forward(torch.nn.Identity(), attention_mask=given.pop("mask", None), **given),
        {name: zeros(2, 4, 8, 32) for name in ("query", "key", "value")},
    ),
    "append_to_cache": (
        append_to_cache,
        {
            "q": Q,
            "k_cache": K,
            "v_cache": K.clone(),
            "k": K[:, :1].clone(),
            "v": K[:, :1].clone(),
            "cache_seqlens": 2,
        },
    ),
}
APPENDED = {"k": K[:, :1].clone(), "v": K[:, :1].clone(), "cache_seqlens": 2}
IN_PAGES = {"k_cache": PAGES, "v_cache": PAGES.clone(), "page_table": TABLE, "cache_seqlens": 2}
FP8 = {"q": zeros(2, 3, 4, 96, dtype=E4M3)} | {n: zeros(2, 8, 2, 96, dtype=E4M3) for n in ("k_cache", "v_cache")}


def call(name, **changes):
    function, given = CALLS[name]
    return function(**(given | changes))


KV, QKV = "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"
CACHE, VL = "flash_attn_with_kvcache", "flash_attn_varlen_func"
VL_KV, VL_QKV = "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"
HUB, VLLM = "transformers' attention", "vllm.flash_attn_varlen_func"
FUNCTIONS = [name for name in CALLS if name.startswith("flash_attn_")]
