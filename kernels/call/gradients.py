"""Gradients of calls: autograd's way through the forward function, and the backward pass that it takes.

A call that needs a gradient keeps its inputs, out and lse; the backward kernels make the weights from these again
(`dispatch.BACKWARD_KERNELS`). What a call is, its `Kind`, decides everything about its backward pass but the strides
of the gradients that come in, so that a later pass is found by those. torch's compilers differentiate an operation
instead (`api.torch_ops`), which ends in `backward` too.

Inputs are *leaves* here: q, k and v, or tensors in which they are stacked (`arguments.stacked`), and then operands of
features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from typing import Any

import torch

from fly import config
from fly.errors import ArgumentTypeError, MissingBuildError, UnsupportedError
from fly.runtime.device import device_of

from .. import dispatch
from ..arguments.callers import OWN, arg, problem
from ..arguments.checks import ALIGNMENT, ATTENTION
from ..arguments.stacked import unstacked
from ..problem.block_mask import BlockMask
from ..problem.catalogue import BLOCKS, BY_NAME
from ..problem.contract import Launch, Prepare, Request, aux_name
from ..problem.mods import Mod
from ..work.tile_list import LISTS_BY_KEYS
from .checks import INPUTS, Call, check_call, is_aligned, loadable, settled
from .memory import Allocate, Memory, active_modes, allocator, contiguous, memory_of
from .operand_gradients import differentiable, gradient, gradient_without_scores, memory_for
from .plan import Kind, Plans, entry_of, queue_of

__all__ = ["backward", "check_8_bits", "check_differentiable", "check_features", "record", "recorded", "run"]

Options = Mapping[str, Any]

# what a call with gradients does not take, and what to do instead
_NOT_TAKEN = {
    "out": "leave it out",
    "workspace": "leave it out",
    "debug_counts": "leave it out",
    "stream": "call under torch.cuda.stream(...)",
}
_LENGTHS = {"cu_seqlens_q", "seqused_q", "seqused_kv"}  # with which some tokens may have no gradient written
_CONTIGUOUS = torch.contiguous_format
# Bytes of gradients and workspace that are allocated together, and live as long as one of the gradients.
MOST_SHARED = 1 << 22
# mapped over tensors in less time than a loop takes
_address, _strides = torch.Tensor.data_ptr, torch.Tensor.stride
_split = torch.unsafe_split_with_sizes
# the variables that a launch depends on
_environment = config.raw_value
_ARCH, _KERNEL = config.ARCH.raw_name, config.BACKWARD_KERNEL.raw_name
SECOND_DERIVATIVE = (
    "a gradient of flydsl_flash_attn_func is differentiated again, and it has no second derivative; detach it, or "
    "use F.scaled_dot_product_attention under SDPBackend.MATH"
)
_kinds: Plans[tuple[Any, ...], Kind] = Plans()


def check_differentiable(request: Request, q: torch.Tensor, **given: Any) -> None:
    """Raise `UnsupportedError` for a call of q that has no gradients; `given`: its arguments of `_NOT_TAKEN`."""
    for name, value in given.items():
        if value is not None:
            ATTENTION.leave_out(name, _NOT_TAKEN[name])
    check_8_bits(q.dtype)
    try:
        serving(q.device, _of_backward(request))
    except UnsupportedError as error:
        OWN.tell(error)
        raise


def serving(device: torch.device, request: Request) -> Prepare:
    """The `prepare` of the backward kernel for a call of tensors on `device`; raises as `dispatch.choose` does.

    `request`: of the backward pass.
    """
    return dispatch.serve(device_of(device).target, request, dispatch.BACKWARD)


def _of_backward(request: Request, of_operands: bool = False) -> Request:
    """The request of a call's backward pass; `of_operands`: as `Request.operand_gradients`."""
    return dispatch.as_backward(request, torch.are_deterministic_algorithms_enabled(), of_operands)


def check_features(names: Iterable[str]) -> None:
    """Raise `UnsupportedError` for features whose gradients no kernel has, on whatever target."""
    known = {name for kernel in dispatch.BACKWARD.table() for name in kernel.features}
    for name in names:
        if name not in known:
            what, instead = BY_NAME[name].told
            raise problem(UnsupportedError, f"the backward pass does not do {what}: {instead}")


