"""What tests on the simulated Hopper GPU share; `simulated` is a fixture where it is imported."""

from __future__ import annotations

import secrets

import pytest
import torch

from fly import config
from fly.runtime.device import CPU, device_for
from fly.runtime.launch import Launcher
from kernels import flash_attn_interface, flash_attn_sm90, flash_attn_sm90_fp8, flash_attn_sm90_fp8_cache
from kernels.cache import kv_cache
from kernels.sm90 import counters as tile_counters
from kernels.sm90 import transpose_values
from kernels.work import split_combine

KERNELS = (
    flash_attn_sm90.flash_attn_sm90,
    flash_attn_sm90_fp8.flash_attn_sm90_fp8,
    flash_attn_sm90_fp8_cache.flash_attn_sm90_fp8_cache,
    transpose_values.transpose_values,
    split_combine.split_combine,
)
SEEDS = range(5)  # schedules
UNITS = 3  # multiprocessors: few, so that blocks take several tiles


@pytest.fixture(autouse=True)
def simulated(request, monkeypatch, seed):
    """CPU tensors belong to a Hopper GPU with `UNITS`, and run on the kernel that the module names `KERNEL`.

    The schedule is the test's parameter `schedule`, or any of `SEEDS`.
    """
    torch.manual_seed(seed)
    params = getattr(request.node, "callspec", None)
    schedule = params.params.get("schedule") if params else None
    monkeypatch.setenv(config.ARCH.name, "sm_90a")
    monkeypatch.setenv(config.KERNEL.name, request.module.KERNEL)
    monkeypatch.setenv(config.SIMULATOR_SEED.name, str(seed % len(SEEDS) if schedule is None else schedule))
    monkeypatch.setattr(device_for(CPU), "compute_units", UNITS)
    monkeypatch.setattr(tile_counters, "_counters", {})  # a bug may leave them in any state
    for kernel in KERNELS:  # builds that no other test has take memory
        monkeypatch.setattr(kernel, "launcher", Launcher(kernel), raising=False)
    for module in (flash_attn_interface, kv_cache):  # plans of other builds
        monkeypatch.setattr(module, "_plans", {})


def in_every_schedule(call):
    """What a call gives in order, with copies at once, and with late ones or by chance; the same bit for bit.

    The checks find what is missing in whatever schedule. These are for results that would depend on it: half of the
    tests have late copies, and chance is another one in every test and run.
    """
    device, results = device_for(CPU), {}
    try:
        for device.seed in (0, secrets.choice((1, 2 + secrets.randbelow(1 << 16)))):
            results[device.seed] = call()
    finally:
        device.seed = None
    for schedule, (out, lse) in results.items():
        same = torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
        assert same, f"schedule {schedule} differs from schedule 0"
    return results[0]
