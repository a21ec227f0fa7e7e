"""Bugs that show in calls of certain sizes, planted one at a time: head dimensions, lengths, strides, heads, batches.

Each is one that another implementation had the like of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fly.lang import copy as copies
from fly.lang import tensor as tensors
from fly_attention import flydsl_flash_attn_backward
from kernels import flash_attn_generic_bwd as generic
from kernels import flash_attn_sm90_bwd as fused
from kernels.call import gradients as calls
from kernels.sm90 import consumer, dq_sums, turns
from kernels.work import gradient_steps, tile_scheduler
from tests.kernels.backward.builds import bindings_of
from tests.kernels.backward.planted import Cases, forget, running, shown
from tests.kernels.backward.test_gradient_cases import among_nan
from tests.kernels.feature_cases import Inputs
from tests.kernels.feature_reference import feature_attention
from tests.kernels.gradient_acceptance import DOUT
from tests.kernels.gradient_reference import by_autograd, gradients, poisoned_memory
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    forget(monkeypatch)


def wrong(
    seed: int,
    arch: str = "sm_90a",
    backward: str = "generic",
    queries: tuple[int, ...] = (40,),
    keys: tuple[int, ...] = (40,),
    heads: int = 2,
    kv_heads: int = 1,
    dims: tuple[int, int] = (32, 32),
    packed: bool = False,
    causal: bool = True,
    place: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **options: Any,
) -> bool:
    """Whether gradients of a call are; `place`: how its tensors lie in memory."""
    inputs = Inputs([*queries], [*keys], heads, kv_heads, dims[0], packed=packed, head_dim_v=dims[1], seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype, scale=DOUT)
    form = inputs.form()
    longest = {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)} if packed else {}
    found = differentiated((q, k, v), dout, causal, place, arch, backward, **form, **longest, **options)
    options.pop("deterministic", None)
    return bool(gradients(q, k, v, causal, dout, **form, **options).wrong(found))


def differentiated(
    given: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    causal: bool,
    place: Callable[[torch.Tensor], torch.Tensor],
    arch: str,
    backward: str,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients by the backward kernels alone: what they get of the forward pass is the reference's."""
    of_reference = {x: y for x, y in options.items() if x not in ("deterministic", "max_seqlen_q", "max_seqlen_kv")}
    out, lse, _ = feature_attention(*given, causal, dtype=torch.float64, **of_reference)
    with running(arch, backward), poisoned_memory():
        placed = map(place, (dout, *given, out.to(dout.dtype)))
        return flydsl_flash_attn_backward(*placed, lse.float(), causal, **options)


def in_columns_of_nan(x: torch.Tensor) -> torch.Tensor:
    """Packed heads with NaN behind their columns, and behind the last token."""
    return among_nan(x, 3)[: len(x)]


def wrong_without_queries(seed: int) -> bool:
    """Keys that no query sees have gradients of zero, also where a kernel has nothing to do."""
    q, k, v = Inputs([0], [5], 2, 1, 256, seed=seed).tensors()
    with running("sm_90a"):
        return any(bool((x != 0).any()) for x in by_autograd(q, k, v, True, torch.ones_like(q), None))


def wrong_far_away(seed: int, strides: tuple[int, ...], tokens: int, backward: str) -> bool:
    """Whether gradients are where inputs and results end past 2**31 elements and 4 GiB, in memory hardly touched."""
    inputs = Inputs([tokens] * 2, [tokens] * 2, 1, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype, scale=DOUT)
    last = sum(stride * (size - 1) for stride, size in zip(strides, q.shape, strict=True))
    assert last > 2**31
    memory = torch.empty(last + 2**17, dtype=q.dtype)
    far = [memory.as_strided(q.shape, strides, 2**13 * i) for i in range(7)]
    for x, source in zip(far, (q, k, v, dout)):
        x.copy_(source)
    out, lse, _ = feature_attention(q, k, v, True, dtype=torch.float64)
    out, lse = out.to(q.dtype), lse.float()
    with running("gfx950", backward):
        results = dict(zip(("dq", "dk", "dv"), far[4:], strict=True))
        found = flydsl_flash_attn_backward(far[3], *far[:3], out, lse, True, **results)
    return bool(gradients(q, k, v, True, dout).wrong(found))


