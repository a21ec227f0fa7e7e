"""Scores, scales, caps, sinks and windows at the ends of their ranges, out and log-sum-exp, on every kernel.

Emulated with checks on the CPU; on a GPU the same cases, for the kernels that there is no emulator of.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.fuzz.fuzz_bounds import exact

F16_UNIT = 2.0**-11
KERNELS = [
    pytest.param(("cpu", "gfx942", "generic"), id="gfx942-generic"),
    pytest.param(("cpu", "gfx950", "generic"), id="gfx950-generic"),
    pytest.param(("cpu", "gfx950", "gfx950"), id="gfx950"),
    pytest.param(("cuda", "", "generic"), id="gpu-generic", marks=pytest.mark.gpu),
    pytest.param(("cuda", "", "sm90"), id="gpu-sm90", marks=pytest.mark.gpu),
]
LONG = {"cpu": 1024, "cuda": 4096}  # keys


@pytest.fixture(params=KERNELS)
def device(request, monkeypatch):
    """Where a test runs, with that kernel and no other."""
    where, arch, kernel = request.param
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if arch:
        monkeypatch.setenv("FLY_ARCH", arch)
    monkeypatch.setenv("FLY_KERNEL", kernel)
    return where


def tensors(seed: int, queries: int, keys: int, heads: int = 1, dtype=torch.float16, size: float = 1.0):
    """Random q, k, v of so many rows, head dimension 64."""
    made = torch.Generator().manual_seed(seed)
    lengths = (queries, keys, keys)
    return [torch.randn(1, n, heads, 64, generator=made).mul(size).to(dtype) for n in lengths]


def attend(device: str, q, k, v, causal=False, **options):
    """(out, lse) on a device, as they are on the CPU."""
    placed = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v = (x.to(device) for x in (q, k, v))
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **placed)
    return out.cpu(), lse.cpu()


def hold(seed: int, device: str, q, k, v, causal=False, splits=1, **options) -> None:
    """A call's results are within float32's and the dtype's rounding of float64."""
    out, lse = attend(device, q, k, v, causal, num_kv_splits=splits, **options)
    wanted = exact(q, k, v, causal, options, ordinary=False)
    of_out, of_lse = wanted.excess(out, lse)
    assert of_out <= 1 and of_lse <= 1, f"seed {seed}: out {of_out:.3g} and lse {of_lse:.3g} of what is allowed"


