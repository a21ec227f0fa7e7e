"""Random builds, and random numbers and tensors under them, that are valid calls of attention.

A build is what a kernel is compiled for; several calls are drawn under one. Everything is decided on the CPU, so that
every device gets the same call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f8e4m3": torch.float8_e4m3fn}
CACHE, APPEND = "flash_attn_with_kvcache", "append_to_cache"
DENSE = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
PACKED = ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func")
OURS, VLLM = "flydsl_flash_attn_func", "vllm.flash_attn_varlen_func"
FUNCTIONS = (
    *(*[OURS] * 8, *[DENSE[0]] * 3, *DENSE[1:], *[PACKED[0]] * 3, *PACKED[1:]),
    *(*[CACHE] * 6, *[APPEND] * 2, VLLM),
)
# head dimensions of 8-bit inputs
HEAD_DIMS_OF_8_BITS = {"gfx950": (64, 128, 256), "sm_90a": (64, 128, 256)}
BLOCKS = ((128, 128), (64, 64), (256, 64), (128, 64), (128, 112), (33, 17), (100, 256))
PAGES = (16, 16, 16, 32, 64, 128, 1, 2, 3, 7, 8, 24, 48, 100)

# of each group a call has one at most
OF_SCORES = (("window",), ("softcap",), ("alibi",), ("sink",))
OF_FUNCTIONS = (("score_mod", "score_mod aux"), ("mask_mod", "mask_mod aux", "block_mask"))
OF_ENTRIES = (("cache_leftpad",), ("kv_batch_idx",))
AUX = {"score_mod aux", "mask_mod aux"}  # whose auxiliary tensors are not each other's
MOST_FEATURES = 4

LAYOUTS = ("plain", "heads first", "wide rows", "shifted", "spaced tokens", "expanded")
ALIGNED = {"wide rows": (16, 32), "shifted": (16, 48)}
ODD = {"wide rows": (1, 2, 4, 5), "shifted": (1, 2, 4, 7)}


class Draw(random.Random):
    """Random choices of one name, and a generator of tensors on the CPU that follows them."""

    def __init__(self, name: str):
        super().__init__(name)
        self.generator = torch.Generator().manual_seed(self.getrandbits(62))

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def power(self, low: float, high: float) -> float:
        """Ten to a uniform power."""
        return 10.0 ** self.uniform(low, high)

    def length(self, most: int) -> int:
        """0 and 1 often, small ones mostly."""
        bounds = self.choices(((0, 0), (1, 1), (2, 9), (10, 70), (1, most)), (4, 14, 35, 27, 20))[0]
        return min(self.randint(*bounds), most)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 from `low` to `high`, that one too."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(torch.int32)


@dataclass(frozen=True)
class Build:
    """What the calls of a group share.

    `page`: keys of a page, 0 without pages. `splits`: "one", "many", or "any" that the library chooses. `odd`: no
    alignment beyond the elements'. `new`: "dense" or "packed" new keys of a cache; `rotary` are then the rotated
    dimensions. `kernel`: what FLY_KERNEL forces, if anything. `tuning`: keywords that change no result. `workspace`:
    the caller has one.
    """

    function: str
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    packed: bool
    page: int
    features: tuple[str, ...]
    sides: tuple[bool, bool]
    splits: str
    odd: bool
    lse: bool
    out: bool
    new: str
    rotary: int
    interleaved: bool
    kernel: str
    block: tuple[int, int]
    most: int = 150
    tuning: tuple[tuple[str, Any], ...] = ()
    workspace: bool = False

    @property
    def packed_keys(self) -> bool:
        """Whether keys are packed too."""
        return self.packed and not self.page and self.function != CACHE

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "f8e4m3" else DTYPES[self.dtype]


def head_dim(draw: Draw, function: str) -> int:
    """Small ones mostly; FlashAttention's functions pad what kernels do not have."""
    if function == OURS or (function == APPEND and draw.chance(0.5)):
        return draw.choice([32] * 5 + [40] + [64] * 5 + [72, 80, 96] + [128] * 2 + [draw.randrange(8, 257, 8)])
    if draw.chance(0.25):
        return draw.choice([8, 16, 24, draw.randint(1, 256), draw.randint(1, 64)])
    return draw.choice([32] * 5 + [40] + [64] * 5 + [72, 96] + [128] * 2 + [draw.randrange(8, 257, 8)])


