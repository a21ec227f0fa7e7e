"""Which flash-attention kernel serves a request: a table for each pass, in order of preference.

A kernel is one row of `KERNELS` or of `BACKWARD_KERNELS`. A new kernel adds its row above those that it beats, and
says which calls it leaves to them (`Preference`); nothing else changes. Rows of other packages come before these: see
`registered`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from fly import config
from fly.errors import ConfigError, UnsupportedError

from .arguments.callers import arg, plain, problem
from .needs import (
    BIAS_OF_WIDE_HEADS,
    SHORT_TRIANGLES,
    Need,
    Preference,
    aligned,
    keys_within,
    mask_blocks,
    only,
    page_within,
    pages_in_runs,
    unless_filled,
    unless_paged,
    unless_wide_fp8,
)
from .problem.catalogue import BY_NAME, EVERYWHERE
from .problem.contract import DQ_SUMS, HEAD_DIMS, Prepare, Request

AMD = ("gfx942", "gfx950")
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90a")
DUALWAVE = ("dualwave_swp_lazy_rescale", "dualwave_swp_setprio", "dualwave_swp_enable_stagger")

# 8-bit floats that few know, with the name that tensors of theirs have; bfloat16 holds all of their numbers
OF_ONE_TARGET = {"f8e4m3fnuz": "f8e4m3fnuz (torch.float8_e4m3fnuz)"}

_OWN = ("fly_attention", "kernels")
OF_CACHES = ("packed", "paged", "seqused", "cache_leftpad", "kv_batch_idx")  # where sequences lie


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def _ordered(request: Request) -> str | None:
    if not request.deterministic:
        return None
    return (
        f"adds parts of {arg.q}'s gradient up in an order that changes from run to run: call without "
        f"{arg.deterministic} and torch.use_deterministic_algorithms"
    )


def _in_float32(request: Request) -> str | None:
    if request.dq_accumulate == DQ_SUMS[0]:
        return None
    return f"adds {arg.q}'s gradient up in float32 alone: call without {arg.dq_accumulate}={request.dq_accumulate!r}"


def _of_operands(request: Request) -> str | None:
    if not request.operand_gradients:
        return None
    return f"makes no gradients of {arg.bias} and {arg.aux_tensors}: pass them detached"


def _listed_in_turn(request: Request) -> str | None:
    if request.static_features.block_size is None or not request.deterministic:
        return None
    return (
        f"adds parts of {arg.q}'s gradient up in an order that changes from run to run where there is a "
        f"{arg.block_mask}: call without {arg.deterministic} and torch.use_deterministic_algorithms, or pass its "
        f"mask_mod as {arg.mask_mod}"
    )


def keys_in_turn(most: int) -> Need:
    """At most so many keys where gradients are the same bits every time."""

    def refuses(request: Request) -> str | None:
        if not request.deterministic or request.seq_len_kv <= most:
            return None
        return f"takes {most} keys at most with {arg.deterministic}, not {request.seq_len_kv}: call without it"

    return Need(f"at most {most} keys where gradients are the same bits every time", refuses)


def dims_among(pairs: Iterable[tuple[int, int]]) -> Need:
    """(head_dim, head_dim_v) is one of these."""
    accepted = tuple(pairs)

    def refuses(request: Request) -> str | None:
        found = request.head_dim, request.value_dim
        if found in accepted:
            return None
        return f"takes (head_dim, head_dim_v) {_listed(accepted)}, not {found}: pad with zeros to one of them"

    return Need(f"(head_dim, head_dim_v) {_listed(accepted)}", refuses)


ANY_ORDER = Need("gradients whose last bits may change from run to run", _ordered)
FLOAT32_SUMS = Need("sums of q's gradient in float32", _in_float32)
INPUTS_ALONE = Need("gradients of q, k, v and sinks alone", _of_operands)
UNLISTED_IN_TURN = Need("no block mask where gradients are the same bits every time", _listed_in_turn)
PAGES = pages_in_runs(16)  # where rows of one page are copied together
FP8_BLOCKS = unless_wide_fp8(mask_blocks(64, 64), mask_blocks(128, 64))  # the others have no build of one consumer


@dataclass(frozen=True)
class Kernel:
    """One row: what a kernel can do, and where it lives.

    `module`, relative to this package or another package's, holds `prepare` (see `Prepare`) and is None while the
    kernel is not built.
    `tuning` maps each tuning option it takes to the architectures it means something on. `needs` are conditions on
    the call. `switched_off` is a variable that keeps the kernel from being chosen. `reason` says in a few words why
    it stands where it stands. `mixed_dims`: whether V's may be another one of `head_dims`. `partly`: architectures of
    features that it has on these alone. `leaves`: calls that it serves only where no later row can.
    """

    name: str
    module: str | None
    archs: tuple[str, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    tuning: Mapping[str, tuple[str, ...]]
    reason: str
    needs: tuple[Need, ...] = ()
    switched_off: config.Variable | None = None
    mixed_dims: bool = False
    partly: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    leaves: Preference | None = None

    def has(self, feature: str, arch: str) -> bool:
        """Whether it does a feature on an architecture."""
        return feature in self.features and arch in self.partly.get(feature, self.archs)

    def yields(self, request: Request) -> bool:
        """Whether it leaves a request to a later row; never with `split_keys`, where a batch must not decide that."""
        return self.leaves is not None and "split_keys" not in request.features and self.leaves.yields(request)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="gfx950",
        module=".flash_attn_gfx950",
        archs=("gfx950",),
        head_dims=tuple(HEAD_DIMS),
        dtypes=("bf16", "f16"),
        features=(*EVERYWHERE, "debug_counts"),
        tuning=dict.fromkeys(("waves_per_eu", "daz", *DUALWAVE), ("gfx950",)),
        reason="two waves per SIMD in antiphase, hand-pipelined for CDNA4",
        needs=(
            aligned(4),
            unless_paged(
                unless_filled(keys_within(2**32, ahead=200), keys_within(2**31, ahead=200)),
                page_within(2**31, rows=512),
            ),
            mask_blocks(128, 64),
            PAGES,
        ),
        switched_off=config.DISABLE_DUALWAVE_SWP,
        mixed_dims=True,
    ),
    Kernel(
        name="gfx950_fp8",
        module=".flash_attn_gfx950_fp8",
        archs=("gfx950",),
        head_dims=(64, 128, 256),
        dtypes=("f8e4m3",),
        features=(
            *("packed", "split_kv", "split_keys", "seqused", "cache_leftpad", "kv_batch_idx", "paged", "window"),
            *("attention_chunk", "softcap", "alibi", "bias", "sink", "block_mask", "descale", "fp8_accumulate"),
            *("score_mod", "mask_mod", "debug_counts"),
        ),
        tuning=dict.fromkeys(("waves_per_eu", "daz", *DUALWAVE), ("gfx950",)),
        reason="the gfx950 kernel on 8-bit products",
        needs=(
            aligned(4),
            unless_paged(keys_within(2**32, ahead=200), page_within(2**31, rows=512)),
            mask_blocks(128, 64),
            PAGES,
        ),
        switched_off=config.DISABLE_DUALWAVE_SWP,
    ),
    Kernel(
        name="gfx942",
        module=".flash_attn_gfx942",
        archs=("gfx942",),
        head_dims=(64, 128),
        dtypes=("bf16", "f16"),
        features=(*(name for name in EVERYWHERE if name not in ("paged", "dropout", "block_mask")), "debug_counts"),
        tuning=dict.fromkeys(("waves_per_eu", "daz"), ("gfx942",)),
        reason="the stages of the gfx950 kernel, with K and V through registers",
        needs=(aligned(4),),
        switched_off=config.DISABLE_DUALWAVE_SWP,
        leaves=SHORT_TRIANGLES,
    ),
    Kernel(
        name="gfx942_fp8",
        module=".flash_attn_gfx942_fp8",
        archs=("gfx942",),
        head_dims=(64, 128),
        dtypes=("f8e4m3fnuz",),
        features=(
            *("packed", "split_kv", "split_keys", "seqused", "cache_leftpad", "kv_batch_idx", "window"),
            *("attention_chunk", "softcap", "alibi", "bias", "sink", "descale", "fp8_accumulate"),
            *("score_mod", "mask_mod", "debug_counts"),
        ),
        tuning=dict.fromkeys(("waves_per_eu", "daz"), ("gfx942",)),
        reason="the gfx942 kernel on 8-bit products",
        needs=(aligned(4),),
        switched_off=config.DISABLE_DUALWAVE_SWP,
    ),
    Kernel(
        name="sm90",
        module=".flash_attn_sm90",
        archs=("sm_90a",),
        head_dims=tuple(HEAD_DIMS),
        dtypes=("bf16", "f16"),
        features=EVERYWHERE,
        tuning={},
        reason="warp-specialised WGMMA and TMA pipeline for Hopper",
        needs=(aligned(16), mask_blocks(64, 64), PAGES),
        mixed_dims=True,
    ),
    Kernel(
        name="sm90_fp8",
        module=".flash_attn_sm90_fp8",
        archs=("sm_90a",),
        head_dims=(64, 96, 128, 192, 256),
        dtypes=("f8e4m3",),
        features=(
            *("packed", "split_kv", "split_keys", "seqused", "cache_leftpad", "kv_batch_idx", "paged", "window"),
            *("attention_chunk", "softcap", "alibi", "bias", "sink", "block_mask", "descale", "fp8_accumulate"),
            *("score_mod", "mask_mod"),
        ),
        tuning={},
        reason="the sm90 kernel on 8-bit products",
        needs=(aligned(16), FP8_BLOCKS, PAGES),
    ),
    Kernel(
        name="sm90_fp8_cache",
        module=".flash_attn_sm90_fp8_cache",
        archs=("sm_90a",),
        head_dims=tuple(range(16, HEAD_DIMS[-1] + 1, 16)),
        dtypes=("bf16", "f16"),
        features=(
            *("split_kv", "split_keys", *OF_CACHES, "window", "attention_chunk", "softcap", "alibi", "sink"),
            "fp8_cache",
        ),
        tuning={},
        reason="the sm90 kernel with a warpgroup that converts 8-bit K and V in shared memory",
        needs=(only("fp8_cache"), aligned(16), PAGES),
        mixed_dims=True,
    ),
    Kernel(
        name="generic",
        module=".flash_attn_generic",
        archs=AMD + NVIDIA,
        head_dims=tuple(HEAD_DIMS),
        dtypes=("bf16", "f16"),
        features=(*EVERYWHERE, "fp8_cache", "kv_cache_layout"),
        tuning={"waves_per_eu": AMD, "daz": AMD + NVIDIA},
        reason="one algorithm over the atoms of every target",
        mixed_dims=True,
        partly={"kv_cache_layout": AMD},
    ),
)

# Their inputs are aligned: others are copied before (`as_backward`).
BACKWARD_KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="gfx942",
        module=".flash_attn_gfx942_bwd",
        archs=("gfx942",),
        head_dims=(64, 128),
        dtypes=("bf16", "f16"),
        features=(
            *("packed", "split_kv", "seqused", "window", "attention_chunk"),
            *("softcap", "alibi", "bias", "sink", "dropout", "score_mod", "mask_mod"),
        ),
        tuning={},
        reason="five products instead of seven, with a wave's registers on each SIMD",
        needs=(INPUTS_ALONE, ANY_ORDER),
    ),
    Kernel(
        name="gfx950",
        module=".flash_attn_gfx950_bwd",
        archs=("gfx950",),
        head_dims=(64, 128, 192),
        dtypes=("bf16", "f16"),
        features=(
            *("packed", "split_kv", "seqused", "window", "attention_chunk"),
            *("softcap", "alibi", "bias", "sink", "dropout", "score_mod", "mask_mod"),
        ),
        tuning={},
        reason="five products instead of seven, with a wave's registers on each SIMD",
        needs=(INPUTS_ALONE, ANY_ORDER, dims_among(((64, 64), (128, 128), (192, 128)))),
        mixed_dims=True,
    ),
    Kernel(
        name="sm90",
        module=".flash_attn_sm90_bwd",
        archs=("sm_90a",),
        head_dims=tuple(range(HEAD_DIMS.start, 128 + 1, HEAD_DIMS.step)),
        dtypes=("bf16", "f16"),
        features=(
            *("packed", "split_kv", "split_keys", "seqused", "window", "attention_chunk"),
            *("softcap", "alibi", "bias", "sink", "dropout", "block_mask", "score_mod", "mask_mod"),
        ),
        tuning={},
        reason="five products instead of seven, on WGMMA and TMA",
        needs=(INPUTS_ALONE, FLOAT32_SUMS, mask_blocks(64, 128), UNLISTED_IN_TURN, keys_in_turn(65_535 * 128)),
        mixed_dims=True,
        leaves=BIAS_OF_WIDE_HEADS,
    ),
    Kernel(
        name="sm90_wide",
        module=".flash_attn_sm90_bwd_wide",
        archs=("sm_90a",),
        head_dims=tuple(HEAD_DIMS),
        dtypes=("bf16", "f16"),
        features=(
            *("packed", "split_kv", "seqused", "window", "attention_chunk"),
            *("softcap", "alibi", "bias", "sink", "dropout", "score_mod", "mask_mod"),
        ),
        tuning={},
        reason="the same with dK and dV in two warpgroups, which leaves more registers",
        needs=(INPUTS_ALONE, FLOAT32_SUMS, keys_in_turn(65_535 * 64)),
        mixed_dims=True,
    ),
    Kernel(
        name="generic",
        module=".flash_attn_generic_bwd",
        archs=AMD + NVIDIA,
        head_dims=tuple(HEAD_DIMS),
        dtypes=("bf16", "f16"),
        features=(
            *("packed", "split_kv", "split_keys", "seqused", "window", "attention_chunk"),
            *("softcap", "alibi", "bias", "sink", "dropout", "block_mask", "score_mod", "mask_mod"),
        ),
        tuning={},
        reason="the same bits every time, on every target",
        needs=(FLOAT32_SUMS,),
        mixed_dims=True,
    ),
)


@dataclass(frozen=True)
class Pass:
    """A pass of attention: what messages call it and its kernels, its table, the variable that forces a kernel."""

    name: str
    adjective: str
    table: Callable[[], tuple[Kernel, ...]]
    forced: config.Variable


@functools.cache
def registered(group: str) -> tuple[Kernel, ...]:
    """Rows that installed packages register under an entry-point `group`, in the order of the entry points' names.

    There are none where this package is a part of another one: they are rows of the installed one.

    An entry point names a `Kernel`, or a list of them, whose `module` is one of the package's own.

    Raises:
        ConfigError: an entry point that cannot be loaded, or is no row, or one whose name is taken.
    """
    rows: list[Kernel] = []
    if __package__ not in _OWN:
        return ()
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):
        of = f"entry point {entry.name!r} of {group} ({entry.value})"
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{of} cannot be loaded: {error}; repair or uninstall its package") from error
        for row in loaded if isinstance(loaded, list | tuple) else (loaded,):
            if not isinstance(row, Kernel):
                raise ConfigError(
                    f"{of} is a {type(row).__name__}; accepted: fly_attention.dispatch.Kernel, or a list"
                )
            if row.name in {other.name for other in (*rows, *KERNELS, *BACKWARD_KERNELS)}:
                raise ConfigError(f"{of} has a kernel {row.name!r}, which there is already: give it another name")
            rows.append(row)
    return tuple(rows)


FORWARD = Pass(
    "flash attention", "flash-attention", lambda: (*registered("fly_attention.kernels"), *KERNELS), config.KERNEL
)
BACKWARD = Pass(
    "the backward pass",
    "backward",
    lambda: (*registered("fly_attention.backward_kernels"), *BACKWARD_KERNELS),
    config.BACKWARD_KERNEL,
)


def as_backward(request: Request, deterministic: bool = False, operand_gradients: bool = False) -> Request:
    """What the backward pass of such a call is: tuning is the forward kernel's, and what is not aligned is copied.

    `deterministic`: as of `Request`, if the call itself does not ask for it. `operand_gradients`: see there too.
    """
    told = request.deterministic or deterministic
    return replace(
        request,
        tuning={},
        alignment=16,
        kv_alignment=16,
        deterministic=told,
        operand_gradients=operand_gradients,
    )


def head_dims(kernel: Kernel) -> str:
    """The kernel's head dimensions in words; many in equal steps as a range."""
    dims = kernel.head_dims
    steps = {b - a for a, b in itertools.pairwise(dims)}
    if len(dims) > 4 and len(steps) == 1:
        return f"{dims[0]} to {dims[-1]} in steps of {steps.pop()}"
    return _listed(dims)


