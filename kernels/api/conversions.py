"""Checks of arguments as FlashAttention's functions take them, which give them as `flydsl_flash_attn_func` does.

FlashAttention takes integers of any kind: Python's, numpy's, tensors without dimensions. Every message names the
function that was called, the argument, the value and what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError

from ..arguments.callers import written
from ..arguments.checks import INTEGERS, Checks, is_dense, shown
from ..work.tile_scheduler import MAX_SPLITS

MOST = 2**31 - 1  # of a window's side or a length


def window_of(function: str, window_size: Any, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for no limit; None is that too. A causal call has no limit on the right besides its own.

    A window may be a tensor or an array of two, as FlashAttention only indexes it.

    Raises:
        ArgumentTypeError, ArgumentError: it is no window.
        UnsupportedError: a side below -1, which FlashAttention-2 and -4 take for different things.
    """
    if window_size.__class__ in (tuple, list) and len(window_size) == 2:
        left, right = window_size
        if isinstance(left, int) and isinstance(right, int) and -1 <= left <= MOST and -1 <= right <= MOST:
            return left, -1 if causal else right
    good = isinstance(window_size, tuple | list | np.ndarray) or (
        isinstance(window_size, torch.Tensor) and is_dense(window_size) and window_size.dim() == 1
    )
    checks, wanted = Checks(function), "two ints (left, right)"
    if not good or len(window_size) != 2:
        checks.fail(f"window_size must be {wanted}, got {shown(window_size)}", ArgumentTypeError)
    sides: list[int] = []
    for side in window_size:
        number = -1 if side is None else checks.integer("window_size", side, wanted, window_size)
        if not -MOST <= number <= MOST:
            checks.fail(f"window_size must have sides up to {MOST}, or -1 for no limit, got {written(window_size)}")
        closed = causal and len(sides) == 1  # the right side of a causal call, whatever was given
        sides.append(-1 if closed else number)
    for side in sides:
        if side < -1:
            checks.fail(
                f"window_size has a side of {written(side)}, which is no limit in FlashAttention-2 and -3 and a "
                "bound in FlashAttention-4: pass -1 or None for no limit, or a mask_mod to flydsl_flash_attn_func "
                "for a bound below 0",
                UnsupportedError,
            )
    left, right = sides
    return left, right


def splits_of(function: str, num_splits: Any) -> int:
    """How many parts keys are split into, 0 for what suits the device.

    Raises:
        ArgumentTypeError, ArgumentError: it is no such number.
        UnsupportedError: more parts than kernels have.
    """
    checks = Checks(function)
    number = checks.integer("num_splits", num_splits)
    checks.whole("num_splits", number, 0)
    if number > MAX_SPLITS:
        checks.fail(
            f"num_splits over {MAX_SPLITS} is not available, got {written(number)}: pass 0, and the number is what "
            "suits the device",
            UnsupportedError,
        )
    return number


def _check_pack_gqa(checks: Checks, name: str, value: Any) -> None:
    if value is not None:
        checks.flag(name, value)


def _check_sm_margin(checks: Checks, name: str, value: Any) -> None:
    checks.whole(name, checks.integer(name, value), 0)


def _check_metadata(checks: Checks, name: str, value: Any) -> None:
    if value is not None:
        checks.plain(name, value)


# what changes how FlashAttention computes and not what: checked, and nothing else
HINTS: Mapping[str, Callable[[Checks, str, Any], None]] = {
    "pack_gqa": _check_pack_gqa,
    "sm_margin": _check_sm_margin,
    "scheduler_metadata": _check_metadata,
}


def check_dense(function: str, name: str, tensor: Any) -> None:
    """It is a tensor of which torch tells shape and strides.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not isinstance(tensor, torch.Tensor) or not is_dense(tensor):
        Checks(function).plain(name, tensor)


def check_cache(function: str, q: Any, k_cache: Any, v_cache: Any, packed: bool) -> None:
    """They are tensors of four dimensions, `packed` q of three, and the caches can be used without a copy.

    Raises:
        ArgumentTypeError, ArgumentError: one is not.
    """
    try:
        good = q.dim() + packed == k_cache.dim() == v_cache.dim() == 4
        good = good and k_cache.stride(-1) == v_cache.stride(-1) == 1
    except (AttributeError, RuntimeError):
        good = False  # no tensor, or one without strides
    if good:
        return
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(function, name, tensor)
        rank = 3 if packed and name == "q" else 4
        if tensor.dim() != rank:
            hint = "; packed queries also need cu_seqlens_q" if (name, tensor.dim()) == ("q", 3) else ""
            raise ArgumentError(
                f"{function}: {name} must have {rank} dimensions, got shape {tuple(tensor.shape)}{hint}"
            )
        if name != "q" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ArgumentError(
                f"{function}: {name}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}"
            )


def lengths_of(function: str, cache_seqlens: Any, batch: int, device: torch.device) -> torch.Tensor:
    """`cache_seqlens` of `batch` sequences on `device`: one number for all, or a tensor, whose number stays there.

    Raises:
        ArgumentTypeError, ArgumentError: it is no such number.
    """
    if isinstance(cache_seqlens, torch.Tensor):
        if not is_dense(cache_seqlens) or cache_seqlens.dim():
            return cache_seqlens
        on_host = cache_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
        if cache_seqlens.dtype in INTEGERS and not on_host:
            return cache_seqlens.to(torch.int32).expand(batch).contiguous()
    checks = Checks(function)
    length = checks.integer("cache_seqlens", cache_seqlens, "an int or (B,) int32")
    checks.whole("cache_seqlens", length, 0, MOST)
    return torch.full((batch,), length, dtype=torch.int32, device=device)
