"""Every environment variable that fly reads, in one table; `python -m fly env` prints it.

Values are read when asked for, so a test or a user may change them at run time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fly.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default, parser, and a line of documentation."""

    name: str
    default: str
    parse: Callable[[str], Any]
    doc: str

    def get(self) -> Any:
        """The parsed value.

        Raises:
            ConfigError: the value is not accepted.
        """
        text = os.environ.get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text!r}: {error}") from None

    @contextmanager
    def set_to(self, text: str | None) -> Iterator[None]:
        """With the variable set for a while, and then what it was; None leaves it as it is."""
        before = os.environ.get(self.name)
        if text is not None:
            os.environ[self.name] = text
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(self.name, None)
            else:
                os.environ[self.name] = before

    @property
    def raw_name(self) -> Any:
        """What `raw_value` knows it by."""
        return os.fsencode(self.name) if hasattr(os.environ, "_data") else self.name


# For paths that are as hot as a launch: `os.environ.get` takes 1 µs for a variable that is not set. The dictionary
# underneath, where there is one, holds the same values as bytes.
raw_value = getattr(os.environ, "_data", os.environ).get


def _boolean(text: str) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _choice(text: str) -> bool | None:
    return _boolean(text) if text else None


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("expected one of " + ", ".join(repr(c) for c in choices))
        return text

    return parse


def _natural(text: str) -> int:
    if not text.isdigit():
        raise ValueError("expected a whole number from 0 on")
    return int(text)


def _megabytes(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError("expected a positive whole number of megabytes")
    return int(text) << 20


def _directory(text: str) -> Path:
    return Path(text).expanduser()


def _directory_or_none(text: str) -> Path | None:
    return _directory(text) if text else None


ARCH = Variable(
    "FLY_ARCH",
    "gfx950",
    str,
    "architecture that CPU tensors run on: gfx942, gfx950 (emulated), or one of NVIDIA's (simulated)",
)
DUMP = Variable("FLY_DUMP", "", str, "dump the IR after a pass: a pass name, or 'all'")
DUMP_DIR = Variable("FLY_DUMP_DIR", "fly_dump", _directory, "directory that dumps are written to")
EMULATOR_CHECKS = Variable(
    "FLY_EMULATOR_CHECKS", "1", _boolean, "0 turns the emulator's checks (races, missing waits, hazards) off"
)
EMULATOR_TRACE = Variable(
    "FLY_EMULATOR_TRACE", "", str, "a wave, such as 0,1,0:3: what it executes is printed to stderr (workgroup:wave)"
)
SIMULATOR_SEED = Variable(
    "FLY_SIMULATOR_SEED", "0", _natural, "which schedule the simulator of NVIDIA GPUs runs kernels in: 0, 1, ..."
)
PRINT_SIZE = Variable(
    "FLY_PRINT_SIZE_MB", "4", _megabytes, "size of the log that fly.print and fly.check write to, megabytes"
)
CHECK_INPUTS = Variable(
    "FLY_CHECK_INPUTS",
    "",
    _choice,
    "1 checks lengths, offsets, pages and entries on a GPU and waits for it, 0 does not in the emulator either",
)
CACHE = Variable("FLY_CACHE", "1", _boolean, "0 turns the disk cache off")
CACHE_DIR = Variable("FLY_CACHE_DIR", "~/.cache/fly", _directory, "directory of the disk cache")
CACHE_SIZE = Variable("FLY_CACHE_SIZE_MB", "512", _megabytes, "bound on the disk cache's size, megabytes")
PREBUILT = Variable(
    "FLY_PREBUILT",
    "",
    _directory_or_none,
    "folder of builds made by `python -m fly prebuild`; then nothing is compiled at run time",
)
LLD = Variable("FLY_LLD", "", str, "path of ld.lld; by default ROCm's, then PATH, then the ziglang wheel's")
KERNEL = Variable(
    "FLY_KERNEL",
    "",
    _one_of("", "generic", "gfx942", "gfx942_fp8", "gfx950", "gfx950_fp8", "sm90", "sm90_fp8", "sm90_fp8_cache"),
    "force a flash-attention kernel",
)
BACKWARD_KERNEL = Variable(
    "FLY_BACKWARD_KERNEL",
    "",
    _one_of("", "gfx942", "gfx950", "sm90", "sm90_wide", "generic"),
    "force a kernel of flash attention's backward pass",
)
DISABLE_DUALWAVE_SWP = Variable(
    "FLYDSL_DISABLE_DUALWAVE_SWP", "0", _boolean, "1 keeps the gfx950 and gfx942 dual-wave kernels from being chosen"
)
DUMP_IR = Variable("FLYDSL_DUMP_IR", "0", _boolean, "1 is the same as FLY_DUMP=all")

VARIABLES: tuple[Variable, ...] = tuple(v for v in globals().values() if isinstance(v, Variable))
