"""The kernels' side of a backward pass: the tensors and the request of a call, and what is compiled for it.

For any target, without a device of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fly.backends.artefact import Artefact
from fly.runtime.compile import compile_kernel
from fly.runtime.launch import Binding, bindings
from fly.runtime.planned import planning
from kernels import flash_attn_generic_bwd as generic
from kernels.call.checks import check_call
from kernels.call.operand_gradients import memory_for
from kernels.flash_attn_interface import OPTION_DEFAULTS
from kernels.problem.contract import Request, aux_name
from kernels.work.tile_list import LISTS_BY_KEYS
from tests.kernels.feature_cases import Inputs


def arguments_of(
    inputs: Inputs, causal: bool, of: Sequence[str] = (), **options: Any
) -> tuple[dict[str, Any], Request]:
    """What `flash_attn_generic_bwd.prepare` gets of a call: random numbers, and a log-sum-exp of 8 in all rows.

    `of`: whose gradients are wanted beside those of q, k and v, as of `gradient_reference.gradients`.
    """
    q, k, v = inputs.tensors()
    options = {**options, **inputs.form(), "return_lse": True}
    if inputs.packed:
        options |= {"max_seqlen_q": max(inputs.queries), "max_seqlen_kv": max(inputs.keys)}
    call = check_call(q, k, v, causal, None, OPTION_DEFAULTS | options)
    auxiliary = [aux_name(i) for i in range(call.request.aux_tensors)]
    wanted = [name for x in of for name in (auxiliary if x == "aux_tensors" else [x])]
    needed = {name: options.get(name, call.tensors[name]) for name in wanted}
    out, dout = (inputs.floats(*q.shape[:-1], v.shape[-1], dtype=q.dtype) for _ in range(2))
    given = {
        **call.tensors,
        **memory_for(needed, call.request, q.device),
        "out": out,
        "dout": dout,
        "lse": torch.full(call.lse, 8.0, device=q.device),
        "dq": torch.empty_like(q),
        "dk": torch.empty_like(k),
        "dv": torch.empty_like(v),
    }
    if (mask := options.get("block_mask")) is not None:
        lists = mask.check_transposed(inputs.batch, inputs.heads, tuple(mask.seq_lengths), q.device)
        given |= zip(LISTS_BY_KEYS, lists)
    return given, call.request


def bindings_of(
    arch: str, inputs: Inputs, causal: bool, of: Sequence[str] = (), *, module: Any = generic, **options: Any
) -> list[Binding]:
    """What `prepare` of a kernel's module binds on a target, in order; arguments as of `arguments_of`."""
    with planning(arch), bindings() as found:
        module.prepare(*arguments_of(inputs, causal, of, **options))
    return found


def compiled(arch: str, binding: Binding) -> Artefact:
    """What is bound, compiled; test processes share the cache."""
    return compile_kernel(binding.kernel, binding.specs, dict(binding.statics), arch, binding.block)
