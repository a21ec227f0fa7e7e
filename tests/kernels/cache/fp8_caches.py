"""8-bit keys and values with 16-bit queries for tests: caches in every form, and what attention of them is.

Results are held to float64 attention on what the cache stands for. Plain attention, which sets the tolerance, has the
cache rounded to the queries' type, as a caller would convert it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.reference import Reference, Report, attention, check, max_difference

E4M3 = torch.float8_e4m3fn
KINDS = ("none", "tensor", "head", "sequence", "key")  # of scales
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q (Sq, H, D), k and v (Skv, Hkv, D) of a sequence


def numbers(*shape: int, device: str = "cpu") -> torch.Tensor:
    """e4m3 numbers around zero, subnormal ones among them."""
    return (torch.randn(shape, device=device) * 2.0 ** torch.randint(-8, 3, shape[-1:], device=device)).to(E4M3)


def queries(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Of a size that leaves scores near 1, whatever `numbers` keys have."""
    return torch.randn(shape, device=device).to(dtype)


@dataclass(frozen=True)
class Scales:
    """Scales of a kind for `batch` sequences and `heads` key heads: what a call is given for K or V."""

    given: torch.Tensor | None
    kind: str

    @staticmethod
    def of(kind: str, batch: int, rows: Sequence[int], heads: int, device: str = "cpu") -> Scales:
        """`rows`: the dimensions of k and v before their heads."""
        shapes = {"tensor": (), "head": (heads,), "sequence": (batch, heads), "key": (*rows, heads)}
        given = None if kind == "none" else torch.rand(shapes[kind], device=device) + 0.25
        return Scales(given, kind)

    def times(self, values: torch.Tensor, b: int, of_keys: torch.Tensor | None) -> torch.Tensor:
        """(Skv, Hkv, D) values of sequence b, scaled, in float64; `of_keys`: its (Skv, Hkv) scales by key."""
        if self.given is None:
            return values.double()
        given = of_keys if self.kind == "key" else self.given[b] if self.kind == "sequence" else self.given
        assert given is not None
        return values.double() * (given[..., None] if given.dim() else given).double()


def reference(parts: Iterable[Part], causal: bool, softmax_scale: float | None = None) -> Reference:
    """Of sequences, packed; k and v in float64, as they stand for."""
    outs, lses, errors = [], [], [0.0]
    for part in parts:
        q, k, v = (x[None] for x in part)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale}
        out, lse = attention(q.double(), k, v, dtype=torch.float64, **options)
        plain, _ = attention(q, k.to(q.dtype), v.to(q.dtype), dtype=q.dtype, **options)
        outs.append(out[0])
        lses.append(lse[0])
        if out.numel():
            errors.append(max_difference(plain, out))
    return Reference(torch.cat(outs), torch.cat(lses, -1), max(errors))


def wrong(out: torch.Tensor, lse: torch.Tensor, parts: Iterable[Part], causal: bool) -> str | None:
    """What is wrong with packed results."""
    report: Report = check(out, reference(parts, causal), lse)
    return None if report.ok else str(report)


def flattened(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of (B, S, H, D) queries as those of packed ones."""
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def spoiled(tensor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The same where `used` (of the dimensions before heads) is True, NaN elsewhere."""
    bits = tensor.view(torch.uint8).clone()
    bits[~used] = 0x7F
    return bits.view(E4M3)


@dataclass(frozen=True)
class Cache:
    """A cache of sequences: k and v as calls take them, and what each sequence's keys and values stand for."""

    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    options: dict[str, Any]

    @staticmethod
    def of(
        lengths: Sequence[int],
        heads: int,
        dims: tuple[int, int],
        kinds: tuple[str, str],
        page_size: int | None = None,
        device: str = "cpu",
        leftpad: Sequence[int] | None = None,
    ) -> Cache:
        """Sequences in entries of a batch, in shuffled order, or in shuffled pages; what none has is NaN.

        `options`: lengths, entries or pages, and scales, as `flydsl_flash_attn_func` takes them.
        """
        batch, first = len(lengths), leftpad or [0] * len(lengths)
        most = max(1, *lengths)
        options: dict[str, Any] = {"seqused_kv": torch.tensor(lengths, dtype=torch.int32, device=device)}
        if page_size is None:
            rows = (batch + 1, most + 3)
            entries = torch.randperm(batch + 1)[:batch].to(torch.int32)
            options["kv_batch_idx"] = entries.to(device)
            places = [(torch.full((n,), int(e)), torch.arange(n)) for n, e in zip(lengths, entries)]
            if leftpad is not None:
                options["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
        else:
            counts = [-(-n // page_size) for n in lengths]
            rows = (sum(counts) + 2, page_size)
            order = torch.randperm(rows[0])
            table = torch.randint(-(2**31), 2**31 - 1, (batch, max(1, *counts) + 1)).to(torch.int32)
            places, taken = [], 0
            for b, (n, count) in enumerate(zip(lengths, counts)):
                mine = order[taken : taken + count]
                table[b, :count] = mine
                places.append((mine.repeat_interleave(page_size)[:n], torch.arange(n) % page_size))
                taken += count
            options["block_table"] = table.to(device)
        places = [(e[skip:].to(device), r[skip:].to(device)) for (e, r), skip in zip(places, first)]
        used = torch.zeros(rows, dtype=torch.bool, device=device)
        for place in places:
            used[place] = True
        held, meant = [], []
        for name, dim, kind in zip("kv", dims, kinds):
            cache = numbers(*rows, heads, dim, device=device)
            scales = Scales.of(kind, batch, rows, heads, device)
            if scales.given is not None:
                options[f"{name}_descale"] = scales.given
            own = [scales.given[place] if kind == "key" and scales.given is not None else None for place in places]
            meant.append([scales.times(cache[place], b, own[b]) for b, place in enumerate(places)])
            held.append(spoiled(cache, used))
        return Cache(*held, *meant, options)

    def parts(self, of_queries: Iterable[torch.Tensor]) -> list[Part]:
        """With the queries of each sequence."""
        return list(zip(of_queries, self.keys, self.values, strict=True))
