"""vLLM's attention backend CUSTOM on fly's kernels, without a change in vLLM.

    vllm serve MODEL --attention-backend CUSTOM    # an installed fly-attention registers it as a plugin
    fly_attention.integrations.vllm_backend.register()    # else, in every process, before the engine starts

What vLLM calls is in https://github.com/vllm-project/vllm at 0014ca6: vllm/v1/attention/backend.py,
backends/registry.py beside it. The module can be imported without vLLM; `FlyAttentionBackend`, `FlyAttentionImpl` and
`FlyMetadataBuilder` are its base classes' subclasses, made when they are first asked for.

Batches are packed, prompts, their chunks and decoding in one, and keys lie in pages of caches (2, pages, page size,
Hkv, D) of 16 bits or of float8_e4m3fn, to which new ones are written first. With VLLM_BATCH_INVARIANT=1, calls have
`split_keys`. With a `speculative_token_tree`, requests that have as many queries as the tree has tokens are trees.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fly.errors import UnsupportedError

from ..flash_attn_interface import flydsl_flash_attn_func
from ..problem.catalogue import NO_WINDOW, SPLIT_UNIT
from ..problem.contract import HEAD_DIMS
from ..work.tile_scheduler import MAX_SPLITS
from .slots import CACHE_DTYPES, Scales, as_float8, scales_of, write_slots
from .trees import Trees

NAME = "CUSTOM"  # vLLM looks backends up by it
BASES = "vllm.v1.attention.backend"
LEAST_SPLIT = 2048  # keys of a part of batch-invariant calls: prompts up to here are not split


def register() -> None:
    """Have vLLM take this backend for CUSTOM, unless something else is registered there already."""
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum[NAME]
    if not custom.is_overridden():
        registry.register_backend(custom, "fly_attention.integrations.vllm_backend.FlyAttentionBackend")


@dataclass(frozen=True)
class FlyMetadata:
    """A step's batch: what calls of all layers have in common. Tensors are vLLM's own, but for `slots`.

    `slots`: (tokens,) int32, where a token's key goes, page · page size + row, or -1 for none; `entries`: as many
    zeros. `split_keys`: as of `flydsl_flash_attn_func`, 0 for as many parts as suit the device. `tree`: what
    `tree_mask` gives, where a step may have trees of draft tokens.
    """

    tokens: int
    query_start_loc: torch.Tensor
    max_query_len: int
    seq_lens: torch.Tensor
    max_seq_len: int
    block_table: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor
    causal: bool
    split_keys: int
    tree: Mapping[str, Any] = field(default_factory=dict)


class _Backend:
    """What vLLM asks a backend for."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_DTYPES]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        return _class("FlyAttentionImpl")

    @staticmethod
    def get_builder_cls() -> type:
        return _class("FlyMetadataBuilder")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """K and V one after the other, as `reshape_and_cache_flash` writes them."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [*HEAD_DIMS]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm_80 on; of AMD's, what dispatch has says the first call."""
        return bool(capability.major >= 8)


