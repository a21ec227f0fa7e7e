"""A Hopper GPU for tensors in host memory, which launches nothing: everything up to the driver is the real thing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fly import config
from fly.backends.artefact import Artefact
from fly.runtime import device, prepared, tensor_map
from fly.runtime.cuda import CudaDevice, CudaKernel
from fly.runtime.launch import Compile, Launcher
from kernels import flash_attn_interface, kv_cache, sm90_launch
from tests.runtime.fake_cuda import FakeDriver


class StubHopper(CudaDevice):
    """Records what is loaded; its `driver` records what is launched, without reading arguments."""

    def __init__(self) -> None:
        super().__init__(0, FakeDriver(parameters=()))
        self.loaded: list[Artefact] = []

    def load(self, artefact: Artefact) -> CudaKernel:
        self.loaded.append(artefact)
        return super().load(artefact)


def install(monkeypatch: pytest.MonkeyPatch, compile: Compile | None = None) -> StubHopper:
    """Have CPU tensors belong to a stub, with no plan kept from before; `compile` in place of the compiler, if given.

    Launchers of kernels are others than those of the process, so that nothing that is built here is used again.
    """
    stub = StubHopper()
    launchers: dict[str, Launcher] = {}

    class StubLauncher(Launcher):
        def enter(self, block, args, statics, compiler, key=None):
            return super().enter(block, args, statics, compile or compiler, key)

    def launcher_of(kernel):
        return launchers.setdefault(kernel.name, StubLauncher(kernel))

    counters = SimpleNamespace(example=torch.zeros(2, dtype=torch.int32), address=lambda stream: 4096)
    monkeypatch.setitem(device._devices, ("cpu", config.ARCH.get()), stub)
    monkeypatch.setattr(tensor_map, "CPU", None)
    monkeypatch.setattr(prepared, "launcher_of", launcher_of)
    monkeypatch.setattr(sm90_launch, "counters_of", lambda device, arrivals: counters)
    for module in (flash_attn_interface, kv_cache):
        monkeypatch.setattr(module, "_plans", {})
    return stub
