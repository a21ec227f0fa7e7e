"""The workspace of split keys: its size, what lies where in it, and who may own it."""

from __future__ import annotations

import math

import pytest
import torch

from fly.errors import ArgumentError, ArgumentTypeError
from kernels.flash_attn_interface import flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels.work.split_combine import Partials
from tests.kernels import stub as stubs


def partials(*shape: int, splits: int) -> Partials:
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return Partials.of(q, splits)


@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (7, 3, 64), (1, 1, 1, 8)])
@pytest.mark.parametrize("splits", [2, 5])
def test_the_parts_do_not_overlap_and_fill_what_is_asked_for(shape, splits):
    layout = partials(*shape, splits=splits)
    memory = torch.zeros(layout.bytes, dtype=torch.uint8)
    out, lse = layout.views(memory)
    *batch, tokens, heads, head_dim = shape
    assert out.shape == (splits, *shape) and lse.shape == (splits, *batch, heads, tokens)
    assert out.dtype == lse.dtype == torch.float32
    assert out.stride()[-3] == head_dim  # tokens of a head follow each other
    out.fill_(1.0)
    assert (lse == 0).all()
    lse.fill_(2.0)
    assert (out == 1).all()
    assert lse.data_ptr() - memory.data_ptr() == layout.lse_offset and layout.lse_offset % 256 == 0
    assert layout.lse_offset + lse.numel() * 4 == layout.bytes
    assert layout.lse_offset - out.numel() * 4 < 256


def test_sizes_past_32_bits():
    layout = partials(8, 131072, 64, 128, splits=5)
    assert layout.lse_offset == 4 * 5 * 8 * 131072 * 64 * 128 > 2**32
    assert layout.bytes == layout.lse_offset + 4 * 5 * 8 * 131072 * 64


def test_a_workspace_of_another_dtype_or_shape():
    layout = partials(1, 4, 2, 8, splits=2)
    memory = torch.zeros(8, 100)
    out, lse = layout.views(memory)
    assert (out.data_ptr(), lse.data_ptr()) == (memory.data_ptr(), memory.data_ptr() + layout.lse_offset)


NEEDED = 4096


@pytest.fixture
def stub(monkeypatch):
    """A kernel that needs a workspace of `NEEDED` bytes."""
    stub = stubs.install(monkeypatch)
    stub.workspace_bytes = NEEDED
    return stub


def inputs():
    return [torch.rand(1, 4, 2, 64).to(torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("workspace", [None, torch.empty(NEEDED // 4), torch.empty(2 * NEEDED, dtype=torch.uint8)])
def test_the_kernel_gets_a_workspace(stub, workspace):
    for _ in range(2):
        flydsl_flash_attn_func(*inputs(), num_kv_splits=2, workspace=workspace)
    assert len(stub.prepared) == 1  # whose it is does not matter to the plan
    for given in stub.workspaces:
        assert given.numel() * given.element_size() >= NEEDED
        assert workspace is None or given is workspace


def test_the_size_can_be_asked_for(stub):
    q, k, v = inputs()
    assert flydsl_flash_attn_workspace(q, k, v, False, num_kv_splits=3, return_lse=True) == NEEDED
    (request,) = stub.prepared
    assert (request.causal, request.num_kv_splits, request.return_lse) == (False, 3, True)
    assert not stub.launches
    assert flydsl_flash_attn_workspace(q[:, :0], k, v) == 0
    with pytest.raises(TypeError, match="nothing"):
        flydsl_flash_attn_workspace(q, k, v, nothing=1)
    with pytest.raises(ArgumentError, match="num_kv_splits must be from 0 to 64, got 65"):
        flydsl_flash_attn_workspace(q, k, v, num_kv_splits=65)


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (7, ArgumentTypeError, "workspace must be a torch.Tensor, got int"),
        (torch.empty(NEEDED - 1, dtype=torch.uint8), ArgumentError, "workspace has 4095 bytes, this call needs 4096"),
        (
            torch.empty(NEEDED)[::2],
            ArgumentError,
            r"workspace must be contiguous and 16-byte aligned, got strides \(2,",
        ),
        (torch.empty(NEEDED)[1:], ArgumentError, r"aligned, got strides \(1,\) at address 0x"),
        (torch.empty(NEEDED, device="meta"), ArgumentError, "workspace is on device 'meta'; accepted: cuda, cpu"),
    ],
    ids=["int", "small", "strided", "unaligned", "meta"],
)
def test_bad_workspace(stub, workspace, error, message):
    for _ in range(2):  # also when the plan is there
        with pytest.raises(error, match=message):
            flydsl_flash_attn_func(*inputs(), num_kv_splits=2, workspace=workspace)
    assert not stub.launches


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_workspace_shares_memory(stub, name):
    call = dict(zip("qkv", inputs())) | {"out": inputs()[0]}
    memory = torch.zeros(2 * NEEDED)
    call[name] = memory[64:].view(torch.bfloat16)[: call[name].numel()].view(call[name].shape)
    with pytest.raises(ArgumentError, match=f"workspace must not share memory with {name}; pass workspace=None or"):
        flydsl_flash_attn_func(**call, num_kv_splits=2, workspace=memory)


@pytest.fixture
def emulated(monkeypatch):
    """The generic kernel itself."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_KERNEL", "generic")


@pytest.mark.parametrize(
    "workspace", [7, torch.empty(100), torch.empty(1 << 20)[1:]], ids=["int", "small", "unaligned"]
)
def test_the_first_call_checks_too(emulated, workspace):
    q, k, v = (torch.zeros(1, 65, 2, 64, dtype=torch.float16) for _ in range(3))
    with pytest.raises(ArgumentError, match="flydsl_flash_attn_func: workspace "):
        flydsl_flash_attn_func(q, k, v, num_kv_splits=2, workspace=workspace)


def test_real_sizes(emulated):
    """Explicit splits need what `Partials` says, and 0 asks the device."""
    q, k, v = (torch.zeros(1, s, 2, 64, dtype=torch.float16) for s in (20, 900, 900))
    assert flydsl_flash_attn_workspace(q, k, v) == 0
    assert flydsl_flash_attn_workspace(q, k, v, num_kv_splits=3) == partials(1, 20, 2, 64, splits=3).bytes
    tiles = math.ceil(900 / 64)
    automatic = flydsl_flash_attn_workspace(q, k, v, num_kv_splits=0)
    assert automatic in {partials(1, 20, 2, 64, splits=n).bytes for n in range(2, tiles + 1)}
    many = torch.zeros(16, 2048, 16, 64, dtype=torch.float16)
    assert flydsl_flash_attn_workspace(many, many, many, num_kv_splits=0) == 0
