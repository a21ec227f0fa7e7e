"""Flash attention as `torch.library` operations, so that `torch.compile(fullgraph=True)` and export see through it.

`torch.ops.fly.flash_attn` and `torch.ops.fly.flash_attn_out` take what `flydsl_flash_attn_func` takes, by the same
names, as far as an operation can: tensors and numbers, no functions. `caller` is the key of one of
`callers.CALLERS`, whose names errors have then. `attention` is what callers use: the operation costs
microseconds on the host and is gone through only where a compiler traces, or a dispatch mode is active.

`torch.ops.fly.flash_attn_backward` has the gradients of `torch.ops.fly.flash_attn`, which autograd and compilers
call: of q, k and v, and of the tensors among its options that `operands` names. Its own are refused.
`torch.ops.fly.flash_attn_backward_out` writes those of q, k and v into given tensors (`api.inner`), by way of a
`workspace` that is given too, or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fly.errors import ArgumentError, FlyError, UnsupportedError

from ..arguments.callers import CALLERS, Caller, arg, problem
from ..arguments.checks import ATTENTION, Checks, check_workspace, shares_memory
from ..arguments.stacked import leaves_of, unstacked
from ..cache.kv_cache import append_to_cache
from ..cache.layouts import vectors
from ..call.checks import INPUTS, OUT_DTYPES, is_aligned
from ..call.memory import active_modes
from ..flash_attn_interface import OPTION_DEFAULTS, flydsl_flash_attn_func
from ..problem.catalogue import DIFFERENTIABLE, FEATURES
from ..problem.dropout_mask import random_state
from .rows import padded_dim, ready

F = TypeVar("F")

_INPUTS = "Tensor q, Tensor? k, Tensor? v, bool causal"
_DEFAULTS = {"Tensor?": "None", "SymInt[]?": "None", "SymInt": "0", "float": "0.0"}


def _default(name: str, kind: str) -> str:
    """An option's default in the schema."""
    return f'"{OPTION_DEFAULTS[name]}"' if kind == "str" else _DEFAULTS[kind]


_OPTIONS = {
    "softmax_scale": "float? softmax_scale=None",
    "return_lse": "bool return_lse=False",
    "num_kv_splits": "SymInt num_kv_splits=1",
    "deterministic": "bool deterministic=False",
    "dq_accumulate": f"str dq_accumulate={_default('dq_accumulate', 'str')}",
    **{name: f"Tensor? {name}=None" for name in ("cu_seqlens_q", "cu_seqlens_kv")},
    **{name: f"SymInt? {name}=None" for name in ("max_seqlen_q", "max_seqlen_kv")},
    **{name: f"{kind} {name}={_default(name, kind)}" for f in FEATURES for name, kind in f.keywords.items() if kind},
    "caller": "str? caller=None",
}
_LISTED = ", ".join(_OPTIONS.values())
_COTANGENTS = ("dout", "dlse", "out", "lse")
_NAMES = ("q", "k", "v", "causal", *_OPTIONS)
_OF_BACKWARD = (*_COTANGENTS, "operands", *_NAMES)

# tensors that autograd is to see are no keyword-only arguments
torch.library.define("fly::flash_attn", f"({_INPUTS}, {_LISTED}) -> (Tensor out, Tensor lse)")
torch.library.define("fly::flash_attn_out", f"({_INPUTS}, *, Tensor(a!) out, {_LISTED}) -> Tensor lse")
torch.library.define(
    "fly::flash_attn_backward",
    f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, str[] operands, {_INPUTS}, {_LISTED}) -> Tensor[]",
)
torch.library.define(
    "fly::flash_attn_backward_out",
    f"(Tensor dout, Tensor out, Tensor lse, {_INPUTS}, *, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
    f"Tensor(d!)? workspace=None, {_LISTED}) -> Tensor delta",
)

torch.library.define(
    "fly::append_to_cache",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "bool rotary_interleaved, *, bool rotate_each_query, Tensor(c!)? k_descale=None, Tensor(d!)? v_descale=None, "
    "str? caller=None) -> Tensor",
)


_register_fake: Callable[[str], Callable[[F], F]] = torch.library.register_fake


def is_seen() -> bool:
    """Whether a compiler, or a mode that counts or keeps operations, has to see what is called as an operation."""
    return torch.compiler.is_compiling() or bool(active_modes())


