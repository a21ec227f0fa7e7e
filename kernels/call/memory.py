"""Memory for results, in half of the host's time that `torch.empty_strided` takes.

torch has functions for the code that its compiler generates, which read three plain arguments and dispatch nothing:
a dispatch mode does not see what they make, and the GPU is the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arguments.checks import DEVICE_TYPES

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""(sizes, strides, dtype) of a tensor, plain tuples."""
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# how many dispatch modes there are, such as selective checkpointing's
active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

_OF_COMPILER: Any = getattr(torch._C._dynamo, "guards", None)


def memory_of(tensor: torch.Tensor) -> Memory:
    """That of a tensor like this one."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def contiguous(sizes: tuple[int, ...], dtype: torch.dtype) -> Memory:
    """That of a contiguous tensor of these sizes."""
    return tuple(sizes), torch.empty(sizes, device="meta").stride(), dtype


def allocator(device: torch.device) -> Allocate:
    """Makes uninitialised tensors on a device, of sizes, strides and a dtype."""

    def by_torch(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    make: Allocate | None = getattr(_OF_COMPILER, f"_empty_strided_{device.type}", None)
    if make is None or device.type not in DEVICE_TYPES:
        return by_torch
    if device.type == "cpu" or torch.cuda.device_count() == 1:
        return make
    current, index = torch._C._cuda_getDevice, device.index
    return lambda *memory: (make if current() == index else by_torch)(*memory)
