"""A small set of calls for compute-sanitizer, on an NVIDIA GPU:

compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitizer_set.py
compute-sanitizer --tool racecheck python tests/kernels/sanitizer_set.py
compute-sanitizer --tool synccheck python tests/kernels/sanitizer_set.py

Names of kernels, "appending", "backward" and "fused_backward" behind it run only these.
(API errors are left out because cuda-bindings asks older drivers for functions that they do not have.)
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fly import config
from fly.runtime.device import device_of
from kernels import dispatch, flash_attn_generic_bwd, flash_attn_generic_probabilities
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import create_block_mask
from kernels.problem.contract import Prepare, Request
from kernels.sm90 import values_ahead
from tests.kernels.backward.builds import arguments_of
from tests.kernels.cache.kv_cache_cases import Case, Problem
from tests.kernels.feature_cases import FEATURES, Inputs
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged

SHAPES = ((130, 130, 2, 2), (65, 257, 7, 1), (129, 31, 8, 1), (1, 1, 1, 1))  # Sq, Skv, H, Hkv
PADDINGS = (4, 1)  # elements a row is longer than head_dim: 8- and 2-byte alignment
# Eight query heads a key head, which may be rows of one tile: Sq, and in how many parts the keys are.
GROUPS = ((1, 1), (1, 3), (5, 1), (17, 2), (64, 1), (130, 1))
RAGGED = ((17, 0, 3, 64, 130, 1), (300, 40, 3, 0, 257, 64))  # queries and keys of packed sequences
PAGED_KEYS, PAGE_SIZES = (300, 0, 129, 1), (16, 64)
# names in `FEATURES`, whether causal, and in how many parts the keys are
ASKED = (
    ("window of chunks", False, 1),
    ("softcap", True, 1),
    ("alibi heads", True, 1),
    ("bias", False, 1),
    ("sink", True, 2),
    ("dropout", True, 1),
    ("score_mod aux", True, 1),
    ("mask_mod aux", False, 1),
    ("seqused", True, 2),
    ("cache_leftpad", True, 1),
    ("kv_batch_idx", False, 1),
)
# with lengths that reach past the cache, and before it
APPENDS = (
    (Case(rotary_dim=16, page=16, new=5), [0, 38, -3]),
    (Case(head_dim=40, rotary_dim=32, interleaved=True, batch_idx=True, shift=1), [39, 2**31 - 1, 7]),
    (Case(head_dim=128, head_dim_v=64, new=33, layout="apart"), [20, 0, -40]),
)


def random(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers from 0 to 1."""
    return torch.rand(shape, device=device).to(dtype)