class _Builder:
    """A step's `FlyMetadata`, in memory that stays where it is, as captured graphs read it."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]  # vLLM's
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.slots = torch.empty(most, dtype=torch.int32, device=device)
        self.entries = torch.zeros(most, dtype=torch.int32, device=device)
        invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
        self.split_keys = split_for(vllm_config.model_config.max_model_len) if invariant else 0
        speculation = getattr(vllm_config, "speculative_config", None)
        self.trees = Trees.of(getattr(speculation, "speculative_token_tree", None), vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FlyMetadata:
        """See vLLM; without cascades, as `use_cascade_attention` is False."""
        common, tokens = common_attn_metadata, common_attn_metadata.num_actual_tokens
        trees = None if self.trees is None or fast_build else self.trees
        if not isinstance(common.causal, bool):
            raise UnsupportedError("vLLM's CUSTOM backend: causal by request is not available")
        self.slots[:tokens].copy_(common.slot_mapping[:tokens])
        return FlyMetadata(
            tokens,
            common.query_start_loc,
            common.max_query_len,
            common.seq_lens,
            common.max_seq_len,
            common.block_table_tensor,
            self.slots[:tokens],
            self.entries[:tokens],
            common.causal,
            self.split_keys,
            {} if trees is None else trees.mask(common.query_start_loc, common.seq_lens, tokens),
        )


class _Impl:
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in CACHE_DTYPES:
            _refuse(f"kv_cache_dtype {kv_cache_dtype!r}", f"one of {', '.join(CACHE_DTYPES)}")
        if attn_type != "decoder":
            _refuse(f"attn_type {attn_type!r}", "'decoder'")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype, self.attn_type = num_kv_heads or num_heads, kv_cache_dtype, attn_type
        self.writes = kv_sharing_target_layer_name is None  # else another layer has written this one's keys
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options: dict[str, Any] = {"softmax_scale": scale, "softcap": logits_soft_cap or 0.0, "sink": sinks}
        # a window of n tokens has the query's own among them
        self.options["window_size"] = NO_WINDOW if sliding_window is None else (sliding_window - 1, -1)
        self.pages = torch.empty(0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlyMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value, (tokens, Hkv, D), to kv_cache, and attention of query, (tokens, H, D), to output.

        Tokens behind those of the batch are not written. Without metadata, as in vLLM's profiling, output is 0.

        Raises:
            UnsupportedError: a quantised output, or what no kernel of the target does.
        """
        if output_scale is not None or output_block_scale is not None:
            _refuse("a quantised output", "output_scale None: quantise it afterwards")
        if attn_metadata is None:
            return output.zero_()
        batch = attn_metadata
        k_cache, v_cache = as_float8(kv_cache).unbind(0)
        scales = scales_of(k_cache, getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None))
        if self.writes and key is not None and value is not None:
            self._write(key, value, k_cache, v_cache, batch, scales)
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        split: dict[str, Any] = {"split_keys": batch.split_keys} if batch.split_keys else {"num_kv_splits": 0}
        shape = (-1, self.num_heads, self.head_size)
        flydsl_flash_attn_func(
            query.view(shape)[: batch.tokens],
            k_cache,
            v_cache,
            batch.causal,
            out=output.view(shape)[: batch.tokens],
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_kv=batch.seq_lens,
            max_seqlen_kv=batch.max_seq_len,
            block_table=batch.block_table,
            alibi_slopes=self.slopes,
            **split,
            **self.options,
            **batch.tree,
            **scales,
        )
        return output

    def _write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: FlyMetadata,
        scales: Scales,
    ) -> None:
        """New keys and values to their slots."""
        if self.pages.numel() != len(k_cache) or self.pages.device != k_cache.device:
            self.pages = torch.arange(len(k_cache), dtype=torch.int32, device=k_cache.device)[None]
        shape = (-1, self.num_kv_heads, self.head_size)
        k, v = (x[: batch.tokens].view(shape) for x in (key, value))
        write_slots(k, v, k_cache, v_cache, batch.slots, batch.entries, self.pages, scales=scales)


def split_for(most_keys: int) -> int:
    """`split_keys` of an engine whose sequences have up to so many keys: one number for all of its calls."""
    return max(LEAST_SPLIT, -(-most_keys // (MAX_SPLITS * SPLIT_UNIT)) * SPLIT_UNIT)


def _refuse(what: str, instead: str) -> None:
    raise UnsupportedError(f"vLLM's CUSTOM backend: {what} is not available; accepted: {instead}")


@functools.cache
def _class(name: str) -> type:
    """A class of vLLM's with what is here."""
    own, base, more = {
        "FlyAttentionBackend": (_Backend, "AttentionBackend", {}),
        "FlyAttentionImpl": (_Impl, "AttentionImpl", {}),
        "FlyMetadataBuilder": (_Builder, "AttentionMetadataBuilder", {"_cudagraph_support": "UNIFORM_BATCH"}),
    }[name]
    bases = importlib.import_module(BASES)
    more = {key: bases.AttentionCGSupport[value] for key, value in more.items()}
    return type(name, (own, getattr(bases, base)), {"__module__": __name__, "__doc__": own.__doc__, **more})


def __getattr__(name: str) -> Any:
    if not name.startswith("Fly"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _class(name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