def steep(seed: int, keys: int, growth: float):
    """q, k, v whose scores are exact in float32, large, and nearly equal; `growth` a tile of 64 keys.

    Values are 1 in the first half of the keys and -1 in the second, so that any weight that one half has more than
    the other shows.
    """
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.zeros(1, n, 1, 64) for n in (64, keys, keys))
    q[0, :, 0, 0] = torch.randperm(64, generator=made) + 960.0  # a maximum of its own for every row
    q[0, :, 0, 1] = 1.0
    k[..., 0] = 64.0
    k[0, :, 0, 1] = torch.randint(-8, 9, (keys,), generator=made) / 8
    k[0, ::64, 0, 1] = 1.0  # so that every tile has the same largest score
    k[0, :, 0, 2] = torch.arange(keys) // 64 * growth
    q[..., 2] = 1.0
    v[:, : keys // 2], v[:, keys // 2 :] = 1.0, -1.0
    return [x.half() for x in (q, k, v)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("splits", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("growth", [0.0, 0.0625, -0.0625, 8.0], ids=str)
def test_large_scores_over_many_tiles(device, growth, splits, seed):
    """Neither maxima that stay nor those that grow a little in every tile weigh one tile more than another."""
    q, k, v = steep(seed, LONG[device], growth)
    scale = 0.377
    out, lse = attend(device, q, k, v, softmax_scale=scale, num_kv_splits=splits)
    scores = torch.einsum("qd,kd->qk", q[0, :, 0].double(), k[0, :, 0].double()) * scale
    wanted = torch.softmax(scores, -1) @ v[0, :, 0].double()
    error = (out[0, :, 0].double() - wanted).abs().max().item()
    # parts are weighed by log-sum-exps, which float32 rounds
    doubt = 0.0 if splits == 1 else 4 * scores.abs().max().item() * 2.0**-24
    assert error <= 4 * F16_UNIT + doubt, f"seed {seed}: {error:.3g}"
    wanted_lse = torch.logsumexp(scores, -1)
    error = ((lse[0, 0].double() - wanted_lse).abs() / wanted_lse.abs()).max().item()
    assert error <= 4 * 2.0**-24, f"seed {seed}: lse {error:.3g}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_that_grow_with_the_distance(device, causal, seed):
    """Two a key: a slope of -2, f16, and maxima that come first or last in the walk."""
    q, k, v = tensors(seed, 65, LONG[device])
    hold(seed, device, q, k, v, causal, alibi_slopes=torch.tensor([-2.0]))


@pytest.mark.parametrize("size", [65000.0, 2000.0], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_largest_numbers_of_f16(device, size, masked, seed):
    """Scores of 1e11, which float32 holds to thousands: its own rounding is all that may be wrong."""
    made = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(0, 2, (1, n, 1, 64), generator=made).mul(2.0).sub(1.0) * size for n in (65, 200))
    v = torch.randn(1, 200, 1, 64, generator=made)
    k[:, 150:] = k[:, :50]  # ties
    hold(seed, device, q.half(), k.half(), v.half(), masked)


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1e-30, 1e9, 1e30, 1e36], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_softmax_scale(device, scale, causal, seed):
    q, k, v = tensors(seed, 70, 130)
    hold(seed, device, q, k, v, causal, softmax_scale=scale)


def test_a_huge_scale_of_scores_that_are_zero(device, seed):
    q, k, v = tensors(seed, 33, 70)
    hold(seed, device, torch.zeros_like(q), k, v, softmax_scale=2e33)


@pytest.mark.sample(2)
@pytest.mark.parametrize("cap", [1e-45, 1e-30, 1e-3, 1.0, 50.0, 300.0, 1e4, 1e6, 1e20, 3e38, 1e300], ids=str)
def test_any_softcap(device, cap, seed):
    q, k, v = tensors(seed, 40, 100, size=3.0)
    hold(seed, device, q, k, v, softcap=cap)


def test_scores_as_large_as_a_wide_softcap(device, seed):
    q, k, v = tensors(seed, 40, 100, size=20.0)
    hold(seed, device, q, k, v, softcap=1000.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sink", [-300.0, 60.0, 1e5, 1e10, 3e38, -3e38], ids=str)
@pytest.mark.parametrize("splits", [1, 2], ids=["whole", "split"])
def test_sinks_far_from_the_scores(device, sink, splits, seed):
    """The sum is measured from the sink where that is larger: or exponentials of it are infinite."""
    q, k, v = tensors(seed, 40, 100)
    hold(seed, device, q, k, v, True, splits, sink=torch.tensor([sink]))


LARGEST = 2**31 - 1
WINDOWS = [(-1, LARGEST), (LARGEST, -1), (LARGEST, LARGEST), (LARGEST, 7), (5, LARGEST - 40), (0, 0)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (90, 40), (40, 90)], ids=str)
def test_any_window(device, window, queries, keys, seed):
    q, k, v = tensors(seed, queries, keys)
    hold(seed, device, q, k, v, window_size=window)


@pytest.mark.sample(2)
@pytest.mark.parametrize("window", WINDOWS[:4], ids=str)
def test_any_window_with_lengths_of_its_own(device, window, seed):
    q, k, v = (x.expand(2, -1, -1, -1).contiguous() for x in tensors(seed, 70, 90))
    lengths = {"seqused_kv": torch.tensor([60, 33]), "cache_leftpad": torch.tensor([7, 30])}
    lengths = {name: x.int() for name, x in lengths.items()}
    hold(seed, device, q, k, v, window_size=window, **lengths)


@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
def test_what_is_no_number_shows(device, number, seed):
    """In the rows that see it, and in no others."""
    q, k, v = tensors(seed, 64, 64)
    k[0, 40, 0, 3] = number
    q[..., 3] = q[..., 3].abs() + 0.1
    out, lse = attend(device, q, k, v, True)
    assert out[0, 40:].isnan().all() and not lse[..., 40:].isfinite().any()
    assert out[0, :40].isfinite().all() and lse[..., :40].isfinite().all()
