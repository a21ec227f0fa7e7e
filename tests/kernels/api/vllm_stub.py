"""vLLM's side of an attention backend, without vLLM: its signatures, as facts, and modules that stand for its own.

https://github.com/vllm-project/vllm at 0014ca6b9929614f1b72c4bb11e5238de49cba89 (vllm/v1/attention/backend.py) and
0033bf03abd6dfdaa158a75e0973eead61875ad0 (vllm/v1/attention/backends/registry.py).
"""

from __future__ import annotations

import enum
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_compute_capability(cls, capability):
        return True


class AttentionMetadataBuilder(ABC):
    _cudagraph_support: Any = None

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.vllm_config = vllm_config

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass
class CommonAttentionMetadata:
    """What a builder is given, as far as backends read it."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


def modules() -> dict[str, types.ModuleType]:
    """What goes to sys.modules."""
    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def is_overridden(self):
            return self in overrides

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path

    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    made = {name: types.ModuleType(name) for name in (*names, f"{names[2]}.backend", f"{names[3]}.registry")}
    bases = (AttentionBackend, AttentionMetadataBuilder, AttentionImpl, AttentionCGSupport)
    vars(made["vllm.v1.attention.backend"]).update({base.__name__: base for base in bases})
    vars(made["vllm.v1.attention.backends.registry"]).update(
        AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend, overrides=overrides
    )
    return made
