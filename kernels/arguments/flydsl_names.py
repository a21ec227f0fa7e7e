"""Keywords of later versions of FlyDSL's `flydsl_flash_attn_func`, as keywords of ours.

Names and meanings: https://github.com/ROCm/FlyDSL, kernels/attention/flash_attn_interface.py at 02ecfe12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from fly.errors import ArgumentTypeError, UnsupportedError

from .checks import ATTENTION


class FlyDslNames(TypedDict, total=False):
    """What later versions of FlyDSL take besides.

    `seqlen_k`: seqused_kv. `dualwave_swp_xcd_swizzle`: None or True, for query blocks of a head are always dealt to
    one die; False is refused.
    """

    seqlen_k: torch.Tensor | None
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
