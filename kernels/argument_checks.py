"""What checks of a caller's arguments share: how a mistake is reported, and what a tensor or number must be."""

from __future__ import annotations

from typing import Any

import torch

from fly.errors import ArgumentError, ArgumentTypeError

FUNCTION = "flydsl_flash_attn_func"
DEVICE_TYPES = ("cuda", "cpu")


def fail(message: str, error: type[Exception] = ArgumentError) -> None:
    """Raise `error` with the function's name before `message`."""
    raise error(f"{FUNCTION}: {message}")


def check_tensor(name: str, value: Any) -> None:
    """It is a plain dense tensor in memory that kernels reach."""
    if not isinstance(value, torch.Tensor):
        fail(f"{name} must be a torch.Tensor, got {type(value).__name__}", ArgumentTypeError)
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        fail(
            f"{name} is a {type(value).__name__}, which has no memory of its own; pass a plain torch.Tensor "
            "(torch.compile sees through the functions of kernels.flash_attn_api)",
            ArgumentTypeError,
        )
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
        fail(f"{name} is {kind}; a dense strided tensor is accepted", ArgumentTypeError)
    if value.device.type not in DEVICE_TYPES:
        fail(f"{name} is on device '{value.device}'; accepted: {', '.join(DEVICE_TYPES)}")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        fail(
            f"{name} is inside a functorch transform (vmap, grad); fold the extra dimension into the batch",
            ArgumentTypeError,
        )


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Its last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
        fail(
            f"{name}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}: pass "
            f"{name}.contiguous() (the other strides are free)"
        )


def whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """It is an int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        fail(f"{name} must be an int, got {value!r} ({type(value).__name__})", ArgumentTypeError)
    if value < low or (high is not None and value > high):
        accepted = f"at least {low}" if high is None else f"from {low} to {high}"
        fail(f"{name} must be {accepted}, got {value}")


def flag(name: str, value: Any) -> None:
    """It is a bool."""
    if not isinstance(value, bool):
        fail(f"{name} must be True or False, got {value!r} ({type(value).__name__})", ArgumentTypeError)