def draw_build(draw: Draw, arch: str, most: int = 150) -> Build:
    """A build for an architecture; `most`: the longest sequence."""
    function = draw.choice(FUNCTIONS)
    if function in (OURS, DENSE[0]) and arch in HEAD_DIMS_OF_8_BITS and draw.chance(0.15):
        return _draw_8_bits(draw, function, arch, most)
    dim = head_dim(draw, function)
    cache = function == CACHE
    packed = function in (*PACKED, VLLM) or ((function == OURS or cache) and draw.chance(0.4))
    paged = draw.chance(0.35) and (cache or function in (OURS, PACKED[0], VLLM))
    stacked = "packed" in function
    new = draw.choice(("", "", "dense", "packed")) if cache else ""
    dim_v = dim if stacked or draw.chance(0.75) else head_dim(draw, function)
    groups = [*OF_SCORES, *([] if function == VLLM else [("attention_chunk",)])]
    if function == OURS:
        groups += OF_FUNCTIONS
        groups += [] if packed else [("bias", "bias of keys", "bias padded")]
    if not cache and function != VLLM:
        groups += [("seqused_q",)] if paged else [("seqused_q",), ("seqused_kv",)]
    if (cache or function == OURS) and (paged or not packed):
        groups += OF_ENTRIES
    chosen = draw.sample(groups, min(len(groups), draw.choice((0, 0, 1, 1, 2, 2, 3, MOST_FEATURES))))
    names = [draw.choice(group) for group in chosen]
    if packed or paged:
        names = ["mask_mod" if name == "block_mask" else name for name in names]
    if set(names) >= AUX or {"block_mask", "score_mod aux"} <= set(names):
        names.remove("score_mod aux")
    kernel = ""
    if arch == "gfx950" and dim in (64, 128) and draw.chance(0.4):
        kernel = "generic"
    rotary = draw.randrange(16, dim + 1, 16) if new and dim >= 16 and draw.chance(0.5) else 0
    return Build(
        function=function,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=draw.choice(("bf16", "bf16", "f16")),
        causal=draw.chance(0.5),
        packed=packed,
        page=draw.choice(PAGES) if paged else 0,
        features=tuple(sorted(names)),
        sides=draw.choice(((True, True), (True, False), (False, True))),
        splits=draw.choice(("any", "one", "many")),
        odd=draw.chance(0.2),
        lse=draw.chance(0.85),
        out=function in (OURS, VLLM) and draw.chance(0.3),
        new=new,
        rotary=rotary,
        interleaved=draw.chance(0.5),
        kernel=kernel,
        block=draw.choice(BLOCKS),
        most=most,
        tuning=_tuning(draw, arch) if function == OURS else (),
        workspace=function == OURS and draw.chance(0.15),
    )


def _tuning(draw: Draw, arch: str) -> tuple[tuple[str, Any], ...]:
    choices = [("daz", draw.chance(0.5))]
    if arch.startswith("gfx"):
        choices.append(("waves_per_eu", draw.randint(1, 4)))
    return (draw.choice(choices),) if draw.chance(0.1) else ()


def _draw_8_bits(draw: Draw, function: str, arch: str, most: int) -> Build:
    """A build of dense 8-bit inputs, with some of their scales."""
    dim = draw.choice(HEAD_DIMS_OF_8_BITS[arch])
    return Build(
        function=function,
        head_dim=dim,
        head_dim_v=dim,
        dtype="f8e4m3",
        causal=draw.chance(0.5),
        packed=False,
        page=0,
        features=tuple(name for name in ("q_descale", "k_descale", "v_descale") if draw.chance(0.3)),
        sides=(False, False),
        splits=draw.choice(("any", "one", "many")),
        odd=False,
        lse=draw.chance(0.85),
        out=function == OURS and draw.chance(0.3),
        new="",
        rotary=0,
        interleaved=False,
        kernel="",
        block=(128, 128),
        most=most,
    )


@dataclass(frozen=True)
class Placed:
    """Tensors in memory of their own whose other elements are NaN, and a copy of that memory."""

    memory: torch.Tensor
    before: torch.Tensor

    def changed(self) -> bool:
        """Whether a bit of the memory is another."""
        return not torch.equal(bits(self.memory), bits(self.before))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes."""
    return tensor.flatten().view(torch.uint8)


def place(
    draw: Draw, content: torch.Tensor, odd: bool, device: str, layouts: Sequence[str] = LAYOUTS
) -> tuple[torch.Tensor, Placed]:
    """A tensor (B, S, H, D) or (tokens, H, D) of the content with random strides; its last one is 1."""
    layout = draw.choice(layouts)
    steps = ODD if odd else ALIGNED
    shape, extra = content.shape, draw.choice(steps.get(layout, (0,)))
    view: Callable[[torch.Tensor], torch.Tensor]
    if layout == "heads first":
        size, view = (*shape[:-3], shape[-2], shape[-3], shape[-1]), lambda x: x.transpose(-2, -3)
    elif layout == "wide rows":
        size, view = (*shape[:-1], shape[-1] + extra), lambda x: x[..., : shape[-1]]
    elif layout == "shifted":
        size, view = (content.numel() + extra,), lambda x: x[extra:].view(shape)
    elif layout == "spaced tokens":
        size, view = (*shape[:-3], shape[-3] * 2, *shape[-2:]), lambda x: x[..., ::2, :, :]
    elif layout == "expanded" and content.dim() == 4 and shape[0]:
        size, view = (1, *shape[1:]), lambda x: x.expand(shape)
        content = content[:1].expand(shape)
    else:
        size, view = tuple(shape), lambda x: x
    memory = torch.full(size, float("nan")).to(content.dtype)
    if layout == "expanded" and len(size) == 4:
        memory.copy_(content[:1])
    else:
        view(memory).copy_(content)
    memory = memory.to(device)
    return view(memory), Placed(memory, memory.clone())


def numbers(draw: Draw, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of an extreme magnitude, or zeros, or some large ones among small."""
    most = 4.8 if dtype == torch.float16 else 8.0
    kind = draw.choice(("scaled", "scaled", "uniform", "outliers", "zeros", "same"))
    x = draw.normal(*shape)
    if kind == "scaled":
        x = x * draw.power(-6, most - 0.7)
    elif kind == "uniform":
        x = (torch.rand(shape, generator=draw.generator) * 2 - 1) * (65000.0 if most < 5 else draw.power(0, most))
    elif kind == "outliers":
        x = torch.where(torch.rand(shape, generator=draw.generator) < 0.05, x * draw.power(1, 3.8), x)
    elif kind == "zeros":
        x = torch.zeros(shape)
    else:
        x = torch.full(shape, draw.power(-3, most - 0.1))
    limit = 65000.0 if dtype == torch.float16 else 1e8
    return x.clamp(-limit, limit).to(dtype)
