"""What tests on both emulated GPUs and on the gfx950 kernel share; `emulated` is a fixture where it is imported."""

from __future__ import annotations

import pytest
import torch

TUNED = "gfx950 tuned"  # the gfx950 kernel; else the generic one
every_kernel = pytest.mark.parametrize("arch", ["gfx942", TUNED])


@pytest.fixture(autouse=True)
def emulated(request, emulate, seed):
    """The emulated GPU and the kernel of a test's `arch`, with checks; seeds torch's generator."""
    torch.manual_seed(seed)
    params = getattr(request.node, "callspec", None)
    arch, _, tuned = (params.params.get("arch", "gfx950") if params else "gfx950").partition(" ")
    emulate(arch, arch if tuned else "generic")


def random(*shape):
    return torch.randn(*shape).bfloat16()


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)
