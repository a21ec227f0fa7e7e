"""vLLM's `reshape_and_cache_flash`: new keys and values at their slots, in every layout of a cache's memory."""

from __future__ import annotations

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from kernels.integrations import vllm

PAGES, SIZE, HEADS, DIM = 3, 16, 2, 32


def caches(layout):
    """K and V (pages, page size, Hkv, D) of zeros, views of memory in vLLM's layout of that name."""
    if layout == "NHD":
        return torch.zeros(2, PAGES, SIZE, HEADS, DIM).bfloat16().unbind(0)
    if layout == "HND":
        return torch.zeros(2, PAGES, HEADS, SIZE, DIM).bfloat16().transpose(2, 3).unbind(0)
    return torch.zeros(PAGES, 2, SIZE, HEADS, DIM).bfloat16().unbind(1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("layout", ["NHD", "HND", "pages of both"])
@pytest.mark.usefixtures("unchecked")  # where inputs are checked, slots of no token are reported
def test_new_keys_go_to_their_slots(emulate, seed, layout, dtype):
    emulate("gfx950", "generic")
    torch.manual_seed(seed)
    key, value = torch.randn(2, 6, HEADS, DIM).bfloat16()
    slots = [37, 3, -1, 15]  # two tokens behind are padding
    k_cache, v_cache = caches(layout)
    arguments = (key, value, k_cache, v_cache, torch.tensor(slots, dtype=dtype), "auto")
    vllm.reshape_and_cache_flash(*arguments, torch.ones(1), torch.ones(1))
    for new, cache in ((key, k_cache), (value, v_cache)):
        expected = torch.zeros(PAGES * SIZE, HEADS, DIM).bfloat16()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[token]
        assert torch.equal(cache.reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.usefixtures("unchecked")
def test_caches_of_8_bits_get_values_over_their_scales(emulate, seed, dtype):
    emulate("gfx950", "generic")
    torch.manual_seed(seed)
    key, value = torch.randn(2, 4, HEADS, DIM).bfloat16()
    memory = torch.zeros(2, PAGES, SIZE, HEADS, DIM, dtype=torch.uint8).view(dtype)
    scales = torch.tensor(0.25), torch.tensor([2.0])
    slots = torch.tensor([37, 3, -1, 15])
    vllm.reshape_and_cache_flash(key, value, *memory.unbind(0), slots, "fp8", *scales)
    for new, cache, scale in zip((key, value), memory.view(torch.float8_e4m3fn), scales):
        expected = torch.zeros(PAGES * SIZE, HEADS, DIM)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = (new[token].float() / scale).to(torch.float8_e4m3fn).float()
        assert torch.equal(cache.float().view(expected.shape), expected), f"seed {seed}"


def test_no_slots_write_nothing(emulate):
    emulate("gfx950", "generic")
    k_cache, v_cache = caches("NHD")
    new = torch.ones(2, HEADS, DIM).bfloat16()
    vllm.reshape_and_cache_flash(new, new, k_cache, v_cache, torch.empty(0, dtype=torch.int64), "auto")
    assert not k_cache.any() and not v_cache.any()


SHUFFLED = torch.zeros(PAGES, HEADS, DIM // 8, SIZE, 8).bfloat16()
MISTAKES = {
    "another type of 8 bits": (
        {"kv_cache_dtype": "fp8_e5m2"},
        UnsupportedError,
        "kv_cache_dtype 'fp8_e5m2' is not available; accepted: auto, float16, bfloat16, fp8, fp8_e4m3",
    ),
    "16 bits for 8": (
        {"kv_cache_dtype": "fp8"},
        ArgumentTypeError,
        "key_cache has dtype torch.bfloat16; accepted: torch.float8_e4m3fn, torch.uint8",
    ),
    "shuffled": (
        {"key_cache": SHUFFLED},
        ArgumentError,
        r"pages in the layout 'paged_attention' are .*got value_cache of shape \(3, 16, 2, 32\)",
    ),
    "no cache": ({"value_cache": None}, ArgumentTypeError, "value_cache must be a torch.Tensor, got NoneType"),
    "a flat cache": (
        {"value_cache": SHUFFLED[0, 0]},
        ArgumentError,
        r"value_cache must have shape \(pages, page size",
    ),
    "flat keys": (
        {"key": SHUFFLED[0, 0, 0]},
        ArgumentError,
        r"key must have shape \(tokens, Hkv, D\), got \(16, 8\)",
    ),
    "slots": ({"slot_mapping": torch.zeros(7).long()}, ArgumentError, "at most a slot for each of 6 tokens, got 7"),
    "floats": ({"slot_mapping": torch.zeros(6)}, ArgumentTypeError, "slot_mapping has dtype torch.float32; accepted"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(emulate, name):
    emulate("gfx950", "generic")
    change, error, message = MISTAKES[name]
    k_cache, v_cache = caches("NHD")
    new = torch.zeros(6, HEADS, DIM).bfloat16()
    given = {"key": new, "value": new, "key_cache": k_cache, "value_cache": v_cache, "kv_cache_dtype": "auto"}
    with pytest.raises(error, match=rf"^vllm\.reshape_and_cache_flash: .*{message}"):
        vllm.reshape_and_cache_flash(**given | {"slot_mapping": torch.zeros(6).long()} | change)
