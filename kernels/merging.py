"""Attention to several sets of keys put together: `merge_states`, in one launch of `work.split_combine`'s kernel.

What attention to each set gave, out and log-sum-exp, is a *state*. Merged states are those of all sets' keys: shared
prefixes, parts of a context on several devices, and caches of several kinds are attended to one by one, and merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fly import config
from fly.errors import UnsupportedError

from .arguments.checks import ALIGNMENT, Checks, has_memory, shares_memory
from .call.plan import Plans
from .problem.contract import Launch
from .work.split_combine import PARTIALS, THREADS, VECTOR, Origin, rows_of_block, split_combine
from .work.steps import Steps, bind_kernel
from .work.tile_scheduler import fold_grid, grid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 16  # states in tensors of their own; of those in one there may be any number
CHECKS = Checks("merge_states")

States = torch.Tensor | Sequence[torch.Tensor]
_environment, _ARCH = config.raw_value, config.ARCH.raw_name
_plans: Plans[Any, Launch | None] = Plans()

torch.library.define(
    "fly::merge_states",
    "(Tensor[] outs, Tensor[] lses, Tensor(a!) out, Tensor(b!)? lse, bool stacked, bool log2) -> ()",
)


def merge_states(
    outs: States,
    lses: States,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    log2: bool = False,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and log-sum-exp of attention to all keys, from those of attention to each of n sets of them.

    Args:
        outs: n tensors (B, S, H, D), or packed (total, H, D), bfloat16, float16 or float32, of one shape and dtype,
            1 to 16 of them; or any number in one tensor, (n, B, S, H, D) or (n, total, H, D). D is a multiple of 8
            up to 2048, and the last dimension contiguous; other strides are free.
        lses: as many float32 tensors (B, H, S) or (H, total), as attention returns them, or one with all; any
            strides. Where one is -inf, or +inf as of FlashAttention-2, there were no keys: that set's out does not
            count, whatever it is, and without any keys out is 0 and lse -inf.
        out: written and returned instead of a new tensor, of the same shape and any of these dtypes. It may be one of
            `outs` itself, and shares no memory with others.
        lse: the same for the log-sum-exp; it shares no memory with another tensor.
        log2: log-sum-exps are of base 2 and not natural, those given and the result.
        return_lse: whether the result's log-sum-exp is wanted, where none is given.

    Returns:
        (out, lse), of the outs' dtype and float32; lse is None where it is not wanted.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument (also a ValueError; the second a TypeError too).
        UnsupportedError: a tensor that requires a gradient; rows that are too far apart in memory.
    """
    stacked = isinstance(outs, torch.Tensor)
    values, logs = _listed("outs", outs), _listed("lses", lses)
    CHECKS.flag("log2", log2)
    try:
        key = (
            *(stacked, log2, return_lse, _environment(_ARCH)),
            *map(_geometry, (*values, *logs)),
            None if out is None else _geometry(out),
            None if lse is None else _geometry(lse),
        )
        known = key in _plans
    except (AttributeError, TypeError, RuntimeError):
        known = False  # something here is no tensor, or one without memory: the checks say what
    if not (known or torch.compiler.is_compiling()):
        CHECKS.flag("return_lse", return_lse)
        _check(values, logs, isinstance(lses, torch.Tensor) == stacked, stacked, out, lse)
    if torch.is_grad_enabled():
        CHECKS.no_gradients({"outs": _first_with_gradient(values), "lses": _first_with_gradient(logs)})
        CHECKS.no_gradients({"out": out, "lse": lse})
    first, first_log = (values[0][0], logs[0][0]) if stacked else (values[0], logs[0])
    given = out is not None or lse is not None
    if out is None:
        out = first.new_empty(first.shape)
    if given and not torch.compiler.is_compiling():
        _check_apart(values, logs, out, lse)
    if lse is None and return_lse:
        lse = first_log.new_empty(first_log.shape)
    if torch.compiler.is_compiling():
        torch.ops.fly.merge_states(values, logs, out, lse, stacked, log2)
        return out, lse
    tensors = _named(values, logs, out, lse, stacked)
    if not known:
        _plans[key] = _prepared(tensors, Origin(log2, foreign=True))
    if (launch := _plans[key]) is not None:
        launch.run(tensors, None)
    return out, lse


@torch.library.impl("fly::merge_states", "CompositeExplicitAutograd")
def _operation(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    stacked: bool,
    log2: bool,
) -> None:
    states = (outs[0], lses[0]) if stacked else (outs, lses)
    merge_states(*states, out=out, lse=lse, log2=log2, return_lse=False)


@torch.library.register_fake("fly::merge_states")  # type: ignore[untyped-decorator]  # torch has no types for it
def _operation_fake(*arguments: Any) -> None:
    pass


