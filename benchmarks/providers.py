"""Everything that computes attention and that fly is compared with: one record each.

A record says whether the provider is there, what it does not do, and how to call it. A provider that fails in
a way that no rule foresaw is reported by whoever runs it, with its own message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.workload import BYTES, IN_PAGES, Workload
from fly import config
from kernels import dispatch

Call = Callable[[], Any]
DOUT = 8.0  # so large that gradients of long sequences are not small beside what rules allow near 0


@dataclass(frozen=True)
class Provider:
    """One way to compute attention.

    missing(device): why it cannot run on "cuda" or "cpu" here, or None. unsupported(workload): why it cannot
    do that workload, or None. bind(workload, *tensors): a call without arguments, of `Pass.tensors`; forward, it
    gives out, shaped like q, and backward, the gradients of q, k and v. `takes`: which of `Workload.forms`.
    """

    name: str
    missing: Callable[[str], str | None]
    unsupported: Callable[[Workload], str | None]
    bind: Callable[..., Call]
    takes: tuple[str, ...] = ()

    def refuses(self, workload: Workload) -> str | None:
        """Why it cannot do a workload, or None."""
        beyond = next((form for form in workload.forms if form not in self.takes), None)
        return self.unsupported(workload) if beyond is None else f"not called on {beyond}"


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


def _fly(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Call:
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    options = workload.keywords(q.device.type) | more
    if workload.page_size:
        k, v, options["block_table"], options["seqused_kv"] = workload.pages(k, v)
    return partial(flydsl_flash_attn_func, q, k, v, workload.causal, **options)


def _fly_forced(kernel: str, workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    chosen = _fly(workload, q, k, v)

    def call() -> torch.Tensor:
        with config.KERNEL.set_to(kernel):
            return chosen()

    return call


def _bytes_only(workload: Workload) -> str | None:
    return None if BYTES in workload.forms else "8 bits only"


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


def _fa3(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

    if workload.lengths:
        return partial(flash_attn_varlen_func, q, k, v, *_packed(workload, q.device.type), causal=workload.causal)
    return partial(flash_attn_func, q, k, v, causal=workload.causal, num_splits=workload.num_kv_splits)


def _fa4(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if workload.lengths:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = dict(zip(names, _packed(workload, q.device.type)))
        attend = partial(flash_attn_varlen_func, q, k, v, causal=workload.causal, **options)
    elif workload.page_size:
        k, v, table, lengths = workload.pages(k, v)
        attend = partial(flash_attn_varlen_func, q, k, v, causal=workload.causal, page_table=table, seqused_k=lengths)
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


def _flex(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    behind = workload.seq_len_kv - workload.seq_len

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query + behind

    lengths = (workload.seq_len, workload.seq_len_kv)
    mask = create_block_mask(seen, None, None, *lengths, device=q.device.type) if workload.causal else None
    torch._dynamo.reset()  # a build for each workload, of its own sizes
    attend = torch.compile(flex_attention, dynamic=False)
    grouped = workload.num_heads != workload.num_kv_heads

    def call() -> torch.Tensor:
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return call


def _gradients(
    forward: Callable[..., Call],
    workload: Workload,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
) -> Call:
    """The backward pass of what `forward` binds; the forward pass runs once."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        out = forward(workload, *leaves)()

    def call() -> tuple[torch.Tensor, ...]:
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)
        # packed sequences that are attended to one by one may all be without keys
        return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves))

    return call


def _fly_gradients_forced(kernel: str, workload: Workload, *tensors: torch.Tensor) -> Call:
    with config.BACKWARD_KERNEL.set_to(kernel):
        chosen = _gradients(_fly, workload, *tensors)

    def call() -> tuple[torch.Tensor, ...]:
        with config.BACKWARD_KERNEL.set_to(kernel):
            return chosen()

    return call


def _gradients_of(provider: Provider) -> Provider:
    """The same for the backward pass, by autograd."""
    return replace(provider, bind=partial(_gradients, provider.bind), takes=())


