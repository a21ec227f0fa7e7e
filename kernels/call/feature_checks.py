"""Checks of the features that a caller asks of flash attention, made once per kind of call.

From keyword arguments to `Features` and the operands that a kernel takes for them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments.asked import Asked
from ..arguments.callers import arg
from ..arguments.checks import check_last_stride, check_tensor, fail
from ..problem.catalogue import FEATURES, OPERANDS
from ..problem.features import Features


def check_table(table: Any, device: torch.device) -> None:
    """It is a table of pages: (B, pages of a sequence) int32, each row contiguous."""
    check_tensor("block_table", table)
    if table.dim() != 2 or table.dtype != torch.int32 or table.device != device:
        fail(
            f"{arg.block_table} must be (B, pages of a sequence) int32 on {device}, got shape {tuple(table.shape)}, "
            f"dtype {table.dtype} on {table.device}"
        )
    check_last_stride("block_table", table)


def check_features(asked: Asked) -> tuple[Features, tuple[Any, ...], tuple[str, ...]]:
    """(static features, operands, names of the features) that a call asks for.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    found: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.check is not None:
            found |= feature.check(asked)
    aux = asked.aux_tensors(used="score_mod" in found or "mask_mod" in found)
    operands = {name: found[name] for name in OPERANDS if name in found}
    static = {name: value for name, value in found.items() if name not in operands}
    wanted = tuple(feature.name for feature in FEATURES if feature.asked(found))
    return Features(tuple(operands), **static), (*operands.values(), *aux), wanted
