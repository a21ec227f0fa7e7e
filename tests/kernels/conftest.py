"""Fixtures of the kernels' tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
import torch

from fly import config


@pytest.fixture
def seed() -> int:
    """Fresh for every test; part of every failure's message."""
    return secrets.randbits(31)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """Of the test's seed, for tensors on a GPU."""
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`emulate(arch, kernel)`: CPU tensors belong to that emulated GPU, with checks, and no other kernel is taken.

    "generic" is both passes' kernel then.
    """

    def take(arch: str, kernel: str) -> None:
        monkeypatch.setenv(config.ARCH.name, arch)
        monkeypatch.setenv(config.EMULATOR_CHECKS.name, "1")
        monkeypatch.setenv(config.KERNEL.name, kernel)
        monkeypatch.setenv(config.BACKWARD_KERNEL.name, kernel if kernel == "generic" else "")

    return take


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get whatever is on the device, as on a GPU: that they stay inside of the tensors shows only so."""
    monkeypatch.setenv(config.CHECK_INPUTS.name, "0")