def _forward_tensors(workload: Workload, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    return workload.tensors(seed, device)


def _backward_tensors(workload: Workload, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    q, k, v = workload.tensors(seed, device)
    dout = torch.randn(q.shape, generator=torch.Generator(device).manual_seed(seed + 1), device=device)
    return q, k, v, (dout * DOUT).to(q.dtype)


@dataclass(frozen=True)
class Pass:
    """A pass of attention that is checked and timed, and who computes it.

    `work`: its arithmetic over the forward pass's. `fly`, and `forced`: the same with one of its kernels, whether or
    not it would be chosen; `others`: in other ways. `tensors(workload, seed, device)`: what calls are bound to.
    `flushes`: how often the buffer that empties the L2 is read before a timed call, so that it takes longer than the
    host takes to queue the call. `kernels`: the table that chooses ours.
    """

    name: str
    work: float
    fly: Provider
    forced: tuple[Provider, ...]
    peers: tuple[Provider, ...]
    tensors: Callable[[Workload, int, str], tuple[torch.Tensor, ...]]
    flushes: int
    kernels: dispatch.Pass
    others: tuple[Provider, ...] = ()

    @property
    def ours(self) -> tuple[Provider, ...]:
        """Fly in every form."""
        return self.fly, *self.others, *self.forced

    @property
    def providers(self) -> tuple[Provider, ...]:
        """Fly as it chooses its kernel, and its peers."""
        return self.fly, *self.peers

    def named(self, names: Iterable[str]) -> tuple[Provider, ...]:
        """The providers of these names, in that order.

        Raises:
            ValueError: a name that no provider has.
        """
        known = {provider.name.lower(): provider for provider in (*self.ours, *self.peers)}
        names = tuple(names)
        for name in names:
            if name.lower() not in known:
                accepted = ", ".join(repr(provider.name) for provider in known.values())
                raise ValueError(f"no provider is called {name!r}; providers: {accepted}")
        return tuple(known[name.lower()] for name in names)


_EVERY_FORM = IN_PAGES, BYTES
FLY = Provider("fly", _fly_missing, _anything, _fly, takes=_EVERY_FORM)
# the same with one of its kernels, whether or not it would be chosen
FORCED: tuple[Provider, ...] = tuple(
    Provider(f"fly {kernel}", _fly_missing, _anything, partial(_fly_forced, kernel), takes=_EVERY_FORM)
    for kernel in ("generic", "gfx950", "sm90")
)
FAST = Provider("fly fast", _fly_missing, _bytes_only, partial(_fly, fp8_accumulate="fast"), takes=_EVERY_FORM)
PEERS: tuple[Provider, ...] = (
    Provider("aiter CK", _gpu_module("aiter", "AMD"), _dense_only, _aiter_ck),
    Provider("aiter asm", _gpu_module("aiter", "AMD"), _aiter_asm_unsupported, _aiter_asm),
    Provider("SDPA flash", _gpu_module(), _sdpa_unsupported, partial(_sdpa, "FLASH_ATTENTION")),
    Provider("SDPA cuDNN", _gpu_module(vendor="NVIDIA"), _sdpa_unsupported, partial(_sdpa, "CUDNN_ATTENTION")),
    Provider("torch varlen", _gpu_module(vendor="NVIDIA"), _torch_varlen_unsupported, _torch_varlen),
    Provider("FA2", _gpu_module("flash_attn_2_cuda"), _anything, _fa2),
    Provider("FA3", _gpu_module("fa3_fwd_interface", "NVIDIA"), _anything, _fa3, takes=(BYTES,)),
    Provider("FA4", _gpu_module("flash_attn.cute", "NVIDIA"), _anything, _fa4, takes=(IN_PAGES,)),
    Provider("Triton", _gpu_module("triton"), _dense_only, _triton),
)
FORWARD = Pass("forward", 1.0, FLY, FORCED, PEERS, _forward_tensors, 1, dispatch.FORWARD, (FAST,))

_BY_AUTOGRAD = ("SDPA flash", "SDPA cuDNN", "torch varlen", "FA2", "FA4")
BACKWARD = Pass(
    "backward",
    2.5,  # five products for the forward pass's two
    _gradients_of(FLY),
    tuple(
        Provider(f"fly {kernel.name}", _fly_missing, _anything, partial(_fly_gradients_forced, kernel.name))
        for kernel in dispatch.BACKWARD_KERNELS
    ),
    (
        *map(_gradients_of, FORWARD.named(_BY_AUTOGRAD)),
        _gradients_of(Provider("Triton", _gpu_module("triton"), _dense_only, _flex)),
    ),
    _backward_tensors,
    4,
    dispatch.BACKWARD,
)
OURS = frozenset(provider.name for of in (FORWARD, BACKWARD) for provider in of.ours)
