"""What is run and compared: an attention configuration, its inputs and its work."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """One forward pass: q (batch, seq_len, num_heads, head_dim), k and v the same with the *_kv sizes.

    Raises:
        ValueError: a size below 1, heads that do not divide, or an unknown dtype.
    """

    batch: int
    seq_len: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    causal: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "causal" and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of {self.num_kv_heads} KV heads")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def __str__(self) -> str:
        heads = f"H{self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f"/{self.num_kv_heads}"
        lengths = f"S{self.seq_len}"
        if self.seq_len_kv != self.seq_len:
            lengths += f"/{self.seq_len_kv}"
        mask = "causal" if self.causal else "full"
        return f"B{self.batch} {heads} {lengths} D{self.head_dim} {self.dtype} {mask}"

    @property
    def flops(self) -> float:
        """4·D per query, key and head that meet; a causal square counts as half, as published figures do."""
        pairs = self.seq_len * self.seq_len_kv
        if self.causal:
            short = min(self.seq_len, self.seq_len_kv)
            pairs = short * self.seq_len_kv - short * short / 2
        return 4.0 * self.batch * self.num_heads * self.head_dim * pairs

    def tensors(self, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, uniform in [−1, 1], the same for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        keys = (self.seq_len_kv, self.num_kv_heads)
        q, k, v = (
            torch.empty(self.batch, *size, self.head_dim, dtype=DTYPES[self.dtype], device=device)
            for size in ((self.seq_len, self.num_heads), keys, keys)
        )
        for tensor in (q, k, v):
            tensor.uniform_(-1, 1, generator=generator)
        return q, k, v
