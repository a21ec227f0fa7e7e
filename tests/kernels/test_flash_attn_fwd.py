"""Flash attention's forward pass against the reference: a test file and, run as a script, a command line.

python tests/kernels/test_flash_attn_fwd.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from benchmarks.shapes import Kind
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels import acceptance
from tests.kernels.acceptance import (
    EMULATED,
    FAMILIES,
    KINDS,
    ON_GPU,
    REDUCED_LENGTHS,
    Run,
    failure,
    failures,
)
from tests.kernels.harness import main
from tests.kernels.reference import check, reference

DEVICE = "cuda"
kinds = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda k: f"{k.dtype}-{'causal' if k.causal else 'full'}-{k.head_dim}"
)
families = pytest.mark.parametrize("family", FAMILIES)
reduced_families = pytest.mark.parametrize("family", REDUCED_LENGTHS)


def _with(runs, *marks):
    parameters = [pytest.param(run, id=str(run), marks=marks) for run in runs]
    return pytest.mark.parametrize("run", parameters, indirect=True)


emulated, on_gpu = _with(EMULATED), _with(ON_GPU, pytest.mark.gpu)
# what not every kernel serves, and the dispatch must find one for
emulated_anyhow = _with((Run("", "gfx942"), Run("", "gfx950"), Run("generic", "gfx950"), Run("", "sm_90a")))
on_gpu_anyhow = _with((Run(""), Run("generic")), pytest.mark.gpu)


@pytest.fixture
def run(request, monkeypatch):
    """A row of `RUNS`, set up; the test is skipped where it cannot run."""
    request.param.start(monkeypatch)
    return request.param


def heads_first(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def padded(t, by):
    wide = torch.nn.functional.pad(t, (0, by))
    return wide[..., : t.shape[-1]]


def moved(t, by):
    memory = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    memory[by:] = t.reshape(-1)
    return memory[by:].view(t.shape)


def every_other_row(t):
    return t.repeat_interleave(2, dim=1)[:, ::2]


LAYOUTS = {
    "heads first": heads_first,
    "sequence first": sequence_first,
    "rows padded to 16 bytes": lambda t: padded(t, 8),
    "rows padded to 2 bytes": lambda t: padded(t, 1),
    "every other row": every_other_row,
    "address moved by 2 bytes": lambda t: moved(t, 1),
    "address moved by 8 bytes": lambda t: moved(t, 4),
    "one head for all": lambda t: t[:, :, :1].expand_as(t),
    "one sequence for all": lambda t: t[:1].expand_as(t),
}


@pytest.mark.sample(2)
@emulated
@kinds
@reduced_families
def test_emulated(run, family, kind, seed):
    assert failures(run, acceptance.sampled(run, family, kind), seed) == []


@pytest.mark.sample(2)
@emulated
@kinds
def test_emulated_small_lengths(run, kind, seed):
    assert failures(run, acceptance.sampled_pairs(run, kind), seed) == []


@pytest.mark.exhaustive
@emulated
@kinds
@reduced_families
def test_emulated_exhaustively(run, family, kind, seed):
    assert failures(run, acceptance.reduced(family, kind), seed) == []


@pytest.mark.exhaustive
@emulated
@kinds
def test_emulated_every_pair_of_small_lengths(run, kind, seed):
    assert failures(run, acceptance.every_pair(kind), seed) == []


@emulated_anyhow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_emulated_strides(run, layout, seed):
    workload = Kind(64, "f16", True).dense(2, 17, 2)
    tensors = [LAYOUTS[layout](t) for t in workload.tensors(seed, "cpu")]
    assert failure(workload, seed, tensors, "cpu") is None


@on_gpu
@kinds
@families
def test_full_size(run, family, kind, seed):
    workloads = [workload for workload in FAMILIES[family](kind) if acceptance.fits_gpu(workload)]
    assert workloads and failures(run, workloads, seed) == []


@on_gpu
@kinds
def test_every_pair_of_small_lengths(run, kind, seed):
    assert failures(run, acceptance.every_pair(kind), seed) == []


@on_gpu
@kinds
def test_long_against_short(run, kind, seed):
    lengths = ((129, 4096), (1, 8192), (2048, 2049), (4097, 3))
    assert failures(run, [kind.dense(2, q, 8, 4, kv) for q, kv in lengths], seed) == []


@on_gpu
@kinds
def test_every_ratio_of_heads(run, kind, seed):
    heads = ((8, 1), (64, 8), (7, 1), (28, 4), (6, 3), (1, 1))
    assert failures(run, [kind.dense(2, 130, *both, 700) for both in heads], seed) == []


@on_gpu_anyhow
@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_any_strides_and_alignment(run, kind, layout, seed):
    workload = kind.dense(2, 200, 4, 4, 333)
    tensors = workload.tensors(seed, DEVICE)
    for changed in range(3):  # one tensor at a time, then all of them
        mixed = [LAYOUTS[layout](t) if i == changed else t for i, t in enumerate(tensors)]
        assert failure(workload, seed, mixed) is None, f"tensor {changed}"
    assert failure(workload, seed, [LAYOUTS[layout](t) for t in tensors]) is None


@on_gpu_anyhow
@kinds
def test_packed_projections(run, kind, seed):
    workload = kind.dense(2, 190, 4)
    packed = torch.stack(workload.tensors(seed, DEVICE), dim=2)
    assert failure(workload, seed, packed.unbind(2)) is None


@on_gpu_anyhow
@pytest.mark.parametrize(
    "batch, seq_len, strides",
    [(2, 80, (2**31, 128, 64, 1)), (2, 300, (8192, 2**23 - 64, 64, 1))],
    ids=["between batches", "between rows"],
)
def test_offsets_past_32_bits(run, batch, seq_len, strides, seed):
    sizes = (batch, seq_len, 2, 64)
    last = sum(stride * (size - 1) for stride, size in zip(strides, sizes))
    assert last > 2**31
    memory = torch.empty(last + 2**17, dtype=torch.bfloat16, device=DEVICE)
    q, k, v, out = (memory.as_strided(sizes, strides, 2**15 * i) for i in range(4))
    for target, source in zip((q, k, v), Kind(64, "bf16", True).dense(batch, seq_len, 2).tensors(seed, DEVICE)):
        target.copy_(source)
    flydsl_flash_attn_func(q, k, v, out=out)
    report = check(out, reference(q, k, v, causal=True))
    assert report.ok, f"seed {seed}: {report}"


@on_gpu
@kinds
@pytest.mark.parametrize("scale", [1e-3, 0.3, 4.0])
def test_softmax_scale(run, kind, scale, seed):
    workload = kind.dense(2, 257, 4)
    assert failure(workload, seed, softmax_scale=scale) is None


@on_gpu
@kinds
def test_large_scores_stay_finite(run, kind, seed):
    # So many rows that some have two scores close together. Where none has, every row is one key's value, plain
    # attention has no error at all, and what is left of the bound is finer than the output's dtype.
    workload = kind.dense(1, 300, 8)
    q, k, v = workload.tensors(seed, DEVICE)
    assert failure(workload, seed, (q * 100, k * 100, v)) is None


@on_gpu
def test_out_is_all_that_is_written(run, seed):
    workload = Kind(64, "bf16", True).dense(2, 100, 3)
    q, k, v = workload.tensors(seed, DEVICE)
    frame = torch.full((4, 104, 5, 80), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = frame[1:3, 2:102, 1:4, 8:72]
    assert flydsl_flash_attn_func(q, k, v, out=out) is out
    report = check(out, reference(q, k, v, causal=True))
    assert report.ok, f"seed {seed}: {report}"
    out.fill_(7.0)
    assert (frame == 7.0).all()


@on_gpu
def test_a_plan_serves_new_tensors_and_streams(run, seed):
    workload = Kind(128, "f16", True).dense(2, 300, 4)
    side = torch.cuda.Stream()
    for i in range(4):
        q, k, v = workload.tensors(seed + i, DEVICE)
        torch.cuda.synchronize()
        stream = (None, side, side.cuda_stream, 0)[i]
        out = flydsl_flash_attn_func(q, k, v, stream=stream)
        torch.cuda.synchronize()
        report = check(out, reference(q, k, v, causal=True))
        assert report.ok, f"call {i}, seed {seed}: {report}"


@on_gpu
def test_graph_capture(run, seed):
    workload = Kind(64, "bf16", True).dense(2, 300, 4)
    q, k, v = workload.tensors(seed, DEVICE)
    flydsl_flash_attn_func(q, k, v, return_lse=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    for tensor, fresh in zip((q, k, v), workload.tensors(seed + 1, DEVICE)):
        tensor.copy_(fresh)
    graph.replay()
    report = check(out, reference(q, k, v, causal=True), lse)
    assert report.ok, f"seed {seed}: {report}"


@on_gpu
def test_results_repeat_bit_for_bit(run, seed):
    q, k, v = Kind(128, "bf16", True).dense(2, 1000, 8, 2).tensors(seed, DEVICE)
    first, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    for _ in range(5):
        again, again_lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
        assert torch.equal(first, again) and torch.equal(lse, again_lse)


if __name__ == "__main__":
    sys.exit(main())
