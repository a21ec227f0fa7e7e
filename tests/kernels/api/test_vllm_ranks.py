"""Decode context parallelism of vLLM's function: what all ranks give, merged, is attention to all keys."""

from __future__ import annotations

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from fly_attention import merge_states
from kernels.integrations import vllm
from tests.kernels.feature_reference import feature_reference
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import Reference, check

WORLD, PAGE = 3, 16
KEYS = (40, 7, 2)


def whole(queries, seed):
    """(q (total, 4, 32), keys and values of each sequence)."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(queries), 4, 32, generator=generator).bfloat16()
    return q, [torch.randn(2, n, 2, 32, generator=generator).bfloat16() for n in KEYS]


def of_rank(rank, parts):
    """vLLM's arguments for the keys that a rank has."""
    own = [part[:, rank::WORLD] for part in parts]
    counts = [x.shape[1] for x in own]
    pages = Paged.of(counts, PAGE, 2, (32, 32), torch.bfloat16, 0)
    for b, (count, part) in enumerate(zip(counts, own)):
        slots = pages.table[b].repeat_interleave(PAGE)[:count].long() * PAGE + torch.arange(count) % PAGE
        for cache, values in zip((pages.k, pages.v), part):
            cache.view(-1, 2, 32)[slots] = values
    return pages, {"max_seqlen_k": max(counts), "seqused_k": pages.lengths, "block_table": pages.table}


@pytest.mark.parametrize(
    ("arch", "queries", "options"),
    [
        ("gfx950", (1, 1, 1), {"causal": True}),
        ("gfx950", (3, 5, 2), {"causal": True, "sink": True}),
        ("sm_90a", (2, 1, 2), {"causal": True, "window_size": (5, 0)}),
        ("gfx950", (1, 2, 1), {"causal": False, "window_size": (9, 1)}),
        ("gfx950", (2, 1, 2), {"causal": False}),
    ],
)
@torch.no_grad()
def test_results_of_all_ranks_are_the_whole(emulate, seed, arch, queries, options):
    emulate(arch, "generic" if arch == "gfx950" else "sm90")
    q, parts = whole(queries, seed)
    sink = torch.linspace(-1, 2, 4) if options.pop("sink", False) else None
    outs, lses = [], []
    for rank in range(WORLD):
        pages, given = of_rank(rank, parts)
        given |= {"cu_seqlens_q": offsets(queries), "max_seqlen_q": max(queries), "return_softmax_lse": True}
        given |= {"cp_world_size": WORLD, "cp_rank": rank, "cp_tot_seqused_k": torch.tensor(KEYS).int()}
        out, lse = vllm.flash_attn_varlen_func(q, pages.k, pages.v, s_aux=None if rank else sink, **given, **options)
        outs.append(out)
        lses.append(lse)
    out, lse = merge_states(outs, lses)
    window = options.get("window_size", (-1, -1))
    refs = [
        feature_reference(rows[None], *part[:, None], options["causal"], window_size=window, sink=sink)
        for rows, part in zip(q.split(queries), parts)
    ]
    ref = Reference(
        torch.cat([r.out[0] for r in refs]),
        torch.cat([r.lse[0] for r in refs], -1),
        # each rank's result is rounded to 16 bits, as vLLM merges them
        max(r.plain_error for r in refs) + max(x.abs().max().item() for x in outs) * 2**-8,
    )
    report = check(out, ref, lse)
    assert report.ok, f"seed {seed}: {report}"


NO_KEYS = torch.zeros(4, dtype=torch.int32)
MISTAKES = {
    "no rank": ({"cp_rank": 3}, ArgumentError, "cp_rank must be from 0 to 2, got 3"),
    "no ranks": ({"cp_world_size": 0}, ArgumentError, "cp_world_size must be at least 1, got 0"),
    "no number": ({"cp_world_size": "2"}, ArgumentTypeError, r"cp_world_size must be an int, got '2' \(str\)"),
    "no lengths": ({"cp_tot_seqused_k": None}, ArgumentError, "cp_world_size is for a rank's keys in pages: pass"),
    "no pages": (
        {"cp_world_size": 1, "cp_rank": 0, "seqused_k": None, "block_table": None, "cu_seqlens_k": NO_KEYS},
        ArgumentError,
        "cp_tot_seqused_k is for a rank's keys in pages: pass",
    ),
    "other lengths": (
        {"cp_tot_seqused_k": torch.zeros(2).int()},
        ArgumentError,
        "cp_tot_seqused_k must hold 3 int32",
    ),
    "slopes": ({"alibi_slopes": torch.ones(4)}, UnsupportedError, "alibi_slopes are for neighbouring keys"),
    "sinks twice": (
        {"s_aux": torch.ones(4)},
        UnsupportedError,
        "s_aux counts once for all ranks: pass it where cp_r",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@torch.no_grad()
def test_mistakes_of_ranks(emulate, name):
    emulate("gfx950", "generic")
    change, error, message = MISTAKES[name]
    q, parts = whole((1, 1, 1), 0)
    pages, given = of_rank(1, parts)
    given |= {"cu_seqlens_q": offsets((1, 1, 1)), "max_seqlen_q": 1, "causal": True}
    given |= {"cp_world_size": WORLD, "cp_rank": 1, "cp_tot_seqused_k": torch.tensor(KEYS).int()} | change
    with pytest.raises(error, match=message):
        vllm.flash_attn_varlen_func(q, pages.k, pages.v, **given)


def test_compilers_are_refused(emulate, monkeypatch):
    emulate("gfx950", "generic")
    q, parts = whole((2, 1, 1), 0)
    pages, given = of_rank(0, parts)
    given |= {"cu_seqlens_q": offsets((2, 1, 1)), "max_seqlen_q": 2, "causal": True}
    given |= {"cp_world_size": WORLD, "cp_tot_seqused_k": torch.tensor(KEYS).int()}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match="cp_world_size with several queries is for eager calls"):
        vllm.flash_attn_varlen_func(q, pages.k, pages.v, **given)
