"""The flash-attention library: `fly_attention` where it is installed, and also `kernels` in a checkout.

Names are loaded on first use: importing the package loads neither MLIR, torch nor a driver.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        ".flash_attn_interface": "flydsl_flash_attn_func flydsl_flash_attn_workspace",
        ".flash_attn_backward": "flydsl_flash_attn_backward",
        ".flash_attn_api": "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func"
        " flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache",
        ".cache.kv_cache": "append_to_cache",
        ".problem.block_mask": "BlockMask create_block_mask",
        ".problem.dropout_mask": "dropout_mask",
        ".problem.tree_mask": "tree_bits tree_mask",
        ".cascade": "cascade_attention",
        ".flex.attention": "flex_attention",
        ".merging": "merge_states",
        ".inspection": "flydsl_flash_attn_plan",
        ".integrations.pytorch": "activate deactivate",
    }.items()
    for name in names.split()
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    from fly.errors import needs_packages

    if name == "__version__":
        from fly import __version__ as value
    elif name in _EXPORTS:
        with needs_packages("flash attention"):
            value = getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _share_modules() -> None:
    """In a checkout this directory has two names; whichever is imported first, both have the same modules."""
    other = sys.modules.get("fly_attention")
    loaded = other is not None and any(Path(path).samefile(__path__[0]) for path in other.__path__)
    first, second = ("fly_attention", "kernels") if loaded else ("kernels", "fly_attention")
    importlib.import_module(".second_name", first).add(first, second)


if __name__ == "kernels":
    _share_modules()
