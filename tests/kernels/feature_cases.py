"""Calls with features for tests: inputs of one form, options that fit them, and one comparison with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import fly
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.feature_reference import check_used, feature_reference
from tests.kernels.packed import offsets
from tests.kernels.reference import Report

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


@dataclass
class Inputs:
    """Random tensors of one call; `queries` and `keys` are the sequences' lengths, all equal if they are dense."""

    queries: list[int]
    keys: list[int]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    dtype: str = "bf16"
    packed: bool = False
    head_dim_v: int | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self):
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.queries)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Standard normal numbers times `scale`."""
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(dtype)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 from `low` to `high`, that one too."""
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.device, dtype=torch.int32)

    def tensors(self, entries: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v; `entries`: another batch of k and v."""
        if self.packed:
            sizes = (sum(self.queries),), (sum(self.keys),)
        else:
            sizes = (self.batch, self.queries[0]), (entries or self.batch, self.keys[0])
        q, k, v = sizes[0], sizes[1], sizes[1]
        element = DTYPES[self.dtype]
        return (
            self.floats(*q, self.heads, self.head_dim, dtype=element),
            self.floats(*k, self.kv_heads, self.head_dim, dtype=element),
            self.floats(*v, self.kv_heads, self.head_dim_v or self.head_dim, dtype=element),
        )

    def form(self) -> dict[str, torch.Tensor]:
        """The offsets of packed sequences."""
        if not self.packed:
            return {}
        return {
            "cu_seqlens_q": offsets(self.queries, self.device),
            "cu_seqlens_kv": offsets(self.keys, self.device),
        }


def compare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, splits: int = 1, **options: Any
) -> Report:
    """One call against the reference; functions are `Pair`s or serve both."""
    kernel, exact = dict(options), dict(options)
    for name in ("score_mod", "mask_mod"):
        if isinstance(options.get(name), Pair):
            kernel[name], exact[name] = options[name].kernel, options[name].torch
    if "cu_seqlens_q" in options:
        for side in ("q", "kv"):
            lengths = options[f"cu_seqlens_{side}"].diff()
            kernel[f"max_seqlen_{side}"] = int(lengths.max())
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits, **kernel)
    return check_used(out, feature_reference(q, k, v, causal, **exact), lse)


@dataclass(frozen=True)
class Pair:
    """One function as kernels trace it and as torch computes it."""

    kernel: Callable[..., Any]
    torch: Callable[..., Any]


# functions of operators alone serve kernels and torch; each gets the auxiliary tensors of both
def document_mask(batch: Any, head: Any, query: Any, key: Any, documents: Any) -> Any:
    """Only keys of the query's own document; documents: (tokens,) int32."""
    return documents[query] == documents[key]


def by_sequence_and_head(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Half of the keys, others for every sequence and head."""
    return (key + 64 * batch + 32 * head) % 192 < 96


def everything(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """All keys."""
    return key >= 0


def stripes(batch: Any, head: Any, query: Any, key: Any, *aux: Any) -> Any:
    """Every third key, another one for every head, and one's own."""
    return ((key + head) % 3 == 0) | (key == query)


def by_head(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    """table: (H, keys) float32 that is added."""
    return score + table[head, key]


def damped() -> Pair:
    """Scores that fall with the distance from the query, written with fly's and with torch's functions."""
    return Pair(
        lambda s, b, h, q, k, *aux: s * fly.exp2(fly.absolute(q - k).to(fly.f32) * -0.03125),
        lambda s, b, h, q, k, *aux: s * torch.exp2((q - k).abs().float() * -0.03125),
    )


def _used(inputs: Inputs) -> dict[str, torch.Tensor]:
    """All but three queries and half of the keys; of the last of several sequences no key."""
    used_q = [max(n - 3, 0) for n in inputs.queries]
    used_kv = [n // 2 for n in inputs.keys[:-1]] + [0 if inputs.batch > 1 else inputs.keys[0] // 2]
    make = {"dtype": torch.int32, "device": inputs.device}
    return {"seqused_q": torch.tensor(used_q, **make), "seqused_kv": torch.tensor(used_kv, **make)}


def _bias(inputs: Inputs) -> torch.Tensor:
    bias = inputs.floats(inputs.batch, 1, inputs.queries[0], inputs.keys[0])
    bias[0, :, :, : inputs.keys[0] // 2] = -math.inf
    bias[-1, :, -1] = -math.inf  # a row that sees nothing
    return bias


# name: options that fit inputs; several forms of one feature where they take different code
FEATURES: Mapping[str, Callable[[Inputs], dict[str, Any]]] = {
    "plain": lambda x: {},
    "window left": lambda x: {"window_size": (10, -1)},
    "window both": lambda x: {"window_size": (7, 3)},
    "window narrow": lambda x: {"window_size": (0, 0)},
    "window of chunks": lambda x: {"window_size": (7, 3), "attention_chunk": 9},
    "softcap": lambda x: {"softcap": 1.5},
    "alibi heads": lambda x: {"alibi_slopes": x.floats(x.heads).abs()},
    "alibi batch": lambda x: {"alibi_slopes": x.floats(x.batch, x.heads).abs()},
    "bias": lambda x: {"bias": _bias(x)},
    "bias of keys": lambda x: {"bias": x.floats(x.heads, 1, x.keys[0], dtype=torch.bfloat16)},
    "bias padded": lambda x: {
        "bias": x.floats(x.heads, x.queries[0], -(-x.keys[0] // 8) * 8, dtype=torch.bfloat16)[..., : x.keys[0]]
    },
    "sink": lambda x: {"sink": x.floats(x.heads, dtype=torch.bfloat16, scale=3.0)},
    "dropout": lambda x: {"dropout_p": 0.3, "rng_state": torch.tensor([x.seed, 5], device=x.device)},
    "score_mod": lambda x: {"score_mod": damped()},
    "score_mod aux": lambda x: {"score_mod": by_head, "aux_tensors": (x.floats(x.heads, max(x.keys)),)},
    "mask_mod": lambda x: {"mask_mod": stripes},
    "mask_mod aux": lambda x: {
        "mask_mod": document_mask,
        "aux_tensors": (x.ints(0, 2, max(x.keys + x.queries)),),
    },
    "seqused": _used,
    "cache_leftpad": lambda x: {"cache_leftpad": x.ints(0, x.keys[0], x.batch)},
    "kv_batch_idx": lambda x: {"kv_batch_idx": x.ints(0, x.batch, x.batch)},
}
DENSE_ONLY = ("bias", "bias of keys", "bias padded", "cache_leftpad", "kv_batch_idx")
