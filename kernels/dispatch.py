"""Which flash-attention kernel serves a request: one table, in order of preference.

A kernel is one row of `KERNELS`. A new kernel adds its row above those that it beats; nothing else changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from fly import config
from fly.errors import UnsupportedError
from fly.runtime.device import device_for

AMD = ("gfx942", "gfx950")
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90a")

# What not every kernel does: how to call it in a message, and what a caller can do instead.
FEATURES: Mapping[str, tuple[str, str]] = {
    "packed": (
        "packed sequences (cu_seqlens_q, cu_seqlens_kv)",
        "call it once per sequence with (1, S, H, D) tensors",
    ),
    "split_kv": ("split keys (num_kv_splits > 1)", "num_kv_splits=1 gives the same result"),
}


@dataclass(frozen=True)
class Request:
    """What a caller asks for, in the terms that decide the kernel.

    `dtype` is fly's name ("bf16", "f16"); lengths are in tokens (the longest sequence's when packed);
    `features` are keys of `FEATURES`; `tuning` names the tuning options given.
    """

    head_dim: int
    dtype: str
    causal: bool
    cross_seqlen: bool
    return_lse: bool
    seq_len: int
    seq_len_kv: int
    num_heads: int
    num_kv_heads: int
    features: tuple[str, ...] = ()
    tuning: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One row: what a kernel can do, and where it lives.

    `module` holds `prepare(q, k, v, out, lse, *, softmax_scale, causal, cross_seqlen, tuning)` and is None
    while the kernel is not built. `tuning` maps each tuning option it takes to the architectures it means
    something on. `switched_off` is a variable that keeps the kernel from being chosen. `reason` says in a few
    words why it stands where it stands.
    """

    name: str
    module: str | None
    archs: tuple[str, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    tuning: Mapping[str, tuple[str, ...]]
    reason: str
    switched_off: config.Variable | None = None


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="gfx950",
        module=None,
        archs=("gfx950",),
        head_dims=(64, 128),
        dtypes=("bf16", "f16"),
        features=(),
        tuning={"waves_per_eu": ("gfx950",), "daz": ("gfx950",)},
        reason="two waves per SIMD in antiphase, hand-pipelined for CDNA4",
        switched_off=config.DISABLE_DUALWAVE_SWP,
    ),
    Kernel(
        name="sm90",
        module=None,
        archs=("sm_90a",),
        head_dims=(64, 128),
        dtypes=("bf16", "f16"),
        features=(),
        tuning={},
        reason="warp-specialised WGMMA and TMA pipeline for Hopper",
    ),
    Kernel(
        name="generic",
        module="kernels.flash_attn_generic",
        archs=AMD + NVIDIA,
        head_dims=(64, 128),
        dtypes=("bf16", "f16"),
        features=(),
        tuning={"waves_per_eu": AMD, "daz": AMD + NVIDIA},
        reason="one algorithm over the atoms of every target",
    ),
)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def _head_dim_advice(kernel: Kernel, head_dim: int) -> str:
    wider = [d for d in kernel.head_dims if d > head_dim]
    if not wider:
        return "torch.nn.functional.scaled_dot_product_attention takes it"
    return f"pad q, k and v with zeros to head_dim {min(wider)} and pass softmax_scale={head_dim}**-0.5"


def refusal(kernel: Kernel, arch: str, request: Request) -> str | None:
    """Why `kernel` cannot serve `request` on `arch` (ends in what to do instead), or None when it can."""
    if arch not in kernel.archs:
        return f"runs on {_listed(kernel.archs)}, not on {arch}"
    if kernel.module is None:
        return f"is not built yet on {arch}"
    if kernel.switched_off is not None and kernel.switched_off.get():
        return f"is switched off by {kernel.switched_off.name}=1"
    if request.dtype not in kernel.dtypes:
        return f"takes {_listed(kernel.dtypes)}, not {request.dtype}: convert with .to(torch.bfloat16)"
    if request.head_dim not in kernel.head_dims:
        advice = _head_dim_advice(kernel, request.head_dim)
        return f"takes head_dim {_listed(kernel.head_dims)}, not {request.head_dim}: {advice}"
    missing = [FEATURES[name] for name in request.features if name not in kernel.features]
    if missing:
        return "; ".join(f"does not do {what} yet: {instead}" for what, instead in missing)
    meaningless = [name for name in request.tuning if arch not in kernel.tuning.get(name, ())]
    if meaningless:
        return f"has no tuning option {_listed(meaningless)} on {arch}: leave it out"
    return None


def choose(arch: str, request: Request) -> Kernel:
    """The first kernel of the table that can serve `request` on `arch`, or the one that FLY_KERNEL forces.

    Raises:
        UnsupportedError: none can, or the forced one cannot; says why for each that is meant for `arch`.
    """
    forced = config.KERNEL.get()
    refusals: dict[str, str] = {}
    for kernel in KERNELS:
        if forced not in ("", kernel.name):
            continue
        why = refusal(kernel, arch, request)
        if why is None:
            return kernel
        if forced:
            raise UnsupportedError(
                f"{config.KERNEL.name}={forced}: the {forced} kernel {why}; unset {config.KERNEL.name}, and "
                "flash attention chooses its kernel"
            )
        if arch in kernel.archs:
            refusals[kernel.name] = why
    if not refusals:
        accepted = _listed(sorted({arch for kernel in KERNELS for arch in kernel.archs}))
        raise UnsupportedError(f"flash attention has no kernel for target {arch}; targets: {accepted}")
    reasons = "; ".join(f"the {name} kernel {why}" for name, why in refusals.items())
    raise UnsupportedError(f"no flash-attention kernel serves this call on target {arch}: {reasons}")


def target_of(device: torch.device) -> str:
    """The architecture that runs kernels for `device`'s tensors, e.g. "sm_90a"; the emulated one for the CPU.

    Raises:
        DeviceError: the device has no driver, or the CPU has no emulator.
    """
    return device_for((device.type, device.index or 0)).target


def prepare_function(kernel: Kernel) -> Callable[..., Callable[..., None]]:
    """The kernel's `prepare`, imported on first use."""
    return importlib.import_module(kernel.module).prepare
