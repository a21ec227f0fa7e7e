"""Memory for results: what is asked for, on the device that it is for, whichever way torch has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.call import memory
from kernels.call.memory import allocator, contiguous, memory_of

FORMS = (torch.empty(2, 3, 8, dtype=torch.bfloat16), torch.empty(3, 2, 4).transpose(0, 1), torch.empty(0, 4))


@pytest.mark.parametrize("known", [True, False], ids=["torch's own", "torch.empty_strided"])
@pytest.mark.parametrize("like", FORMS, ids=lambda x: str(tuple(x.shape)))
def test_memory_is_as_asked_for(like, known, monkeypatch):
    if not known:
        monkeypatch.setattr(memory, "_OF_COMPILER", None)
    made = allocator(like.device)(*memory_of(like))
    assert (made.shape, made.stride(), made.dtype, made.device) == (
        like.shape,
        like.stride(),
        like.dtype,
        like.device,
    )
    assert (not made.requires_grad and made.data_ptr() != like.data_ptr()) or not made.numel()


def test_this_torch_has_functions_of_its_own():
    assert allocator(torch.device("cpu")) is torch._C._dynamo.guards._empty_strided_cpu


def test_contiguous_memory():
    assert contiguous((5, 2, 8), torch.float16) == ((5, 2, 8), (16, 8, 1), torch.float16)


@pytest.mark.parametrize("devices, current, way", [(1, 1, "own"), (2, 1, "own"), (2, 0, "torch's")])
def test_one_of_several_gpus_is_the_current_one_or_is_named(devices, current, way, monkeypatch):
    made = []
    own = lambda *given: made.append(("own", *given))  # noqa: E731

    def by_torch(sizes, strides, *, dtype, device):
        made.append(("torch's", sizes, strides, dtype))
        assert device == torch.device("cuda", 1)

    monkeypatch.setattr(memory, "_OF_COMPILER", SimpleNamespace(_empty_strided_cuda=own))
    monkeypatch.setattr(torch, "empty_strided", by_torch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    wanted = (4, 8), (8, 1), torch.bfloat16
    allocator(torch.device("cuda", 1))(*wanted)
    assert made == [(way, *wanted)]