def wrong_of_one_token(seed: int) -> bool:
    """Of more sequences of one token than a grid has places: a weight is 1, dv is dout, dq and dk are nothing."""
    inputs = Inputs([1] * 5, [1] * 5, 2, 2, 32, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    with running("sm_90a"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_scheduler, "MAX_GRID_YZ", 3)
        dq, dk, dv = by_autograd(q, k, v, True, dout, None)
    return not (torch.equal(dv, dout) and max(dq.abs().max(), dk.abs().max()) < 1e-4)


def grids_are_too_large(seed: int) -> bool:
    """Of 70,000 sequences of one token: nothing is computed here, it is where blocks are that counts."""
    inputs = Inputs([1] * 70_000, [1] * 70_000, 1, 1, 8, seed=seed)
    kernels = (("generic", generic), ("sm90", fused))
    grids = [b.grid for name, module in kernels for b in bindings_of("sm_90a", inputs, True, module=module)]
    return any(max(y, z) > 65_535 or x * y * z < 70_000 for x, y, z in grids)


BETWEEN_BATCHES = ((2**31, 64, 64, 1), 20)
BETWEEN_ROWS = ((8192 * 8, 2**23 - 64, 64, 1), 260)

_MASKED = """scores, pull = _modified(raw, given, place, rows, first_key, scale_log2, inputs)
    if hide is not None:
        scores = hide(scores)"""
_MASKED_EARLY = """if hide is not None:
        raw = hide(raw)
    scores, pull = _modified(raw, given, place, rows, first_key, scale_log2, inputs)"""
_STORED = "memory.store(value, destination.pointer.offset(base).offset(add), align=align)"
_STORED_IF_THERE = f"""with __import__("fly").when(self.column < self.source.columns - self.groups[i // self.passes]):
            {_STORED}"""

CASES: Cases = {
    "far batches": lambda seed: wrong_far_away(seed, *BETWEEN_BATCHES, "generic"),
    "far rows": lambda seed: wrong_far_away(seed, *BETWEEN_ROWS, "generic"),
    "far batches, gfx950": lambda seed: wrong_far_away(seed, *BETWEEN_BATCHES, "gfx950"),
    "no queries, no keys": lambda seed: wrong(seed, queries=(0, 3), keys=(5, 0), dims=(256, 256), packed=True),
    "no queries": wrong_without_queries,
    "0, 1, n": lambda seed: wrong(
        seed, backward="sm90", queries=(0, 1, 70), keys=(20, 3, 80), dims=(64, 64), packed=True
    ),
    "72": lambda seed: wrong(seed, backward="sm90", dims=(72, 72), packed=True, place=in_columns_of_nan),
    "72, gfx950": lambda seed: wrong(seed, "gfx950", queries=(20,), keys=(20,), heads=1, dims=(72, 72)),
    "104": lambda seed: wrong(seed, dims=(104, 104), packed=True, place=in_columns_of_nan),
    "heads share keys, wider values": lambda seed: wrong(seed, heads=4, kv_heads=2, dims=(96, 160)),
    "256, sm_80": lambda seed: wrong(seed, "sm_80", dims=(256, 256)),
    "256, sm_86": lambda seed: wrong(seed, "sm_86", dims=(256, 256)),
    "256, sm_90a": lambda seed: wrong(seed, "sm_90a", dims=(256, 256)),
    "256, gfx942": lambda seed: wrong(seed, "gfx942", dims=(256, 256), queries=(20,), keys=(20,), heads=1),
    "256, gfx950": lambda seed: wrong(seed, "gfx950", dims=(256, 256), queries=(20,), keys=(20,), heads=1),
    "256, sm90": lambda seed: wrong(seed, backward="sm90_wide", dims=(256, 256)),
    "256, sm90 in turn": lambda seed: wrong(seed, backward="sm90_wide", dims=(256, 256), deterministic=True),
    "softcap, window": lambda seed: wrong(seed, queries=(90,), softcap=2.0, causal=False, window_size=(11, 3)),
    "softcap, sm90": lambda seed: wrong(
        seed, backward="sm90", queries=(90,), dims=(64, 64), softcap=2.0, causal=False, window_size=(11, 3)
    ),
    "heads share keys, in turn": lambda seed: wrong(
        seed, backward="sm90", queries=(70,), keys=(140,), heads=4, kv_heads=2, dims=(64, 64), deterministic=True
    ),
    "one token": wrong_of_one_token,
    "one token, grids": grids_are_too_large,
}


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_there_is_none(case, seed):
    assert not CASES[case](seed), f"seed {seed}"


BUGS = (
    Bug(
        "offsets of elements are of 32 bits",
        tensors.Tensor,
        "_offset",
        "return total * self.dtype.bytes => "
        "return total * self.dtype.bytes if isinstance(total, int) else (total * self.dtype.bytes).to(i32)",
        "far batches",
        "wrong report",
    ),
    Bug(
        "offsets of elements are of 32 bits, gfx950",
        tensors.Tensor,
        "_offset",
        "return total * self.dtype.bytes => "
        "return total * self.dtype.bytes if isinstance(total, int) else (total * self.dtype.bytes).to(i32)",
        "far batches, gfx950",
        "wrong report",
    ),
    Bug(
        "offsets of rows are of 32 bits",
        tensors.RowView,
        "row",
        "wide(index) * self.stride * self.dtype.bytes => (wide(index) * self.stride * self.dtype.bytes).to(i32)",
        "far rows",
        "wrong report",
    ),
    Bug(
        "a window of no rows has one",
        tensors.RowView,
        "window",
        "(valid > 0).to(i32) * bound, valid => bound, maximum(valid, 1)",
        "no queries, no keys",
        "out-of-bounds",
    ),
    Bug(
        "gradients of a call without queries are what was there",
        calls,
        "run",
        "[x.zero_() for x in results or => [x for x in results or",
        "no queries",
        "wrong",
    ),
    Bug(
        "sequences share tiles of dQ",
        dq_sums,
        "tile_of_all",
        "queries.start // rows + batch + tile => queries.start // rows + tile",
        "0, 1, n",
        "wrong",
    ),
    Bug(
        "rows are as wide as tiles",
        fused,
        "prepare",
        "q, k, v, dout = (t.unsqueeze(0) if options.packed else t for t => "
        "q, k, v, dout = (t.as_strided((1, *t.shape[:-1], 128), (0, *t.stride())) for t",
        "72",
        "wrong out-of-bounds",
    ),
    Bug(
        "columns that rows lack are what was there",
        copies.RowCopy,
        "land",
        f"{_STORED} => {_STORED_IF_THERE}",
        "72, gfx950",
        "report wrong",
    ),
    Bug(
        "columns that rows lack are copied",
        copies._Copy,
        "_reach",
        "group + self.group <= self.source.columns => group <= self.source.columns",
        "104",
        "wrong out-of-bounds",
    ),
    Bug(
        "delta is summed over q's columns",
        generic,
        "prepare",
        "THREADS, head_dim=request.value_dim => THREADS, head_dim=request.head_dim",
        "heads share keys, wider values",
        "wrong",
    ),
    Bug(
        "V has K's columns",
        generic.flash_attn_generic_dkdv,
        "function",
        '"v": keys.rows(fly.reread(v), kv_head, options.head_dim_v) => '
        '"v": keys.rows(fly.reread(v), kv_head, options.head_dim)',
        "heads share keys, wider values",
        "wrong out-of-bounds",
    ),
    *(
        Bug(
            f"dV's launch is left out, {arch}",
            generic,
            "options_for",
            '(("dk",), ("dv",)) => (("dk",),)',
            f"256, {arch}",
            "wrong",
        )
        for arch in ("sm_80", "sm_86", "sm_90a", "gfx942", "gfx950")
    ),
    *(
        Bug(
            f"both consumers have dQ's first piece, {case}",
            consumer.Consumer,
            "piece",
            "rank * CONSUMERS + index => rank * CONSUMERS",
            f"256, {case}",
            "wrong global-race",
        )
        for case in ("sm90", "sm90 in turn")
    ),
    *(
        Bug(
            f"scores are masked before the softcap, {case}",
            owner,
            "weights",
            f"{_MASKED} => {_MASKED_EARLY}",
            f"softcap, {case}",
            "wrong",
        )
        for case, owner in (("window", generic), ("sm90", consumer))
    ),
    Bug(
        "heads of a group share their turns",
        turns,
        "_tiles_before",
        "(entry * sums.shape[1] + head) => (entry * sums.shape[1] + head // 2)",
        "heads share keys, in turn",
        "wrong deadlock global-race",
    ),
    Bug(
        "blocks along z are forgotten",
        tile_scheduler,
        "slice_of_block",
        "fly.block_id.y + fly.grid_dim.y * fly.block_id.z => fly.block_id.y",
        "one token",
        "wrong",
    ),
    Bug(
        "grids have as many blocks as there are sequences",
        gradient_steps,
        "fold_grid",
        "max(heads, sequences) <= MAX_GRID_YZ => True",
        "one token, grids",
        "wrong",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, monkeypatch, seed):
    found = shown(CASES, bug, monkeypatch, seed)
    assert found in bug.found.split(), f"{found}, seed {seed}"
