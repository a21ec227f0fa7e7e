"""What is run and compared: an attention configuration, its inputs and its work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
BYTE_DTYPES = {"f8e4m3": torch.float8_e4m3fn}
ALL_DTYPES = DTYPES | BYTE_DTYPES
IN_PAGES, BYTES = "keys in pages", "8 bits"
SIZES = ("num_heads", "num_kv_heads", "head_dim")
DENSE_SIZES = ("batch", "seq_len", "seq_len_kv")


@dataclass(frozen=True)
class Workload:
    """One forward pass: q (batch, seq_len, num_heads, head_dim), k and v the same with the *_kv sizes.

    With `lengths`, the (queries, keys) of each sequence, it is packed: q is (total queries, num_heads, head_dim), k
    and v likewise, and batch, seq_len and seq_len_kv are the number of sequences and the largest lengths
    (`Workload.packed` fills them in). `num_kv_splits` is passed on; 0 leaves the choice to the callee. With
    `page_size`, providers get the keys of dense sequences in pages of so many, see `pages`.

    Raises:
        ValueError: a size below 1 (0 is accepted in `lengths`), heads that do not divide, an unknown dtype, or pages
            of packed sequences.
    """

    batch: int
    seq_len: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    num_kv_splits: int = 1
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = 0

    def __post_init__(self) -> None:
        for name in SIZES if self.lengths else DENSE_SIZES + SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_kv_splits < 0:
            raise ValueError(f"num_kv_splits must be at least 0, got {self.num_kv_splits}")
        if self.page_size < 0 or (self.page_size and self.lengths):
            wanted = "0 for packed sequences" if self.lengths else "at least 0"
            raise ValueError(f"page_size must be {wanted}, got {self.page_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of {self.num_kv_heads} KV heads")
        if self.dtype not in ALL_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(ALL_DTYPES)}, got {self.dtype!r}")
        if self.lengths:
            self._check_lengths()

    def _check_lengths(self) -> None:
        if min(map(min, self.lengths)) < 0:
            raise ValueError(f"packed lengths must be at least 0, got {self.lengths}")
        wanted = len(self.lengths), *(max(side) for side in zip(*self.lengths))
        if wanted != (self.batch, self.seq_len, self.seq_len_kv):
            raise ValueError(f"batch, seq_len and seq_len_kv must be {wanted} for lengths {self.lengths}")

    @classmethod
    def packed(
        cls,
        lengths: Iterable[tuple[int, int]],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        causal: bool,
        num_kv_splits: int = 1,
    ) -> Workload:
        """Packed sequences of these (queries, keys); at least one sequence."""
        lengths = tuple(lengths)
        if not lengths:
            raise ValueError("packed sequences need at least one length")
        queries, keys = (max(side) for side in zip(*lengths))
        return cls(
            len(lengths), queries, keys, num_heads, num_kv_heads, head_dim, dtype, causal, num_kv_splits, lengths
        )

    def __str__(self) -> str:
        def pair(queries: int, keys: int) -> str:
            return str(queries) if queries == keys else f"{queries}/{keys}"

        if self.lengths:
            batch, lengths = "packed", ",".join(pair(*both) for both in self.lengths)
        else:
            batch, lengths = f"B{self.batch}", pair(self.seq_len, self.seq_len_kv)
        heads, mask = pair(self.num_heads, self.num_kv_heads), "causal" if self.causal else "full"
        splits = "" if self.num_kv_splits == 1 else f" splits={self.num_kv_splits or 'auto'}"
        pages = f" pages={self.page_size}" if self.page_size else ""
        return f"{batch} H{heads} S{lengths} D{self.head_dim} {self.dtype} {mask}{splits}{pages}"

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of every sequence, packed or not."""
        return self.lengths or ((self.seq_len, self.seq_len_kv),) * self.batch

    @property
    def forms(self) -> tuple[str, ...]:
        """What not every provider takes: among `IN_PAGES` and `BYTES`."""
        asked = {IN_PAGES: self.page_size > 0, BYTES: self.dtype in BYTE_DTYPES}
        return tuple(form for form, is_asked in asked.items() if is_asked)

    @property
    def flops(self) -> float:
        """4·D per query, key and head that meet; a causal square counts as half, as published figures do."""

        def pairs(queries: int, keys: int) -> float:
            if not self.causal:
                return queries * keys
            short = min(queries, keys)
            return short * keys - short * short / 2

        return 4.0 * self.num_heads * self.head_dim * sum(pairs(*lengths) for lengths in self.sequences)

    def tensors(self, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, uniform in [−1, 1], the same for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        if self.lengths:
            (queries, keys) = ((sum(side),) for side in zip(*self.lengths))
        else:
            queries, keys = (self.batch, self.seq_len), (self.batch, self.seq_len_kv)
        sizes = (*queries, self.num_heads), (*keys, self.num_kv_heads), (*keys, self.num_kv_heads)
        made_of = DTYPES.get(self.dtype, torch.bfloat16)
        made = [torch.empty(*size, self.head_dim, dtype=made_of, device=device) for size in sizes]
        for tensor in made:
            tensor.uniform_(-1, 1, generator=generator)
        q, k, v = (tensor.to(ALL_DTYPES[self.dtype]) for tensor in made)
        return q, k, v

    def pages(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """k and v in pages that are dealt out at random, (pages, page_size, num_kv_heads, head_dim), the table of
        each sequence's, (batch, pages) int32, and how many keys are in use, (batch,) int32.

        Behind the last key of a sequence a page has zeros.
        """
        batch, keys, size = self.batch, self.seq_len_kv, self.page_size
        of_sequence = -(-keys // size)
        table = torch.randperm(
            batch * of_sequence, generator=torch.Generator(k.device).manual_seed(0), device=k.device
        )

        def pool(tensor: torch.Tensor) -> torch.Tensor:
            bits = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            whole = torch.nn.functional.pad(bits, (0, 0, 0, 0, 0, of_sequence * size - keys))
            pages = whole.view(len(table), size, *tensor.shape[2:])
            return torch.empty_like(pages).index_copy_(0, table, pages).view(tensor.dtype)

        lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
        return pool(k), pool(v), table.int().view(batch, of_sequence), lengths

    def offsets(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where packed sequences start in q and in k, and end: two int32 tensors of batch + 1."""
        starts = (list(accumulate(side, initial=0)) for side in zip(*self.lengths))
        cu_seqlens_q, cu_seqlens_kv = (torch.tensor(s, dtype=torch.int32, device=device) for s in starts)
        return cu_seqlens_q, cu_seqlens_kv

    def keywords(self, device: str) -> dict[str, object]:
        """What `flydsl_flash_attn_func` must be told besides q, k, v and causal."""
        given: dict[str, object] = {}
        if self.lengths:
            given["cu_seqlens_q"], given["cu_seqlens_kv"] = self.offsets(device)
            given |= {"max_seqlen_q": self.seq_len, "max_seqlen_kv": self.seq_len_kv}
        if self.num_kv_splits != 1:
            given["num_kv_splits"] = self.num_kv_splits
        return given

    def record(self) -> dict[str, object]:
        """One flat record for a CSV file, with the keys `COLUMNS`; packed lengths as "1024 8192 3", "" if dense."""
        queries, keys = zip(*self.lengths) if self.lengths else ((), ())
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lengths"}
        return flat | {"seqlens": " ".join(map(str, queries)), "seqlens_kv": " ".join(map(str, keys))}

    def reduced(self, max_len: int, max_heads: int = 2) -> Workload:
        """The same form in miniature, so that an emulator runs it in seconds.

        A sequence longer than `max_len` shrinks to that, queries and keys by one factor. At most two sequences stay
        if it is dense, and at most `max_heads` key heads; one of each where many query heads share a key head.
        """

        def shrunk(queries: int, keys: int) -> tuple[int, int]:
            factor = min(1.0, max_len / max(queries, keys, 1))
            return math.ceil(queries * factor), math.ceil(keys * factor)

        group = self.num_heads // self.num_kv_heads
        few = group <= 2
        kv_heads = min(self.num_kv_heads, max_heads if few else 1)
        if self.lengths:
            lengths = [shrunk(*both) for both in self.lengths]
            heads = group * kv_heads, kv_heads
            return Workload.packed(lengths, *heads, self.head_dim, self.dtype, self.causal, self.num_kv_splits)
        seq_len, seq_len_kv = shrunk(self.seq_len, self.seq_len_kv)
        sizes = {"batch": min(self.batch, 2 if few else 1), "seq_len": seq_len, "seq_len_kv": seq_len_kv}
        return replace(self, **sizes, num_heads=group * kv_heads, num_kv_heads=kv_heads)


COLUMNS: tuple[str, ...] = (*(f.name for f in fields(Workload) if f.name != "lengths"), "seqlens", "seqlens_kv")