def _listed(name: str, states: States) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        return [states]
    CHECKS.sequence(name, states, "a tensor of n states, or a list of tensors")
    return list(states)


def _geometry(x: torch.Tensor) -> tuple[Any, ...]:
    if not has_memory(type(x)):
        raise TypeError("no memory")
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT


def _first_with_gradient(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    return next((x for x in tensors if x.requires_grad), None)


def _check(
    values: list[torch.Tensor],
    logs: list[torch.Tensor],
    alike: bool,
    stacked: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Check what the key of a plan holds."""
    if not alike or len(values) != len(logs) or not 1 <= len(values) <= MOST:
        CHECKS.fail(
            f"outs and lses must be one tensor each, or as many tensors, 1 to {MOST}, got {len(values)} and "
            f"{len(logs)}"
        )
    layout = "(n, B, S, H, D) or (n, total, H, D)" if stacked else "(B, S, H, D) or (total, H, D)"
    first = values[0]
    CHECKS.plain("outs", first)
    rank = first.dim() - stacked
    if rank not in (3, 4) or (stacked and not len(first)):
        CHECKS.fail(f"outs must have shape {layout}, got {tuple(first.shape)}")
    *batch, tokens, heads, head_dim = first.shape
    if head_dim % VECTOR or not 0 < head_dim <= THREADS * VECTOR:
        CHECKS.fail(f"outs must have a head dimension D of a multiple of 8 up to {THREADS * VECTOR}, got {head_dim}")
    wanted: list[tuple[str, torch.Tensor, tuple[int, ...], tuple[torch.dtype, ...]]]
    wanted = [("outs", x, first.shape, (first.dtype,)) for x in values]
    wanted += [("lses", x, (*batch, heads, tokens), (torch.float32,)) for x in logs]
    if out is not None:
        wanted.append(("out", out, first.shape[stacked:], DTYPES))
    if lse is not None:
        wanted.append(("lse", lse, (*batch[stacked:], heads, tokens), (torch.float32,)))
    CHECKS.dtype("outs", first, DTYPES)
    for name, x, shape, dtypes in wanted:
        CHECKS.plain(name, x)
        CHECKS.dtype(name, x, dtypes)
        if x.shape != shape or x.device != first.device:
            CHECKS.fail(
                f"{name} must have shape {tuple(shape)} on {first.device}, got {tuple(x.shape)} on {x.device}"
            )
        if name in ("outs", "out"):
            CHECKS.unit_last_stride(name, x)
            pitch = abs(x.stride(-3)) * x.element_size()
            if pitch * rows_of_block(head_dim) >= 2**31:
                CHECKS.fail(f"{name} has rows {pitch} bytes apart: make it contiguous", UnsupportedError)


def _check_apart(
    values: list[torch.Tensor], logs: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Check that what is written shares no memory with what is read, unless thread by thread."""
    for name, x in (("outs", values), ("lses", logs)):
        for given in x:
            same = given.data_ptr() == out.data_ptr() and _geometry(given) == _geometry(out)
            if not same and shares_memory(given, out):
                CHECKS.fail(f"out must not share memory with one of {name}, unless it is one of outs")
            if lse is not None and shares_memory(given, lse):
                CHECKS.fail(
                    f"lse must not share memory with one of {name}: leave it out, or pass a tensor of its own"
                )
    if lse is not None and shares_memory(out, lse):
        CHECKS.fail("lse must not share memory with out")


def _named(
    values: list[torch.Tensor], logs: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None, stacked: bool
) -> dict[str, torch.Tensor | None]:
    """The kernel's tensors; packed ones are those of one sequence."""
    if out.dim() == 3:
        values, logs = ([x.unsqueeze(int(stacked)) for x in states] for states in (values, logs))
        out, lse = out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    results = {"out": out, "lse": lse}
    if stacked:
        return results | dict(zip(PARTIALS, (values[0], logs[0])))
    apart = {f"out{i}": x for i, x in enumerate(values)} | {f"lse{i}": x for i, x in enumerate(logs)}
    return results | apart


def _prepared(tensors: dict[str, Any], origin: Origin) -> Launch | None:
    """The launch for such tensors; None where nothing is written."""
    out = tensors["out"]
    if not out.numel():
        return None
    batch, tokens, heads, head_dim = out.shape
    count = 0 if PARTIALS[0] in tensors else (len(tensors) - 2) // 2
    operands = [f"{kind}{i}" for i in range(count) for kind in ("out", "lse")]
    blocks, fold = fold_grid(grid(batch, heads, tokens, rows_of_block(head_dim)))
    statics = {"head_dim": head_dim, "origin": origin, **fold}
    kernel = bind_kernel(split_combine, blocks, THREADS, tensors, statics, operands=operands)
    return Steps((kernel,)).launch()
