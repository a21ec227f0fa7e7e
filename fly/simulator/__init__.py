"""A simulator of traced kernels for NVIDIA GPUs: it executes the operations that a kernel was traced to, on the CPU.

    program = Program.of(module, target)
    Launch(program, grid=(4, 1, 1), regions=[Region(address, nbytes, "x")], arguments=[address], seed=1).run()

Warpgroups run as concurrent roles; bulk copies and warpgroup products are asynchronous, as they are on the chip; and
what a kernel must not do is reported with the author's line. See docs/simulator.md.
"""

from fly.simulator.launch import Launch
from fly.simulator.memory import Region
from fly.simulator.program import Program
from fly.simulator.report import Report

__all__ = ["Launch", "Program", "Region", "Report"]