def _head_dim_advice(kernel: Kernel, head_dim: int) -> str:
    wider = [d for d in kernel.head_dims if d > head_dim]
    if not wider:
        return f"torch.nn.functional.scaled_dot_product_attention takes {arg('q, k')} and {arg.v}"
    padded = f"pad {arg('q, k')} and {arg.v} with zeros to head_dim {min(wider)}"
    return f"{padded} and pass {arg.softmax_scale}={head_dim}**-0.5"


def refusal(kernel: Kernel, arch: str, request: Request) -> str | None:
    """Why `kernel` cannot serve `request` on `arch` (ends in what to do instead), or None when it can."""
    text = _refusal(kernel, arch, request)
    return None if text is None else plain(text)


def _refusal(kernel: Kernel, arch: str, request: Request) -> str | None:
    """`refusal` with arguments marked."""
    if arch not in kernel.archs:
        return f"runs on {_listed(kernel.archs)}, not on {arch}"
    if kernel.module is None:
        return f"is not built yet on {arch}"
    if kernel.switched_off is not None and kernel.switched_off.get():
        return f"is switched off by {kernel.switched_off.name}=1"
    if request.dtype not in kernel.dtypes:
        exact = ", which is exact" if request.dtype in OF_ONE_TARGET else ""
        taken = _listed(OF_ONE_TARGET.get(name, name) for name in kernel.dtypes)
        return f"takes {arg.q} of {taken}, not {request.dtype}: convert with .to(torch.bfloat16){exact}"
    if request.head_dim not in kernel.head_dims:
        advice = _head_dim_advice(kernel, request.head_dim)
        return f"takes head_dim {head_dims(kernel)}, not {request.head_dim}: {advice}"
    if request.value_dim != request.head_dim and not (kernel.mixed_dims and request.value_dim in kernel.head_dims):
        pairs = f"of {head_dims(kernel)}" if kernel.mixed_dims else "none that differ"
        return (
            f"takes (head_dim, head_dim_v) {pairs}, not ({request.head_dim}, {request.value_dim}): pad {arg.v} with "
            f"zeros to head_dim {request.head_dim} and cut the output"
        )
    missing = [BY_NAME[name].told for name in request.features if not kernel.has(name, arch)]
    if missing:
        return "; ".join(f"does not do {what} yet: {instead}" for what, instead in missing)
    meaningless = [name for name in request.tuning if arch not in kernel.tuning.get(name, ())]
    if meaningless:
        return f"has no tuning option {_listed(meaningless)} on {arch}: leave it out"
    return next(filter(None, (need.refuses(request) for need in kernel.needs)), None)


