import pytest

from fly.runtime import launch

from .fakes import Compiler, Device


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def devices(monkeypatch) -> dict:
    """Fake devices by device key, made when asked for, in place of real ones."""
    made: dict = {}

    def device_for(key):
        return made.setdefault(key, Device("gfx950" if key[0] == "cpu" else "sm_90a"))

    monkeypatch.setattr(launch, "device_for", device_for)
    return made


@pytest.fixture(autouse=True)
def cuda_ordinals(monkeypatch) -> None:
    """`CudaArray` addresses tell their device."""
    monkeypatch.setattr("fly.runtime.cuda.ordinal_of", lambda address: address >> 40)


@pytest.fixture
def device(devices) -> Device:
    """The fake device of host memory."""
    return devices.setdefault(("cpu", 0), Device())
