"""The targets: what each architecture offers, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from fly.errors import AtomError, TargetError
from fly.lang.atoms import MatrixLoad, MmaAtom


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    `shared_bytes` is the most shared memory one block can have, `async_copy_bytes` the widths of asynchronous
    global-to-shared copies to any address, `direct_copy_bytes` of those whose lanes fill a run,
    `matrix_loads` the shared-memory loads in order of
    preference, `lane_swaps` the bits of a lane's index across which one instruction swaps two registers' halves,
    `registers` the 32-bit vector registers a thread can have. `xcds`: dies, each with a level-2 cache,
    that blocks are dealt to in turn. `hopper`: it has bulk copies through tensor maps (TMA), mbarriers and warpgroup
    matrix products (WGMMA). `float8`: the 8-bit floats that it has instructions to convert f32 to;
    `float8_to_f32`: the same of the way back. `mma_atoms` and `matrix_loads` are for 16-bit
    operands, `byte_atoms` and `byte_loads` for 8-bit ones.
    """

    arch: str
    backend: str  # "rocdl" | "nvvm"
    wave_size: int
    shared_bytes: int
    registers: int
    compute_units: int
    mma_atoms: tuple[MmaAtom, ...] = field(repr=False)
    matrix_loads: tuple[MatrixLoad, ...] = field(repr=False)
    async_copy_bytes: tuple[int, ...] = ()
    direct_copy_bytes: tuple[int, ...] = ()
    lane_swaps: tuple[int, ...] = ()
    max_threads: int = 1024
    xcds: int = 1
    hopper: bool = False
    float8: tuple[str, ...] = ()
    float8_to_f32: tuple[str, ...] = ()
    byte_atoms: tuple[MmaAtom, ...] = field(default=(), repr=False)
    byte_loads: tuple[MatrixLoad, ...] = field(default=(), repr=False)

    def mma(self, dtype: str, shape: tuple[int, int, int] | None = None) -> MmaAtom:
        """The preferred matrix instruction for operands of `dtype`, or the one of a shape (m, n, k).

        Raises:
            AtomError: there is none.
        """
        for atom in (*self.mma_atoms, *self.byte_atoms):
            if atom.dtype == dtype and shape in (None, (atom.m, atom.n, atom.k)):
                return atom
        offered = ", ".join(f"{a.m}x{a.n}x{a.k} {a.dtype}" for a in (*self.mma_atoms, *self.byte_atoms))
        wanted = dtype if shape is None else f"{'x'.join(map(str, shape))} {dtype}"
        raise AtomError(f"{self.arch} has no matrix instruction for {wanted}; it has {offered}")

    def atom(self, name: str) -> MmaAtom:
        """A matrix instruction by name."""
        return next(atom for atom in (*self.mma_atoms, *self.byte_atoms) if atom.name == name)

    def matrix_load(self, name: str) -> MatrixLoad:
        """A shared-memory load by name."""
        return next(load for load in (*self.matrix_loads, *self.byte_loads) if load.name == name)


# 8-bit floats of the Open Compute Project, and gfx942's (CDNA3 ISA, "FP8": bias 8, no -0, no infinity)
_OCP, _FNUZ = ("f8e4m3", "f8e5m2"), ("f8e4m3fnuz",)


def _registry() -> dict[str, Target]:
    from fly.backends.nvvm import atoms as nvvm
    from fly.backends.rocdl import atoms as rocdl

    def amd(
        arch: str,
        shared_kib: int,
        units: int,
        atoms: tuple[MmaAtom, ...],
        loads: tuple[MatrixLoad, ...],
        direct: tuple[int, ...],
        lane_swaps: tuple[int, ...] = (),
        float8: tuple[str, ...] = (),
        float8_to_f32: tuple[str, ...] = (),
        byte_atoms: tuple[MmaAtom, ...] = (),
        byte_loads: tuple[MatrixLoad, ...] = (),
    ) -> Target:
        return Target(
            arch,
            "rocdl",
            64,
            shared_kib << 10,
            512,
            units,
            atoms,
            loads,
            direct_copy_bytes=direct,
            lane_swaps=lane_swaps,
            xcds=8,
            float8=float8,
            float8_to_f32=float8_to_f32,
            byte_atoms=byte_atoms,
            byte_loads=byte_loads,
        )

    def nvidia(arch: str, shared_kib: int, units: int, hopper: bool = False, float8: tuple[str, ...] = ()) -> Target:
        return Target(
            arch,
            "nvvm",
            32,
            shared_kib << 10,
            255,
            units,
            nvvm.MMA,
            nvvm.LOADS,
            async_copy_bytes=(4, 8, 16),
            hopper=hopper,
            float8=float8,
            float8_to_f32=float8,
        )

    targets = (
        amd(
            "gfx942",
            64,
            304,
            rocdl.GFX942_MMA,
            rocdl.GFX942_LOADS,
            (4,),
            byte_atoms=rocdl.GFX942_BYTE_MMA,
            byte_loads=rocdl.GFX942_BYTE_LOADS,
            float8=_FNUZ,
            float8_to_f32=_FNUZ,
        ),
        amd(
            "gfx950",
            160,
            256,
            rocdl.GFX950_MMA,
            rocdl.GFX950_LOADS,
            (4, 16),
            lane_swaps=(16, 32),
            byte_atoms=rocdl.GFX950_BYTE_MMA,
            byte_loads=rocdl.GFX950_BYTE_LOADS,
            float8_to_f32=_OCP,
        ),
        # compute units of the largest part; shared memory per block from the CUDA programming guide
        nvidia("sm_80", 163, 108),
        nvidia("sm_86", 99, 84),
        nvidia("sm_89", 99, 142, float8=_OCP),
        nvidia("sm_90a", 227, 132, hopper=True, float8=_OCP),
    )
    return {t.arch: t for t in targets}


_TARGETS: dict[str, Target] = {}


def target(arch: str) -> Target:
    """Look a target up by architecture name.

    Raises:
        TargetError: unknown architecture.
    """
    if not _TARGETS:
        _TARGETS.update(_registry())
    if arch not in _TARGETS:
        raise TargetError(f"unknown target {arch!r}; expected one of {', '.join(_TARGETS)}")
    return _TARGETS[arch]


def targets() -> tuple[Target, ...]:
    """All targets."""
    target("gfx950")
    return tuple(_TARGETS.values())


_CAPABILITIES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a"}


def arch_for_capability(major: int, minor: int) -> str:
    """The architecture to compile for on an NVIDIA device of a compute capability.

    Raises:
        TargetError: older than 8.0. Newer devices run sm_80 code through the driver's compiler.
    """
    if (major, minor) < (8, 0):
        raise TargetError(f"compute capability {major}.{minor} is not supported; 8.0 or newer is")
    return _CAPABILITIES.get((major, minor), "sm_80")
