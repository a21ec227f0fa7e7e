"""A checkout's `fly_attention`: the package in `kernels/`, which the wheel installs under this name.

Both names have the same modules here. Where another package is imported as `kernels` (Hugging Face's, from a path
before this one's), the modules have this name only.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1] / "kernels"


def _load() -> None:
    found = importlib.util.find_spec("kernels")
    if found is not None and found.origin and Path(found.origin).resolve() == _PACKAGE / "__init__.py":
        importlib.import_module("kernels")  # takes this module's place in sys.modules
        return
    spec = importlib.util.spec_from_file_location(
        __name__, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


_load()
