"""One kernel, ready to run: compiled instructions, the launch's memory, LDS and scratch, and the initial wave
state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.control import CONTROL, compile_control
from fly.emulator.decode import EXEC, Instruction, decode_program
from fly.emulator.elf import CodeObject
from fly.emulator.lanes import LANE_OPS, compile_lane
from fly.emulator.lds import compile_ds
from fly.emulator.memory import AccessError, Memory, Region
from fly.emulator.mfma import compile_mfma
from fly.emulator.operands import unknown
from fly.emulator.salu import compile_sop1, compile_sop2, compile_sopc, compile_sopk
from fly.emulator.state import SGPR_PAIRS, Group
from fly.emulator.valu import compile_vop
from fly.emulator.vmem import compile_flat, compile_mubuf, compile_smem
from fly.emulator.vop3p import compile_vop3p
from fly.emulator.vopc import compile_vopc
from fly.errors import EmulatorError, LaunchError

if TYPE_CHECKING:
    from fly.emulator.footprint import Footprint

LDS_LIMIT = {"gfx942": 65536, "gfx950": 163840}
_UNSET = np.uint32(0xFFC0DEAD)  # registers nobody wrote: a NaN as a float, far out of range as an address

# (instruction, LDS byte addresses uint32 (waves, 64), bytes a lane, active lanes or None for all, whether it writes)
LdsObserver = Callable[[Instruction, np.ndarray, int, "np.ndarray | None", bool], None]

_COMPILERS: dict[str, Callable[[Instruction, Any], Callable[[Group], None]]] = {
    "SOP1": compile_sop1, "SOP2": compile_sop2, "SOPC": compile_sopc, "SOPK": compile_sopk, "SMEM": compile_smem,
    "DS": compile_ds, "FLAT": compile_flat, "GLOBAL": compile_flat, "SCRATCH": compile_flat, "MUBUF": compile_mubuf,
    "VOP3P": compile_vop3p, "VOP3P_MFMA": compile_mfma,
    **dict.fromkeys(("VOP1", "VOP2", "VOP3", "VOP3SD", "VOP1_SDWA", "VOP2_SDWA", "VOP1_DPP16"), compile_vop),
    **dict.fromkeys(("VOP2_DPP16", "VOP2_SDWA_SDST"), compile_vop),
    **dict.fromkeys(("VOPC", "VOPC_SDWA_SDST", "VOP3_SDST", "VOPC_SDWA"), compile_vopc),
}  # fmt: skip


def compile_instruction(inst: Instruction, machine: Machine) -> Callable[[Group], None]:
    """The function that executes a non-control instruction on a group.

    Raises:
        EmulatorError: the instruction is not implemented; names it, its address and the kernel.
    """
    if inst.name in LANE_OPS:
        return compile_lane(inst, machine)
    if inst.form == "VOP3P_MFMA" and inst.name.startswith("v_accvgpr"):
        return compile_vop3p(inst, machine)
    if inst.form == "VOP3" and inst.name.startswith("v_cmp"):
        return compile_vopc(inst, machine)
    compiler = _COMPILERS.get(inst.form)
    if compiler is None:
        raise unknown(inst, machine)
    return compiler(inst, machine)


class Machine:
    """A kernel of a code object on an emulated architecture.

    Attributes that change from launch to launch: `memory`, `grid`, `block`, LDS and scratch contents, `checker`,
    `lds_observer`.
    """

    # as `Executing` declares them
    apertures: Mapping[int, int]
    index: Mapping[int, int]
    grid: Sequence[int]
    lds_views: Mapping[int, np.ndarray]
    scratch_views: Mapping[int, np.ndarray]
    footprints: MutableMapping[int, Footprint]

    def __init__(self, code: CodeObject, kernel: str, arch: str | None = None):
        if kernel not in code.kernels:
            raise EmulatorError(f"kernel {kernel!r} is not in the code object; it has {sorted(code.kernels)}")
        if arch is not None and arch != code.arch:
            raise EmulatorError(f"code object is for {code.arch}, the emulated device is {arch}")
        self.code, self.kernel, self.arch = code, code.kernels[kernel], code.arch
        self.rows = self.kernel.vgprs
        self.accum_offset = min(self.kernel.accum_offset, self.rows)
        # the apertures of flat addressing: shared base and limit, private base and limit
        self.apertures = {235: 1 << 56, 236: (1 << 56) | 0xFFFFFFFF, 237: 2 << 56, 238: (2 << 56) | 0xFFFFFFFF}
        self.checker: Any = None
        self.lds_observer: LdsObserver | None = None
        self.executed = 0
        self._decode()
        self.runs: list[Callable[[Group], None] | None] = [None] * len(self.instructions)
        self.footprints = {}  # by address
        self.memory = Memory([])

    def _decode(self) -> None:
        entry = self.kernel.entry + (256 if self.kernel.preload & 127 else 0)
        end = self.code.code_end.get(self.kernel.name, len(self.code.image))
        self.instructions = decode_program(self.code.image.tobytes(), self.kernel.entry, end)
        self.index = {inst.address: i for i, inst in enumerate(self.instructions)}
        if entry not in self.index:
            raise EmulatorError(f"{self.kernel.name}: entry {entry:#x} is not an instruction boundary")
        self.entry = self.index[entry]

    def hardware_register(self, register: int, inst: Instruction) -> int:
        """Value of a hardware register other than MODE: HW_ID, XCC_ID and the shader's own state read as 0."""
        if register in (2, 3, 4, 5, 6, 7, 15, 20, 21, 22):
            return 0
        raise unknown(inst, self, f"reads hardware register {register}, which is not modelled")

    def run_of(self, i: int) -> Callable[[Group], None]:
        """The compiled function of instruction i, compiled when first needed."""
        run = self.runs[i]
        if run is None:
            inst = self.instructions[i]
            run = compile_control(inst, self) if inst.name in CONTROL else compile_instruction(inst, self)
            self.runs[i] = run
        return run

    # ---- a launch ----

    def prepare(
        self, grid: Sequence[int], block: Sequence[int], kernarg: bytes, regions: list[Region], dynamic_lds: int = 0
    ) -> None:
        """Set up a launch of `grid` workgroups of `block` work-items.

        Raises:
            LaunchError: the block or the LDS does not fit the architecture.
        """
        self.grid, self.block = (tuple([*x, 1, 1][:3]) for x in (grid, block))
        threads = self.block[0] * self.block[1] * self.block[2]
        if not 0 < threads <= 1024:
            raise LaunchError(f"block {self.block} has {threads} work-items; a workgroup has 1 to 1024")
        self.waves_per_group = (threads + 63) // 64
        self.lds_bytes = self.kernel.lds_bytes + dynamic_lds
        if self.lds_bytes > LDS_LIMIT[self.arch]:
            raise LaunchError(f"{self.lds_bytes} bytes of LDS; {self.arch} has {LDS_LIMIT[self.arch]} a workgroup")
        self.lds_stride = (self.lds_bytes + 127) // 128 * 128
        self.scratch_bytes = (self.kernel.scratch_bytes + 15) // 16 * 16
        self._arguments(kernarg)
        own = [
            Region(self.code.base, len(self.code.image), "code object"),
            Region(self.kernarg.ctypes.data, self.kernarg.nbytes, "kernel arguments"),
            Region(self.packet.ctypes.data, self.packet.nbytes, "dispatch packet"),
        ]
        self.memory = Memory(own + regions)

    def _arguments(self, packed: bytes) -> None:
        """Copy the explicit arguments and fill the hidden ones that the metadata names."""
        # the segment is 16-byte aligned, and LLVM widens scalar loads over its padding
        size = -(-max(self.kernel.kernarg_bytes, len(packed)) // 16) * 16
        self._kernarg_backing = np.zeros(size + 64, np.uint8)
        start = -self._kernarg_backing.ctypes.data % 64
        self.kernarg = self._kernarg_backing[start : start + size]
        self.kernarg[: len(packed)] = np.frombuffer(bytes(packed), np.uint8)
        hidden: dict[str, tuple[str, int]] = {"hidden_grid_dims": ("<H", sum(g > 1 for g in self.grid) or 1)}
        for i, axis in enumerate("xyz"):
            hidden[f"hidden_block_count_{axis}"] = ("<I", self.grid[i])
            hidden[f"hidden_group_size_{axis}"] = ("<H", self.block[i])
            hidden[f"hidden_remainder_{axis}"] = ("<H", 0)
            hidden[f"hidden_global_offset_{axis}"] = ("<Q", 0)
        hidden["hidden_dynamic_lds_size"] = ("<I", self.lds_bytes - self.kernel.lds_bytes)
        hidden["hidden_shared_base"] = ("<I", self.apertures[235] >> 32)
        hidden["hidden_private_base"] = ("<I", self.apertures[237] >> 32)
        for arg in self.kernel.args:
            if arg[".value_kind"] in hidden:
                form, value = hidden[arg[".value_kind"]]
                raw = struct.pack(form, value)
                self.kernarg[arg[".offset"] : arg[".offset"] + len(raw)] = np.frombuffer(raw, np.uint8)
        work = [g * b for g, b in zip(self.grid, self.block)]
        packet = struct.pack(
            "<HHHHHHIIIIIQQQQ", 0, 3, *self.block, 0, *work, self.scratch_bytes, self.lds_bytes, 0,
            self.kernarg.ctypes.data, 0, 0,
        )  # fmt: skip
        self.packet = np.frombuffer(packet, np.uint8).copy()

    def start_batch(self, first: int, count: int) -> Group:
        """State of workgroups [first, first + count) at the kernel's entry; allocates their LDS and scratch."""
        waves = self.waves_per_group
        # waves of equal rank lie together, so that kernels that give ranks different roles split without copying
        wave, wg = (x.reshape(-1) for x in np.meshgrid(np.arange(waves), np.arange(count), indexing="ij"))
        total = waves * count
        lds = np.full(count * self.lds_stride // 4 + 8, _UNSET, np.uint32)
        self.lds_address = lds.ctypes.data
        self.lds_views = {1: lds.view(np.uint8), 2: lds.view(np.uint16), 4: lds, 8: lds.view(np.uint64)}
        scratch = np.full(total * 64 * self.scratch_bytes // 4 + 8, _UNSET, np.uint32)
        self.scratch_views = {1: scratch.view(np.uint8), 2: scratch.view(np.uint16), 4: scratch}
        v = np.full((self.rows, total, 64), _UNSET, np.uint32)
        s = np.full((SGPR_PAIRS, total, 2), _UNSET, np.uint32)
        self.first_group = first
        written = self._scalars(s, wg + first)
        thread = (wave[:, None] * 64 + np.arange(64)[None, :]).astype(np.uint32)
        bx, by = self.block[0], self.block[0] * self.block[1]
        v[0] = thread % bx | (thread % by // bx) << 10 | (thread // by) << 20
        active = thread < np.uint32(by * self.block[2])
        s[EXEC >> 1] = np.packbits(active, axis=-1, bitorder="little").view(np.uint32)
        group = Group(self, v, s, wg, wave)
        group.set_mode(self.kernel.float_mode)
        group.pc = self.entry
        group.written = written | 1
        return group

    def _scalars(self, s: np.ndarray, wg: np.ndarray) -> int:
        """Initial SGPRs (AMDGPU backend, "Initial Kernel Execution State"); returns the mask of those set."""
        k, values = self.kernel, []
        properties = k.properties
        if properties & 1:
            values += [0, 0, 0, 0]
        for bit, address in ((2, self.packet.ctypes.data), (4, 0), (8, self.kernarg.ctypes.data), (16, 0), (32, 0)):
            if properties & bit:
                values += [address & 0xFFFFFFFF, address >> 32]
        if properties & 64:
            values.append(self.scratch_bytes)
        preload, offset = k.preload & 127, k.preload >> 7
        words = self.kernarg[: self.kernarg.nbytes // 4 * 4].view(np.uint32)
        values += [int(x) for x in words[offset : offset + preload]]
        values += [0] * (k.user_sgprs - len(values))
        columns: list[Any] = list(values)
        gx, gy = self.grid[0], self.grid[1]
        for bit, value in ((7, wg % gx), (8, wg // gx % gy), (9, wg // (gx * gy))):
            if k.rsrc2 >> bit & 1:
                columns.append(value)
        if k.rsrc2 >> 10 & 1:
            columns.append(0)
        for i, value in enumerate(columns):
            s[i >> 1, :, i & 1] = value
        mask = (1 << len(columns)) - 1
        return (mask | 0b11 << EXEC) << 512

    # ---- faults ----

    def fault(self, g: Group, inst: Instruction, kind: str, lanes: np.ndarray | None, message: str) -> EmulatorError:
        """The error that stops a run: kernel, instruction, first wave and lane concerned."""
        from fly.emulator.report import describe

        return EmulatorError(describe(self, g, inst, kind, lanes, message))

    def access_fault(self, g: Group, inst: Instruction, error: AccessError) -> EmulatorError:
        """An out-of-bounds access as an error with its place."""
        return self.fault(g, inst, "out-of-bounds", error.lanes, str(error))

    def report_lds_bounds(self, g: Group, inst: Instruction, address: np.ndarray, bad: np.ndarray, size: int) -> None:
        """LDS access beyond the workgroup's allocation: reported when checks are on, as hardware does otherwise."""
        if self.checker is not None:
            first = int(np.broadcast_to(address, bad.shape)[bad][0])
            self.checker.report(
                g, inst, "out-of-bounds", bad, f"LDS address {first:#x} ({size} bytes) of {self.lds_bytes} bytes"
            )