def check_8_bits(dtype: torch.dtype, name: str = "q") -> None:
    """Raise `UnsupportedError` for q, or k or v, of 8 bits, where a gradient is needed."""
    if dtype.itemsize == 1:
        needs = "requires a gradient" if name == "q" else "is for calls without gradients"
        text = f"{arg(name)} {needs}, and {dtype} has none: use bfloat16 or float16"
        ATTENTION.fail(text, UnsupportedError)


def recorded(
    kind: Kind,
    leaves: Sequence[torch.Tensor],
    tensors: Mapping[str, Any],
    block_mask: BlockMask | None,
    wants_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out, or out and lse, among `tensors` of a call that was launched, as autograd's results of its leaves."""
    names = kind.kept
    operands: tuple[str, ...] = ()
    if kind.operands:
        found = (name for name in differentiable(kind.request) if name in names and tensors[name].requires_grad)
        if operands := tuple(found):
            names = tuple(name for name in names if name not in operands)
    kept = [tensors[name] for name in names]
    if block_mask is not None and (brought := block_mask.brought) is not None:
        names, kept = (*names, *LISTS_BY_KEYS), [*kept, *brought]
    if operands:
        leaves = (*leaves, *[tensors[name] for name in operands])
    return record((kind, names, operands), leaves, kept, wants_lse)


_Recorded = tuple[Kind, tuple[str, ...], tuple[str, ...]]
"""What a call is, and what it keeps besides inputs: the names of tensors, and of operands that need a gradient."""


def record(
    recorded: _Recorded, leaves: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], wants_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The first of what is `kept`, or the first two, out and lse, as autograd's results of the leaves."""
    apply = _Attention.apply if _transformed() else _apply
    # one argument besides the leaves, as autograd looks at each
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    result = apply((kept, wants_lse, recorded), *leaves)
    return result


class _Attention(torch.autograd.Function):
    """A call as autograd sees it: out, or out and lse, which there are already, of its leaves."""

    @staticmethod
    def forward(ctx: Any, recorded: tuple[Sequence[torch.Tensor], bool, _Recorded], *leaves: torch.Tensor) -> Any:
        kept, wants_lse, ctx.recorded = recorded
        ctx.save_for_backward(*leaves, *kept)  # tensors are autograd's, whose hooks may move them
        if not wants_lse:
            return kept[0]
        ctx.set_materialize_grads(False)  # one of two gradients may be missing
        return kept[0], kept[1]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        kind, names, operands = ctx.recorded
        saved = ctx.saved_tensors
        found: Sequence[torch.Tensor] | None = None
        if dlse is None is not dout:
            found = _again(kind, names, saved, dout)
        if found is None:
            count = len(saved) - len(names)
            found = run(kind, saved[:count], dict(zip(names, saved[count:])), dout, dlse, operands)
        if torch.is_grad_enabled():
            # not without a history: what is made of these gradients would miss its own, and nothing would say so
            found = _NoSecondDerivative.apply(*(x.requires_grad_() for x in found))  # type: ignore[no-untyped-call]
        return None, *found


# What the engine calls, past a function of torch's that looks for it every time.
_Attention._backward_cls.apply = _Attention.backward  # type: ignore[attr-defined]
# What `Function.apply` ends in where no transform of torch.func is active, as its Python takes 3 µs.
_apply: Any = super(torch.autograd.Function, _Attention).apply
_transformed: Any = torch._C._are_functorch_transforms_active


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are; an error where someone differentiates them."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        raise UnsupportedError(SECOND_DERIVATIVE)


@dataclass(frozen=True, slots=True)
class _Shared:
    """One piece of memory for the gradients of leaves and the workspace: `rows` of it each, in order.

    `alone`: of how many leaves before these gradients are allocated by themselves, as they have other sizes of a row.
    `memory`: what to `allocate`, these and then the piece. `places`: where the others and the workspace begin in it,
    in bytes. `zeros`: not all of a gradient is written.
    """

    allocate: Allocate
    memory: tuple[Memory, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]
    alone: int
    zeros: bool

    @staticmethod
    def of(results: Sequence[torch.Tensor], workspace_bytes: int, zeros: bool) -> _Shared | None:
        """For contiguous gradients like these, if all are small."""
        row = results[-1].shape[1:]
        alike = [x.shape[1:] == row for x in results]
        alone = next(i for i in range(len(alike)) if all(alike[i:]))
        rows = [len(x) for x in results[alone:]]
        nbytes = math.prod(row) * results[-1].element_size()
        rows.append(-(-workspace_bytes // nbytes))
        if sum(rows) * nbytes > MOST_SHARED:
            return None
        together = contiguous((sum(rows), *row), results[-1].dtype)
        memory = (*map(memory_of, results[:alone]), together)
        places = tuple(nbytes * before for before in accumulate(rows[:-1], initial=0))
        return _Shared(allocator(results[-1].device), memory, tuple(rows), places, alone, zeros)

    def make(self) -> list[torch.Tensor]:
        """The gradients that are allocated by themselves, and the piece."""
        made = [*starmap(self.allocate, self.memory)]
        if self.zeros:
            for x in made:
                x.zero_()
        return made

    def split(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The gradients and the workspace in it; each has a version of its own, and is no view for autograd."""
        return _split(whole, self.rows)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A backward pass for one form of its tensors; `copied`: inputs that kernels do not take as they are."""

    launch: Launch
    copied: tuple[str, ...]
    shared: _Shared | None


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A backward pass that takes what is saved as it is, and whose results are small.

    `queue` launches it on the addresses of q, k, v, out, what else is saved, dout, then dq, dk, dv and the workspace.
    """

    shared: _Shared
    queue: Callable[[list[int]], None]

    @staticmethod
    def of(prepared: _Prepared, names: Iterable[str]) -> _Repeated | None:
        """`names`: of what is saved besides q, k and v. None if there is more to do for such a call."""
        launch, shared = prepared.launch, prepared.shared
        if shared is None or launch.at is None or prepared.copied:
            return None
        given = (*INPUTS, *names, "dout", "dq", "dk", "dv", "workspace")
        return _Repeated(shared, queue_of(launch.at, launch.names, given))


def _form(names: tuple[str, ...], saved: Sequence[torch.Tensor], dout: torch.Tensor) -> tuple[Any, ...]:
    """What decides, of calls of one kind without a gradient of lse, how one is repeated; but for alignments."""
    # autograd's hooks may hand back what lies otherwise than what the call was given
    return (
        names, _environment(_ARCH), _environment(_KERNEL), torch.are_deterministic_algorithms_enabled(),
        dout.stride(), *map(_strides, saved[:4]),
    )  # fmt: skip


def _again(
    kind: Kind, names: tuple[str, ...], saved: Sequence[torch.Tensor], dout: torch.Tensor
) -> Sequence[torch.Tensor] | None:
    """`run` for a call whose like there was, which takes a third of the time; None if there was none.

    `saved`: the leaves, out, and the others called `names`.
    """
    repeated: _Repeated | None = kind.repeated.get(_form(names, saved, dout))
    if repeated is None or active_modes():
        return None
    addresses = [*map(_address, (*saved, dout))]
    if (addresses[0] | addresses[1] | addresses[2] | addresses[3] | addresses[-1]) % ALIGNMENT:
        return None
    shared = repeated.shared
    *alone, whole = shared.make()
    if alone:
        addresses += map(_address, alone)
    addresses += map(whole.data_ptr().__add__, shared.places)
    repeated.queue(addresses)
    return *alone, *shared.split(whole)[:-1]


def run(
    kind: Kind,
    leaves: Sequence[torch.Tensor],
    tensors: dict[str, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    operands: Sequence[str] = (),
    results: Sequence[torch.Tensor] | None = None,
    workspace: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of the leaves of a call, given those of its results, of which None stands for zeros.

    `tensors`: the call's others by name, out and lse too, and delta, where that is wanted: float32 like lse. The last
    leaves are the `operands`. Gradients are contiguous and of the leaves' shapes, one for what is stacked, with zeros
    for tokens outside of all sequences, and small ones share memory (`MOST_SHARED`); or they are written to
    `results`, which kernels can write to as they are, and tokens outside of all sequences are not written. Those of
    operands are like the operands. `workspace`: with `results`, a checked one instead of an allocation.

    Raises:
        ArgumentError: a workspace of fewer bytes than the pass needs.
        UnsupportedError: see `operand_gradients.memory_for`.
    """
    out = tensors["out"]
    if out.data_ptr() % ALIGNMENT:
        out = tensors["out"] = loadable(out)
    if dout is None:
        dout = torch.zeros_like(out, memory_format=_CONTIGUOUS)
    elif not dout.is_contiguous() or dout.data_ptr() % ALIGNMENT:
        dout = loadable(dout)
    if dlse is not None and not dlse.is_contiguous():
        dlse = dlse.contiguous()
    inputs = leaves
    needed: dict[str, torch.Tensor] = {}
    if operands:
        inputs = leaves[: -len(operands)]
        needed = dict(zip(operands, leaves[len(inputs) :], strict=True))
    if kind.empty:
        if "delta" in tensors:
            tensors["delta"].zero_()
        made = [x.zero_() for x in results or results_for(inputs, tensors)]
        return [*made, *(gradient_without_scores(*item, dlse) for item in needed.items())]
    q, k, v = inputs if len(inputs) == 3 else unstacked(inputs)
    # what autograd's hooks hand back may lie otherwise than what the call was given
    # fmt: off
    key: tuple[Any, ...] = (
        _environment(_ARCH), _environment(_KERNEL), len(inputs),
        q.stride(), k.stride(), v.stride(), out.stride(), dout.stride(),
        q.data_ptr() % ALIGNMENT, k.data_ptr() % ALIGNMENT, v.data_ptr() % ALIGNMENT,
        dlse is None, torch.are_deterministic_algorithms_enabled(),
    )
    # fmt: on
    if operands or results is not None or "delta" in tensors:
        key += (*operands, "delta" in tensors, *(x.stride() for x in results or ()))
    given: dict[str, Any] = {**tensors, "q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}
    memory = memory_for(needed, kind.request, q.device) if needed else {}
    if kind.request.static_features.block_size is not None:
        memory |= _lists_by_keys(kind.request, tensors)
    if memory:
        given |= needed | memory
        key += tuple((x.shape, x.stride(), x.dtype) for x in memory.values())
    prepared = kind.backward.get(key)
    if prepared is None:
        prepared = kind.backward[key] = _prepared(kind, inputs, given, results)
        if not (needed or memory or len(inputs) != 3 or results or dlse is not None):
            names = tuple(tensors)
            if (repeated := _Repeated.of(prepared, names)) is not None:
                kind.repeated[_form(names, (*inputs, *tensors.values()), dout)] = repeated
    for name in prepared.copied:
        given[name] = given[name].clone(memory_format=_CONTIGUOUS)
    if results is None and (shared := prepared.shared) is not None and not active_modes():
        *alone, whole = shared.make()
        results = [*alone, *shared.split(whole)]
        given["workspace"] = results.pop()
    else:
        results = results or results_for(inputs, tensors)
        if size := prepared.launch.workspace_bytes:
            if workspace is None:
                workspace = q.new_empty(size, dtype=torch.uint8)
            elif workspace.nbytes < size:
                text = f"{arg.workspace} has {workspace.nbytes} bytes, these gradients need {size}"
                ATTENTION.fail(f"{text} (flydsl_flash_attn_workspace with backward=True tells)")
            given["workspace"] = workspace
    given["dq"], given["dk"], given["dv"] = results if len(inputs) == 3 else unstacked(results)
    prepared.launch.run(given, None)
    return [*results, *(gradient(name, memory[f"d{name}"], of) for name, of in needed.items())]


def results_for(inputs: Sequence[torch.Tensor], tensors: Iterable[str]) -> list[torch.Tensor]:
    """Memory for gradients of these, each its own; zeros where calls with such `tensors` leave tokens without one."""
    make = torch.zeros_like if not _LENGTHS.isdisjoint(tensors) else torch.empty_like
    return [make(x, memory_format=_CONTIGUOUS) for x in inputs]


def _lists_by_keys(request: Request, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A block mask's lists by key blocks, as it brings them or made on the device."""
    counts, indices, *more = (tensors.get(name) for name in (*BLOCKS, *LISTS_BY_KEYS))
    size = request.static_features.block_size
    assert counts is not None and indices is not None and size is not None
    lengths, whole, brought = (request.seq_len, request.seq_len_kv), more[:2], more[2:]
    mask = BlockMask(counts, indices, whole[0], whole[1], size, lengths, _listed_only, *brought)
    by_keys = mask.check_transposed(request.batch, request.num_heads, lengths, counts.device)
    return dict(zip(LISTS_BY_KEYS, by_keys))


def _listed_only(batch: Any, head: Any, query: Any, key: Any) -> bool:
    """The `mask_mod` of a mask of which nobody asks but for its lists."""
    return True


def _prepared(
    kind: Kind,
    inputs: Sequence[torch.Tensor],
    given: Mapping[str, Any],
    results: Sequence[torch.Tensor] | None,
) -> _Prepared:
    """The backward pass of calls like this one."""
    copied = tuple(name for name in INPUTS if not is_aligned(given[name]))
    made = results_for(inputs, given) if results is None else results
    tensors = {**given, **dict(zip(("dq", "dk", "dv"), unstacked(made)))}
    for name in (*INPUTS, "out", "dout", *(f"d{name}" for name in INPUTS)):
        x = tensors[name].clone(memory_format=_CONTIGUOUS) if name in copied else tensors[name]
        tensors[name] = settled(x)
    for name, form in kind.operands.items():
        tensors[name] = tensors[name].as_strided(*form) if isinstance(form, tuple) else form
    wanted = (name for name in differentiable(kind.request) if name != "sink")
    request = _of_backward(kind.request, any(f"d{name}" in given for name in wanted))
    try:
        launch = serving(given["q"].device, request)(tensors, request)
    except MissingBuildError as error:
        error.add_note(entry_of(kind.request, backward=True))
        raise
    zeros = not _LENGTHS.isdisjoint(given)
    shared = _Shared.of(made, launch.workspace_bytes, zeros) if results is None else None
    return _Prepared(launch, copied, shared)


def backward(
    leaves: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    causal: bool,
    options: Options,
    results: Sequence[torch.Tensor] | None = None,
    delta: torch.Tensor | None = None,
    operands: Sequence[str] = (),
    workspace: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of a call of which only its arguments are known, `options` by `flydsl_flash_attn_func`'s names.

    q, k, v (B, S, H, D) or packed (total, H, D), out and dout like q with v's head dimension, lse, dlse and delta
    (B, H, Sq) or (H, total) float32. What is not 16-byte aligned with a last stride of 1 is copied. `results`: as of
    `run`, like the leaves, aligned so; delta is written too. `operands`: the options whose gradients come behind.
    `workspace`: as of `run`.

    Raises:
        ArgumentError, ArgumentTypeError: one of them does not go with the others.
        UnsupportedError: a call without gradients.
    """
    q, k, v = unstacked(leaves)
    key = (causal, *map(_key, (*leaves, out, lse, dout, dlse, *(results or ()), delta)), *map(_key, options.values()))
    kind = _kinds.get(key)
    if kind is None:
        call = check_call(q, k, v, causal, None, options)
        check_differentiable(call.request, q)
        like_out = (*q.shape[:-1], v.shape[-1])
        for name, x, shape, dtype in (
            ("out", out, like_out, q.dtype),
            ("dout", dout, like_out, q.dtype),
            *((name, x, call.lse, torch.float32) for name, x in (("lse", lse), ("dlse", dlse), ("delta", delta))),
            *((f"d{name}", x, y.shape, q.dtype) for name, x, y in zip(INPUTS, results or (), leaves)),
        ):
            if x is not None:
                _check_like(name, x, shape, dtype, q.device)
        kind = _kinds[key] = Kind.of(call)
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    tensors |= {aux_name(i): tensor for i, tensor in enumerate(options["aux_tensors"])}
    tensors |= {"out": loadable(out), "lse": lse.contiguous()}
    if delta is not None:
        tensors["delta"] = delta
    if results is None:
        results = results_for(leaves, tensors)  # results of operations share nothing
    leaves = (*leaves, *(tensors.pop(name) for name in operands))
    return run(kind, leaves, tensors, dout, dlse, operands, results, workspace)


def workspace_bytes(call: Call) -> int:
    """Bytes of workspace that gradients of q, k and v of a checked call need, which may compile.

    Raises:
        UnsupportedError: a call without gradients.
    """
    inputs = [call.tensors[name] for name in INPUTS]
    q, _, v = inputs
    check_differentiable(call.request, q)
    if call.empty:
        return 0
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    given = {**call.tensors, "out": out, "dout": torch.empty_like(out), "dlse": None}
    given["lse"] = q.new_empty(call.lse, dtype=torch.float32)
    return _prepared(Kind.of(call), inputs, given, results_for(inputs, given)).launch.workspace_bytes


def _check_like(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """It is a tensor of this shape and dtype, on this device."""
    ATTENTION.plain(name, x)
    if x.dtype != dtype:
        ATTENTION.fail(f"{arg(name)} has dtype {x.dtype}; accepted: {dtype}", ArgumentTypeError)
    if x.shape != shape or x.device != device:
        ATTENTION.fail(f"{arg(name)} must have shape {tuple(shape)} on {device}, got {tuple(x.shape)} on {x.device}")


def _key(value: Any) -> Any:
    """What decides a kind of call of an argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % ALIGNMENT
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return Mod.of(value) if callable(value) else value
