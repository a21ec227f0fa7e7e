"""A call that is described and not made: its tensors, and what is compiled for it.

What a feature's operands hold does not matter here; their sizes and dtypes are those of the commonest call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fly.errors import ArgumentError
from fly.runtime.launch import Binding, bindings
from fly.runtime.planned import planning

from .call.checks import INPUTS, OUT_DTYPES, check_call
from .call.operand_gradients import memory_for
from .dispatch import FORWARD, KERNELS, Pass, as_backward, serve
from .flash_attn_interface import flydsl_flash_attn_func
from .problem.block_mask import BlockMask
from .problem.catalogue import BLOCKS, VECTOR_LAYOUTS
from .problem.contract import Request, Tensors
from .work.tile_list import LISTS_BY_KEYS

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2": torch.float8_e5m2,
}
PAGE = 64  # keys
BLOCK = (128, 128)  # queries and keys of a block mask's blocks
WINDOW = 256  # keys
WAVES = 2  # of a SIMD


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _float32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the output, and of what is added to scores, where inputs may have 8 bits."""
    return OUT_DTYPES.get(dtype, dtype)


def block_mask(request: Request, size: tuple[int, int] = BLOCK) -> BlockMask:
    """Lists of part and of whole blocks of `size` queries and keys, for every head."""
    sizes = (request.seq_len, request.seq_len_kv)
    rows, keys = (-(-length // block) for length, block in zip(sizes, size))
    lists = (_int32(1, 1, rows), _int32(1, 1, rows, keys)) * 2
    return BlockMask(*lists, size, sizes, _not_after)


def _not_after(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _halved(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score * 0.5


Keywords = Mapping[str, Any]
# keywords of `flydsl_flash_attn_func` by which a call asks for a feature
ASKING: Mapping[str, Callable[[Request], Keywords]] = {
    "packed": lambda r: {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), _int32(r.batch + 1)),
        "max_seqlen_q": r.seq_len,
        "max_seqlen_kv": r.seq_len_kv,
    },
    "split_kv": lambda r: {},  # the number of splits is always said
    "split_keys": lambda r: {"split_keys": 1024},
    "debug_counts": lambda r: {"debug_counts": _float32(2)},
    "seqused": lambda r: {"seqused_kv": _int32(r.batch)},
    "cache_leftpad": lambda r: {"cache_leftpad": _int32(r.batch)},
    "kv_batch_idx": lambda r: {"kv_batch_idx": _int32(r.batch)},
    "paged": lambda r: {
        "block_table": _int32(r.batch, -(-r.seq_len_kv // PAGE)),
        "seqused_kv": _int32(r.batch),
    },
    "kv_cache_layout": lambda r: {**ASKING["paged"](r), "kv_cache_layout": VECTOR_LAYOUTS[0]},
    "window": lambda r: {"window_size": (WINDOW, 0 if r.causal else WINDOW)},
    "attention_chunk": lambda r: {"attention_chunk": WINDOW},
    "softcap": lambda r: {"softcap": 30.0},
    "alibi": lambda r: {"alibi_slopes": _float32(r.num_heads)},
    "bias": lambda r: {"bias": torch.empty(r.num_heads, r.seq_len, r.seq_len_kv, dtype=_out_dtype(DTYPES[r.dtype]))},
    "sink": lambda r: {"sink": _float32(r.num_heads)},
    "dropout": lambda r: {"dropout_p": 0.1, "rng_state": torch.empty(2, dtype=torch.int64)},
    "block_mask": lambda r: {"block_mask": block_mask(r)},
    "fp8_cache": lambda r: {},  # what dtype k and v have
    "descale": lambda r: {f"{name}_descale": _float32(r.batch, r.num_kv_heads) for name in ("q", "k", "v")},
    "fp8_accumulate": lambda r: {"fp8_accumulate": "fast"},
    "score_mod": lambda r: {"score_mod": _halved},
    "mask_mod": lambda r: {"mask_mod": _not_after},
}


# keyword arguments, as checks get them
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(flydsl_flash_attn_func).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _tensor(request: Request, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody touches, as aligned as the request says."""
    apart = math.gcd(request.alignment, 16)
    if apart % dtype.itemsize:
        raise ArgumentError(f"alignment {apart}; accepted for {request.dtype}: multiples of {dtype.itemsize}")
    offset = apart % 16 // dtype.itemsize
    return torch.empty(math.prod(shape) + offset, dtype=dtype)[offset:].view(shape)


def _inputs(request: Request) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v."""
    queries: tuple[int, ...] = (request.batch, request.seq_len)
    keys: tuple[int, ...] = (request.batch, request.seq_len_kv)
    if "packed" in request.features:
        queries, keys = ((math.prod(sizes),) for sizes in (queries, keys))
    if not {"paged", "kv_cache_layout"}.isdisjoint(request.features):
        keys = (request.batch * -(-request.seq_len_kv // PAGE), PAGE)
    heads, dim, dtype = request.num_kv_heads, request.head_dim, DTYPES[request.dtype]
    q = _tensor(request, *queries, request.num_heads, dim, dtype=dtype)
    kv_dtype = torch.float8_e4m3fn if "fp8_cache" in request.features else dtype
    k, v = (_tensor(request, *keys, heads, d, dtype=kv_dtype) for d in (dim, request.value_dim))
    return q, k, v


def _asked(request: Request) -> dict[str, Any]:
    """Keyword arguments of the call."""
    known = {name for kernel in KERNELS for name in kernel.tuning}
    for name in request.tuning:
        if name not in known:
            raise ArgumentError(f"--tuning {name}; accepted: {', '.join(sorted(known))}")
    asked: dict[str, Any] = {"num_kv_splits": request.num_kv_splits, "dq_accumulate": request.dq_accumulate}
    asked |= {name: WAVES if name == "waves_per_eu" else True for name in request.tuning}
    for name in request.features:
        asked |= ASKING[name](request)
    return _DEFAULTS | asked


def call_of(request: Request, **given: Any) -> tuple[Request, Tensors]:
    """The request of a call like `request` with tensors of its own, and these; nothing is written to them.

    `given`: keyword arguments of the call in the place of those that are made up.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such call, or its tensors do not fit this machine's memory.
    """
    try:
        options = _asked(request) | given
        q, k, v = _inputs(request)
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=_out_dtype(q.dtype))
    except (RuntimeError, MemoryError) as error:
        raise ArgumentError(f"the tensors of such a call do not fit this machine: {error}") from error
    call = check_call(q, k, v, request.causal, None, options)
    lse = {"lse": _float32_like(call.lse)} if call.request.return_lse else {}
    return call.request, {**call.tensors, "out": out, **lse}


def of_backward(
    request: Request, tensors: Tensors, given: Keywords | None = None, gradients: Sequence[str] = ()
) -> tuple[Request, Tensors]:
    """The backward pass of a call: its request, and its tensors with what it takes besides.

    `given`: keyword arguments of the call that have operands; `gradients`: whose are wanted besides those of q, k
    and v, by their names there or among the tensors.
    """
    q, given = tensors["q"], given or {}
    lse = (q.shape[-2], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[-2], q.shape[1])
    more = {"dout": tensors["out"], "lse": _float32_like(lse), **{f"d{name}": tensors[name] for name in INPUTS}}
    more |= memory_for({name: given.get(name, tensors[name]) for name in gradients}, request, q.device)
    lists = [tensors[name] for name in BLOCKS[:2] if name in tensors]
    asked = as_backward(request, operand_gradients=bool(gradients))
    return asked, {**tensors, **more, **dict(zip(LISTS_BY_KEYS, lists * 2))}


def _float32_like(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def bindings_of(
    arch: str, request: Request, tensors: Tensors, of: Pass = FORWARD, compute_units: int | None = None
) -> list[Binding]:
    """What a pass of a call on `arch` binds, in order; nothing is compiled or launched.

    `compute_units`: of the device, which builds may depend on; None: of the target's largest.

    Raises:
        UnsupportedError: no kernel serves it.
    """
    with planning(arch, compute_units), bindings() as found:
        serve(arch, request, of)(tensors, request)
    return found


def attention_first(found: Sequence[Binding]) -> list[Binding]:
    """The attention kernel before what prepares and combines for it."""
    return sorted(found, key=lambda binding: not binding.kernel.name.startswith("flash_attn"))
