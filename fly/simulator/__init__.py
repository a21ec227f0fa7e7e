"""A simulator of traced kernels: it executes the operations that a kernel was traced to, on the CPU.

    program = Program.of(module, target)
    Launch(program, grid=(4, 1, 1), regions=[Region(address, nbytes, "x")], arguments=[address], seed=1).run()

Groups of four warps (a warpgroup of Hopper's) run as concurrent roles; copies and warpgroup products are
asynchronous, as they are on the chip; and what a kernel must not do is reported with the author's line. See
docs/simulator.md.
"""

from fly.simulator.launch import Launch
from fly.simulator.memory import Region
from fly.simulator.program import Program
from fly.simulator.report import Report
from fly.simulator.shared import SharedAccess

__all__ = ["Launch", "Program", "Region", "Report", "SharedAccess"]
