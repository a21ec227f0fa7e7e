"""The backward pass by itself, into memory of the caller's: `flydsl_flash_attn_backward`."""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import FlyError, UnsupportedError

from .arguments.callers import Caller, arg
from .arguments.checks import ATTENTION, check_no_overlap, check_workspace
from .call.checks import is_aligned
from .call.gradients import backward
from .flash_attn_interface import OPTION_DEFAULTS

_CALLER = Caller("flydsl_flash_attn_backward", {}, "flydsl_flash_attn_backward")
_NOT_TAKEN = {
    "block_mask": "torch.autograd.grad of flydsl_flash_attn_func takes it",
    "debug_counts": "leave it out",
    "stream": "call under torch.cuda.stream(...)",
}
# what is an argument here, or decides nothing about gradients
_OWN = ("out", "workspace", "return_lse")


def flydsl_flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = True,
    *,
    dlse: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v of `flydsl_flash_attn_func(q, k, v, causal, **options)`, without autograd.

    With dq, dk, dv and workspace, nothing is allocated but copies of inputs that kernels do not take as they are
    (not 16-byte aligned, or with a last stride other than 1). Autograd makes the same gradients by itself.

    Args:
        dout: the gradient of out, of its shape and q's dtype, with any strides.
        q, k, v, causal: as of the call.
        out, lse: its results, lse with `return_lse=True`; those of more keys for a part of the keys.
        dlse: the gradient of lse, float32 of its shape.
        dq, dk, dv: written and returned instead of new tensors, all three or none: of q's, k's and v's shape and
            dtype, 16-byte aligned, with a last stride of 1, sharing no memory with each other or another argument.
            Tokens outside of all sequences are not written.
        workspace: memory instead of an allocation in the call, contiguous, 16-byte aligned, of at least
            `flydsl_flash_attn_workspace(q, k, v, causal, backward=True, **options)` bytes and any dtype;
            overwritten.
        options: keywords of `flydsl_flash_attn_func` but `block_mask`, `stream` and `debug_counts`; with dropout, the
            call's rng_state.

    Returns:
        (dq, dk, dv).

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument.
        UnsupportedError: a call without gradients, or an option that this function does not take.
    """
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        given["dlse"] = dlse
    written = {"dq": dq, "dk": dk, "dv": dv}
    try:
        _check(given, written, workspace, options)
        results = None if dq is None or dk is None or dv is None else (dq, dk, dv)
        options = OPTION_DEFAULTS | options
        found = backward((q, k, v), out, lse, dout, dlse, causal, options, results, workspace=workspace)
    except FlyError as error:
        _CALLER.tell(error)
        raise
    return found[0], found[1], found[2]


def _check(
    given: dict[str, torch.Tensor],
    written: dict[str, torch.Tensor | None],
    workspace: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise for what `backward` does not look at itself."""
    if unknown := sorted({*options} - {*OPTION_DEFAULTS}):
        known = ", ".join(name for name in OPTION_DEFAULTS if name not in (*_NOT_TAKEN, *_OWN))
        ATTENTION.fail(f"has no keyword {unknown[0]}; accepted: {known}")
    for name, instead in _NOT_TAKEN.items():
        if options.get(name) is not None:
            ATTENTION.fail(f"{arg(name)} is not taken here: {instead}", UnsupportedError)
    if options.get("dropout_p") and options.get("rng_state") is None:
        ATTENTION.fail(f"{arg.rng_state} is None with dropout: pass the forward call's")
    results = {name: x for name, x in written.items() if x is not None}
    if len(results) not in (0, len(written)):
        missing = ", ".join(arg(name) for name in written if name not in results)
        ATTENTION.fail(f"{missing} missing: pass dq, dk and dv, or none of them")
    for name, x in (given | results).items():
        ATTENTION.plain(name, x)
    for name, x in results.items():
        if not is_aligned(x):
            ATTENTION.fail(
                f"{arg(name)} has strides {x.stride()} at address {x.data_ptr():#x}; accepted: a last stride of 1, "
                "and others and an address that are multiples of 16 bytes"
            )
        others = {other: y for other, y in (given | results).items() if other != name}
        check_no_overlap(x, others, what=name)
    if workspace is not None:
        tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
        check_workspace(workspace, given | results | tensors)