def eager(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool,
    options: Mapping[str, Any],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flydsl_flash_attn_func` with these keywords; errors have the `caller`'s names."""
    try:
        return flydsl_flash_attn_func(q, k, v, causal, **options)
    except FlyError as error:
        caller.tell(error)
        raise


def attention(
    caller: Caller,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    causal: bool,
    options: dict[str, Any],
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flydsl_flash_attn_func`, and the same as an operation where a compiler or a mode has to see it.

    `options`: its keywords that are tensors or numbers. Returns (out, lse or None); errors have the `caller`'s names.
    """
    if not is_seen():
        result = eager(caller, q, k, v, causal, {**options, "out": out, "return_lse": return_lse})
        return result if isinstance(result, tuple) else (result, None)
    if options.get("dropout_p") and options.get("rng_state") is None:
        # outside of the operation, whose results are a function of its arguments
        options["rng_state"] = random_state(q.device)
    key = caller.key
    if out is None:
        given = (*leaves_of(q, k, v), *(options.get(name) for name in DIFFERENTIABLE))
        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        out, lse = torch.ops.fly.flash_attn(q, k, v, causal, return_lse=return_lse or needed, caller=key, **options)
    else:
        if torch.is_grad_enabled():
            named = zip(("q", "k", "v", "out"), (q, k, v, out))
            Checks(caller.function).no_gradients({caller.name(name): tensor for name, tensor in named})
        lse = torch.ops.fly.flash_attn_out(q, k, v, causal, out=out, return_lse=return_lse, caller=key, **options)
    return out, lse if return_lse else None


def gradients(
    caller: Caller,
    given: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
    causal: bool,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """`_written`, and the same as an operation where a compiler or a mode has to see it."""
    if is_seen():
        delta: torch.Tensor = torch.ops.fly.flash_attn_backward_out(
            **given, causal=causal, **results, **options, caller=caller.key
        )
        return delta
    try:
        return _written(given, results, causal, options)
    except FlyError as error:
        caller.tell(error)
        raise


def _written(
    given: dict[str, torch.Tensor],
    results: dict[str, torch.Tensor],
    causal: bool,
    options: Mapping[str, Any],
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backward pass of a call as FlashAttention takes its tensors; returns delta, float32 like lse.

    `given`: dout, out, lse, q, k and v. `results`: dq, dk and dv, which are written, by way of copies where kernels
    do not write to them as they are. `workspace`: memory to use instead of an allocation.

    Raises:
        ArgumentError: one of the results shares memory with another tensor.
    """
    from ..call.gradients import backward

    memory = {name: tensor.untyped_storage().data_ptr() for name, tensor in (given | results).items()}
    if len({*memory.values()}) < len(memory):
        _check_apart(given, results)
    if workspace is not None:
        check_workspace(workspace, given | results)
    head_dim, value_dim = given["q"].shape[-1], given["v"].shape[-1]
    width, value_width = padded_dim(head_dim), padded_dim(value_dim)
    options = {**OPTION_DEFAULTS, **options}
    if width != head_dim and options["softmax_scale"] is None:
        options["softmax_scale"] = head_dim**-0.5
    widths = dict.fromkeys(("q", "k", "dq", "dk"), (head_dim, width))
    widths |= dict.fromkeys(("v", "out", "dout", "dv"), (value_dim, value_width))

    def wide(name: str, x: torch.Tensor) -> torch.Tensor:
        dim, padded = widths[name]
        return ready(x, padded) if x.shape[-1] == dim else x  # one of another dimension is found to be wrong later

    dout, out, *leaves = (wide(name, given[name]) for name in ("dout", "out", *INPUTS))
    written = []
    for name in (f"d{name}" for name in INPUTS):
        x = wide(name, results[name])
        written.append(x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format))
    lse = given["lse"]
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    backward(leaves, out, lse, dout, None, causal, options, written, delta, workspace=workspace)
    for x, result in zip(written, (results[f"d{name}"] for name in INPUTS)):
        if x is not result:
            result.copy_(x[..., : result.shape[-1]])
    return delta


