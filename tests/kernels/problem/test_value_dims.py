"""A head dimension of V's own: (head_dim, head_dim_v) on every kernel that takes it, and who refuses it."""

from __future__ import annotations

import itertools

import pytest
import torch

from fly import config
from fly.errors import ArgumentError, UnsupportedError
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.reference import check, reference

LENGTHS = ((70, 90), (0, 20), (33, 5))


def tensors(head_dim: int, head_dim_v: int, device: str, seed: int, packed: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    queries, keys = (sum(side) for side in zip(*LENGTHS)) if packed else (133, 101)
    batch = () if packed else (2,)
    sizes = ((queries, 4, head_dim), (keys, 2, head_dim), (keys, 2, head_dim_v))
    return [
        (torch.rand(*batch, *size, generator=generator, device=device) * 2 - 1).to(torch.bfloat16) for size in sizes
    ]


def dense(head_dim: int, head_dim_v: int, device: str, seed: int, **options) -> None:
    q, k, v = tensors(head_dim, head_dim_v, device, seed)
    for causal in (False, True):
        out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)
        assert out.shape == (2, 133, 4, head_dim_v)
        assert check(out, reference(q, k, v, causal=causal), lse).ok


def packed(head_dim: int, head_dim_v: int, device: str, seed: int) -> None:
    q, k, v = tensors(head_dim, head_dim_v, device, seed, packed=True)
    offsets = [
        torch.tensor([0, *side], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for side in zip(*LENGTHS)
    ]
    longest = [max(side) for side in zip(*LENGTHS)]
    for splits in (1, 2):
        out, lse = flydsl_flash_attn_func(
            q, k, v, True, return_lse=True, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1],
            max_seqlen_q=longest[0], max_seqlen_kv=longest[1], num_kv_splits=splits,
        )  # fmt: skip
        assert check(out, reference(q, k, v, causal=True, lengths=LENGTHS), lse).ok


@pytest.mark.parametrize(
    ("arch", "kernel", "dims"),
    [
        *(("gfx942", "generic", (96, 64)), ("gfx950", "generic", (64, 40)), ("gfx950", "generic", (72, 104))),
        ("sm_90a", "sm90", (72, 104)),
    ],
)
def test_emulated(monkeypatch, arch, kernel, dims, seed):
    monkeypatch.setenv(config.ARCH.name, arch)
    monkeypatch.setenv(config.KERNEL.name, kernel)
    dense(*dims, "cpu", seed, num_kv_splits=1 if arch == "gfx950" else 2)
    packed(*dims, "cpu", seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize(
    ("kernel", "dims"),
    list(itertools.product(("sm90", "generic"), ((192, 128), (64, 40), (72, 104), (24, 256), (200, 8)))),
)
def test_on_a_gpu(monkeypatch, kernel, dims, seed):
    monkeypatch.setenv(config.KERNEL.name, kernel)
    dense(*dims, "cuda", seed)
    dense(*dims, "cuda", seed, num_kv_splits=3)
    packed(*dims, "cuda", seed)


def test_an_output_has_v_s_head_dimension(monkeypatch):
    monkeypatch.setenv(config.ARCH.name, "gfx950")
    q, k, v = tensors(64, 40, "cpu", 0)
    with pytest.raises(ArgumentError, match=r"out must have shape \(2, 133, 4, 40\) \(q's, with v's head_dim\)"):
        flydsl_flash_attn_func(q, k, v, out=torch.empty_like(q))


def test_a_kernel_for_equal_dimensions_says_so(monkeypatch):
    monkeypatch.setenv(config.ARCH.name, "gfx942")
    monkeypatch.setenv(config.KERNEL.name, "gfx942")
    message = r"takes \(head_dim, head_dim_v\) none that differ, not \(128, 64\): pad v with zeros to head_dim 128"
    with pytest.raises(UnsupportedError, match=message):
        flydsl_flash_attn_func(*tensors(128, 64, "cpu", 0))
