"""S_dmask of FlashAttention's functions: the weights of a call with dropout, and which of them it keeps."""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import FlyError, UnsupportedError

from ..arguments.callers import Caller
from ..arguments.checks import Checks
from ..call.checks import check_call, loadable
from ..flash_attn_interface import OPTION_DEFAULTS


def refuse_while_compiling(caller: Caller) -> None:
    """Raise `UnsupportedError` where torch compiles: no operation makes probabilities."""
    if torch.compiler.is_compiling():
        shown, dropout = caller.name("return_lse"), caller.name("dropout_p")
        text = f"{shown} with {dropout} is not available while torch compiles: leave one of them out"
        Checks(caller.function).fail(text, UnsupportedError)


def signed_probabilities(
    caller: Caller, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, causal: bool, options: dict[str, Any]
) -> torch.Tensor:
    """(B, H, the longest Sq, the longest Skv) of q's dtype: softmax weights, below zero where they are dropped.

    q, k and `options`: a call's that has been made, with head dimensions that kernels have, and the random state;
    `lse`: its result. Weights are before dropout's scale, and 0 where a query does not see a key or a sequence ends.

    Raises:
        UnsupportedError: keys in pages.
    """
    from ..flash_attn_generic_probabilities import prepare  # calls without it do not wait for it to load

    q, k, lse = loadable(q.detach()), loadable(k.detach()), lse.detach()
    try:
        call = check_call(q, k, k, causal, None, {**OPTION_DEFAULTS, **options})
        request = call.request
        shape = (request.batch, request.num_heads, request.seq_len, request.seq_len_kv)
        found = q.new_zeros(shape)
        if not call.empty:
            tensors = {**call.tensors, "lse": lse, "probabilities": found}
            prepare(tensors, request).run(tensors, None)
    except FlyError as error:
        caller.tell(error)
        raise
    return found
