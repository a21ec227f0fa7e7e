"""The accumulator layouts that there are, for tests over all of them."""

from __future__ import annotations

from typing import Any

import pytest

from fly.backends.nvvm.wgmma import WarpgroupAtom
from fly.backends.target import targets
from fly.lang.fragment import AccumulatorLayout


def accumulator_layouts(*, warpgroups: tuple[int, ...]) -> list[Any]:
    """(arch, layout) of every bf16 instruction, rows on either side, and of warpgroups' as many columns wide."""
    return [
        pytest.param(t.arch, AccumulatorLayout(atom, rows_on), id=f"{t.arch}-{atom.name}-{rows_on}")
        for t in targets()
        if t.arch in ("gfx942", "gfx950", "sm_80")
        for atom in t.mma_atoms
        if atom.dtype == "bf16"
        for rows_on in ("m", "n")
    ] + [
        pytest.param("sm_90a", AccumulatorLayout(WarpgroupAtom(n, "bf16"), "m"), id=f"sm_90a-warpgroup-{n}")
        for n in warpgroups
    ]
