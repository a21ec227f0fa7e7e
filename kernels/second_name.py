"""One set of module objects under two names: a checkout's `kernels` is the same package as `fly_attention`.

Loaded twice, every class would be there twice and PyTorch would refuse to register the operations again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _SecondName(MetaPathFinder, Loader):
    """Finds `second.module` as what `first.module` is."""

    def __init__(self, first: str, second: str):
        self.first, self.second = first, second

    def _original(self, name: str) -> str:
        return self.first + name.removeprefix(self.second)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        shared = sys.modules.get(self.second) is sys.modules.get(self.first)
        if not name.startswith(self.second + ".") or not shared:
            return None
        found = importlib.util.find_spec(self._original(name))
        return None if found is None else ModuleSpec(name, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._original(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # it has run under its first name; the import system has just given it the second name's spec
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


def add(first: str, second: str) -> None:
    """Let the package `first`, which is being or has been imported, be `second` as well, its modules too."""
    sys.modules[second] = sys.modules[first]
    sys.meta_path.insert(0, _SecondName(first, second))
