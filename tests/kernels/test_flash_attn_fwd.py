"""Flash attention's forward pass against the reference: a test file and, run as a script, a command line.

python tests/kernels/test_flash_attn_fwd.py --help
"""

from __future__ import annotations

import secrets
import sys
from importlib.util import find_spec
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from benchmarks.workload import Workload
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.harness import default_workloads, main
from tests.kernels.reference import MAX_SCORES, check, reference

DEVICE = "cuda"
needs_emulator = pytest.mark.skipif(
    find_spec("fly.runtime.emulated") is None, reason="CPU tensors need the emulator, which is not here"
)
KINDS = [(dtype, causal, head_dim) for dtype in ("bf16", "f16") for causal in (True, False) for head_dim in (64, 128)]
kinds = pytest.mark.parametrize("dtype, causal, head_dim", KINDS)
SMALL_LENGTHS = (1, 3, 31, 33, 63, 65, 127, 129, 255, 257)


def needs_gpu(test):
    """Mark a test as one that runs on a GPU only."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")(test))


@pytest.fixture
def seed():
    """Fresh for every test; part of every failure's message, and the script takes it as --seed."""
    return secrets.randbits(31)


def failure(workload: Workload, seed: int, tensors=None, device=DEVICE, **options) -> str | None:
    """Run a workload with its LSE; what is wrong with the result, or None."""
    q, k, v = workload.tensors(seed, device) if tensors is None else tensors
    ref = reference(q, k, v, causal=workload.causal, softmax_scale=options.get("softmax_scale"))
    out, lse = flydsl_flash_attn_func(q, k, v, workload.causal, return_lse=True, **options)
    report = check(out, ref, lse)
    return None if report.ok else f"{workload}, seed {seed}: {report}"


def square(batch, seq_len, heads, dtype, causal, head_dim, kv_heads=None, seq_len_kv=None) -> Workload:
    return Workload(batch, seq_len, seq_len_kv or seq_len, heads, kv_heads or heads, head_dim, dtype, causal)


@needs_gpu
@pytest.mark.parametrize("workload", default_workloads(head_dims=(64, 128)), ids=str)
def test_default_shapes(workload, seed):
    elements = workload.batch * workload.seq_len * workload.num_heads * workload.head_dim
    # q, k, v, out and plain attention of 2 bytes, the reference of 4, and a block of scores with temporaries
    needed = elements * (5 * 2 + 4) + 4 * 4 * MAX_SCORES
    if needed > torch.cuda.get_device_properties(0).total_memory:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    assert failure(workload, seed) is None


@needs_gpu
@kinds
def test_every_pair_of_small_lengths(dtype, causal, head_dim, seed):
    failures = []
    for seq_len in SMALL_LENGTHS:
        for seq_len_kv in SMALL_LENGTHS:
            workload = square(2, seq_len, 4, dtype, causal, head_dim, 2, seq_len_kv)
            failures.append(failure(workload, seed))
    assert [f for f in failures if f is not None] == []


@needs_gpu
@kinds
@pytest.mark.parametrize("lengths", [(1024, 8192), (8192, 1024), (129, 4096), (1, 8192), (2048, 2049)])
def test_lengths_that_differ(dtype, causal, head_dim, lengths, seed):
    assert failure(square(2, lengths[0], 8, dtype, causal, head_dim, 4, lengths[1]), seed) is None


@needs_gpu
@kinds
@pytest.mark.parametrize("heads, kv_heads", [(8, 1), (64, 8), (7, 1), (28, 4), (6, 3), (1, 1)])
def test_heads_share_keys(dtype, causal, head_dim, heads, kv_heads, seed):
    for seq_len, seq_len_kv in ((512, 512), (130, 700)):
        assert failure(square(2, seq_len, heads, dtype, causal, head_dim, kv_heads, seq_len_kv), seed) is None


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


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_any_strides_and_alignment(dtype, causal, head_dim, layout, seed):
    workload = square(2, 200, 4, dtype, causal, head_dim, 4, 333)
    tensors = workload.tensors(seed, DEVICE)
    for changed in range(3):  # one tensor at a time, then all of them
        mixed = [LAYOUTS[layout](t) if i == changed else t for i, t in enumerate(tensors)]
        assert failure(workload, seed, mixed) is None, f"tensor {changed}"
    assert failure(workload, seed, [LAYOUTS[layout](t) for t in tensors]) is None


