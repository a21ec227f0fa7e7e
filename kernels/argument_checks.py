"""What checks of a caller's arguments share: how a mistake is reported, and what a tensor or number must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fly.errors import ArgumentError, ArgumentTypeError, UnsupportedError

DEVICE_TYPES = ("cuda", "cpu")


@dataclass(frozen=True)
class Checks:
    """Checks of a call of `function`, whose name every message starts with."""

    function: str

    def fail(self, message: str, error: type[Exception] = ArgumentError) -> None:
        """Raise `error` with the function's name before `message`."""
        raise error(f"{self.function}: {message}")

    def plain(self, name: str, value: Any) -> None:
        """It is a plain dense tensor in memory that kernels reach."""
        if not isinstance(value, torch.Tensor):
            self.fail(f"{name} must be a torch.Tensor, got {type(value).__name__}", ArgumentTypeError)
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            self.fail(
                f"{name} is a {type(value).__name__}, which has no memory of its own; pass a plain torch.Tensor "
                "(torch.compile sees through the functions of kernels.flash_attn_api)",
                ArgumentTypeError,
            )
        if value.is_nested or value.layout != torch.strided:
            kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            self.fail(f"{name} is {kind}; a dense strided tensor is accepted", ArgumentTypeError)
        if value.device.type not in DEVICE_TYPES:
            self.fail(f"{name} is on device '{value.device}'; accepted: {', '.join(DEVICE_TYPES)}")
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            self.fail(
                f"{name} is inside a functorch transform (vmap, grad); fold the extra dimension into the batch",
                ArgumentTypeError,
            )

    def tensor(self, name: str, value: Any, dtypes: Sequence[torch.dtype], rank: int, wanted: str) -> None:
        """It is such a tensor of one of `dtypes` with `rank` dimensions, which `wanted` spells: "(B, S, H, D)"."""
        self.plain(name, value)
        if value.dtype not in dtypes:
            accepted = ", ".join(map(str, dtypes))
            self.fail(f"{name} has dtype {value.dtype}; accepted: {accepted}", ArgumentTypeError)
        if value.dim() != rank:
            self.fail(f"{name} must have {rank} dimensions {wanted}, got shape {tuple(value.shape)}")

    def unit_last_stride(self, name: str, tensor: torch.Tensor) -> None:
        """Elements along its last dimension are next to each other."""
        if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
            self.fail(
                f"{name}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}: pass "
                f"{name}.contiguous() (the other strides are free)"
            )

    def flag(self, name: str, value: Any) -> None:
        """It is a bool."""
        if not isinstance(value, bool):
            self.fail(f"{name} must be True or False, got {value!r} ({type(value).__name__})", ArgumentTypeError)

    def whole(self, name: str, value: Any, low: int, high: int | None = None) -> None:
        """It is an int from `low` to `high`, which may be open."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{name} must be an int, got {value!r} ({type(value).__name__})", ArgumentTypeError)
        if value < low or (high is not None and value > high):
            accepted = f"at least {low}" if high is None else f"from {low} to {high}"
            self.fail(f"{name} must be {accepted}, got {value}")

    def no_gradients(self, named: Mapping[str, Any]) -> None:
        """None of the tensors among the values requires a gradient (call it only in grad mode)."""
        for name, value in named.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise UnsupportedError(
                    f"{self.function}: {name} requires a gradient, but the backward is not available; call it under "
                    "torch.no_grad() or pass detached tensors (.detach())"
                )


ATTENTION = Checks("flydsl_flash_attn_func")
fail, flag, whole = ATTENTION.fail, ATTENTION.flag, ATTENTION.whole
check_tensor, check_last_stride, check_gradients = ATTENTION.plain, ATTENTION.unit_last_stride, ATTENTION.no_gradients
