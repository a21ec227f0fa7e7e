"""A timing model of CDNA3 and CDNA4: cycles without the hardware.

    session = Session(launch, Parameters.of("gfx950"), workgroups=[0])
    result = session.replay()                 # one compute unit, cycle by cycle
    print(report(session.machine, session.operations(), result))
    whole_launch(launch, Parameters.of("gfx950")).time().microseconds

The emulator executes some workgroups and notes every wave's instructions with their LDS and memory addresses; the
model replays them on a compute unit. `docs/timing-model.md` tells what is modelled, from which sources, and what is
not.
"""

from fly.emulator.timing.figures import FIGURES, Figure, Parameters
from fly.emulator.timing.report import report
from fly.emulator.timing.session import Launch, Session, whole_launch

__all__ = ["FIGURES", "Figure", "Launch", "Parameters", "Session", "report", "whole_launch"]