@needs_gpu
@kinds
def test_packed_projections(dtype, causal, head_dim, seed):
    workload = square(2, 190, 4, dtype, causal, head_dim)
    packed = torch.stack(workload.tensors(seed, DEVICE), dim=2)
    assert failure(workload, seed, packed.unbind(2)) is None


@needs_gpu
@pytest.mark.parametrize(
    "batch, seq_len, strides",
    [(2, 80, (2**31, 128, 64, 1)), (2, 300, (8192, 2**23 - 64, 64, 1))],
    ids=["between batches", "between rows"],
)
def test_offsets_past_32_bits(batch, seq_len, strides, seed):
    sizes = (batch, seq_len, 2, 64)
    last = sum(stride * (size - 1) for stride, size in zip(strides, sizes))
    assert last > 2**31
    memory = torch.empty(last + 2**17, dtype=torch.bfloat16, device=DEVICE)
    q, k, v, out = (memory.as_strided(sizes, strides, 2**15 * i) for i in range(4))
    for target, source in zip((q, k, v), square(batch, seq_len, 2, "bf16", True, 64).tensors(seed, DEVICE)):
        target.copy_(source)
    flydsl_flash_attn_func(q, k, v, out=out)
    report = check(out, reference(q, k, v, causal=True))
    assert report.ok, f"seed {seed}: {report}"


@needs_gpu
@kinds
@pytest.mark.parametrize("scale", [1e-3, 0.3, 4.0])
def test_softmax_scale(dtype, causal, head_dim, scale, seed):
    workload = square(2, 257, 4, dtype, causal, head_dim)
    assert failure(workload, seed, softmax_scale=scale) is None


@needs_gpu
@kinds
def test_large_scores_stay_finite(dtype, causal, head_dim, seed):
    workload = square(1, 300, 2, dtype, causal, head_dim)
    q, k, v = workload.tensors(seed, DEVICE)
    assert failure(workload, seed, (q * 100, k * 100, v)) is None


@needs_gpu
def test_out_is_all_that_is_written(seed):
    workload = square(2, 100, 3, "bf16", True, 64)
    q, k, v = workload.tensors(seed, DEVICE)
    frame = torch.full((4, 104, 5, 72), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = frame[1:3, 2:102, 1:4, 4:68]
    assert flydsl_flash_attn_func(q, k, v, out=out) is out
    report = check(out, reference(q, k, v, causal=True))
    assert report.ok, f"seed {seed}: {report}"
    out.fill_(7.0)
    assert (frame == 7.0).all()


@needs_gpu
def test_a_plan_serves_new_tensors_and_streams(seed):
    workload = square(2, 300, 4, "f16", True, 128)
    side = torch.cuda.Stream()
    for i in range(4):
        q, k, v = workload.tensors(seed + i, DEVICE)
        torch.cuda.synchronize()
        stream = (None, side, side.cuda_stream, 0)[i]
        out = flydsl_flash_attn_func(q, k, v, stream=stream)
        torch.cuda.synchronize()
        report = check(out, reference(q, k, v, causal=True))
        assert report.ok, f"call {i}, seed {seed}: {report}"


@needs_gpu
def test_graph_capture(seed):
    workload = square(2, 300, 4, "bf16", True, 64)
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


@needs_gpu
def test_results_repeat_bit_for_bit(seed):
    q, k, v = square(2, 1000, 8, "bf16", True, 128, 2).tensors(seed, DEVICE)
    first, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
    for _ in range(5):
        again, again_lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
        assert torch.equal(first, again) and torch.equal(lse, again_lse)


if __name__ == "__main__":
    sys.exit(main())
