"""Flash attention for Hugging Face diffusers: `register()`, then `model.set_attention_backend("fly")`.

    from fly_attention.integrations import diffusers as fly_for_diffusers
    fly_for_diffusers.register()
    pipeline.transformer.set_attention_backend("fly")    # or: with attention_backend("fly"):

Arguments are those that `dispatch_attention_fn` hands to its backends: diffusers/models/attention_dispatch.py of
https://github.com/huggingface/diffusers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fly.errors import UnsupportedError

from ..api.conversions import check_dense
from ..api.options import attend
from ..arguments.callers import DIFFUSERS
from ..arguments.checks import Checks
from .masks import bias_of, top_left

NAME = "fly"
CHECKS = Checks(DIFFUSERS.function)


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What diffusers calls for one layer, with the meaning that `F.scaled_dot_product_attention` gives its arguments.

    Args:
        query: (B, Sq, H, D). key, value: (B, Skv, Hkv, D), with fewer heads also without `enable_gqa`.
        attn_mask: None, or broadcastable to (B, H, Sq, Skv): True where a query sees a key, or added to the scores.
        is_causal: query i sees the keys up to i (top-left).
        scale: factor of the scores, D**-0.5 by default.

    Returns:
        out (B, Sq, H, D), or with `return_lse` (out, lse (B, Sq, H) float32, natural).

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: context parallelism (a NotImplementedError).
    """
    if _parallel_config is not None:
        raise UnsupportedError(
            f"{DIFFUSERS.function}: context parallelism is not available: call fly_attention.activate() and take the "
            'backend "_native_flash"'
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        CHECKS.tensor(name, tensor, (torch.bfloat16, torch.float16), 4, "(B, S, H, D)")
    CHECKS.flag("is_causal", is_causal)
    options: dict[str, Any] = {"num_kv_splits": 0}
    if scale is not None:
        options["softmax_scale"] = scale
    if not isinstance(dropout_p, float) or dropout_p:
        options["dropout_p"] = dropout_p
    if attn_mask is not None:
        check_dense(DIFFUSERS.function, "attn_mask", attn_mask)
        options["bias"] = bias_of(attn_mask, query)
    if is_causal:
        keys, options["window_size"] = top_left(query.shape[1], key.shape[1])
        key, value = key[:, :keys], value[:, :keys]
    out, lse = attend(DIFFUSERS, query, key, value, False, options, return_lse=return_lse)
    return out if lse is None else (out, lse.transpose(1, 2))


def register(name: str = NAME) -> None:
    """Make the attention backend `name` known to diffusers, which keeps its backends in an enumeration.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
        ImportError: it has no attention backends (before 0.35).
    """
    importlib.import_module("diffusers")
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    known: Any = dispatch.AttentionBackendName
    if name not in known._value2member_map_:
        backend = str.__new__(known, name)
        backend._name_, backend._value_ = name.upper(), name
        known._member_map_[name.upper()] = known._value2member_map_[name] = backend
        known._member_names_.append(name.upper())
    dispatch._AttentionBackendRegistry.register(known(name))(attention_forward)