def _check_apart(given: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> None:
    for name, result in results.items():
        for other, tensor in (given | results).items():
            if other != name and shares_memory(result, tensor):
                ATTENTION.fail(f"{arg(name)} must not share memory with {arg(other)}: pass a tensor of its own")


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


def _named(
    arguments: Sequence[Any], options: dict[str, Any] | None = None, names: Sequence[str] = _NAMES
) -> dict[str, Any]:
    """An operation's arguments by name; torch leaves out the last ones that have their defaults."""
    named: dict[str, Any] = dict(zip(names, arguments)) | (options or {})
    window = named.pop("window_size", None)
    return named if window is None else named | {"window_size": tuple(window)}


def _inputs(named: dict[str, Any]) -> tuple[Any, Any, Any, bool]:
    """q, k, v and causal, taken out."""
    return named.pop("q"), named.pop("k"), named.pop("v"), named.pop("causal")


def _run(named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, causal = _inputs(named)
    with _in_names_of(named.pop("caller", None)):
        if named.get("dropout_p") and named.get("rng_state") is None:
            text = f"torch.ops.fly.flash_attn draws nothing: {arg.dropout_p} needs rng_state, int64 (seed, offset)"
            raise problem(ArgumentError, text)
        result = flydsl_flash_attn_func(q, k, v, causal, **named)
    # an operation has the same number of results in every call
    return result if isinstance(result, tuple) else (result, result.new_empty(0, dtype=torch.float32))


@torch.library.impl("fly::flash_attn", "CompositeExplicitAutograd")
def _flash_attn(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(_named(arguments))


@torch.library.impl("fly::flash_attn_out", "CompositeExplicitAutograd")
def _flash_attn_out(*arguments: Any, **options: Any) -> torch.Tensor:
    return _run(_named(arguments, options))[1]


def _empty(named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v = unstacked(leaves_of(named["q"], named["k"], named["v"]))
    *batch, seq_len, heads, _ = q.shape
    head_dim_v = v.shape[-1 if vectors(named.get("kv_cache_layout", "linear")) is None else -2]
    out = q.new_empty((*q.shape[:-1], head_dim_v), dtype=OUT_DTYPES.get(q.dtype, q.dtype))
    return out, q.new_empty((*batch, heads, seq_len) if named.get("return_lse") else (0,), dtype=torch.float32)


@_register_fake("fly::flash_attn")
def _flash_attn_fake(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(_named(arguments, options))


@_register_fake("fly::flash_attn_out")
def _flash_attn_out_fake(*arguments: Any, **options: Any) -> torch.Tensor:
    return _empty(_named(arguments, options))[1]


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the backward operation takes; errors for calls that have no gradients, as the eager function's are."""
    from ..call.gradients import check_8_bits, check_features  # inference does not wait for the backward kernels

    named = dict(zip(_NAMES, inputs))
    needed = dict(zip(_NAMES, ctx.needs_input_grad))
    options = {name: value for name, value in named.items() if name in _OPTIONS}
    with _in_names_of(named["caller"]):
        ATTENTION.have_gradients({name: options[name] for name in options if needed.get(name)}, DIFFERENTIABLE)
        for name in INPUTS:
            if named[name] is not None:
                check_8_bits(named[name].dtype, name)
        check_features(f.name for f in FEATURES for name in f.keywords if isinstance(options.get(name), torch.Tensor))
        if not named["return_lse"]:
            ATTENTION.fail(f"{arg.return_lse} is False where a gradient is needed: pass True", UnsupportedError)
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    ctx.save_for_backward(*output, *tensors.values())
    ctx.set_materialize_grads(False)
    ctx.kept, ctx.names = named, tuple(tensors)
    ctx.operands = [name for name in DIFFERENTIABLE if needed.get(name)]


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the operation's arguments."""
    found: dict[str, torch.Tensor] = {}
    if not (dout is dlse is None):
        out, lse, *saved = ctx.saved_tensors
        named = ctx.kept | dict(zip(ctx.names, saved, strict=True))
        leaves = [*(name for name in INPUTS if named[name] is not None), *ctx.operands]
        given = (dout, dlse, out, lse, ctx.operands, *named.values())
        found = dict(zip(leaves, torch.ops.fly.flash_attn_backward(*given), strict=True))
    return tuple(found.get(name) for name in ctx.kept)


torch.library.register_autograd("fly::flash_attn", _differentiate, setup_context=_keep)


@torch.library.impl("fly::flash_attn_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> list[torch.Tensor]:
    from ..call.gradients import backward

    named = _named(arguments, names=_OF_BACKWARD)
    dout, dlse, out, lse, operands = (named.pop(name) for name in (*_COTANGENTS, "operands"))
    q, k, v, causal = _inputs(named)
    with _in_names_of(named.pop("caller", None)):
        options = OPTION_DEFAULTS | named
        return backward(leaves_of(q, k, v), out, lse, dout, dlse, causal, options, operands=operands)


@_register_fake("fly::flash_attn_backward")
def _backward_fake(*arguments: Any, **options: Any) -> list[torch.Tensor]:
    named = _named(arguments, options, _OF_BACKWARD)
    leaves = (*leaves_of(named["q"], named["k"], named["v"]), *(named[name] for name in named["operands"]))
    return [x.new_empty(x.shape) for x in leaves]


_GIVEN = ("dout", "out", "lse", *INPUTS)


@torch.library.impl("fly::flash_attn_backward_out", "CompositeExplicitAutograd")
def _backward_out(*arguments: Any, **options: Any) -> torch.Tensor:
    named = _named(arguments, options, (*_GIVEN, "causal"))
    given = {name: named.pop(name) for name in _GIVEN}
    results = {name: named.pop(name) for name in ("dq", "dk", "dv")}
    with _in_names_of(named.pop("caller", None)):
        return _written(given, results, named.pop("causal"), named, named.pop("workspace", None))


@_register_fake("fly::flash_attn_backward_out")
def _backward_out_fake(*arguments: Any, **options: Any) -> torch.Tensor:
    lse: torch.Tensor = _named(arguments, options, _GIVEN)["lse"]
    return lse.new_empty(lse.shape)


def _refuse(ctx: Any, *cotangents: Any) -> None:
    from ..call.gradients import SECOND_DERIVATIVE

    raise UnsupportedError(SECOND_DERIVATIVE)


torch.library.register_autograd("fly::flash_attn_backward", _refuse)


@torch.library.impl("fly::append_to_cache", "CompositeExplicitAutograd")
def _append(q: torch.Tensor, *arguments: Any, caller: str | None = None, **options: Any) -> torch.Tensor:
    with _in_names_of(caller):
        result = append_to_cache(q, *arguments, **options)
    return q.new_empty(0) if result is q else result  # an operation's result is not one of its arguments


@_register_fake("fly::append_to_cache")
def _append_fake(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    rotary_cos = arguments[4]
    return q.new_empty(0 if rotary_cos is None else q.shape)
