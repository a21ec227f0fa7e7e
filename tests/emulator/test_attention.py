"""The attention library on CPU tensors: the emulated GPU with every check on."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kernels.flash_attn_interface import flydsl_flash_attn_func  # noqa: E402

ARCHES = ("gfx942", "gfx950")
SMALL = [(1, 1), (31, 31), (33, 33), (63, 33), (64, 64), (65, 65), (127, 129), (129, 255), (257, 127)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention in the dtype of the inputs, (B, S, H, D); bottom-right causal, 0 for a row without keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if causal:
        sq, sk = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq), float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0).to(v.dtype)
    return (weights @ v).transpose(1, 2)


def check(arch: str, dtype: torch.dtype, d: int, causal: bool, sq: int, sk: int, heads: int = 2) -> None:
    """FlashAttention's tolerance rule against float32."""
    torch.manual_seed(sq * 1000 + sk + d)
    q, k, v = ((torch.rand(1, s, heads, d) * 2 - 1).to(dtype) for s in (sq, sk, sk))
    out = flydsl_flash_attn_func(q, k, v, causal=causal)
    exact = reference(q.float(), k.float(), v.float(), causal)
    rounded = reference(q, k, v, causal).float()
    assert (out.float() - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-5


@pytest.fixture(autouse=True)
def _with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "1")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_generic_kernel_without_findings(
    arch: str, dtype: torch.dtype, d: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLY_ARCH", arch)
    for sq, sk in ((192, 192), (129, 255)):
        check(arch, dtype, d, causal, sq, sk)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
def test_small_lengths(arch: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_ARCH", arch)
    for sq, sk in SMALL:
        check(arch, torch.bfloat16, 64, causal, sq, sk, heads=1)
