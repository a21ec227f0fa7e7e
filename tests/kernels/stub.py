"""A stand-in for a compiled kernel, so that what surrounds kernels is tested without a device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import dispatch, flash_attn_interface
from tests.kernels.reference import attention


class StubKernel:
    """Takes the generic kernel's place: records what is prepared and launched, and computes in torch."""

    def __init__(self) -> None:
        self.prepared: list[dict[str, Any]] = []
        self.launches: list[int | None] = []

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        softmax_scale: float,
        causal: bool,
        cross_seqlen: bool,
        tuning: Mapping[str, object],
    ) -> Callable[..., None]:
        self.prepared.append(
            {"scale": softmax_scale, "causal": causal, "cross": cross_seqlen, "tuning": dict(tuning)}
        )

        def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, stream: int | None) -> None:
            self.launches.append(stream)
            result, result_lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
            out.copy_(result)
            if lse is not None:
                lse.copy_(result_lse)

        return launch


def install(monkeypatch: pytest.MonkeyPatch, target: str = "gfx950") -> StubKernel:
    """Put a stub in the generic kernel's place on `target`, with no plan kept from before."""
    stub = StubKernel()
    monkeypatch.setitem(sys.modules, "kernels.flash_attn_generic", SimpleNamespace(prepare=stub.prepare))
    monkeypatch.setattr(dispatch, "target_of", lambda device: target)
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    for variable in ("FLY_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP", "FLY_ARCH"):
        monkeypatch.delenv(variable, raising=False)
    return stub
