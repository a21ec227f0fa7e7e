"""`split_keys`: a sequence's results have the same bits in every batch, on every kernel."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workload import Workload
from fly import config
from fly.errors import ArgumentError, UnsupportedError
from kernels import create_block_mask
from kernels.dispatch import choose
from kernels.flash_attn_api import flash_attn_func, flash_attn_with_kvcache
from kernels.flash_attn_interface import checked, flydsl_flash_attn_func
from kernels.problem.contract import Request
from kernels.problem.features import Features
from kernels.problem.mask import TileRange
from kernels.sm90.builds import build_for
from kernels.sm90.fp8_builds import TILES as FP8_TILES
from kernels.sm90.fp8_builds import Fp8Options
from tests.kernels.acceptance import EMULATED, failure
from tests.kernels.work.batch_invariance import FEATURES, VOCABULARY, Batch, greedy_tokens, same_bits

SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 64}


@pytest.mark.sample(2)
@pytest.mark.parametrize("run", EMULATED, ids=str)
def test_a_sequence_has_the_same_bits_in_every_batch(run, monkeypatch, seed):
    run.start(monkeypatch)
    rest = {"page_size": 16 if run.has("paged") else 0, "feature": "window, sink", "split_keys": 128}
    batch = Batch.draw(random.Random(seed), 8, 300, **SMALL, **rest)
    assert batch.difference() is None, batch


def test_a_part_alone_has_the_bits_of_one_that_is_combined(monkeypatch, seed):
    """The other sequence has three parts, and this one is computed alone without any combination; on any kernel."""
    random.Random(seed).choice(EMULATED).start(monkeypatch)
    rest = {"page_size": 0, "split_keys": 128, "feature": "plain", "seed": seed}
    batch = Batch((9, 2), (100, 300), **SMALL, **rest)
    assert batch.difference() is None, batch


def test_results_are_right(monkeypatch, seed):
    """On any kernel."""
    random.Random(seed).choice(EMULATED).start(monkeypatch)
    assert failure(Workload(1, 20, 300, 2, 1, 64, "bf16", True), seed, device="cpu", split_keys=128) is None


def test_8_bit_inputs_too(monkeypatch, seed):
    """On any target: a query of a prompt, and the same one alone."""
    draw = random.Random(seed)
    arch, head_dim = draw.choice((("gfx942", 64), ("gfx950", 128), ("sm_90a", 64), ("sm_90a", 128)))
    monkeypatch.setenv(config.ARCH.name, arch)
    torch.manual_seed(seed)
    dtype = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    q, k, v = (torch.randn(1, n, 1, head_dim).to(dtype) for n in (70, 200, 200))
    out, lse = flydsl_flash_attn_func(q, k, v, split_keys=128, return_lse=True)
    last = draw.choice((1, 7))
    its_out, its_lse = flydsl_flash_attn_func(q[:, -last:], k, v, split_keys=128, return_lse=True)
    assert same_bits(its_out, out[:, -last:]) and same_bits(its_lse, lse[..., -last:]), (arch, head_dim, last, seed)


def test_parts_end_where_their_own_keys_do():
    """Whatever tiles are seen: part i has those from tile each * i on, and the last part has the rest."""
    tiles = TileRange(3, 4, 9, 11)
    parts = [tiles.part(i, 4, each=2) for i in range(4)]
    assert [(p.first, p.whole_from, p.whole_end, p.end) for p in parts] == [
        (3, 3, 3, 3),
        (3, 4, 4, 4),
        (4, 4, 6, 6),
        (6, 6, 9, 11),
    ]


@settings(max_examples=50, deadline=None)
@given(*[st.integers(0, 40)] * 4, st.integers(1, 9), st.integers(1, 9))
def test_parts_of_a_fixed_size_are_all_tiles(first, whole_from, whole_end, end, each, parts):
    first, whole_from, whole_end, end = sorted((first, whole_from, whole_end, end))
    tiles = TileRange(first, whole_from, whole_end, end)
    taken = [tiles.part(i, parts, each=each) for i in range(parts)]
    assert list(itertools.chain.from_iterable(range(p.first, p.end) for p in taken)) == list(range(first, end))
    assert all(tiles.sees_whole(j) == p.sees_whole(j) for p in taken for j in range(p.first, p.end))
    assert all(i * each <= p.first and p.end <= (i + 1) * each for i, p in enumerate(taken[:-1]) if p.first < p.end)


def request(head_dims, batch, queries, heads, paged, asked=(), dtype="bf16") -> Request:
    operands = ("split_keys", *(("block_table",) if paged else ()), *asked)
    return Request(
        *(head_dims[0], dtype, True, True, False, batch, queries, 9000, *heads, 0.1),
        num_kv_splits=9,
        page_size=16 if paged else None,
        static_features=Features(operands),
        head_dim_v=head_dims[1],
    )


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("asked", [(), ("bias",), ("rng_state", "dropped", "query_heads")], ids=str)
def test_no_batch_changes_the_tiles_of_the_hopper_kernel(asked, dtype):
    """Whatever build serves a launch, its tiles have as many keys, rescale alike, and one kernel combines."""
    if dtype == "bf16":
        build, dims = (
            build_for,
            [(64, 64), (72, 72), (96, 96), (128, 128), (152, 152), (160, 160), (192, 128), (256, 256)],
        )
    else:
        build, dims = partial(build_for, table=FP8_TILES, kind=Fp8Options), [(64, 64), (128, 128), (256, 256)]
    for head_dims, paged in itertools.product(dims, (False, True)):
        found, consumers = set(), set()
        for batch, queries, units in itertools.product((1, 40), (1, 300, 5000), (4, 132)):
            for heads in ((8, 8), (32, 4)):
                options, _ = build(request(head_dims, batch, queries, heads, paged, asked, dtype), units)
                found.add((options.block_n, options.rescale, options.combines))
                consumers.add(options.consumers)
        assert len(found) == 1 and found.pop()[2] is False
        assert len(consumers) > 1


def zeros(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K = zeros(1, 4, 2, 64), zeros(1, 300, 2, 64)
UNALIGNED = zeros(4 * 2 * 64 + 1)[1:].view(1, 4, 2, 64)


@pytest.mark.parametrize(
    ("q", "options", "error", "message"),
    [
        (Q, {"split_keys": 100}, ArgumentError, "split_keys must be a multiple of 128, which every kernel's tiles"),
        (Q, {"split_keys": -128}, ArgumentError, "split_keys must be from 0 to 2147483647, got -128"),
        (Q, {"split_keys": 128, "num_kv_splits": 2}, ArgumentError, "says where keys are split, and num_kv"),
        (Q, {"split_keys": 128, "dualwave_swp_lazy_rescale": True}, ArgumentError, "rescales rows together"),
        (UNALIGNED, {"split_keys": 128}, UnsupportedError, "multiples of 16 bytes, not of 2"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_taken_is_refused_by_name(q, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        checked(q, K, K, **options)


def test_too_many_parts_are_refused_with_the_least_number_of_keys():
    long = zeros(1, 64 * 128 + 1, 1, 8)
    with pytest.raises(
        ArgumentError, match=re.escape("8193 keys are 65 parts of so many; at most 64 are available")
    ) as e:
        checked(zeros(1, 1, 1, 8), long, long, split_keys=128)
    assert "pass 256 or more" in str(e.value)
    assert checked(zeros(1, 1, 1, 8), long, long, split_keys=256).request.num_kv_splits == 33


def test_block_masks_are_refused():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 300, "cpu")
    with pytest.raises(ArgumentError, match="split_keys is not for a block_mask"):
        checked(Q, K, K, split_keys=128, block_mask=mask)


def test_a_long_sequence_does_not_change_the_kernel():
    """On gfx950 another one would serve the whole batch, with other bits."""
    long = replace(request((128, 128), 1, 1, (8, 8), False), seq_len_kv=1 << 22, kv_pitch=2048, causal=False)
    assert choose("gfx950", replace(long, features=())).name == "generic"
    with pytest.raises(UnsupportedError, match="with split_keys, the gfx950 kernel reaches 2096952 keys"):
        choose("gfx950", replace(long, features=("split_keys",)))


def test_flash_attention_s_functions_take_it(monkeypatch, seed):
    EMULATED[0].start(monkeypatch)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (2, 200, 200))
    own = flydsl_flash_attn_func(q, k, v, split_keys=128)
    assert same_bits(flash_attn_func(q, k, v, causal=True, split_keys=128), own)
    assert same_bits(flash_attn_with_kvcache(q, k, v, cache_seqlens=200, causal=True, split_keys=128), own)


def test_every_feature_of_random_batches_is_one():
    drawn = {Batch.draw(random.Random(i), 9, 99).feature for i in range(200)}
    assert drawn == set(FEATURES)


def check_greedy_tokens(lengths, steps, device, seed):
    draw = random.Random(seed)
    prompts = [draw.choices(range(VOCABULARY), k=n) for n in lengths]
    found = greedy_tokens(prompts, steps, 128, device, seed)
    alone = [greedy_tokens([prompt], steps, 128, device, seed)[0] for prompt in prompts]
    assert found == alone, seed
    assert len({token for tokens in found for token in tokens}) > 2


def test_greedy_tokens_are_those_of_each_prompt_alone(monkeypatch, seed):
    random.Random(seed).choice(EMULATED).start(monkeypatch)
    check_greedy_tokens((3, 150, 300), 3, "cpu", seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_greedy_tokens_on_a_gpu(seed):
    check_greedy_tokens((5, 900, 2500, 257, 31, 1200), 40, "cuda", seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_200_batches_on_a_gpu(seed):
    draw = random.Random(seed)
    for _ in range(200):
        batch = Batch.draw(draw, 700, 6000, device="cuda")
        assert batch.difference() is None, batch
