"""Keywords of later versions of FlyDSL's `flydsl_flash_attn_func`, as keywords of ours.

Names and meanings: https://github.com/ROCm/FlyDSL, kernels/attention/flash_attn_interface.py at 02ecfe12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from fly.errors import ArgumentTypeError, UnsupportedError

from .callers import written
from .checks import ATTENTION

LAYOUTS = ("linear", "linear3d", "vectorized")


class FlyDslNames(TypedDict, total=False):
    """What later versions of FlyDSL take besides.

    `seqlen_k`: seqused_kv. `kv_cache_layout`: "linear", pages (pages, page_size, Hkv, D); "linear3d", pages of one
    key (pages, Hkv, D); "vectorized" is refused. `dualwave_swp_xcd_swizzle`: None or True, for query blocks of a head
    are always dealt to one die; False is refused.
    """

    seqlen_k: torch.Tensor | None
    kv_cache_layout: str
    dualwave_swp_xcd_swizzle: bool | None


def translated(given: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by our names; `given`: those that have them already, `names`: the others.

    Raises:
        ArgumentError, ArgumentTypeError: a name that FlyDSL does not have, or a value that is none.
        UnsupportedError: what is not available.
    """
    arguments = dict(given)
    for name in names:
        if name not in FlyDslNames.__optional_keys__:
            ATTENTION.fail(f"unexpected keyword argument {name!r}", ArgumentTypeError)
    if (lengths := names.get("seqlen_k")) is not None:
        if arguments["seqused_kv"] is not None:
            ATTENTION.fail("seqlen_k and seqused_kv are two names of one argument: pass one of them")
        arguments["seqused_kv"] = lengths
        if arguments["block_table"] is not None:
            arguments["cu_seqlens_kv"] = None  # of pages, whose lengths these are
    layout = names.get("kv_cache_layout", "linear")
    if layout not in LAYOUTS:
        ATTENTION.fail(f"kv_cache_layout must be one of {', '.join(LAYOUTS)}, got {written(layout)}")
    if layout == "vectorized":
        ATTENTION.fail(
            'kv_cache_layout="vectorized" is not available, which has no row of a token in one piece, as the kernels '
            "load them: pass pages (pages, page_size, Hkv, D), such as k.permute(0, 3, 1, 2, 4).flatten(3) and "
            "v.permute(0, 2, 4, 1, 3).flatten(1, 2)",
            UnsupportedError,
        )
    if layout == "linear3d":
        for name in ("k", "v"):
            pages = arguments[name]
            ATTENTION.plain(name, pages)
            if pages.dim() != 3 or arguments["block_table"] is None:
                ATTENTION.fail(
                    'kv_cache_layout="linear3d" is for pages of one key, (pages, Hkv, D) with a block_table, got '
                    f"{name} of shape {tuple(pages.shape)}"
                )
            arguments[name] = pages.unsqueeze(1)
    swizzle = names.get("dualwave_swp_xcd_swizzle")
    if swizzle is not None:
        ATTENTION.flag("dualwave_swp_xcd_swizzle", swizzle)
        if not swizzle:
            ATTENTION.fail(
                "dualwave_swp_xcd_swizzle=False is not available: query blocks of a head are always dealt to one "
                "die; leave it out",
                UnsupportedError,
            )
    return arguments
