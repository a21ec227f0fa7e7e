"""A Hopper GPU for tensors in host memory, which launches nothing: everything up to the driver is the real thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fly
from fly import config
from fly.backends.artefact import Artefact
from fly.runtime import device, prepared, tensor_map
from fly.runtime.cuda import CudaDevice, CudaKernel
from fly.runtime.launch import Compile, Launcher
from kernels import flash_attn_interface, flash_attn_sm90, flash_attn_sm90_fp8
from kernels.cache import kv_cache
from kernels.sm90 import launch as sm90_launch
from kernels.work import steps
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


UNITS = 132  # multiprocessors of an H200


@dataclass
class Recorded:
    """What `prepare` of a Hopper kernel makes, in order.

    `maps`: (shape, box) of tensor maps; `bound`: what `bind` gets; `launched`: (kernel, addresses, stream) of what
    that gives, once it is run; `arrivals`: for how many tiles counters of parts are asked for.
    """

    maps: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    bound: list[tuple[Any, ...]] = field(default_factory=list)
    launched: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)


def record(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Have `prepare` of the Hopper kernels record what it would compile and launch on a device with `UNITS`.

    Counters have "counters" for an example, and "counters of STREAM" for an address.
    """
    made = Recorded()

    def bind(*arguments: Any):
        made.bound.append(arguments)
        launch = lambda addresses, stream: made.launched.append((arguments[0].name, tuple(addresses), stream))  # noqa: E731
        return SimpleNamespace(
            launch=launch, entry=SimpleNamespace(current_stream=lambda: "current stream", kernel=None)
        )

    def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int) -> str:
        made.maps.append((tuple(tensor.shape), box))
        return "map"

    def counters_of(device: Any, arrivals: int) -> SimpleNamespace:
        made.arrivals.append(arrivals)
        return SimpleNamespace(example="counters", address=lambda stream: f"counters of {stream}")

    monkeypatch.setattr(fly, "tensor_map", tensor_map)
    monkeypatch.setattr(sm90_launch, "counters_of", counters_of)
    monkeypatch.setattr(steps, "bind", bind)
    for module in (flash_attn_sm90, flash_attn_sm90_fp8, sm90_launch):
        monkeypatch.setattr(module, "device_of", lambda device: SimpleNamespace(compute_units=UNITS))
    return made
