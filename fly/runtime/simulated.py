"""The simulated NVIDIA GPU: what CPU tensors run on where `FLY_ARCH` names one of NVIDIA's architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fly import config
from fly.backends.artefact import Artefact
from fly.backends.target import target
from fly.errors import DeviceError
from fly.lang.signature import TensorMapSpec
from fly.runtime.compile import STAGE, TRACED
from fly.runtime.device import Allocation, Dim3, traced
from fly.runtime.emulated import Progress
from fly.runtime.limits import CheckedSizes, Limits
from fly.runtime.log import HostMemory
from fly.runtime.packing import ArgumentSlot, packer
from fly.simulator import Launch, Program, Region
from fly.simulator.tensor_map import TensorMap


class SimulatedDevice:
    """A simulated GPU of an architecture; kernels have finished when `launch` returns.

    It runs what a kernel is traced to and needs neither LLVM nor the NVIDIA driver. `seed` chooses the schedules of
    launches; None: `FLY_SIMULATOR_SEED` does. `last`: what the last one executed, see `fly.simulator.Launch.counts`.
    """

    needs_allocations = True

    def __init__(self, arch: str):
        self.target, self.build = arch, traced(arch)
        self.compute_units = target(arch).compute_units
        self.limits = Limits(
            device=f"the simulated GPU ({arch})",
            grid=(2**31 - 1, 65535, 65535),
            block=(1024, 1024, 64),
            block_threads=1024,
            shared_bytes=target(arch).shared_bytes,
        )
        self.seed: int | None = None
        self.last: Mapping[str, int] = {}

    def load(self, artefact: Artefact) -> SimulatedKernel:
        """Read an artefact's module.

        Raises:
            DeviceError: the artefact is machine code.
        """
        return SimulatedKernel(self, artefact)

    def is_capturing(self, stream: int) -> bool:
        """See `fly.runtime.device.Device`: there are no graphs."""
        return False

    def log_memory(self, nbytes: int) -> HostMemory:
        """See `fly.runtime.device.Device`."""
        return HostMemory(nbytes)

    def encode_tensor_map(
        self, spec: TensorMapSpec, element_bytes: int, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        """The 128 bytes of a map; sizes in elements and strides (of all dimensions but the last) in bytes."""
        return TensorMap(address, element_bytes, tuple(shape), tuple(strides), spec.box, spec.swizzle).pack()


class SimulatedKernel:
    """A kernel that was read; see `fly.runtime.device.LoadedKernel`."""

    def __init__(self, device: SimulatedDevice, artefact: Artefact):
        if artefact.metadata.get(STAGE) != TRACED:
            raise DeviceError(
                f"{artefact.kernel}: compiled to machine code of {artefact.target}, and the simulator runs what "
                "kernels are traced to; launch the kernel itself"
            )
        self.device, self.artefact = device, artefact
        self.program = Program.parse(artefact.binary, target(artefact.target))
        self._layout = packer(artefact.fields)
        self._checked = CheckedSizes(device.limits)

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        arguments: ArgumentSlot,
        stream: int = 0,
        allocations: Sequence[Allocation] = (),
    ) -> None:
        """Run the kernel; `stream` has no meaning here.

        Raises:
            LaunchError: a grid or block that NVIDIA GPUs do not take.
            SimulatorError: an operation that the simulator does not know.
            SimulatorReportError: the checks found something.
            ConfigError: `FLY_SIMULATOR_SEED` is no number.
        """
        if (grid, block) not in self._checked:
            self._checked.check(self.artefact.kernel, grid, block)
        values = [
            TensorMap.unpack(value) if field.kind == "map" else value
            for field, value in zip(self.artefact.fields, self._layout.unpack(arguments.view), strict=True)
        ]
        regions = [Region(a.address, a.nbytes, a.name) for a in allocations]
        seed = config.SIMULATOR_SEED.get() if self.device.seed is None else self.device.seed
        with Progress(grid[0] * grid[1] * grid[2], self.artefact.kernel, "simulating") as progress:
            launch = Launch(self.program, grid, regions, values, seed, progress)
            launch.run()
        self.device.last = launch.counts
