"""CPU tensors of these tests belong to a simulated Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from fly import config


@pytest.fixture(autouse=True)
def seed(monkeypatch) -> int:
    """The seed of the test's input, which is in the failure's message; and the simulated GPU."""
    monkeypatch.setenv(config.ARCH.name, "sm_90a")
    monkeypatch.delenv(config.SIMULATOR_SEED.name, raising=False)
    seed = torch.seed() % 2**32
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")
    return seed
