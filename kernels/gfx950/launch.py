"""Binding the gfx950 forward kernels."""

from __future__ import annotations

import fly

from ..problem.contract import Launch, Request, Tensors
from ..work.launch import bind_forward, heads_as_rows, split_count
from .options import BLOCK_N, DualWaveOptions


def prepare_kernel(
    kernel: fly.Kernel, tensors: Tensors, request: Request, kind: type[DualWaveOptions] = DualWaveOptions
) -> Launch:
    """Compile and bind a kernel of these parameters and options for one kind of call.

    One build serves equal and different lengths: masks follow the lengths at run time.

    Raises:
        UnsupportedError: rows of a tensor are 2**31 bytes or more apart within one block.
    """
    tensors, request = heads_as_rows(tensors, request)
    options = kind.of(request)
    return bind_forward(
        kernel,
        tensors,
        request,
        block_m=options.block_m,
        block_n=BLOCK_N,
        threads=options.waves * 64,
        statics={"options": options},
        splits=split_count(request, tensors["q"].device, options.block_m, BLOCK_N),
    )
