"""The kernel that appends and rotates, as it is traced for each kind of target, run in numpy.

No code generator takes part, and every access must be aligned as the kernel claims: a GPU faults where it is not.
"""

from __future__ import annotations

import secrets
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from fly.backends.target import target
from kernels.cache import kv_cache
from kernels.cache.kv_cache import THREADS, rotate_and_append
from kernels.work import steps
from tests.kernels.cache.kv_cache_cases import Case, Problem, failures
from tests.simulated import Machine, Program, flat
from tests.tracing import matrix, trace

NUMPY = {
    torch.bfloat16: ("bf16", ml_dtypes.bfloat16),
    torch.float16: ("f16", np.float16),
    torch.int32: ("i32", np.int32),
}


class Simulated:
    """Takes a bound launch's place: keeps the tensors of the call, and runs them in the simulator."""

    def __init__(self, arch: str):
        self.arch = arch

    def bind(self, kernel, grid, threads, operands, statics, compile):
        """As `fly.runtime.prepared.bind`."""
        assert kernel is rotate_and_append and threads == THREADS
        names = [None if x is None else NUMPY[x.dtype] for x in operands]
        specs = [None if x is None else matrix(name[0], x.dim()) for x, name in zip(operands, names)]
        program = Program.of(trace(kernel, *specs, arch=self.arch, block=threads, **statics), target(self.arch))
        arrays = [
            None if x is None else (x if x.dtype == torch.int32 else x.view(torch.int16)).numpy().view(name[1])
            for x, name in zip(operands, names)
        ]

        def launch(addresses: list[int], stream: int) -> None:
            assert addresses == [x.data_ptr() for x in operands if x is not None] and stream == 0
            Machine(program)(flat(*arrays), grid)

        return SimpleNamespace(launch=launch, entry=SimpleNamespace(current_stream=int, kernel=None))


@pytest.mark.parametrize("arch", ["gfx942", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2),
        Case(rotary_dim=16, new=3, page=16),
        Case(rotary_dim=64, interleaved=True, dtype=torch.float16, batch_idx=True),
        Case(head_dim=40, rotary_dim=32, interleaved=True, each_query=False, batch=2),
        Case(head_dim=128, head_dim_v=72, rotary_dim=128, dtype=torch.float16, batch=2),
    ],
    ids=str,
)
def test_append(arch, case, monkeypatch):
    seed = secrets.randbits(31)
    monkeypatch.setattr(kv_cache, "_plans", {})
    monkeypatch.setattr(steps, "bind", Simulated(arch).bind)
    assert failures(Problem(case, seed)) == [], f"seed {seed}"
