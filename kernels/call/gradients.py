"""Gradients of calls: autograd's way through the forward function, and the backward pass that it takes.

A call that needs a gradient keeps its inputs, out and lse; the backward kernels make the weights from these again
(`flash_attn_generic_bwd`). It is eager: operations of torch's compilers have no gradient yet (`api.torch_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fly.errors import UnsupportedError

from ..arguments.callers import OWN, arg
from ..arguments.checks import ALIGNMENT, ATTENTION
from ..flash_attn_generic_bwd import check_request, prepare
from ..problem.contract import Launch, Request, aux_name
from ..problem.mods import Mod
from .checks import INPUTS, alignment, check_call, settled
from .plan import Plans

Options = Mapping[str, Any]
Forward = Callable[..., Any]

# what a call with gradients does not take, and what to do instead
_NOT_TAKEN = {
    "out": "leave it out",
    "workspace": "leave it out",
    "debug_counts": "leave it out",
    "stream": "call under torch.cuda.stream(...)",
}
_LENGTHS = ("cu_seqlens_q", "seqused_q", "seqused_kv")  # with which some tokens may have no gradient written
_plans: Plans[tuple[Any, ...], Launch] = Plans()


def differentiable(
    forward: Forward,
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `forward(q, k, v, causal, **options)`, a checked call's; gradients of both flow to q, k and v.

    Raises:
        UnsupportedError: something among the arguments has no gradient, or is not for calls that need one.
    """
    for name, instead in _NOT_TAKEN.items():
        if options[name] is not None:
            ATTENTION.fail(f"{arg(name)} is given where a gradient is needed: {instead}", UnsupportedError)
    if q.element_size() == 1:
        text = f"{arg.q} requires a gradient, and {q.dtype} has none: use bfloat16 or float16"
        ATTENTION.fail(text, UnsupportedError)
    try:
        check_request(request)
    except UnsupportedError as error:
        OWN.tell(error)
        raise
    options = {**options, "return_lse": True}
    result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, forward, causal, options)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


class _Attention(torch.autograd.Function):
    """The call as autograd sees it: out and lse of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward: Forward, causal: bool, options: Options
    ) -> Any:
        out, lse = forward(q, k, v, causal, **options)
        tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        ctx.save_for_backward(q, k, v, out, lse, *tensors.values())
        ctx.set_materialize_grads(False)
        ctx.call = causal, options, tuple(tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        causal, options, names = ctx.call
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = {**options, **dict(zip(names, tensors, strict=True))}
        with torch.no_grad():
            found = backward(q, k, v, out, lse, dout, dlse, causal, options)
        if torch.is_grad_enabled():
            # not without a history: what is made of these gradients would miss its own, and nothing would say so
            found = _NoSecondDerivative.apply(*(x.requires_grad_() for x in found))  # type: ignore[no-untyped-call]
        return *found, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are; an error where someone differentiates them."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        raise UnsupportedError(
            "a gradient of flydsl_flash_attn_func is differentiated again, and it has no second derivative; detach "
            "it, or use F.scaled_dot_product_attention under SDPBackend.MATH"
        )


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    causal: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous, of a call's results and of their gradients, of which None stands for zeros.

    q, k, v (B, S, H, D) or packed (total, H, D), out and dout like q with v's head dimension, lse and dlse (B, H, Sq)
    or (H, total) float32. What is not 16-byte aligned with a last stride of 1 is copied. Tokens outside of all
    sequences have zeros.
    """
    q, k, v, dout = (_aligned(x) for x in (q, k, v, torch.zeros_like(out) if dout is None else dout))
    make = torch.zeros_like if any(options[name] is not None for name in _LENGTHS) else torch.empty_like
    results = {
        f"d{name}": make(x, memory_format=torch.contiguous_format) for name, x in zip(INPUTS, (q, k, v), strict=True)
    }
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **results}
    if dlse is not None:
        given["dlse"] = dlse.contiguous()
    key = (causal, *map(_key, given.values()), len(given), *map(_key, options.values()))
    launch = _plans.get(key)
    if launch is None:
        call = check_call(q, k, v, causal, None, options)
        if call.empty:
            return results["dq"].zero_(), results["dk"].zero_(), results["dv"].zero_()
        launch = _plans[key] = prepare({**call.tensors, **given}, call.request)
    operands = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    operands |= {aux_name(i): tensor for i, tensor in enumerate(options["aux_tensors"])}
    workspace = q.new_empty(launch.workspace_bytes, dtype=torch.uint8)
    launch.run({**operands, **given, "workspace": workspace}, None)
    return results["dq"], results["dk"], results["dv"]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy where kernels cannot load 16 bytes at once from it.

    Strides of 0 are those of expanded gradients: their rows are alike, and are loaded as they are.
    """
    x = settled(x)
    return x if x.stride(-1) == 1 and alignment(x) >= ALIGNMENT else x.clone(memory_format=torch.contiguous_format)


def _key(value: Any) -> Any:
    """What decides a plan of an argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return Mod.of(value) if callable(value) else value
