"""Flash attention for Hugging Face transformers: `register()`, then `attn_implementation="fly"`.

    from fly_attention.integrations import transformers as fly_for_transformers
    fly_for_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fly", dtype=torch.bfloat16)

A model's masks come as they do for "sdpa": none where a causal mask alone says it all, otherwise a mask for every
query and key, which also contains windows and padding. Continuous batching (`generate_batch`) packs sequences over
pages of a cache; what it calls has offsets, which are used instead of its mask.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fly.errors import ArgumentError, UnsupportedError

from ..api.conversions import check_dense
from ..api.options import add_packing, attend
from ..arguments.callers import TRANSFORMERS
from ..arguments.checks import Checks
from .masks import bias_of

NAME = "fly"
PAGED = "paged|eager"  # of the names that continuous batching takes, the only one for functions of others
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
        kwargs: what other implementations need; nothing in it changes the result, except what is refused, and of
            continuous batching: `cache`, to which keys and values are written, and offsets of its packed sequences.

    Returns:
        (out (B, Sq, H, D), None): there are no attention weights.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: `output_attentions`, a cache's table of blocks (a NotImplementedError).
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dense(FUNCTION, name, tensor)
        if tensor.dim() != 4:
            raise ArgumentError(f"{FUNCTION}: {name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f'{FUNCTION}: output_attentions is not available: use attn_implementation="eager"')
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{FUNCTION}: {name} is not available: add it to attention_mask")
    options: dict[str, Any] = {"num_kv_splits": 0}
    given = {"softmax_scale": scaling, "softcap": softcap, "sink": s_aux}
    options |= {name: value for name, value in given.items() if value is not None}
    if not isinstance(dropout, float) or dropout:
        options["dropout_p"] = dropout
    if kwargs.get("cache") is not None:
        return _of_packed(module, query, key, value, sliding_window, options, kwargs), None
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
        options["window_size"] = _window(sliding_window, is_causal)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(TRANSFORMERS, q, k, v, causal, options)[0], None


def _of_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int | None,
    options: dict[str, Any],
    given: dict[str, Any],
) -> torch.Tensor:
    """(1, total_q, H, D) of continuous batching: packed sequences of one query or more, behind their cache's keys.

    The cache takes the new keys and gives all of each sequence, of a layer with a window those that it keeps.
    """
    if given.get("block_table") is not None:
        raise UnsupportedError(
            f"{FUNCTION}: a table of blocks (block_table) is not available: set max_blocks_per_request=0 of the "
            "ContinuousBatchingConfig, and the keys are gathered"
        )
    key, value = given["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given)
    if sliding_window is not None:
        options["window_size"] = _window(sliding_window, True)
    add_packing(
        TRANSFORMERS,
        options,
        given["cu_seq_lens_q"].to(torch.int32),
        given["cu_seq_lens_k"],
        given["max_length_q"],
        given["max_length_k"],
        None,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(TRANSFORMERS, q, k, v, True, options)[0][None]


def _window(sliding_window: Any, is_causal: bool) -> tuple[int, int]:
    """The window's sides: both ends included; looking one way, it counts the query's own key."""
    window = CHECKS.integer("sliding_window", sliding_window)
    CHECKS.whole("sliding_window", window, 1, 2**31 - 1)
    return (window - 1, -1) if is_causal else (window, window)


def _bias(mask: torch.Tensor, query: torch.Tensor, keys: int) -> torch.Tensor:
    check_dense(FUNCTION, "attention_mask", mask)
    if mask.dim() != 4 or mask.shape[-1] < keys:
        raise ArgumentError(
            f"{FUNCTION}: attention_mask must broadcast to (B, H, Sq, Skv) = "
            f"{(*query.shape[:3], keys)}, got shape {tuple(mask.shape)}"
        )
    return bias_of(mask[..., :keys], query)  # a static cache's mask may be longer than its keys


def register(name: str = NAME, continuous_batching: bool = False) -> None:
    """Make attn_implementation=`name` known to transformers, with the masks it needs.

    continuous_batching: also take the place of "paged|eager", so that `generate_batch` of models with that
    attn_implementation, or "eager", which it makes that, runs on fly. It takes no other function's name.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ImportError: it has no `AttentionMaskInterface` (before 4.53).
    """
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention_forward)
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)
    if continuous_batching:
        transformers.AttentionInterface.register(PAGED, attention_forward)