def _by_length(kernel: Kernel, request: Request) -> list[str | None]:
    """What a kernel says where a sequence of the batch is too long for it."""
    return [need.refuses(request) for need in kernel.needs if need.by_length]


def choose(arch: str, request: Request, of: Pass = FORWARD) -> Kernel:
    """The first kernel of a pass's table that can serve `request` on `arch` and does not leave it to a later one that
    can, or the one that its variable forces.

    Raises:
        UnsupportedError: none can, or the forced one cannot; says why for each that is meant for `arch`.
    """
    forced = of.forced.get()
    refusals: dict[str, str] = {}
    yielding: Kernel | None = None
    for kernel in of.table():
        if forced not in ("", kernel.name):
            continue
        why = _refusal(kernel, arch, request)
        if why is None:
            if forced or not kernel.yields(request):
                return kernel
            yielding = yielding or kernel
            continue
        if "split_keys" in request.features and why in _by_length(kernel, request):
            raise problem(UnsupportedError, f"with {arg.split_keys}, the {kernel.name} kernel {why}")
        if forced:
            raise problem(
                UnsupportedError,
                f"{of.forced.name}={forced}: the {forced} kernel {why}; unset {of.forced.name}, and "
                f"{of.name} chooses its kernel for target {arch}",
            )
        if arch in kernel.archs:
            refusals[kernel.name] = why
    if yielding is not None:
        return yielding
    if not refusals:
        accepted = _listed(sorted({arch for kernel in of.table() for arch in kernel.archs}))
        raise problem(UnsupportedError, f"{of.name} has no kernel for target {arch}; targets: {accepted}")
    reasons = "; ".join(f"the {name} kernel {why}" for name, why in refusals.items())
    raise problem(UnsupportedError, f"no {of.adjective} kernel serves this call on target {arch}: {reasons}")


def prepare_function(kernel: Kernel) -> Prepare:
    """The kernel's `prepare`, imported on first use."""
    assert kernel.module is not None
    prepare: Prepare = importlib.import_module(kernel.module, __package__).prepare
    return prepare


def serve(arch: str, request: Request, of: Pass = FORWARD) -> Prepare:
    """The `prepare` of the kernel that serves a pass of `request` on `arch`; raises as `choose` does."""
    return prepare_function(choose(arch, request, of))
