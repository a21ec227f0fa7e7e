"""Blocks that load key tiles for each other on a Hopper GPU: right results, and the bits of blocks by themselves."""

from __future__ import annotations

import pytest
import torch

from kernels import flash_attn_interface, flash_attn_sm90
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.sm90 import sharing
from tests.kernels.reference import check, reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU")]


@pytest.fixture
def builds(monkeypatch):
    """Options of the builds of calls, none of which was planned before."""
    found = []
    build_for = flash_attn_sm90.build_for

    def chosen(*arguments, **named):
        found.append(build_for(*arguments, **named)[0])
        return found[-1], 1

    monkeypatch.setattr(flash_attn_sm90, "build_for", chosen)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    return found


# head dimension, batch, tokens, key heads of eight query heads: few and many tiles a block, with a last one cut
CASES = [
    (72, 5, 768, 8),
    (72, 30, 700, 8),
    (104, 10, 1024, 8),
    (104, 4, 2048, 4),
    (184, 4, 2048, 8),
    (216, 8, 1024, 2),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_key_tiles_change_no_bit(case, causal, builds, monkeypatch, generator):
    dim, batch, tokens, kv_heads = case
    q, k, v = (
        torch.randn(batch, tokens, heads, dim, device="cuda", generator=generator).bfloat16()
        for heads in (8, kv_heads, kv_heads)
    )
    found = []
    for rows in ((sharing.Row(8, 256, causal),), ()):
        monkeypatch.setattr(sharing, "SHARED", rows)
        monkeypatch.setattr(flash_attn_interface, "_plans", {})
        found.append(flydsl_flash_attn_func(q, k, v, causal, return_lse=True))
    assert [options.blocks for options in builds] == [1 if causal and tokens % 128 else 2, 1]
    assert all(map(torch.equal, *found))
    out, lse = found[0]
    report = check(out, reference(q, k, v, causal=causal), lse)
    assert report.ok, f"seed {generator.initial_seed()}: {report}"
