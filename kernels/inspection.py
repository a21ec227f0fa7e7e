"""Dispatch and plans for programs: what `python -m fly paths --json` prints, and `flydsl_flash_attn_plan`.

Records are dictionaries of what JSON has. Names stay; new ones may be added. `SCHEMA` is counted up where a name goes
away or changes its meaning. Imports nothing heavy: fly's command line loads this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fly.errors import UnsupportedError

from .dispatch import FORWARD, Kernel, Pass, as_backward, choose, refusal
from .problem.contract import Request

SCHEMA = 1
OWN = "fly_attention"
# fields of a request that say what a call is
_OF_CALL = (
    *("head_dim", "dtype", "causal", "batch", "seq_len", "seq_len_kv", "num_heads", "num_kv_heads"),
    *("num_kv_splits", "alignment", "page_size", "dq_accumulate"),
)


def report(of: Pass, archs: Iterable[str], request: Request | None) -> dict[str, Any]:
    """The table of a pass for some targets, and with a request, which kernel serves it on each.

    Keys: `schema`; `pass`: "forward" or "backward"; `forced`: the kernel that the pass' variable names, or None;
    `kernels`: rows in order of preference, see `row`; `call`: the request, see `call_of`, or None; `targets`: by
    target, see `verdict`, empty without a request.
    """
    archs = tuple(archs)
    asked = request if request is None or of is FORWARD else as_backward(request)
    return {
        "schema": SCHEMA,
        "pass": "forward" if of is FORWARD else "backward",
        "forced": of.forced.get() or None,
        "kernels": [row(kernel) for kernel in of.table() if set(archs) & set(kernel.archs)],
        "call": None if asked is None else call_of(asked),
        "targets": {} if asked is None else {arch: verdict(arch, asked, of) for arch in archs},
    }


def row(kernel: Kernel) -> dict[str, Any]:
    """A row of a table.

    `package`: whose it is; `module`: None while it is not built; `mixed_head_dims`: whether V's may be
    another one of `head_dims`; `features_on`: targets of features that it has on some alone; `tuning`: targets by
    option; `needs`: in words; `leaves`: in words, the calls that it leaves to a later row which can serve them, or
    None.
    """
    module = kernel.module
    own = module is None or module.startswith(".")
    return {
        "name": kernel.name,
        "package": OWN if own else str(module).partition(".")[0],
        "module": module if module is None or not own else OWN + module,
        "targets": list(kernel.archs),
        "head_dims": list(kernel.head_dims),
        "mixed_head_dims": kernel.mixed_dims,
        "dtypes": list(kernel.dtypes),
        "features": list(kernel.features),
        "features_on": {name: list(archs) for name, archs in kernel.partly.items()},
        "tuning": {name: list(archs) for name, archs in kernel.tuning.items()},
        "needs": [need.what for need in kernel.needs],
        "leaves": None if kernel.leaves is None else kernel.leaves.what,
        "reason": kernel.reason,
    }


def call_of(request: Request) -> dict[str, Any]:
    """A call: `_OF_CALL` and `head_dim_v`, `features` and `tuning` by name. Lengths are the longest sequence's."""
    return {
        **{name: getattr(request, name) for name in _OF_CALL},
        "head_dim_v": request.value_dim,
        "features": list(request.features),
        "tuning": dict(request.tuning),
    }


def verdict(arch: str, request: Request, of: Pass = FORWARD) -> dict[str, Any]:
    """`chosen`: the name of the kernel that serves a pass of the request, or None, and then `error` says why;
    `refusals`: by kernel of this target, why it does not serve the request, None where it could; `yields`: names of
    those that could and leave it to later ones.
    """
    try:
        chosen, error = choose(arch, request, of).name, None
    except UnsupportedError as refused:
        chosen, error = None, str(refused)
    of_target = [kernel for kernel in of.table() if arch in kernel.archs]
    return {
        "chosen": chosen,
        "error": error,
        "refusals": (refusals := {kernel.name: refusal(kernel, arch, request) for kernel in of_target}),
        "yields": [k.name for k in of_target if refusals[k.name] is None and k.yields(request)],
    }


def flydsl_flash_attn_plan(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """How `flydsl_flash_attn_func` would run with these arguments; nothing is computed, and kernels are compiled.

    Returns:
        A dictionary of what JSON has: `schema`, 1; `target`; `call`, the call in the terms of dispatch; `chosen`, the
        kernel's name, and `refusals`, by name why others do not serve it (None: they could); `workspace_bytes`;
        `launches`: of each kernel that a call launches, in order, `kernel`, `grid`, `block`, `statics`, the static
        parameters of its build as text by name, and `build`, the build's key in folders of `python -m fly prebuild`.

    Raises as `flydsl_flash_attn_func` does.
    """
    from fly.runtime.device import device_of
    from fly.runtime.launch import bindings
    from fly.runtime.prebuilt import Build

    interface = importlib.import_module(".flash_attn_interface", __package__)
    call = interface.checked(q, k, v, *args, **options)
    with bindings() as bound:
        launch = interface.plan_of(call).launch
    arch = device_of(call.tensors["q"].device).target
    found = verdict(arch, call.request)
    return {
        "schema": SCHEMA,
        "target": arch,
        "call": call_of(call.request),
        "chosen": found["chosen"],
        "refusals": found["refusals"],
        "workspace_bytes": launch.workspace_bytes,
        "launches": [
            {
                "kernel": binding.kernel.name,
                "grid": list(binding.grid),
                "block": list(binding.block),
                "statics": _statics(binding.statics),
                "build": Build.of(binding, arch).key,
            }
            for binding in bound
        ],
    }


def _statics(statics: Mapping[str, Any]) -> dict[str, str]:
    """As text; those of an options dataclass one by one."""
    shown: dict[str, str] = {}
    for name, value in statics.items():
        if is_dataclass(value):
            shown |= {f"{name}.{field.name}": repr(getattr(value, field.name)) for field in fields(value)}
        else:
            shown[name] = repr(value)
    return shown
