"""Keys and values in pages for tests: what a paged call takes, and the same sequences one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Paged:
    """Sequences in shuffled pages, and packed one after the other.

    k, v: (pages, page_size, Hkv, D); `table`: (B, pages of a sequence) i32; `lengths`: (B,) i32. `packed_k`,
    `packed_v`: (sum of the lengths, Hkv, D). Rows that no sequence uses are NaN, and table entries that none uses are
    any number, most of them of no page.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    packed_k: torch.Tensor
    packed_v: torch.Tensor

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a call."""
        return {"block_table": self.table, "seqused_kv": self.lengths}

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as (B, the longest length, Hkv, D), zeros behind the lengths."""
        most = max(1, int(self.lengths.max()))

        def pad(packed: torch.Tensor) -> torch.Tensor:
            result = packed.new_zeros((len(self.lengths), most, *packed.shape[1:]))
            for row, part in zip(result, packed.split(self.lengths.tolist())):
                row[: len(part)] = part
            return result

        return pad(self.packed_k), pad(self.packed_v)

    @staticmethod
    def of(
        lengths: Sequence[int],
        page_size: int,
        kv_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        seed: int,
        *,
        device: str = "cpu",
        spare_pages: int = 2,
        spare_entries: int = 2,
    ) -> Paged:
        """Values uniform in [-1, 1]; `spare_pages` that no sequence has, `spare_entries` of the table a sequence."""
        generator = torch.Generator(device).manual_seed(seed)
        counts = [-(-length // page_size) for length in lengths]
        pages = sum(counts) + spare_pages
        order = torch.randperm(pages, generator=generator, device=device).to(torch.int32)
        shape = (len(lengths), max(counts) + spare_entries)
        table = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, device=device).to(torch.int32)
        rows, first = [], 0
        for b, (length, count) in enumerate(zip(lengths, counts)):
            mine = order[first : first + count]
            table[b, :count] = mine
            inside = torch.arange(page_size, device=device)
            rows.append((mine.long()[:, None] * page_size + inside).flatten()[:length])
            first += count
        used = torch.cat(rows)

        def one(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
            packed = torch.rand(sum(lengths), kv_heads, head_dim, generator=generator, device=device) * 2 - 1
            pool = torch.full((pages * page_size, kv_heads, head_dim), math.nan, dtype=dtype, device=device)
            pool[used] = packed.to(dtype)
            return pool.view(pages, page_size, kv_heads, head_dim), packed.to(dtype)

        (k, packed_k), (v, packed_v) = one(head_dims[0]), one(head_dims[1])
        counted = torch.tensor(list(lengths), dtype=torch.int32, device=device)
        return Paged(k, v, table, counted, packed_k, packed_v)
