"""MLIR's Python bindings, loaded when something is first traced.

What a kernel is written with can be imported without them, so that builds that were made before run where no compiler
is installed (`fly.runtime.prebuilt`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fly.errors import needs_packages


class _Late(ModuleType):
    """A module that takes the place of the one of its name, and loads it for the first attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by importers and by debuggers
            raise AttributeError(f"module {self.__name__!r} is not loaded yet: it has no {name!r}")
        with needs_packages("compiling a kernel"):
            loaded = importlib.import_module(self.__name__)
        # later attributes are found without coming here
        self.__dict__.update((key, value) for key, value in vars(loaded).items() if not key.startswith("__"))
        return getattr(loaded, name)


__all__ = ["func", "ir", "irdl"]

if TYPE_CHECKING:
    from mlir import ir
    from mlir.dialects import func, irdl
else:
    ir, func, irdl = map(_Late, ("mlir.ir", "mlir.dialects.func", "mlir.dialects.irdl"))
