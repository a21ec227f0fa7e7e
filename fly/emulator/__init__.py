"""An instruction-level emulator of gfx942 (CDNA3) and gfx950 (CDNA4): it executes linked AMDGPU code objects on the
CPU.

    program = Program(code_object_bytes)
    program.launch("kernel", grid=(4,), block=(256,), kernarg=packed, regions=[Region(address, nbytes, "x")])

Kernel arguments hold host addresses; `regions` lists the memory that the kernel may touch.
"""

from fly.emulator.memory import Region
from fly.emulator.program import Program, RunResult

__all__ = ["Program", "Region", "RunResult"]
