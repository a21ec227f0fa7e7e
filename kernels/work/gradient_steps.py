"""The kernels of a backward pass as they are added, and what they leave for each other in the call's workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fly.backends.target import target
from fly.runtime.device import device_of

from ..problem.contract import Launch, Request, Tensors
from .sink_gradients import sink_gradients
from .steps import BoundKernel, Steps, aligned, bind_kernel
from .tile_scheduler import fold_grid


class GradientSteps:
    """Kernels of one launch, each bound to the call's tensors and to what is `made` for them.

    `made`: parts of the workspace by name, allocations of which only sizes and strides matter, or views of whole
    ones; `numbers`: parameters that are not tensors.
    """

    def __init__(self, tensors: Tensors, request: Request, made: Mapping[str, torch.Tensor], **numbers: Any):
        self._tensors, self._request, self._made = tensors, request, made
        self._arguments: dict[str, Any] = {**tensors, **made, "scale_log2": request.scale_log2, **numbers}
        self._kernels: list[BoundKernel] = []

    def add(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        operands: Sequence[str] = (),
        *,
        called: Mapping[str, str] | None = None,
        instead: Mapping[str, Any] | None = None,
        folds: bool = True,
        **statics: Any,
    ) -> None:
        """One more kernel; `instead`: other arguments than all kernels'; `folds`: whether by `fold_grid`.

        See `bind_kernel`.
        """
        grid, fold = fold_grid(grid) if folds else (grid, {})
        arguments = {**self._arguments, **(instead or {})}
        statics = {**statics, **fold}
        self._kernels.append(bind_kernel(kernel, grid, threads, arguments, statics, called=called, operands=operands))

    def add_sinks(
        self, operands: Sequence[str] = (), *, called: Mapping[str, str] | None = None, **statics: Any
    ) -> None:
        """The kernel of sinks' gradients, where they are wanted; see `add`."""
        if (dsink := self._tensors.get("dsink")) is None:
            return
        wave = target(device_of(dsink.device).target).wave_size
        grid = dsink.shape[0], self._request.num_heads, self._request.batch
        self.add(sink_gradients, grid, wave, operands, called=called, **statics)

    def launch(self) -> Launch:
        """All of them, one after the other."""
        places, nbytes = {}, 0
        for name, part in self._made.items():
            places[name] = nbytes
            nbytes += aligned(part.untyped_storage().nbytes())
        return Steps(tuple(self._kernels), places, nbytes).launch()
