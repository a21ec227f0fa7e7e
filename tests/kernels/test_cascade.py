"""Attention to a shared prefix and sequences' own keys in one call, against attention to all of a sequence's keys."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fly_attention
from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.kernels.feature_reference import feature_reference
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import Reference, check

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@dataclass(frozen=True)
class Sequences:
    """`queries` and own `keys` of each, behind a prefix; `page_size` 0: nothing is in pages."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    prefix: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    packed: bool = False
    page_size: int = 0
    device: str = "cpu"

    def problem(self, seed: int, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any], Reference]:
        """(positional arguments, keyword arguments, what is right)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (self.heads, self.head_dim)
        q = torch.randn(sum(self.queries), *size, generator=generator, device=self.device).bfloat16()
        rest = (self.kv_heads, (self.head_dim, self.head_dim), torch.bfloat16)
        own = Paged.of(self.keys, self.page_size or 16, *rest, seed, device=self.device)
        shared = Paged.of([self.prefix], self.page_size or 16, *rest, seed + 1, device=self.device)
        refs = []
        for rows, k, v in zip(q.split(self.queries), *(x.split(self.keys) for x in (own.packed_k, own.packed_v))):
            whole = (torch.cat([a, b])[None] for a, b in ((shared.packed_k, k), (shared.packed_v, v)))
            refs.append(feature_reference(rows[None], *whole, True, **options))
        out, lse = torch.cat([r.out[0] for r in refs]), torch.cat([r.lse[0] for r in refs], -1)
        given: dict[str, Any] = {"return_lse": True, **options}
        prefix = shared.packed_k, shared.packed_v
        k, v = own.packed_k, own.packed_v
        if self.page_size:
            prefix = shared.k, shared.v
            pages = -(-self.prefix // self.page_size)
            given |= {"prefix_block_table": shared.table[0, :pages], "prefix_seqlen": shared.lengths}
            k, v = own.k, own.v
            given |= own.options
        if self.packed:
            given |= {"cu_seqlens_q": offsets(self.queries, self.device), "max_seqlen_q": max(self.queries)}
            if not self.page_size:
                given |= {"cu_seqlens_kv": offsets(self.keys, self.device), "max_seqlen_kv": max(self.keys)}
        else:
            batch = len(self.queries)
            q, out = q.view(batch, -1, *size), out.view(batch, -1, *size)
            lse = lse.view(self.heads, batch, -1).transpose(0, 1)
            if not self.page_size:
                k, v = (x.view(batch, -1, *x.shape[1:]) for x in (k, v))
        return (q, *prefix, k, v), given, Reference(out, lse, max(r.plain_error for r in refs))


CASES = {
    "decoding": (Sequences((1, 1, 1), (9, 9, 9), 70), {}),
    "drafts of one key head": (Sequences((2, 2), (70, 70), 9, kv_heads=1, head_dim=64), {"softcap": 3.0}),
    "packed": (Sequences((3, 1, 5), (20, 3, 5), 40, packed=True), {"softmax_scale": 0.3}),
    "pages": (Sequences((2, 2), (30, 3), 37, page_size=16), {}),
    "packed pages": (Sequences((1, 7, 1), (1, 30, 40), 33, packed=True, page_size=16), {}),
}
KERNELS = {
    "drafts of one key head": ("gfx950", "gfx950"),
    "pages": ("sm_90a", "sm90"),
    "packed pages": ("sm_90a", "sm90"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_to_all_keys(emulate, seed, name, sinks):
    case, options = CASES[name]
    emulate(*KERNELS.get(name, ("gfx950", "generic")))
    options = options | ({"sink": torch.linspace(-1, 2, case.heads)} if sinks else {})
    arguments, given, ref = case.problem(seed, **options)
    for _ in range(2):  # the second call is a known one's
        report = check(*_results(fly_attention.cascade_attention(*arguments, **given), ref))
        assert report.ok, f"seed {seed}: {report}"


def _results(result: Any, ref: Reference) -> tuple[torch.Tensor, Reference, torch.Tensor]:
    return result[0], ref, result[1]


def test_the_result_goes_where_it_is_wanted(emulate, seed):
    emulate("gfx950", "generic")
    arguments, given, ref = CASES["packed"][0].problem(seed)
    memory = torch.full((12, *ref.out.shape[1:]), math.nan).bfloat16()
    q = torch.cat([arguments[0], arguments[0][:3]])  # some of no sequence
    out = fly_attention.cascade_attention(q, *arguments[1:], **given | {"return_lse": False}, out=memory)
    assert out is memory and check(out[:9], ref).ok and out[9:].isnan().all()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("prefix", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_keys(emulate, seed, prefix, keys, sinks):
    emulate("gfx950", "generic")
    q = torch.randn(2, 1, 4, 32).bfloat16()
    shared, own = torch.randn(2, prefix, 2, 32).bfloat16(), torch.randn(2, 2, keys, 2, 32).bfloat16()
    sink = torch.linspace(-1, 2, 4) if sinks else None
    result = fly_attention.cascade_attention(q, *shared, *own, sink=sink, return_lse=True)
    if prefix + keys == 0:
        wanted = torch.full((4,), -math.inf) if sink is None else sink
        assert not result[0].any() and torch.equal(result[1], wanted[None, :, None].expand(2, 4, 1))
        return
    whole = (torch.cat([a[None].expand(2, -1, -1, -1), b], 1) for a, b in zip(shared, own))
    assert check(*_results(result, feature_reference(q, *whole, True, sink=sink))).ok


MISTAKES = {
    "no tensor": ({"prefix_k": None}, ArgumentTypeError, "prefix_k must be a torch.Tensor, got NoneType"),
    "a batch of prefixes": (
        {"prefix_k": torch.zeros(1, 5, 2, 32).bfloat16()},
        ArgumentError,
        "prefix_k must have 3 dim",
    ),
    "other heads of the prefix": (
        {"prefix_v": torch.zeros(5, 1, 32).bfloat16()},
        ArgumentError,
        "prefix_k and prefix_v must",
    ),
    "8 bits": (
        {"q": torch.zeros(2, 1, 4, 32).to(torch.float8_e4m3fn)},
        ArgumentTypeError,
        "q has dtype torch.float8_e4",
    ),
    "two dimensions": (
        {"q": torch.zeros(4, 32).bfloat16()},
        ArgumentError,
        r"q must have shape \(B, Sq, H, D\), or pack",
    ),
    "values of other sizes": (
        {"v": torch.zeros(2, 3, 2, 16).bfloat16()},
        ArgumentError,
        "one head dimension, got 32 and 16",
    ),
    "a length alone": (
        {"prefix_seqlen": torch.ones(1).int()},
        ArgumentError,
        "prefix_block_table and prefix_seqlen go",
    ),
    "a table of rows": (
        {
            "prefix_block_table": torch.zeros(1, 2).int(),
            "prefix_seqlen": torch.ones(1).int(),
            **{f"prefix_{x}": torch.zeros(2, 16, 2, 32).bfloat16() for x in "kv"},
        },
        ArgumentError,
        r"prefix_block_table must be \(pages of the prefix,\) int32, got shape \(1, 2\)",
    ),
    "a gradient": (
        {"k": torch.zeros(2, 3, 2, 32).bfloat16().requires_grad_()},
        UnsupportedError,
        "k requires a grad",
    ),
    "a flag": ({"return_lse": 1}, ArgumentTypeError, "return_lse must be True or False"),
    "softcap": ({"softcap": -1}, ArgumentError, "softcap must be"),
    "out": ({"out": torch.zeros(2, 1, 4, 16).bfloat16()}, ArgumentError, r"out must have shape \(2, 1, 4, 32\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_say_what_is_wrong(emulate, name):
    emulate("gfx950", "generic")
    change, error, message = MISTAKES[name]
    shapes = {
        "q": (2, 1, 4, 32),
        "prefix_k": (5, 2, 32),
        "prefix_v": (5, 2, 32),
        "k": (2, 3, 2, 32),
        "v": (2, 3, 2, 32),
    }
    given = {name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()} | change
    with pytest.raises(error, match=f"^cascade_attention: .*{message}"):
        fly_attention.cascade_attention(**given)


def test_values_on_the_device_are_checked(emulate, seed):
    emulate("gfx950", "generic")
    arguments, given, _ = CASES["pages"][0].problem(seed)
    with pytest.raises(ArgumentError, match="cascade_attention: prefix_seqlen"):
        fly_attention.cascade_attention(*arguments, **given | {"prefix_seqlen": torch.tensor([1000]).int()})


def test_out_and_compilers(emulate, monkeypatch, seed):
    emulate("gfx950", "generic")
    arguments, given, _ = CASES["decoding"][0].problem(seed)
    with pytest.raises(ArgumentError, match="out must not share memory with q"):
        fly_attention.cascade_attention(*arguments, **given, out=arguments[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match=r"^cascade_attention: it is not for torch\.compile"):
        fly_attention.cascade_attention(*arguments, **given)


@pytest.mark.gpu
@GPU
def test_random_cascades_on_a_gpu(seed):
    draw = random.Random(seed)
    for _ in range(24):
        count = draw.randint(1, 12)
        packed, page_size = draw.random() < 0.5, draw.choice((0, 64))
        one = draw.choice((1, 1, 4, 130))
        queries = tuple(draw.choice((1, draw.randint(1, 300))) if packed else one for _ in range(count))
        keys = tuple(n + draw.randint(0, 900) for n in queries)
        if not packed and not page_size:
            keys = (max(keys),) * count
        kv_heads = draw.choice((1, 2, 4))
        heads = kv_heads * draw.choice((1, 8))
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128}
        case = Sequences(
            queries, keys, draw.randint(1, 5000), **sizes, packed=packed, page_size=page_size, device="cuda"
        )
        sink = torch.linspace(-1, 2, heads, device="cuda") if draw.random() < 0.3 else None
        arguments, given, ref = case.problem(draw.getrandbits(30), **{} if sink is None else {"sink": sink})
        report = check(*_results(fly_attention.cascade_attention(*arguments, **given), ref))
        assert report.ok, f"seed {seed}: {case}: {report}"
