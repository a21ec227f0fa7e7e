"""What checks of a caller's arguments share: how a mistake is reported, and what a tensor, number or stream must be.

Checks of memory ask tensors for their address: only of tensors that `Checks.plain` accepts.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from fly.errors import ArgumentError, ArgumentTypeError, FlyError, UnsupportedError

from .callers import arg, problem, written

DEVICE_TYPES = ("cuda", "cpu")
ALIGNMENT = 16  # the largest alignment of an address, in bytes, that a kernel may rely on
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def shown(value: Any) -> str:
    """A value with its type, for a message about a type that is not accepted."""
    return f"{written(value)} ({type(value).__name__})"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether torch tells a tensor's shape and strides: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor with memory of its own, of which torch tells shape and strides."""
    dense = has_memory(type(tensor)) and is_dense(tensor)
    return dense and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


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
        if not has_memory(type(value)):
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

    def vector(
        self, name: str, value: Any, dtype: torch.dtype, device: torch.device, what: str, length: int | None = None
    ) -> None:
        """It is such a tensor of one dimension, contiguous, of `length` or of any but 0; `what` says so in words."""
        self.plain(name, value)
        good = value.dim() == 1 and value.dtype == dtype and value.is_contiguous() and value.device == device
        if not good or (not len(value) if length is None else len(value) != length):
            self.fail(
                f"{arg(name)} must hold {what} on {device}, got shape {tuple(value.shape)}, strides "
                f"{value.stride()}, dtype {value.dtype} on {value.device}"
            )

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

    def sequence(self, name: str, value: Any, wanted: str) -> None:
        """It is a list or tuple."""
        if not isinstance(value, list | tuple):
            self.fail(f"{arg(name)} must be {wanted}, got {type(value).__name__}", ArgumentTypeError)

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
                    f"{arg(name)} requires a gradient, but the backward is not available here; call it under "
                    "torch.no_grad() or pass detached tensors (.detach())",
                    UnsupportedError,
                )

    def leave_out(self, name: str, instead: str = "leave it out") -> NoReturn:
        """Raise for an argument that a call has none of where a gradient is needed; `instead` says what to do."""
        self.fail(f"{arg(name)} is given where a gradient is needed: {instead}", UnsupportedError)

    def have_gradients(self, operands: Mapping[str, Any], have: Collection[str]) -> None:
        """Operands that require a gradient are among those that `have` one (call it only in grad mode)."""
        for name, tensor in operands.items():
            if tensor is not None and tensor.requires_grad and name not in have:
                self.fail(f"{arg(name)} requires a gradient, and has none: pass it detached", UnsupportedError)


ATTENTION = Checks("flydsl_flash_attn_func")
fail, flag, whole = ATTENTION.fail, ATTENTION.flag, ATTENTION.whole
check_tensor, check_last_stride, check_gradients = ATTENTION.plain, ATTENTION.unit_last_stride, ATTENTION.no_gradients


def has_memory(kind: type) -> bool:
    """Whether tensors of this class have memory, whose address they may be asked for; others only stand for one."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]  # of tensors


def extent_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of memory a tensor spans, from its first to its last element."""
    if not tensor.numel():
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return (last + 1) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may be at one address."""
    # sorted by stride, each dimension must step past everything that the smaller ones span
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


class _NoTouch:
    """Describes a tensor's memory to numpy, which reads only addresses and strides from it."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
        }


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have an element at one address; also when that is too hard to find out."""
    try:
        return np.shares_memory(
            np.asarray(_NoTouch(a)),
            np.asarray(_NoTouch(b)),
            max_work=100_000,  # type: ignore[arg-type]  # numpy's stubs know two limits only
        )
    except np.exceptions.TooHardError:
        return True


def check_no_overlap(
    out: torch.Tensor, inputs: Mapping[str, torch.Tensor], extents: Sequence[int] = (), what: str = "out"
) -> None:
    """Raise `ArgumentError` when `out` (called `what`) shares memory with an input; interleaved views are fine.

    `extents`: `extent_bytes` of the inputs and of out, where they are known.
    """
    extents = extents or [extent_bytes(tensor) for tensor in (*inputs.values(), out)]
    start = out.data_ptr()
    end = start + extents[-1]
    for (name, tensor), size in zip(inputs.items(), extents):
        address = tensor.data_ptr()
        if address < end and start < address + size and shares_memory(out, tensor):
            fail(f"{arg(what)} must not share memory with {arg(name)}; pass {arg(what)}=None or a separate tensor")


def check_workspace(workspace: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check a caller's workspace, which must not share memory with `tensors`; its size is for the launch to say.

    Raises:
        ArgumentError, ArgumentTypeError: it is no memory that kernels can use.
    """
    check_tensor("workspace", workspace)
    device = tensors["q"].device
    if workspace.device != device:
        fail(f"workspace must be on q's device {device}, got {workspace.device}")
    if not workspace.is_contiguous() or workspace.data_ptr() % ALIGNMENT:
        fail(
            f"workspace must be contiguous and {ALIGNMENT}-byte aligned, got strides {workspace.stride()} at "
            f"address {workspace.data_ptr():#x}: use torch.empty(size, dtype=torch.uint8, device=q.device)"
        )
    check_no_overlap(workspace, tensors, what="workspace")


def stream_of(stream: Any, device: torch.device) -> tuple[int, AbstractContextManager[Any]]:
    """The raw handle of a caller's `stream`, and the scope in which torch allocates for it.

    Raises:
        ArgumentError, ArgumentTypeError: it is no stream of this device, which has to be a GPU.
    """
    if device.type != "cuda":
        fail(f"stream is for GPU tensors, but q is on '{device}': leave it out")
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            fail(f"stream belongs to {stream.device}, but q is on {device}")
    elif isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        # the legacy default stream has handle 0, which torch does not take as an external one
        stream = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]  # torch's
    else:
        fail(
            f"stream must be a torch.cuda.Stream or an int handle, got {stream!r} ({type(stream).__name__})",
            ArgumentTypeError,
        )
    return stream.cuda_stream, torch.cuda.stream(stream)
