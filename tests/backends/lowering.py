"""Lowering one `fly` operation for a target, without the rest of the pipeline."""

from __future__ import annotations

from fly.backends.nvvm.lower import lower as lower_to_nvvm
from fly.backends.rocdl.lower import lower as lower_to_rocdl
from fly.backends.target import target
from tests.passes.modules import apply, parse


def lowered(body: str, arch: str) -> str:
    """The kernel `body` (in the notation of `tests.passes.modules`) after its backend's lowering pass."""
    description = target(arch)
    lower = {"rocdl": lower_to_rocdl, "nvvm": lower_to_nvvm}[description.backend]
    return apply(lower(description), parse(body))