def plain(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """Dense and packed tensors, keys whole and in parts, and alignments."""
    bf16, f16 = torch.bfloat16, torch.float16
    first, second, third = dims
    builds = ((first, f16, False), (first, bf16, True), (second, bf16, False), (second, bf16, True))
    for dim, dtype, causal in (*builds, (third, bf16, True)):
        for queries, keys, heads, kv_heads in SHAPES:
            sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
            q, k, v = (random(device, 1, *size, dim, dtype=dtype) for size in sizes)
            for splits in (1, 2):
                flydsl_flash_attn_func(q, k, v, causal, return_lse=True, num_kv_splits=splits)
        packed((130, 0, 70), (33, 17, 100), (2, 1), dim, causal, device, dtype)
        for padding in PADDINGS if kernel.name == "generic" and causal else ():
            x = random(device, 1, 70, 2, dim + padding, dtype=dtype)[..., :dim]
            flydsl_flash_attn_func(x, x, x)


def packed(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    heads: tuple[int, int],
    dim: int,
    causal: bool,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One call on sequences of these lengths; `heads`: H, Hkv."""
    q, k = (random(device, sum(n), h, dim, dtype=dtype) for n, h in zip((queries, keys), heads))
    places = {"cu_seqlens_q": offsets(queries, device), "cu_seqlens_kv": offsets(keys, device)}
    flydsl_flash_attn_func(q, k, k, causal, max_seqlen_q=max(queries), max_seqlen_kv=max(keys), **places)


def groups(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """Eight query heads a key head, few queries to some."""
    for queries, splits in GROUPS:
        q = random(device, 2, queries, 16, dims[1])
        k, v = (random(device, 2, 300, 2, dims[1]) for _ in range(2))
        flydsl_flash_attn_func(q, k, v, True, return_lse=True, num_kv_splits=splits)
    packed(*RAGGED, (16, 2), dims[1], True, device)


def pages(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """Keys in shuffled pages; what is behind a length is NaN, and table entries are of no page."""
    for dim, size in zip(dims, PAGE_SIZES):
        paged = Paged.of(PAGED_KEYS, size, 2, (dim, dim), torch.bfloat16, seed=size, device=device)
        for queries, heads, splits in ((1, 16, 1), (1, 16, 3), (70, 4, 1)):
            q = random(device, len(PAGED_KEYS), queries, heads, dim)
            flydsl_flash_attn_func(q, paged.k, paged.v, True, num_kv_splits=splits, **paged.options)
        lengths = RAGGED[0][: len(PAGED_KEYS)]
        at = {"cu_seqlens_q": offsets(lengths, device), "max_seqlen_q": max(lengths)}
        flydsl_flash_attn_func(random(device, sum(lengths), 4, dim), paged.k, paged.v, True, **at, **paged.options)


def sliding(batch: int, head: int, query: int, key: int) -> bool:
    """Some of the keys before a query, as a mask_mod."""
    return (key <= query + 60) & (key > query - 30)


def features(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """What changes scores and masks, and where sequences lie."""
    inputs = Inputs([130, 130], [257, 257], heads=4, kv_heads=2, head_dim=dims[1], device=device)
    for name, causal, splits in ASKED:
        q, k, v = inputs.tensors(entries=3 if name == "kv_batch_idx" else None)
        options = {"return_lse": True, "num_kv_splits": splits} | FEATURES[name](inputs)
        flydsl_flash_attn_func(q, k, v, causal, **options)
    flydsl_flash_attn_func(*inputs.tensors(), True, split_keys=128)
    if "block_mask" in kernel.features:
        mask = create_block_mask(sliding, 2, 4, 130, 257, device)
        flydsl_flash_attn_func(*inputs.tensors(), False, block_mask=mask)


def together(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """Key tiles that two blocks load for each other: more of them than slots."""
    for dim, batch, length in ((72, 5, 768), (216, 3, 1024)):
        q, k = (random(device, batch, length, heads, dim) for heads in (8, 2))
        for causal in (False, True):
            flydsl_flash_attn_func(q, k, k, causal, return_lse=True)


def eight_bit(kernel: dispatch.Kernel, dims: tuple[int, ...], device: str) -> None:
    """e4m3 inputs with scales of tensors, and of sequences and key heads; decoding from pages, and packed."""
    for dim in dims:
        builds = ((130, 4, 257, 1, ()), (1, 16, 257, 3, (2, 2)), (65, 2, 257, 2, (1,)), (3, 8, 900, 1, ()))
        for queries, heads, keys, splits, shape in builds:
            sizes = ((queries, heads), (keys, 2), (keys, 2))
            q, k, v = (random(device, 2, *size, dim, dtype=torch.float8_e4m3fn) for size in sizes)
            names = ("q_descale", "k_descale", "v_descale")
            scales = {name: random(device, *shape, dtype=torch.float32) for name in names}
            flydsl_flash_attn_func(q, k, v, True, return_lse=True, num_kv_splits=splits, **scales)
        q, k, v = (random(device, 17, 100, 8, dim, dtype=torch.float8_e4m3fn) for _ in range(3))
        few, values_ahead.HEADS_PER_WAVE = values_ahead.HEADS_PER_WAVE, 1
        flydsl_flash_attn_func(q, k, v, dim == 128)  # blocks transpose V for each other, two tiles each at most
        values_ahead.HEADS_PER_WAVE = few
        paged = Paged.of(PAGED_KEYS, 16, 2, (dim, dim), torch.float32, seed=dim, device=device)
        k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (paged.k, paged.v))
        q = random(device, len(PAGED_KEYS), 1, 16, dim, dtype=torch.float8_e4m3fn)
        flydsl_flash_attn_func(q, k, v, True, num_kv_splits=3, **paged.options)
        packed((3, 0, 5), (33, 17, 300), (8, 2), dim, True, device, torch.float8_e4m3fn)


def asked(*names: str) -> Callable[[Inputs], dict[str, Any]]:
    """All options of some of `FEATURES`, "bias of every score" and "block mask" among them."""
    more: Mapping[str, Callable[[Inputs], dict[str, Any]]] = {
        "bias of every score": lambda x: {"bias": x.floats(x.batch, x.heads, x.queries[0], x.keys[0])},
        "block mask": lambda x: {
            "block_mask": create_block_mask(sliding, x.batch, x.heads, x.queries[0], x.keys[0], x.device)
        },
    }
    return lambda x: {key: value for name in names for key, value in {**FEATURES, **more}[name](x).items()}


# sizes, whether causal, options, and whose gradients are wanted beside those of q, k and v
BACKWARD: tuple[tuple[dict[str, Any], bool, Callable[[Inputs], dict[str, Any]], tuple[str, ...]], ...] = (
    *(
        ({"queries": [sq], "keys": [skv], "heads": h, "kv_heads": hkv, "head_dim": 64}, True, asked(), ())
        for sq, skv, h, hkv in SHAPES
    ),
    ({"queries": [33, 0, 130], "keys": [40, 20, 70], "head_dim": 128, "packed": True}, True, asked("dropout"), ()),
    ({"queries": [70], "keys": [130], "head_dim": 256, "dtype": "f16"}, False, asked("window both"), ()),
    ({"queries": [40] * 2, "keys": [70] * 2, "head_dim": 72, "head_dim_v": 40}, True, asked("seqused"), ()),
    ({"queries": [130], "keys": [70]}, False, asked("bias of every score", "sink"), ("bias", "sink")),
    ({"queries": [70], "keys": [130]}, True, asked("bias", "score_mod aux"), ("bias", "aux_tensors")),
    ({"queries": [70] * 2, "keys": [70] * 2}, False, asked("bias of keys", "alibi heads", "softcap"), ("bias",)),
    ({"queries": [200], "keys": [300], "head_dim": 64}, False, asked("block mask"), ()),
)


def backward(device: str) -> None:
    """The backward pass alone: statistics of rows, dK and dV, dQ, and gradients of operands."""
    for sizes, causal, options, of in BACKWARD:
        inputs = Inputs(**sizes, device=device)
        launched(flash_attn_generic_bwd.prepare, *arguments_of(inputs, causal, of, **options(inputs)))
    inputs = Inputs([33, 0, 130], [40, 20, 70], head_dim=64, packed=True, device=device)
    tensors, request = arguments_of(inputs, True, **FEATURES["dropout"](inputs))
    tensors["probabilities"] = random(device, 3, request.num_heads, 130, 70)
    launched(flash_attn_generic_probabilities.prepare, tensors, request)


# of the fused Hopper kernel: sizes, whether causal, options; each in turn too, where that is served
FUSED: tuple[tuple[dict[str, Any], bool, Callable[[Inputs], dict[str, Any]]], ...] = (
    # consumers that make P in turn
    ({"queries": [130], "keys": [290], "heads": 4, "kv_heads": 2, "head_dim": 64}, True, asked("sink", "dropout")),
    ({"queries": [33, 0, 130], "keys": [40, 20, 300], "head_dim": 128, "packed": True}, True, asked("dropout")),
    ({"queries": [130] * 2, "keys": [290] * 2, "head_dim": 128}, False, asked("seqused", "window both")),
    ({"queries": [130], "keys": [290], "head_dim": 64}, False, asked("bias", "score_mod aux")),
    ({"queries": [200], "keys": [300], "head_dim": 64}, False, asked("block mask")),
    # products one behind the other
    ({"queries": [330], "keys": [290], "heads": 2, "kv_heads": 2, "head_dim": 64}, False, asked()),
    # long enough for tiles in pairs
    ({"queries": [1600], "keys": [1700], "heads": 2, "kv_heads": 2, "head_dim": 128}, False, asked()),
    # enough heads for blocks that clear sums of later ones
    ({"queries": [130] * 5, "keys": [130] * 5, "heads": 33, "kv_heads": 33, "head_dim": 128}, False, asked()),
)
# of its form for wide heads
WIDE: tuple[tuple[dict[str, Any], bool, Callable[[Inputs], dict[str, Any]]], ...] = (
    ({"queries": [130], "keys": [290], "head_dim": 192, "head_dim_v": 128}, True, asked()),
    ({"queries": [33, 0, 130], "keys": [40, 20, 300], "head_dim": 192, "packed": True}, False, asked("dropout")),
    ({"queries": [130], "keys": [290], "heads": 4, "kv_heads": 2, "head_dim": 256}, True, asked("sink")),
)


def fused_backward(device: str) -> None:
    """The Hopper backward pass alone: statistics of rows, the kernels, and what rounds or clears dq."""
    target = device_of(torch.device(device)).target
    kernels = {kernel.name: kernel for kernel in dispatch.BACKWARD_KERNELS}
    of_kernels = [(kernels[name], *of) for name, cases in (("sm90", FUSED), ("sm90_wide", WIDE)) for of in cases]
    for (kernel, sizes, causal, options), deterministic in itertools.product(of_kernels, (False, True)):
        inputs = Inputs(**sizes, device=device)
        tensors, request = arguments_of(inputs, causal, **options(inputs))
        request = dispatch.as_backward(request, deterministic)
        if dispatch.refusal(kernel, target, request) is None:
            launched(dispatch.prepare_function(kernel), tensors, request)


def launched(prepare: Prepare, tensors: dict[str, Any], request: Request) -> None:
    """A launch on these tensors."""
    launch = prepare(tensors, request)
    workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device=tensors["q"].device)
    launch.run({**tensors, "workspace": workspace}, None)


def appending(device: str) -> None:
    """New keys and values of caches."""
    for case, lengths in APPENDS:
        Problem(case, 0, device, lengths).call()


Section = Callable[[dispatch.Kernel, tuple[int, ...], str], None]
# of every NVIDIA kernel: head dimensions, and what is called
SETS: Mapping[str, tuple[tuple[int, ...], tuple[Section, ...]]] = {
    "sm90": ((64, 128, 256), (plain, groups, pages, features, together)),
    "sm90_fp8": ((64, 128, 256), (eight_bit,)),
    "generic": ((64, 128, 72), (plain, groups, pages, features)),
}
OTHERS: Mapping[str, Callable[[str], None]] = {
    "appending": appending,
    "backward": backward,
    "fused_backward": fused_backward,
}


def run(device: str, only: Collection[str] = (*SETS, *OTHERS)) -> None:
    """Every kernel that the device has, and what is launched beside them; `only`: of these names."""
    target = device_of(torch.device(device)).target
    for kernel in dispatch.KERNELS:
        if target not in kernel.archs or kernel.name not in only:
            continue
        os.environ[config.KERNEL.name] = kernel.name
        dims, sections = SETS[kernel.name]
        for section in sections:
            done(device, f"{kernel.name} {section.__name__}", partial(section, kernel, dims, device))
    for name, section in OTHERS.items():
        if name in only:
            done(device, name, partial(section, device))


def done(device: str, name: str, section: Callable[[], None]) -> None:
    """A section, to its end, so that what a tool reports comes after its name."""
    print(name, flush=True)
    section()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    names = (*SETS, *OTHERS)
    if unknown := {*sys.argv[1:]} - {*names}:
        sys.exit(f"{', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    run("cuda", sys.argv[1:] or names)
