"""Every mistake a kernel author or caller can make, one class each.

Messages name the author's file and line (added here, from the first stack frame outside the compiler), the
offending value, and what is accepted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

_COMPILER_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
# `with fly.when(...)` enters the compiler through the standard library
_NOT_THE_AUTHOR = (_COMPILER_DIR, contextlib.__file__, "<")

# module -> (the distribution that has it, the extra of fly-attention that installs it; none: always installed)
_PACKAGES = {
    "mlir": ("xtc-mlir-python-bindings", None),
    "llvmlite": ("llvmlite", None),
    "numpy": ("numpy", None),
    "torch": ("torch", "torch"),
    "ziglang": ("ziglang", "amd"),
    "tinygrad": ("tinygrad", "emulator"),
    "tqdm": ("tqdm", "emulator"),
    "matplotlib": ("matplotlib", "bench"),
}


def author_frame() -> FrameType | None:
    """The innermost stack frame that is not part of the compiler: the line the author wrote."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_AUTHOR):
        frame = frame.f_back
    return frame


def author_location() -> str:
    """`file:line` of the author's frame, or an empty string when every frame belongs to the compiler."""
    frame = author_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class FlyError(Exception):
    """Base of every error that fly raises on purpose."""


class AuthorError(FlyError):
    """A mistake in a kernel's source; the message starts with the author's file and line.

    `at` overrides the location for mistakes that are found later than they were made.
    """

    def __init__(self, message: str, at: str | None = None):
        location = author_location() if at is None else at
        super().__init__(f"{location}: {message}" if location else message)


class DTypeError(AuthorError, TypeError):
    """A value of the wrong element type, or a conversion that must be explicit."""


class ShapeError(AuthorError, ValueError):
    """Vector lengths, tile shapes or ranks that do not fit."""


class LayoutError(AuthorError, ValueError):
    """A layout operation whose operands do not meet its definition's conditions."""


class StaticValueError(AuthorError, TypeError):
    """A run-time value used where Python needs a compile-time one (`if`, `int()`, `len()`, indexing)."""


class ControlFlowError(AuthorError):
    """A run-time loop or branch that was not closed as it must be."""


class DerivativeError(AuthorError):
    """A derivative asked for of what has none that the compiler knows: see `fly.Tape`."""


class CarryError(ControlFlowError):
    """A loop carry or branch result whose structure or types change."""


class PipelineError(AuthorError, ValueError):
    """A table of pipeline stages that does not fit together."""


class MessageError(AuthorError, ValueError):
    """A text of `fly.print` or `fly.check` that does not fit its values."""


class KernelDefinitionError(AuthorError, TypeError):
    """A function that cannot be a kernel: its signature or annotations."""


class TraceError(AuthorError, RuntimeError):
    """A traced operation used outside a kernel, or in the wrong kernel."""


class AtomError(AuthorError, ValueError):
    """A matrix or copy instruction that the target does not offer, or operands that do not match it."""


class SharedMemoryError(FlyError):
    """A kernel's shared memory does not fit its target; the message shows the table of allocations."""


class TargetError(FlyError, ValueError):
    """An unknown target, or a feature that the target does not have."""


class CompileError(FlyError):
    """MLIR, LLVM, the linker or the driver rejected what was generated."""


class LaunchError(FlyError, ValueError):
    """A launch whose grid, block or shared memory the device cannot take."""


class CheckError(FlyError, AssertionError):
    """A `fly.check` of a kernel failed; names its line, the block, the thread, the message and its values."""


class ArgumentError(FlyError, ValueError):
    """A kernel or library argument with a bad value; names the argument, the value and what is accepted."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A kernel or library argument of a type that is not accepted."""


class UnsupportedError(FlyError, NotImplementedError):
    """A valid request that a target or a kernel cannot serve (yet); names the target and the alternative."""


class DeviceError(FlyError, RuntimeError):
    """A device or its driver is missing or reported a failure."""


class MissingBuildError(FlyError, RuntimeError):
    """A build that is not among those that were made ahead (`FLY_PREBUILT`); names the build and how to make it."""


class MissingPackageError(DeviceError, ImportError):
    """A package that is installed on request is missing; the message names the `pip install` that brings it."""

    def __init__(self, purpose: str, module: str, otherwise: str = ""):
        package, extra = _PACKAGES[module]
        wanted = f"'fly-attention[{extra}]'" if extra else "fly-attention"
        super().__init__(f"{purpose} needs the package {package}: pip install {wanted}{otherwise}")


@contextlib.contextmanager
def needs_packages(purpose: str) -> Iterator[None]:
    """Whatever of `_PACKAGES` the block fails to import is reported by name.

    Raises:
        MissingPackageError: the block imports a package that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _PACKAGES:
            raise
        raise MissingPackageError(purpose, module) from error


class ArtefactError(FlyError, ValueError):
    """A file that is not an artefact, or one written by an incompatible version."""


class ConfigError(FlyError, ValueError):
    """An environment variable with a value that is not accepted."""


class EmulatorError(FlyError, RuntimeError):
    """Code that the emulator cannot execute, or a fault that stops it (unknown instruction, bad address)."""


class EmulatorReportError(EmulatorError):
    """What the emulator's checks found in a kernel; `.reports` holds one `Report` per finding."""

    def __init__(self, message: str, reports: tuple[Any, ...] = ()):
        super().__init__(message)
        self.reports = reports


class SimulatorError(FlyError, RuntimeError):
    """A kernel that the simulator of NVIDIA GPUs cannot execute."""


class SimulatorReportError(SimulatorError):
    """What the simulator's checks found in a kernel; `.reports` holds one `Report` per finding."""

    def __init__(self, message: str, reports: tuple[Any, ...] = ()):
        super().__init__(message)
        self.reports = reports
