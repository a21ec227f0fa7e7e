"""Flash attention for Hugging Face transformers: `register()`, then `attn_implementation="fly"`.

    from fly_attention.integrations import transformers as fly_for_transformers
    fly_for_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fly", dtype=torch.bfloat16)

A model's masks come as they do for "sdpa": none where a causal mask alone says it all, otherwise a mask for every
query and key, which also contains windows and padding.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fly.errors import ArgumentError, UnsupportedError

from ..api.conversions import check_dense
from ..api.options import attend
from ..arguments.callers import TRANSFORMERS
from ..arguments.checks import Checks
from .masks import bias_of

NAME = "fly"
FUNCTION = TRANSFORMERS.function
CHECKS = Checks(FUNCTION)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for one layer.

    Args:
        module: the layer; its `is_causal` (True by default) counts where the argument is None.
        query: (B, H, Sq, D). key, value: (B, Hkv, Skv, D), not repeated.
        attention_mask: None, or broadcastable to (B, H, Sq, Skv): True where a query sees a key, or added to the
            scores. With a mask nothing else hides keys: it contains causality and windows.
        scaling: factor of the scores, D**-0.5 by default. dropout: probability, as layers pass it in training.
        sliding_window: keys that a query sees, itself included, where there is no mask.
        softcap: scores become softcap·tanh(score/softcap). s_aux: (H,) sinks.
        kwargs: what other implementations need; nothing in it changes the result, except what is refused.

    Returns:
        (out (B, Sq, H, D), None): there are no attention weights.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: `output_attentions`, a paged `cache` (a NotImplementedError).
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dense(FUNCTION, name, tensor)
        if tensor.dim() != 4:
            raise ArgumentError(f"{FUNCTION}: {name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f'{FUNCTION}: output_attentions is not available: use attn_implementation="eager"')
    if kwargs.get("cache") is not None:
        raise UnsupportedError(
            f'{FUNCTION}: a paged cache (continuous batching) is not available: use attn_implementation="paged|sdpa"'
        )
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{FUNCTION}: {name} is not available: add it to attention_mask")
    options: dict[str, Any] = {"num_kv_splits": 0}
    given = {"softmax_scale": scaling, "softcap": softcap, "sink": s_aux}
    options |= {name: value for name, value in given.items() if value is not None}
    if not isinstance(dropout, float) or dropout:
        options["dropout_p"] = dropout
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    CHECKS.flag("is_causal", is_causal)
    queries, keys = query.shape[2], key.shape[2]
    causal = is_causal and attention_mask is None and queries > 1  # a single query is the last, and sees all keys
    if causal and queries != keys:
        # so do masks that are left out count on "sdpa": query i sees keys up to i of a cache that is yet to be filled
        if keys < queries:
            raise UnsupportedError(
                f"{FUNCTION}: causal without a mask needs as many keys as queries, got {keys} keys and {queries} "
                "queries: pass an attention_mask"
            )
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    if attention_mask is not None:
        options["bias"] = _bias(attention_mask, query, keys)
    elif sliding_window is not None:
        # both ends of a window included; looking one way, it counts the query's own key
        window = CHECKS.integer("sliding_window", sliding_window)
        CHECKS.whole("sliding_window", window, 1, 2**31 - 1)
        options["window_size"] = (window - 1, -1) if is_causal else (window, window)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(TRANSFORMERS, q, k, v, causal, options)[0], None


def _bias(mask: torch.Tensor, query: torch.Tensor, keys: int) -> torch.Tensor:
    check_dense(FUNCTION, "attention_mask", mask)
    if mask.dim() != 4 or mask.shape[-1] < keys:
        raise ArgumentError(
            f"{FUNCTION}: attention_mask must broadcast to (B, H, Sq, Skv) = "
            f"{(*query.shape[:3], keys)}, got shape {tuple(mask.shape)}"
        )
    return bias_of(mask[..., :keys], query)  # a static cache's mask may be longer than its keys


def register(name: str = NAME) -> None:
    """Make attn_implementation=`name` known to transformers, with the masks it needs.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ImportError: it has no `AttentionMaskInterface` (before 4.53).
    """
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention_forward)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)
