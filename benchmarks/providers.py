"""Everything that computes attention and that fly is compared with: one record each.

A record says whether the provider is there, what it does not do, and how to call it. A provider that fails in
a way that no rule foresaw is reported by whoever runs it, with its own message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.workload import Workload
from fly import config

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Provider:
    """One way to compute attention.

    missing(device): why it cannot run on "cuda" or "cpu" here, or None. unsupported(workload): why it cannot
    do that workload, or None. bind(workload, q, k, v): a call without arguments that gives out, shaped like q.
    """

    name: str
    missing: Callable[[str], str | None]
    unsupported: Callable[[Workload], str | None]
    bind: Callable[[Workload, torch.Tensor, torch.Tensor, torch.Tensor], Call]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would hold it
        return False


def _needs(device: str, *, module: str | None = None, vendor: str | None = None) -> str | None:
    """Why a provider that needs a GPU, a module and a vendor ("NVIDIA", "AMD") is missing, or None."""
    if device != "cuda":
        return "needs a GPU"
    if vendor is not None and vendor != ("AMD" if torch.version.hip else "NVIDIA"):
        return f"needs an {vendor} GPU"
    if module is not None and not _installed(module):
        return f"not installed (no module {module})"
    return None


def _gpu_module(module: str | None = None, vendor: str | None = None) -> Callable[[str], str | None]:
    return partial(_needs, module=module, vendor=vendor)


def _anything(workload: Workload) -> str | None:
    return None


def _dense_only(workload: Workload) -> str | None:
    return "not called on packed sequences" if workload.lengths else None


def _fly_missing(device: str) -> str | None:
    if device == "cpu" and not _installed("tinygrad"):
        return "CPU tensors need the emulator: pip install 'fly-attention[emulator]'"
    return None


def _fly(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    return partial(flydsl_flash_attn_func, q, k, v, workload.causal, **workload.keywords(q.device.type))


def _fly_forced(kernel: str, workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    chosen = _fly(workload, q, k, v)

    def call() -> torch.Tensor:
        with config.KERNEL.set_to(kernel):
            return chosen()

    return call


def _sdpa_unsupported(workload: Workload) -> str | None:
    if workload.causal and any(queries != keys for queries, keys in workload.sequences):
        return "its causal mask is aligned top-left"
    return None


def _sdpa(backend: str, workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    options = {"is_causal": workload.causal}
    if workload.num_heads != workload.num_kv_heads:
        options["enable_gqa"] = True

    def attend(heads_first: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

    if not workload.lengths:
        whole = tuple(t.transpose(1, 2) for t in (q, k, v))

        def call() -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return attend(whole)

        return call

    queries, keys = (list(side) for side in zip(*workload.lengths))
    parts = zip(q.split(queries), k.split(keys), v.split(keys))
    sequences = [tuple(t[None].transpose(1, 2) for t in part) for part in parts]

    def call_each() -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            # without queries or without keys there is nothing to attend to
            outs = [attend(s)[0] if s[0].numel() and s[1].numel() else s[0][0].transpose(0, 1) * 0 for s in sequences]
        return torch.cat(outs)

    return call_each


def _torch_varlen_unsupported(workload: Workload) -> str | None:
    if not workload.lengths and _sdpa_unsupported(workload) is None:
        return "SDPA flash is the same kernel"
    return None


def _torch_varlen(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    # the FlashAttention-2 inside torch, without the wrapper that keeps packed sequences from it
    offsets = workload.offsets(q.device.type) if workload.lengths else (None, None)
    options = (*offsets, workload.seq_len, workload.seq_len_kv, 0.0, workload.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(q, k, v, *options)[0]


def _packed(workload: Workload, device: str) -> tuple[object, ...]:
    """The arguments after q, k and v of FlashAttention's varlen functions."""
    return *workload.offsets(device), workload.seq_len, workload.seq_len_kv


def _fa2(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if workload.lengths:
        return partial(flash_attn_varlen_func, q, k, v, *_packed(workload, q.device.type), causal=workload.causal)
    return partial(flash_attn_func, q, k, v, causal=workload.causal)


def _fa4(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if workload.lengths:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = dict(zip(names, _packed(workload, q.device.type)))
        attend = partial(flash_attn_varlen_func, q, k, v, causal=workload.causal, **options)
    else:
        attend = partial(flash_attn_func, q, k, v, causal=workload.causal)

    def call() -> torch.Tensor:
        result = attend()
        return result[0] if isinstance(result, tuple) else result  # some versions add the LSE

    return call


def _aiter_ck(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from aiter.ops.mha import mha_fwd

    # dropout 0, no window, no sink, neither LSE nor the dropout mask returned
    options = (0.0, workload.head_dim**-0.5, workload.causal, -1, -1, 0, False, False)
    return lambda: mha_fwd(q, k, v, *options)[0]


def _aiter_asm_unsupported(workload: Workload) -> str | None:
    if workload.dtype != "bf16" or workload.head_dim != 128:
        return "bf16 with head_dim 128 only"
    return _dense_only(workload)


def _aiter_asm(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from aiter.ops.mha import fmha_v3_fwd

    # dropout 0, no window, neither LSE nor the dropout mask returned, aiter's default conversion to bf16
    options = (0.0, workload.head_dim**-0.5, workload.causal, -1, -1, False, False, 1)
    return lambda: fmha_v3_fwd(q, k, v, *options)[0]


def _triton(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from benchmarks.triton_attention import triton_attention

    return partial(triton_attention, q, k, v, workload.causal)


FLY = Provider("fly", _fly_missing, _anything, _fly)
# the same with one of its kernels, whether or not it would be chosen
FORCED: tuple[Provider, ...] = tuple(
    Provider(f"fly {kernel}", _fly_missing, _anything, partial(_fly_forced, kernel))
    for kernel in ("generic", "gfx950", "sm90")
)
OURS = frozenset(provider.name for provider in (FLY, *FORCED))
PEERS: tuple[Provider, ...] = (
    Provider("aiter CK", _gpu_module("aiter", "AMD"), _dense_only, _aiter_ck),
    Provider("aiter asm", _gpu_module("aiter", "AMD"), _aiter_asm_unsupported, _aiter_asm),
    Provider("SDPA flash", _gpu_module(), _sdpa_unsupported, partial(_sdpa, "FLASH_ATTENTION")),
    Provider("SDPA cuDNN", _gpu_module(vendor="NVIDIA"), _sdpa_unsupported, partial(_sdpa, "CUDNN_ATTENTION")),
    Provider("torch varlen", _gpu_module(vendor="NVIDIA"), _torch_varlen_unsupported, _torch_varlen),
    Provider("FA2", _gpu_module("flash_attn_2_cuda"), _anything, _fa2),
    Provider("FA4", _gpu_module("flash_attn.cute", "NVIDIA"), _anything, _fa4),
    Provider("Triton", _gpu_module("triton"), _dense_only, _triton),
)
PROVIDERS: tuple[Provider, ...] = (FLY, *PEERS)


def named(names: Sequence[str]) -> tuple[Provider, ...]:
    """The providers of these names, in that order.

    Raises:
        ValueError: a name that no provider has.
    """
    known = {provider.name.lower(): provider for provider in (FLY, *FORCED, *PEERS)}
    for name in names:
        if name.lower() not in known:
            accepted = ", ".join(repr(provider.name) for provider in known.values())
            raise ValueError(f"no provider is called {name!r}; providers: {accepted}")
    return tuple(known[name.lower()] for name in names)
