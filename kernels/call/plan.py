"""Plans: a kind of call, checked and prepared once, that later calls of the kind are run by."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fly.errors import MissingBuildError, UnsupportedError
from fly.runtime.device import device_of
from fly.runtime.prepared import picker

from .. import dispatch
from ..arguments.callers import OWN
from ..arguments.checks import stream_of
from ..problem.contract import DQ_SUMS, Launch, Request, Tensors
from .checks import INPUTS, Call, Result
from .memory import Allocate, Memory, allocator, contiguous, memory_of

MAX_PLANS = 1024

_NOT_KEPT = {*INPUTS, "out", "debug_counts"}
_ALONE = (*INPUTS, "out", "lse", "workspace")

K = TypeVar("K")
P = TypeVar("P")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Kind:
    """What calls of one kind have in common, without their tensors; what their gradients are prepared from.

    `operands`: numbers that kernels take, and of tensors (sizes, strides) as kernels take them. `empty`: as of
    `Call`. `kept`: the names of what a gradient needs besides inputs, out and lse first. `backward`: launches of the
    backward pass, by what decides them besides (`call.gradients`), and `repeated`: a shorter way to some of them.
    """

    request: Request
    operands: Mapping[str, Any]
    empty: bool
    kept: tuple[str, ...]
    backward: dict[Any, Any] = field(default_factory=dict)
    repeated: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of(call: Call) -> Kind:
        """Of a checked call."""
        operands = {name: call.tensors[name] for name in call.request.operands}
        described = {
            name: (x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for name, x in operands.items()
        }
        kept = (name for name, x in call.tensors.items() if isinstance(x, torch.Tensor) and name not in _NOT_KEPT)
        return Kind(call.request, described, call.empty, ("out", "lse", *kept))


@dataclass(frozen=True, slots=True)
class Short:
    """A call of q, k and v alone without anything that is to be decided again.

    `memory`: what to `allocate` for it, out, lse and the workspace, those that it has. `queue` launches it on the
    addresses of q, k, v and these. `recorded`: as `gradients.record` takes it, of a call that needs a gradient.
    """

    allocate: Allocate
    memory: tuple[Memory, ...]
    queue: Callable[[list[int]], None]
    recorded: tuple[Kind, tuple[str, ...], tuple[str, ...]]

    @staticmethod
    def of(call: Call, kind: Kind, launch: Launch, results: Sequence[torch.Tensor]) -> Short | None:
        """None if there is more to do for such a call; `results`: like its out, and lse where it has one."""
        if launch.at is None or call.reads_device or not {*launch.names} <= {*_ALONE}:
            return None
        given = [name for name in _ALONE if name != "lse" or call.request.return_lse]
        memory = [*map(memory_of, results)]
        if launch.workspace_bytes:
            memory.append(contiguous((launch.workspace_bytes,), torch.uint8))
        queue = queue_of(launch.at, launch.names, given[: len(INPUTS) + len(memory)])
        return Short(allocator(results[0].device), tuple(memory), queue, (kind, kind.kept, ()))


def queue_of(
    at: Callable[[list[int], int | None], None], names: Sequence[str], given: Sequence[str]
) -> Callable[[list[int]], None]:
    """`Launch.at` with these `names` on torch's current stream, of a list of the addresses `given`, its own then."""
    if [*names] == [*given]:
        return lambda addresses: at(addresses, None)
    pick = picker([given.index(name) for name in names])
    return lambda addresses: at([*pick(addresses)], None)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prepared kind of call, without any of the caller's tensors; `lse`: (sizes, strides), others as of `Call`.

    `short`: a shorter way to such a call, where there is one.
    """

    launch: Launch
    kind: Kind
    extents: tuple[int, ...]
    out: Result
    lse: tuple[tuple[int, ...], tuple[int, ...]]
    reads_device: bool
    short: Short | None

    @staticmethod
    def of(call: Call, launch: Launch, results: Sequence[torch.Tensor] = ()) -> Plan:
        """Of a checked call; `results`: as of `Short`, or none."""
        lse = call.lse, torch.empty(call.lse, device="meta").stride()
        kind = Kind.of(call)
        short = Short.of(call, kind, launch, results) if results else None
        return Plan(launch, kind, call.extents, call.out, lse, call.reads_device, short)


class Plans(dict[K, P]):
    """Plans by the keys of their calls, `MAX_PLANS` of them: one more takes the place of the oldest."""

    def __setitem__(self, key: K, plan: P) -> None:
        with _lock:
            while len(self) >= MAX_PLANS:
                del self[next(iter(self))]
            super().__setitem__(key, plan)


def plan_of(call: Call) -> Plan:
    """Choose a kernel for a checked call and prepare its launch, which may compile; nothing is computed.

    Raises:
        UnsupportedError: no kernel serves the call.
    """
    tensors, request = dict(call.tensors), call.request
    q = tensors["q"]
    try:
        prepare = dispatch.serve(device_of(q.device).target, request)
        if call.empty:
            launch = Launch(functools.partial(_fill, "sink" in request.static_features.operands))
            return Plan.of(call, launch)
        # like the results that calls will have: only sizes and strides matter
        if "out" not in tensors:
            tensors["out"] = torch.empty_like(q) if call.out is None else q.new_empty(call.out[0], dtype=call.out[1])
        if request.return_lse:
            tensors["lse"] = q.new_empty(call.lse, dtype=torch.float32)
        launch = prepare(tensors, request)
        results = [tensors[name] for name in ("out", "lse") if name in tensors]
    except UnsupportedError as error:
        OWN.tell(error)
        raise
    except MissingBuildError as error:
        error.add_note(entry_of(request))
        raise
    return Plan.of(call, launch, results)


def entry_of(request: Request, backward: bool = False) -> str:
    """A call as an entry of a spec, which describes it to `python -m fly prebuild`."""
    sizes = ("head_dim", "head_dim_v", "batch", "seq_len", "seq_len_kv", "num_heads", "num_kv_heads", "num_kv_splits")
    named = {name: getattr(request, name) for name in (*sizes, "alignment", "dtype", "causal")}
    features = [name for name in request.features if name not in ("packed", "split_kv", "debug_counts")]
    named |= {"packed": "packed" in request.features, "feature": features, "tuning": [*request.tuning]}
    named |= {"lse": request.return_lse, "backward": backward}
    named["dq_accumulate"] = "" if request.dq_accumulate == DQ_SUMS[0] else request.dq_accumulate
    given = {name: value for name, value in named.items() if value or name == "causal"}
    return "\n".join(["[[call]]", *(f"{name} = {json.dumps(value)}" for name, value in given.items())])


def _fill(sinks: bool, tensors: Tensors, stream: int | None) -> None:
    """The result of a call in which no query sees a key, with `sinks` or without; none of it is a kernel's."""
    out, lse = tensors["out"], tensors.get("lse")
    with nullcontext() if stream is None else stream_of(stream, out.device)[1]:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
            if sinks:
                lse.copy_(tensors["sink"].unsqueeze(-1))
