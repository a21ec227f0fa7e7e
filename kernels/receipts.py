"""Receipts: named sets of calls whose builds are made ahead, as `python -m fly prebuild --receipt NAME` takes them.

A receipt is what a spec file holds (`prebuild`): calls, in which a list stands for each of its values. Sequence
lengths are odd, and 4 bytes is all that divides the rows of a log-sum-exp then: such builds serve every length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LENGTHS = (1, 63, 511, 4095)
_BATCHES = (1, 16)
_HALVES = ("bf16", "f16")
# dense and packed calls of training, with gradients
_TRAINING = {
    "head_dim": (64, 128),
    "dtype": _HALVES,
    "causal": (False, True),
    "batch": _BATCHES,
    "seq_len": _LENGTHS[2:],
    "num_heads": 32,
    "num_kv_heads": (8, 32),
    "lse": True,
    "backward": True,
}
_PREFILL = {
    "head_dim": (64, 128),
    "dtype": _HALVES,
    "batch": _BATCHES,
    "seq_len": _LENGTHS[1:],
    "num_heads": 32,
    "num_kv_heads": (8, 32),
}
_DECODING = {**_PREFILL, "seq_len": 1, "seq_len_kv": _LENGTHS[1:], "num_kv_splits": 0, "causal": True}

RECEIPTS: Mapping[str, Mapping[str, Any]] = {
    # FlashAttention-2's functions: training, dense and packed, and decoding from a cache
    "flash_attn": {
        "call": (
            {**_TRAINING, "packed": (False, True)},
            {**_PREFILL, "causal": (False, True), "packed": (False, True), "lse": (False, True)},
            {**_DECODING, "feature": (("seqused",), ("seqused", "paged"))},
        )
    },
    # scaled_dot_product_attention and varlen_attn
    "pytorch": {
        "call": (
            {**_TRAINING, "packed": (False, True)},
            {**_PREFILL, "causal": (False, True), "lse": (False, True)},
            {**_DECODING, "lse": (False, True)},
        )
    },
    # the forward functions of serving on AMD: dense, packed, paged, log-sum-exp on request
    "aiter": {
        "call": (
            {**_PREFILL, "causal": (False, True), "packed": (False, True), "lse": (False, True)},
            {**_DECODING, "packed": True, "feature": (("seqused", "paged"),)},
        )
    },
    # an engine's batches: packed queries over pages, prefill and decoding, windows and sinks
    "vllm": {
        "call": (
            {
                **_PREFILL,
                "causal": True,
                "packed": True,
                "seq_len": _LENGTHS,
                "seq_len_kv": _LENGTHS[2:],
                "num_kv_splits": (0, 1),
                "feature": (("seqused", "paged"), ("seqused", "paged", "window", "sink")),
                "lse": (False, True),
            },
        )
    },
}
