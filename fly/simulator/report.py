"""What the checks find, and the error that carries it."""

from __future__ import annotations

from dataclasses import dataclass

from fly.errors import SimulatorReportError


@dataclass(frozen=True)
class Report:
    """One finding: `kind` is the name of the check, `location` the author's file and line, `text` all of it."""

    kind: str
    kernel: str
    location: str
    block: tuple[int, int, int]
    warp: int
    text: str

    def __str__(self) -> str:
        return self.text


def error(kind: str, kernel: str, location: str, block: tuple[int, int, int], warp: int, message: str) -> Exception:
    """The error to raise for one finding."""
    where = f" at {location}" if location else ""
    text = f"{kind}: {kernel}{where}, block {block}, warp {warp}: {message}"
    return SimulatorReportError(text, (Report(kind, kernel, location, block, warp, text),))


class Together(Exception):
    """A warp that goes on for itself has come to what its whole warpgroup executes."""


class Finding(Exception):
    """What a part of the simulator found that does not know the line; the role that ran into it adds where it is.

    `warp` counts in the role, where it is known; `location`: where it was begun, of what is found later.
    """

    def __init__(self, kind: str, message: str, warp: int | None = None, location: str = ""):
        super().__init__(message)
        self.kind, self.message, self.warp, self.location = kind, message, warp, location
