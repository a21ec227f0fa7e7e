"""A sample of `tests/kernels/fuzz_calls.py`: random calls of the public functions, fresh in every run."""

from __future__ import annotations

import pytest
import torch

from fly.runtime.device import device_of
from tests.kernels.fuzz_calls import CALLS, Setting, mistakes, several

BUILDS, CALLS_OF_A_BUILD = 5, 3
MISTAKES = 300


def failed(outcomes, arguments):
    """What failed, with the command that makes each call again."""
    command = "python tests/kernels/fuzz_calls.py"
    return "\n".join(f"{command} {arguments} {x.index}\n{x.what}" for x in outcomes if x.verdict != "right")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("group", range(BUILDS))
def test_random_valid_calls_are_right(arch, group, seed):
    indices = [group * CALLS + i for i in range(CALLS_OF_A_BUILD)]
    outcomes = several(Setting(seed, arch, most=100), indices)
    found = failed(outcomes, f"--seed {seed} --arch {arch} --most 100 --only")
    assert not found, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("group", range(20))
def test_random_valid_calls_are_right_on_a_gpu(group, seed):
    setting = Setting(seed, device_of(torch.device("cuda")).target, "cuda", most=1500)
    outcomes = several(setting, range(group * CALLS, (group + 1) * CALLS))
    found = failed(outcomes, f"--seed {seed} --device cuda --most 1500 --only")
    assert not found, found


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_random_mistakes_are_named(arch, seed):
    """Errors are fly's, start with the function that was called, and name an argument that the caller passed."""
    found = failed(mistakes(Setting(seed, arch), range(MISTAKES)), f"--seed {seed} --arch {arch} --only-invalid")
    assert not found, found
