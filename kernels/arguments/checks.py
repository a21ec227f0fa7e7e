"""What checks of a caller's arguments share: how a mistake is reported, and what a tensor or number must be."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, UnsupportedError

from .callers import arg, problem, written

DEVICE_TYPES = ("cuda", "cpu")
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def shown(value: Any) -> str:
    """A value with its type, for a message about a type that is not accepted."""
    return f"{written(value)} ({type(value).__name__})"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether torch tells a tensor's shape and strides: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor with memory of its own, of which torch tells shape and strides."""
    of_its_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return of_its_own and is_dense(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@dataclass(frozen=True)
class Checks:
    """Checks of a call of `function`, whose name every message starts with."""

    function: str

    def fail(self, message: str, error: type[FlyError] = ArgumentError) -> NoReturn:
        """Raise `error` with the function's name before `message`, in which `arg` marks arguments."""
        raise problem(error, message, self.function)

    def plain(self, name: str, value: Any) -> None:
        """It is a plain dense tensor in memory that kernels reach."""
        if not isinstance(value, torch.Tensor):
            self.fail(f"{arg(name)} must be a torch.Tensor, got {type(value).__name__}", ArgumentTypeError)
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            self.fail(
                f"{arg(name)} is a {type(value).__name__}, which has no memory of its own; pass a plain torch.Tensor "
                "(torch.compile sees through the functions of fly_attention.flash_attn_api)",
                ArgumentTypeError,
            )
        if value.is_nested or value.layout != torch.strided:
            kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            self.fail(f"{arg(name)} is {kind}; a dense strided tensor is accepted", ArgumentTypeError)
        if value.device.type not in DEVICE_TYPES:
            self.fail(f"{arg(name)} is on device '{value.device}'; accepted: {', '.join(DEVICE_TYPES)}")
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            self.fail(
                f"{arg(name)} is inside a functorch transform (vmap, grad); fold the extra dimension into the batch",
                ArgumentTypeError,
            )

    def dtype(self, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
        """It has one of `dtypes`."""
        if tensor.dtype not in dtypes:
            accepted = ", ".join(map(str, dtypes))
            self.fail(f"{arg(name)} has dtype {tensor.dtype}; accepted: {accepted}", ArgumentTypeError)

    def tensor(self, name: str, value: Any, dtypes: Sequence[torch.dtype], rank: int, wanted: str) -> None:
        """It is such a tensor of one of `dtypes` with `rank` dimensions, which `wanted` spells: "(B, S, H, D)"."""
        self.plain(name, value)
        self.dtype(name, value, dtypes)
        if value.dim() != rank:
            self.fail(f"{arg(name)} must have {rank} dimensions {wanted}, got shape {tuple(value.shape)}")

    def unit_last_stride(self, name: str, tensor: torch.Tensor) -> None:
        """Elements along its last dimension are next to each other."""
        if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
            self.fail(
                f"{arg(name)}'s last dimension must be contiguous (stride 1), got strides {tensor.stride()}: pass "
                f"{arg(name)}.contiguous() (the other strides are free)"
            )

    def flag(self, name: str, value: Any) -> None:
        """It is a bool."""
        if not isinstance(value, bool):
            self.fail(f"{arg(name)} must be True or False, got {shown(value)}", ArgumentTypeError)

    def integer(self, name: str, value: Any, wanted: str = "an int", given: Any = None) -> int:
        """It as an int: one already, of numpy, or a tensor without dimensions on the CPU.

        `wanted` is what the argument must be, and `given` what it is, where `value` is only a part of it.
        """
        if value.__class__ is int:
            return value
        if isinstance(value, torch.Tensor):
            if _is_plain(value) and not value.dim() and value.dtype in INTEGERS:
                if value.device.type == "cpu":
                    return int(value)
                self.fail(
                    f"{arg(name)} is on device '{value.device}', and reading it would synchronise: pass {wanted}",
                    UnsupportedError,
                )
        elif not isinstance(value, bool | np.bool_) and hasattr(value, "__index__"):
            with contextlib.suppress(TypeError):  # an array of several has it too
                return operator.index(value)
        return self.fail(
            f"{arg(name)} must be {wanted}, got {shown(value if given is None else given)}", ArgumentTypeError
        )

    def whole(self, name: str, value: Any, low: int, high: int | None = None) -> None:
        """It is an int from `low` to `high`, which may be open."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{arg(name)} must be an int, got {shown(value)}", ArgumentTypeError)
        if value < low or (high is not None and value > high):
            accepted = f"at least {low}" if high is None else f"from {low} to {high}"
            self.fail(f"{arg(name)} must be {accepted}, got {written(value)}")

    def number(self, name: str, value: Any, accepted: str, good: Callable[[float], bool]) -> float:
        """It as a float: a finite number that is `good`, which `accepted` says in words."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            self.fail(f"{arg(name)} must be a Python number, got {shown(value)}", ArgumentTypeError)
        try:
            number = float(value)
        except OverflowError:  # an int or a fraction beyond floats
            number = math.inf
        if not (math.isfinite(number) and good(number)):
            self.fail(f"{arg(name)} must be {accepted}, got {written(value)}")
        return number

    def no_gradients(self, named: Mapping[str, Any]) -> None:
        """None of the tensors among the values requires a gradient (call it only in grad mode)."""
        for name, value in named.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.fail(
                    f"{arg(name)} requires a gradient, but the backward is not available; call it under "
                    "torch.no_grad() or pass detached tensors (.detach())",
                    UnsupportedError,
                )


ATTENTION = Checks("flydsl_flash_attn_func")
fail, flag, whole = ATTENTION.fail, ATTENTION.flag, ATTENTION.whole
check_tensor, check_last_stride, check_gradients = ATTENTION.plain, ATTENTION.unit_last_stride, ATTENTION.no_gradients
