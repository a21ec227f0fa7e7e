"""Flash attention as `torch.library` operations, so that `torch.compile(fullgraph=True)` and export see through it.

`torch.ops.fly.flash_attn` and `torch.ops.fly.flash_attn_out` take what `flydsl_flash_attn_func` takes, by the same
names, as far as an operation can: tensors and numbers, no functions. `caller` is the key of one of
`callers.CALLERS`, whose names errors have then. `attention` is what callers use: the operation costs
microseconds on the host and is gone through only where a compiler traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fly.errors import ArgumentError, FlyError

from ..arguments.callers import CALLERS, Caller, arg, problem
from ..arguments.checks import Checks
from ..cache.kv_cache import append_to_cache
from ..call.checks import OUT_DTYPES
from ..flash_attn_interface import flydsl_flash_attn_func
from ..problem.catalogue import FEATURES
from ..problem.dropout_mask import random_state

F = TypeVar("F")

_INPUTS = "Tensor q, Tensor k, Tensor v, bool causal"
_DEFAULTS = {"Tensor?": "None", "SymInt[]?": "None", "SymInt": "0", "float": "0.0"}
_OPTIONS = ", ".join(
    (
        "float? softmax_scale=None, bool return_lse=False, SymInt num_kv_splits=1",
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None",
        "SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None",
        *(f"{kind} {name}={_DEFAULTS[kind]}" for f in FEATURES for name, kind in f.keywords.items() if kind),
        "str? caller=None",
    )
)

torch.library.define("fly::flash_attn", f"({_INPUTS}, *, {_OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define("fly::flash_attn_out", f"({_INPUTS}, *, Tensor(a!) out, {_OPTIONS}) -> Tensor lse")

torch.library.define(
    "fly::append_to_cache",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "bool rotary_interleaved, *, bool rotate_each_query, str? caller=None) -> Tensor",
)


_register_fake: Callable[[str], Callable[[F], F]] = torch.library.register_fake


def attention(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flydsl_flash_attn_func`, and the same as an operation while torch compiles or exports.

    `options`: its keywords that are tensors or numbers. Returns (out, lse or None); errors have the `caller`'s names.
    """
    if not torch.compiler.is_compiling():
        try:
            result = flydsl_flash_attn_func(q, k, v, causal, out=out, return_lse=return_lse, **options)
        except FlyError as error:
            caller.tell(error)
            raise
        return result if isinstance(result, tuple) else (result, None)
    if torch.is_grad_enabled():
        named = zip(("q", "k", "v", "out"), (q, k, v, out))
        Checks(caller.function).no_gradients({caller.name(name): tensor for name, tensor in named})
    if options.get("dropout_p") and options.get("rng_state") is None:
        # outside of the operation, whose results are a function of its arguments
        options["rng_state"] = random_state(q.device)
    key = caller.key
    if out is None:
        out, lse = torch.ops.fly.flash_attn(q, k, v, causal, return_lse=return_lse, caller=key, **options)
    else:
        lse = torch.ops.fly.flash_attn_out(q, k, v, causal, out=out, return_lse=return_lse, caller=key, **options)
    return out, lse if return_lse else None


def append(
    caller: Caller, rotary_interleaved: bool, rotate_each_query: bool, given: Mapping[str, Any]
) -> torch.Tensor:
    """`append_to_cache` of what is `given` by name, and the same as an operation while torch compiles or exports."""
    options: Any = {"rotary_interleaved": rotary_interleaved, "rotate_each_query": rotate_each_query}
    if not torch.compiler.is_compiling():
        try:
            return append_to_cache(**given, **options)
        except FlyError as error:
            caller.tell(error)
            raise
    rotated: torch.Tensor = torch.ops.fly.append_to_cache(**given, **options, caller=caller.key)
    q: torch.Tensor = given["q"]
    return q if given["rotary_cos"] is None else rotated


@contextmanager
def _in_names_of(key: str | None) -> Iterator[None]:
    """Errors in the names of the caller with this key; an operation that was called as such has none."""
    try:
        yield
    except FlyError as error:
        if key is not None and key in CALLERS:
            CALLERS[key].tell(error)
        raise


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    if options.get("window_size") is not None:
        options["window_size"] = tuple(options["window_size"])
    else:
        options.pop("window_size", None)
    with _in_names_of(options.pop("caller", None)):
        if options.get("dropout_p") and options.get("rng_state") is None:
            text = f"torch.ops.fly.flash_attn draws nothing: {arg.dropout_p} needs rng_state, int64 (seed, offset)"
            raise problem(ArgumentError, text)
        result = flydsl_flash_attn_func(q, k, v, causal, **options)
    # an operation has the same number of results in every call
    return result if isinstance(result, tuple) else (result, _lse(q, False))


def _lse(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    *batch, seq_len, heads, _ = q.shape
    return q.new_empty((*batch, heads, seq_len) if wanted else (0,), dtype=torch.float32)


@torch.library.impl("fly::flash_attn", "CompositeExplicitAutograd")
def _flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(q, k, v, causal, options)


@torch.library.impl("fly::flash_attn_out", "CompositeExplicitAutograd")
def _flash_attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any) -> torch.Tensor:
    return _run(q, k, v, causal, options)[1]


@_register_fake("fly::flash_attn")
def _flash_attn_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=OUT_DTYPES.get(q.dtype, q.dtype))
    return out, _lse(q, options.get("return_lse", False))


@_register_fake("fly::flash_attn_out")
def _flash_attn_out_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
) -> torch.Tensor:
    return _lse(q, options.get("return_lse", False))


@torch.library.impl("fly::append_to_cache", "CompositeExplicitAutograd")
def _append(q: torch.Tensor, *arguments: Any, caller: str | None = None, **options: Any) -> torch.Tensor:
    with _in_names_of(caller):
        result = append_to_cache(q, *arguments, **options)
    return q.new_empty(0) if result is q else result  # an operation's result is not one of its arguments


@_register_fake("fly::append_to_cache")
def _append_fake(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    rotary_cos = arguments[4]
    return q.new_empty(0 if rotary_cos is None else q.shape)
